"""What the broker frees: by age, by size and by what every queue has passed, when asked for; otherwise nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.broker import Client, Server

from .conftest import LONG, until

SEGMENT_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for what can be freed at every turn of housekeeping."""
    monkeypatch.setattr("penstock.broker.server.TRIM_S", 0.0)
    monkeypatch.setattr("penstock.broker.server.HOUSEKEEPING_S", 0.0)


def fill(client: Client, batches: int = 10) -> None:
    for _ in range(batches):
        client.publish_many("t", [b"x" * 100] * 1000)


def first(client: Client) -> int:
    return int(client.statistics()["first"])


def read_all(client: Client, queue: str, count: int) -> int:
    """Read and acknowledge so many at least; gives how many."""
    found = 0
    with client.subscribe(queue) as consumer:
        while found < count:
            found += len(consumer.read_many(1000, LONG))
    return found


def test_the_default_keeps_everything(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES)
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        fill(client)
        read_all(client, "q", 10_000)
        turns = server.turns
        until(lambda: client.ping() or server.turns > turns + 20)
        assert first(client) == 1
    server.close()
    with Client(port=serve(segment_bytes=SEGMENT_BYTES).port) as client:
        assert first(client) == 1


def test_by_size_with_and_without_queues(serve: Callable[..., Server]) -> None:
    with Client(port=serve(segment_bytes=SEGMENT_BYTES, retain_bytes=4 * SEGMENT_BYTES).port) as client:
        fill(client)
        until(lambda: first(client) > 1)
        client.queue("slow", topics="t", from_position=1)
        before = first(client)
        fill(client)
        until(lambda: first(client) > before)
        read = first(client)
        with client.subscribe("slow", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None and message.position >= read - 10_000, "a queue goes on after what was freed"


def test_by_age_while_running_and_on_opening(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES)
    with Client(port=server.port) as client:
        fill(client)
        assert first(client) == 1
    server.close()
    server = serve(segment_bytes=SEGMENT_BYTES, retain_age_s=0.2)
    with Client(port=server.port) as client:
        until(lambda: first(client) > 5000)
        client.publish("t", b"goes on")
    server.close()


def test_what_queues_passed_is_freed_on_opening(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES)
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        fill(client)
        count = read_all(client, "q", 9000)
    server.close()
    server = serve(segment_bytes=SEGMENT_BYTES, retain_queues=True)
    assert server.broker.store.statistics().first > 5000, "found from the durable cursors, before the first client"
    with Client(port=server.port) as client, client.subscribe("q") as consumer:
        message = consumer.read(LONG)
        assert message is not None and message.position <= count + 1


def test_without_queues_nothing_was_passed(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES, retain_queues=True)
    with Client(port=server.port) as client:
        fill(client)
        turns = server.turns
        until(lambda: client.ping() or server.turns > turns + 20)
        assert first(client) == 1


def test_a_delayed_message_is_not_passed(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES, retain_queues=True)
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish("t", b"late", delay_s=3600)
        fill(client)
        read_all(client, "q", 10_000)
        turns = server.turns
        until(lambda: client.ping() or server.turns > turns + 20)
        assert first(client) == 1
