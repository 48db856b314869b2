"""Times that publishers tell: kept as they were given, beside the broker's own time of storing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock._core.broker import Scanner
from penstock.broker import Client, Publisher, Server
from penstock.broker.client.dialogue import Dialogue
from penstock.broker.fetch import RangeClient
from penstock.broker.ranges import ENTRY
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import Journal
from penstock.recording.player import Player

from .conftest import LONG, Wire, until

OLD_NS = 1_000_000_000_000_000_007  # in 2001
EXTREMES = [-(2**63) + 1, -1, 0, 1, OLD_NS, 2**63 - 1]


def stored(server: Server) -> list[tuple[bytes, int, int]]:
    """Data, time and time of storing of everything."""
    with RangeClient(port=server.port) as client:
        return [(item.payload, item.timestamp_ns, item.stored_ns or 0) for item in client.fetch(1, stored=True)]


def test_messages_with_times_are_one_run() -> None:
    """As many as come are one step, whatever their times."""
    scanner = Scanner("hello", 1000)
    scanner.allow("t")
    scanner.feed(
        b"".join(b"PUB t 1 time_ns=%d\nx\n" % when for when in EXTREMES) + b"PUB t 1\nx\nPUB t 1 time_ns=5 id=a\nx\n"
    )
    events = [event for event in (scanner.next() for _ in range(4)) if event is not None]
    assert [(verb, rest.split()) for verb, rest, _ in events] == [
        ("PUB", ["time_ns"]),
        ("PUB", []),
        ("PUB", ["id=a", "time_ns"]),
    ]
    assert [list(batch.timestamps_ns) for *_, batch in events if batch is not None] == [EXTREMES, [-(2**63)], [5]]


def test_a_time_is_kept_and_delivered(server: Server, client: Client) -> None:
    before_ns = time.time_ns()
    client.queue("q", topics="t")
    client.publish_many("t", [b"%d" % when for when in EXTREMES], timestamps_ns=EXTREMES)
    client.publish("t", b"one", timestamp_ns=OLD_NS, message_id="a")
    assert client.publish("t", b"one", timestamp_ns=OLD_NS + 1, message_id="a").duplicate
    client.publish("t", b"now")
    found = stored(server)
    assert [(data, when) for data, when, _ in found[:-1]] == [
        *((b"%d" % when, when) for when in EXTREMES),
        (b"one", OLD_NS),
    ]
    assert found[-1][1] >= before_ns and all(at_ns >= before_ns for *_, at_ns in found)
    with client.subscribe("q") as consumer:
        messages = [consumer.receive(timeout=LONG) for _ in range(len(found))]
        assert [(bytes(message), message.timestamp_ns) for message in messages] == [item[:2] for item in found]


def test_what_is_told_of_the_past_expires_by_when_it_was_stored(server: Server, client: Client) -> None:
    client.queue("q", topics="t", ttl_s=3600)
    client.publish("t", b"x", timestamp_ns=OLD_NS, ttl_s=3600)
    with client.subscribe("q") as consumer:
        assert bytes(consumer.receive(timeout=LONG)) == b"x"


def test_a_range_with_times_before_1970_is_delivered(server: Server, client: Client) -> None:
    client.queue("q", topics="t")
    with RangeClient(port=server.port) as bulk:
        bulk.load("job", ["t"], ENTRY.pack(0, 0, -5, 0, 1, 0, 0, 0, 0), b"x", times=True)
        bulk.commit("job")
    with client.subscribe("q") as consumer:
        assert consumer.receive(timeout=LONG).timestamp_ns == -5


def test_dead_letters_keep_their_time(server: Server, client: Client) -> None:
    client.queue("q", topics="t", max_tries=1)
    client.publish("t", b"x", timestamp_ns=OLD_NS)
    with client.subscribe("q", ack="manual") as consumer:
        consumer.nack(consumer.receive(timeout=LONG))
        until(lambda: "q.dead" in server.broker.queues)
        with client.subscribe("q.dead") as dead:
            assert dead.receive(timeout=LONG).timestamp_ns == OLD_NS


@pytest.mark.parametrize("word", ["", "x", "5x", "--5", "9223372036854775808", "-9223372036854775808", "1" * 30])
def test_what_is_no_time_closes_the_connection(wire: Callable[[], Wire], word: str) -> None:
    connection = wire().hello().send(f"PUB t 1 time_ns={word}\nx".encode())
    assert connection.closed() == b"ERR closing bad time\n"


def test_a_time_has_its_place(wire: Callable[[], Wire], client: Client) -> None:
    connection = wire().hello()
    for options in ("ttl_ms=5 time_ns=5", "time_ns=5 time_ns=6", "time_ns=5 delay_ms=5", "time_ns=5 at_ns=5"):
        connection.send(f"PUB t 1 {options}\nx".encode())
        assert connection.line().startswith("ERR bad_option"), options
    connection.send(b"PUB t 1 time_ns\nxPUB t 1 ttl_ms=5 time_ns\nxPUB t 1 \x0b\nxPING\n")  # bare: nothing is told
    connection.stored(1, 3)
    assert connection.line() == "PONG"
    for wrong in (2**63, "5", 1.5):
        with pytest.raises(InvalidArgument, match="nanoseconds since 1970"):
            client.publish("t", b"x", timestamp_ns=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="2 messages have 1 times"):
        client.publish_many("t", [b"a", b"b"], timestamps_ns=[1])
    with pytest.raises(RefusedError, match="delayed"):
        client.publish("t", b"x", timestamp_ns=5, delay_s=5)


@pytest.mark.parametrize("count", [3, 20_000])
def test_what_is_forwarded_keeps_its_times(server: Server, tmp_path: Path, count: int) -> None:
    with Journal(tmp_path / "j") as journal, Publisher(port=server.port, topic="t") as publisher:
        for number in range(count) if count < 100 else ():
            journal.append("t", b"%d" % number, timestamp_ns=OLD_NS + number, properties={"n": str(number)})
        if count >= 100:
            journal.append_many("t", [b"x"] * count, timestamp_ns=OLD_NS)
        publisher.forward(journal.read_many(1, count))
        publisher.forward(list(journal.read_many(1, count)))
        times = [message.timestamp_ns for message in journal.read_many(1, count)]
    with RangeClient(port=server.port) as client:
        assert [item.timestamp_ns for part in client.ranges(1, 2 * count + 1) for item in part] == times * 2


def test_an_older_broker_is_told_no_times(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Dialogue, "_welcome", lambda self, rest, real=Dialogue._welcome: real(self, rest.replace(" times=1", ""))
    )
    with Journal(tmp_path / "j") as journal, Publisher(port=server.port, topic="t") as publisher:
        journal.append("t", b"x", timestamp_ns=OLD_NS)
        publisher.forward(journal.read_many(1, 1))
    ((_, when, at_ns),) = stored(server)
    assert when == at_ns


def test_a_recording_is_played_into_a_broker_with_its_times(server: Server, tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, contextlib.ExitStack() as stack:
        for number in range(3):
            journal.append("t", b"%d" % number, timestamp_ns=OLD_NS + number)
        player = Player(stack, {"t": f"broker://127.0.0.1:{server.port}/t"}, 0, LONG)
        assert player.play(((journal, message) for message in journal.read_many(1, 3)), 0.0, lambda count: None) == 3
    assert [(data, when) for data, when, _ in stored(server)] == [(b"%d" % n, OLD_NS + n) for n in range(3)]
