"""The disk quota refuses publishers and nobody else, counts what is staged, and gives way when queues drain."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Limits, Server
from penstock.broker.store import RESERVE_NAME
from penstock.errors import RefusedError
from tests.broker.conftest import LONG, Wire, until

QUOTA = 4_000_000


def size(directory: Path) -> int:
    found = 0
    for entry in os.scandir(directory):
        if entry.name == RESERVE_NAME:  # on top of the quota
            continue
        with contextlib.suppress(FileNotFoundError):  # freed meanwhile
            found += entry.stat().st_blocks * 512
    return found


def fill(client: Client) -> int:
    count = 0
    with pytest.raises(RefusedError, match="quota"):
        for _ in range(1000):
            client.publish("t", bytes(65536))
            count += 1
    return count


def test_publishers_are_refused_at_once_and_all_else_is_served(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        assert fill(client) > 10
    server.close()
    server = serve(limits=Limits(quota_bytes=QUOTA))  # full from the start
    with Client(port=server.port) as client:
        client.ping()
        assert client.statistics()["quota_bytes"] == QUOTA
        fill(client)
        client.queue("other", topics="t")
        with client.subscribe("q", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None
            consumer.ack(message, confirm=True)
        assert client.purge("q") > 0


@pytest.mark.parametrize("way", ["consume", "purge", "delete"])
def test_room_is_given_back_as_queues_drain(serve: Callable[..., Server], way: str) -> None:
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for _ in range(3):  # again and again
            count = fill(client)
            assert count > 10
            if way == "consume":
                with client.subscribe("q") as consumer:
                    for _ in range(count):
                        assert consumer.read(LONG) is not None
            elif way == "purge":
                client.purge("q")
            else:
                client.delete("q")
                client.queue("q", topics="t")

            def stored() -> bool:
                try:
                    client.publish("t", bytes(65536 * 12))
                except RefusedError:
                    return False
                return True

            until(stored, "room is given back")
            client.purge("q")


def test_room_is_given_back_while_a_queue_is_drained(serve: Callable[..., Server]) -> None:
    """Not only when the last message of the last segment is done: a quota has several segments."""
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        count = fill(client)
        with client.subscribe("q", ack="manual") as consumer:
            for _ in range(count // 2):
                message = consumer.read(LONG)
                assert message is not None
                consumer.ack(message, confirm=True)

            def stored() -> bool:
                with contextlib.suppress(RefusedError):
                    client.publish("t", bytes(65536))
                    return True
                return False

            until(stored, "half of the queue is drained, and there is room for a message")


def test_a_large_state_is_not_written_with_every_part_of_the_quota(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Each segment begins with the whole state: it ends only when it has several times as many messages."""
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        for number in range(1000):
            client.queue(f"queue-{number}" + "x" * 200, topics="other")
        client.queue("q", topics="t")
        assert fill(client) * 65536 > QUOTA // 2, "most of the quota is for messages"


def test_what_waits_for_the_commit_counts(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        with pytest.raises(RefusedError, match="quota"):
            client.publish_many("t", [bytes(65536)] * 2000)  # 131 MB in one go
    server.close()
    assert size(tmp_path / "broker") < 2 * QUOTA


def test_a_publisher_of_the_compatible_mode_waits_and_its_consumers_do_not(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=QUOTA))
    collector = Wire(server.port).send(b"SUB q\n")
    until(lambda: "q" in server.broker.queues)
    collector.close()
    until(lambda: not server.broker.queues["q"].consumers)
    message = bytes(range(256)) * 256
    publisher = Wire(server.port)
    publisher.socket.settimeout(LONG)
    publisher.send(b"".join(b"PUB %d\n%s" % (len(message), message) for _ in range(40)))
    publisher.send(b"".join(b"PUB %d\n%s" % (len(message), message) for _ in range(20)))
    until(lambda: any(connection.working for connection in list(server.connections.values())), "it waits")
    consumer = Wire(server.port).send(b"SUB q\n")
    for _ in range(60):
        consumer.exactly(message)
    consumer.close()
    publisher.close()


def test_what_every_queue_has_passed_is_freed_beyond_what_is_kept(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(segment_bytes=1 << 20, keep="3MiB")
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for _ in range(20):
            client.publish_many("t", [bytes(65536)] * 16)
        assert size(tmp_path / "broker") > 20 << 20, "nothing is freed that a queue needs"
        client.purge("q")
        until(lambda: size(tmp_path / "broker") < 8 << 20)
        assert client.statistics()["first"] > 1
        assert client.statistics()["keep"] == "3MiB"


def test_kept_forever(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(segment_bytes=1 << 20, keep="forever")
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for _ in range(5):
            client.publish_many("t", [bytes(65536)] * 16)
        client.purge("q")
        server.broker.trim()
        assert client.statistics()["first"] == 1


@pytest.mark.parametrize("way", ["nack", "queues"])
def test_records_beyond_the_quota_have_a_bound(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What says that messages were delivered, returned or that queues came and went does not add up for ever."""
    monkeypatch.setattr("penstock.broker.store.STATE_BYTES", 65_536)
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"small"] * 1000)
        count = 1000 + fill(client)
    wire = Wire(server.port).hello()
    if way == "queues":
        for _ in range(40):
            wire.send(b"QUEUE other topics=some.topic\nDELETE other\n" * 500 + b"PING\n")
            while wire.line() != "PONG":
                pass
    else:
        wire.send(b"SUB q credit=1000\n")
        assert wire.line() == "OK"
        for _ in range(150):
            positions: list[int] = []
            while len(positions) < 1000:
                line = wire.line()
                if line.startswith("MSG"):
                    positions.append(int(line.split()[3]))
            wire.send(b"".join(b"NACK q %d\n" % position for position in positions))
    wire.close()
    assert size(tmp_path / "broker") < QUOTA + (3 << 19)
    server.close()
    server = serve(limits=Limits(quota_bytes=QUOTA))
    with Client(port=server.port) as client:
        assert [(entry["queue"], entry["depth"]) for entry in client.queues()] == [("q", count)]
