"""Pausing a queue, and what its counters tell who looks from outside."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from penstock._core import counters_read
from penstock.broker import Client, Server
from penstock.broker.queue import Queue
from penstock.errors import RefusedError

from .conftest import LONG, until


def counters(name: str) -> dict[str, object]:
    """What the queue of this process counts, as another process would see it."""
    return next(
        block
        for block in counters_read()
        if (block["pid"], block["room"], block["kind"], block["name"]) == (os.getpid(), "broker", "queue", name)
    )


def test_a_paused_queue_hands_out_nothing_until_resumed(client: Client) -> None:
    client.queue("q", topics="t")
    with client.subscribe("q", ack="manual", credit=1) as consumer:
        client.publish("t", b"before")
        held = consumer.read(LONG)
        assert held is not None
        client.pause("q")
        client.publish_many("t", [b"1", b"2"])
        consumer.ack(held, confirm=True)
        assert consumer.read(0.3) is None
        assert next(entry for entry in client.queues() if entry["queue"] == "q")["paused"] is True
        client.resume("q")
        for expected in (b"1", b"2"):
            message = consumer.read(LONG)
            assert message is not None and bytes(message) == expected
            consumer.ack(message)


def test_a_pause_survives_a_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.pause("q")
        client.publish("t", b"waits")
    server.close()
    server = serve()
    with Client(port=server.port) as client, client.subscribe("q") as consumer:
        assert consumer.read(0.3) is None
        client.resume("q")
        assert bytes(consumer.read(LONG) or b"") == b"waits"


def test_messages_due_again_wait_while_paused_without_a_busy_loop(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"1", b"2"])
        with client.subscribe("q", ack="manual") as consumer:
            assert len([consumer.read(LONG), consumer.read(LONG)]) == 2
            client.pause("q")
        with client.subscribe("q", ack="manual") as consumer:  # what the first one held is due again
            assert consumer.read(0.1) is None
            assert server.broker.next_time_ns() > 1 << 62, "the loop would not sleep"
            client.resume("q")
            again = [consumer.read(LONG), consumer.read(LONG)]
            assert [bytes(message or b"") for message in again] == [b"1", b"2"]


def test_a_message_due_again_that_nobody_has_credit_for_costs_no_busy_loop(serve: Callable[..., Server]) -> None:
    server = serve()
    turns = 0
    pump = server.broker.pump

    def counted(now_ns: int, over: Callable[[], bool]) -> list[Queue]:
        nonlocal turns
        turns += 1
        return pump(now_ns, over)

    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"1", b"2"])
        with client.subscribe("q", ack="manual", credit=1) as consumer:
            held = consumer.read(LONG)
            assert held is not None
            with client.subscribe("q", ack="manual", credit=1) as other:
                assert other.read(LONG) is not None
            until(lambda: next(entry for entry in client.queues() if entry["queue"] == "q")["ready"] == 1)
            server.broker.pump = counted  # type: ignore[method-assign]
            assert consumer.read(0.4) is None
            assert turns < 100, "about one look in 50 ms, not one after the other"
            consumer.ack(held)
            assert bytes(consumer.read(LONG) or b"") == b"2"


def test_pausing_needs_the_queue_to_be_there(client: Client) -> None:
    with pytest.raises(RefusedError, match="no queue none"):
        client.pause("none")


def test_counters_tell_depth_lag_and_why_nothing_moves(client: Client) -> None:
    client.queue("q", topics="t")
    client.queue("other", topics="else")
    client.publish_many("t", [b"x"] * 20)
    client.publish_many("else", [b"x"] * 5)
    until(lambda: (counters("q")["depth"], counters("other")["depth"]) == (20, 5))
    until(lambda: counters("q")["lag"] == 25, "positions behind the end of the store")
    with client.subscribe("q", ack="manual", credit=3) as consumer:
        assert consumer.read(LONG) is not None
        until(lambda: counters("q")["state"] == "no credit: 1 consumer(s) hold 3 unacknowledged, 17 wait")
        assert counters("q")["depth"] == 20
        client.pause("q")
        assert counters("q")["state"] == "paused"
        client.resume("q")
    with client.subscribe("q") as consumer:
        read = 0
        while read < 20:
            read += len(consumer.read_many(20, LONG))
        consumer.read(0)  # acknowledges the last one
        until(lambda: (counters("q")["depth"], counters("q")["lag"], counters("q")["state"]) == (0, 0, ""))
    client.publish_many("t", [b"x"] * 7)
    until(lambda: counters("q")["depth"] == 7)
    assert client.purge("q") == 7
    until(lambda: counters("q")["depth"] == 0)
