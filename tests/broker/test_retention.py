"""What the broker frees: by age, by size and by what every queue has passed, when asked for; and how that is counted."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


# --- what is taken from a queue is told


def summary(client: Client, queue: str) -> dict[str, Any]:
    return next(entry for entry in client.queues() if entry["queue"] == queue)


def ledger(server: Server, queue: str) -> tuple[int, int, int]:
    counters = server.broker.queues[queue].counters
    return counters.get("matched"), counters.get("delivered"), counters.get("expired")


def test_what_is_taken_before_it_was_delivered_is_expired(serve: Callable[..., Server]) -> None:
    """By number, of this queue's own topics: each message is counted long before it is freed."""
    server = serve(segment_bytes=SEGMENT_BYTES, retain_bytes=4 << 20)
    own: list[int] = []
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for _ in range(40):
            start, end = client.publish_many("t", [b"x" * 100] * 400)
            own += range(start, end + 1)
            client.publish_many("other", [b"x" * 100] * 600)
            client.queues()
        until(lambda: summary(client, "q")["expired"] == bisect.bisect_left(own, first(client)) > 0)
        found = summary(client, "q")
        assert (found["expired"] + found["depth"], found["skipped"]) == (16_000, 0)
        read, last = 0, 0
        with client.subscribe("q") as consumer:
            while last < own[-1]:
                batch = consumer.read_many(1000, LONG)
                read, last = read + len(batch), batch[-1].position or 0
        assert 0 < read <= found["depth"]
        assert ledger(server, "q") == (16_000, read, 16_000 - read)


def test_what_nobody_had_counted_is_told_as_positions(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.broker.Broker.observing", lambda _: iter(()))
    server = serve(segment_bytes=SEGMENT_BYTES, retain_bytes=4 * SEGMENT_BYTES)

    def told(queue: str) -> int:
        found = summary(client, queue)
        return int(found["skipped"] + found["expired"] + found["depth"])

    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        fill(client)
        until(lambda: (before := first(client)) > 1 and summary(client, "q")["skipped"] >= before - 1)
        assert told("q") == 10_000
        before = first(client)
        client.queue("late", topics="t", from_position=1)
        assert told("late") <= 10_001 - before, "what was freed before it began is not its loss"


def test_what_is_taken_while_it_waits_to_come_again_is_expired(serve: Callable[..., Server]) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES, retain_bytes=4 * SEGMENT_BYTES)
    with Client(port=server.port) as client:
        client.queue("q", topics="once")
        client.publish_many("once", [b"x"] * 10)
        with client.subscribe("q", ack="manual") as consumer:
            assert all(consumer.read(LONG) for _ in range(10))
        fill(client)
        until(lambda: first(client) > 10)
        with client.subscribe("q") as consumer:
            client.publish("once", b"new")
            assert bytes(consumer.read(LONG) or b"") == b"new"
            until(lambda: summary(client, "q")["expired"] == 10)
        matched, delivered, expired = ledger(server, "q")
        assert (matched, delivered, expired) == (21, 11, 10), "ten of them twice: delivered, and then not again"


def test_a_delayed_message_that_is_taken_is_counted(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    later_ns = [0]
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, time_ns=lambda: time.time_ns() + later_ns[0])
    monkeypatch.setattr("penstock.broker.server.time", clock)
    server = serve(segment_bytes=SEGMENT_BYTES, retain_bytes=4 * SEGMENT_BYTES)
    with Client(port=server.port) as client:
        client.publish("t", b"late", delay_s=3600)
        fill(client)
        until(lambda: first(client) > 1)
        later_ns[0] = 7200 * 10**9
        until(lambda: client.statistics()["expired"] == 1)
        client.ping()
        counters = server.broker.counters
        assert counters.get("matched") == counters.get("delivered") + counters.get("expired") == 10_001


def test_a_trickle_is_not_counted_in_crumbs(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for number in range(1, 31):
            client.publish("t", b"x")
            assert client.queues()[0]["depth"] == number
        assert len(server.broker.queues["q"]._backlog._pieces) == 1


def test_dead_letters_that_were_sent_back_hold_nothing(server: Server, client: Client) -> None:
    """A queue that nobody ever read goes on when nothing waits in it."""
    client.queue("poison", topics="t", max_tries=1)
    client.publish_many("t", [b"1", b"2"])
    with client.subscribe("poison", ack="manual") as consumer:
        for _ in range(2):
            consumer.nack(consumer.receive(LONG))
        # before its reader leaves: without one nothing becomes a dead letter
        until(lambda: {entry["queue"]: entry["depth"] for entry in client.queues()}.get("poison.dead") == 2, "dead letters")
    assert client.redrive("poison") == 2
    with client.subscribe("poison", ack="read") as consumer:
        for _ in range(2):
            consumer.receive(LONG)
    last = client.publish("other", b"x")
    dead = server.broker.queues["poison.dead"]
    until(lambda: dead.state.floor > last, "it goes on with the log")
    client.publish_many("t", [b"3"])
    with client.subscribe("poison", ack="manual") as consumer:
        consumer.nack(consumer.receive(LONG))
    until(lambda: client.redrive("poison") == 1, "a later dead letter is found")
