"""User properties: from every way of publishing, through the disk, to every way of reading."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock
from penstock._core.broker import publish_lines
from penstock.broker import Client, Server
from penstock.broker.client.dialogue import _offset
from penstock.broker.fetch import RangeClient
from penstock.errors import InvalidArgument

from .conftest import LONG, Wire, until

UNIT = {"unit": "°C", "empty": "", "": "no name"}


def test_they_travel_to_every_reader(server: Server, client: Client) -> None:
    client.queue("q", topics="t")
    client.publish("t", b"one", properties=UNIT)
    client.publish_many("t", [b"two", b"three"], properties={"k": "all"})
    client.publish_many("t", [b"four", b"five"], properties=[{"k": "4"}, {}])
    client.publish("t", b"six")
    client.stage("job", "t", [b"seven"], properties={"staged": "yes"})
    client.commit("job")
    with RangeClient(port=server.port) as reader:
        reader.stage("bulk", "t", [b"eight", b"nine"], properties=[{"bulk": "8"}, None])
        reader.commit("bulk")
        wanted = [
            (b"one", UNIT), (b"two", {"k": "all"}), (b"three", {"k": "all"}), (b"four", {"k": "4"}), (b"five", {}),
            (b"six", {}), (b"seven", {"staged": "yes"}), (b"eight", {"bulk": "8"}), (b"nine", {}),
        ]  # fmt: skip
        fetched = [(m.payload, m.properties) for part in reader.ranges(1, reader.frontier) for m in part]
    assert fetched == wanted
    with client.subscribe("q", ack="manual") as consumer:
        found = [consumer.read(LONG) for _ in wanted]
    assert [(bytes(message), dict(message.properties)) for message in found if message] == wanted


def test_they_come_back_after_a_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1)
        client.publish("t", b"kept", properties=UNIT)
        client.publish("t", b"later", properties=UNIT, delay_s=0.3)
        client.publish("t", b"short", properties=UNIT, ttl_s=1000)
    server.close()
    server = serve()
    with Client(port=server.port) as client:
        with client.subscribe("q", ack="manual") as consumer:
            found = [consumer.read(LONG) for _ in range(3)]
            # On a slow machine the delayed one is due before the third is published.
            assert sorted(bytes(message) for message in found if message) == [b"kept", b"later", b"short"]
            for message in found:
                assert message is not None
                users = {key: value for key, value in message.properties.items() if not key.startswith("$")}
                assert users == UNIT
                consumer.nack(message)
            until(lambda: any(entry["queue"] == "q.dead" and entry["depth"] == 3 for entry in client.queues()))
        with client.subscribe("q.dead", ack="manual") as dead:
            message = dead.read(LONG)
            assert message is not None and bytes(message) == b"kept"
            told = {"$topic": "t", "$queue": "q", "$reason": "delivered too often"}
            found_properties = dict(message.properties)
            found_properties.pop("$position")
            assert found_properties == {**UNIT, **told}
        until(lambda: all(entry["consumers"] == 0 for entry in client.queues()))
        assert client.redrive("q") == 3
        with client.subscribe("q", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None and dict(message.properties) == {**UNIT, "$topic": "t"}


def test_on_the_wire_they_stand_right_after_the_data(wire: Callable[[], Wire]) -> None:
    connection = wire().hello().send(b"SUB q topics=t\n")
    assert connection.line() == "OK"
    wire().hello().send(b"PUB t 2+4\nhik\0v\0\nPUB t 2\nho").stored(1, 2)
    head = connection.line().split()
    assert (head[:4], head[6:]) == (["MSG", "q", "t", "1"], ["1", "2+4"])
    connection.exactly(b"hik\0v\0\n")
    assert connection.line().split()[6:] == ["1", "2"]
    connection.exactly(b"ho\n")


@pytest.mark.parametrize(
    "data",
    [
        b"PUB t 1+1\nxk",
        b"PUB t 1+3\nxk\0v",
        b"PUB t 1+2\nxk\0",
        b"PUB t 1+8\nx$secret\0",
        b"PUB t 1+5\nx$s\0v\0",
        b"PUB t 1+\nx",
        b"PUB t +1\nx",
        b"PUB t 1+1+1\nx",
        b"PUB t 1+-1\nx",
        b"PUB t 1+99999999999999999999\nx",
        b"PUB t 9999999999999999999+9999999999999999999\nx",
        b"STAGE a t 1+3\nxk\0v",
    ],
)
def test_what_are_none_closes(wire: Callable[[], Wire], client: Client, data: bytes) -> None:
    assert wire().hello().send(data).closed().startswith(b"ERR closing ")
    assert client.publish("t", b"still here") == 1


def test_too_many_are_refused_and_passed_over(wire: Callable[[], Wire], client: Client) -> None:
    many = b"k\0" + b"v" * 70_000 + b"\0"
    connection = wire().hello().send(b"PUB t 1+%d\nx%s\nPUB t 1\ny" % (len(many), many))
    assert connection.line().startswith("ERR too_large ")
    assert connection.line() == "OK 1"
    with pytest.raises(InvalidArgument, match="65535"):
        client.publish("t", b"x", properties={"k": "v" * 70_000})
    with pytest.raises(InvalidArgument, match=r"\$"):
        client.publish("t", b"x", properties={"$mine": "v"})
    client.publish("t", b"again", properties={"$topic": "was.here", "k": "v"})
    with client.subscribe("q", topics="t", from_position=2) as consumer:
        message = consumer.read(LONG)
        assert message is not None and dict(message.properties) == {"k": "v"}
    with pytest.raises(InvalidArgument, match="NUL"):
        client.publish("t", b"x", properties={"k": "a\0b"})
    with pytest.raises(InvalidArgument, match="2 messages have 1"):
        client.publish_many("t", [b"x", b"y"], properties=[{}])


def test_a_raw_client_has_none(wire: Callable[[], Wire], client: Client) -> None:
    assert wire().send(b"PUB 1+4\nxk\0v\0\n").closed() == b"", "one byte; what follows is no command"
    raw = wire().send(b"SUB q\nPUB 1\na")
    raw.exactly(b"a")
    client.publish("default", b"x", properties=UNIT)
    raw.send(b"PUB 1\nb").exactly(b"xb")


def test_what_is_sent_again_begins_at_a_message(client: Client) -> None:
    """Of three publishes the first is known to be stored: the other two are sent again, with their properties."""
    lines = publish_lines(
        b"PUB t", [b"a" * 10, b"b" * 20, b"c"], b" ttl_ms=5", properties=[b"n\0001\0", b"", b"n\0003\0"]
    )
    assert lines[_offset(lines, 1) :] == publish_lines(b"PUB t", [b"b" * 20], b" ttl_ms=5") + publish_lines(
        b"PUB t", [b"c"], b" ttl_ms=5", properties=b"n\0003\0"
    )
    assert _offset(lines, 3) == len(lines)


def test_forwarded_messages_keep_theirs(server: Server, client: Client) -> None:
    client.queue("in", topics="in")
    client.publish_many("in", [b"x", b"y"], properties=[UNIT, {}], ttl_s=1000)
    with (
        client.subscribe("in") as source,
        penstock.publisher(f"broker://127.0.0.1:{server.port}/out?queue=out") as sink,
        client.subscribe("out") as reader,
    ):
        count = 0
        while count < 2:
            batch = source.read_many(10, LONG)
            assert not isinstance(batch, list)
            count += sink.forward(batch)  # type: ignore[attr-defined]
        found = [reader.read(LONG) for _ in range(2)]
        assert [dict(message.properties) for message in found if message] == [UNIT, {}]
