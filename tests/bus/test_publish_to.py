"""Private and peer-to-peer messages: published to one subscriber, past the bus."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.bus import (
    Bus,
    CallbackSubscriber,
    FifoSubscriber,
    QueueSubscriber,
    SlabAllocator,
    StaticMessage,
    publish_to,
)
from penstock.errors import ClosedError, InvalidArgument, StateError

from .conftest import LONG, House

KINDS = ["callback", "queue", "fifo"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_gets_only_its_own(house: House, kind: str) -> None:
    low = house.subscribe("low", 3, kind=kind, max_public_id=4)
    high = house.subscribe("high", 6, kind=kind, max_public_id=7)
    house.publish(3, 6)
    house.bus.publish_to(low, house.bus.allocate(5, 8, house.slab))  # public to one, private to the other
    house.bus.publish_to(high, house.bus.allocate(9, 8, house.slab))
    house.handle(low, high)
    assert house.take("low") == [3, 5]
    assert house.take("high") == [6, 9]


def test_to_a_callback_subscriber_it_runs_at_once_in_the_caller() -> None:
    import threading

    threads: list[int] = []
    subscriber = CallbackSubscriber(lambda message: threads.append(threading.get_ident()), max_public_id=7)  # on no bus
    with Bus() as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        publish_to(subscriber, slab.allocate(8, 8))
        assert threads == [threading.get_ident()]
        assert slab.in_use == 0
    assert subscriber.ledger.delivered == 1 and subscriber.ledger.balanced


@pytest.mark.parametrize("kind", KINDS)
def test_a_public_id_is_refused_and_nothing_is_lost(house: House, kind: str) -> None:
    subscriber = house.subscribe("a", 0, kind=kind)
    draft = house.bus.allocate(7, 8, house.slab)
    assert draft is not None
    with pytest.raises(InvalidArgument, match="public"):
        publish_to(subscriber, draft)
    assert draft.open
    draft.cancel()


def test_the_same_private_id_may_mean_two_things() -> None:
    with Bus(mode="direct") as bus:
        seen: list[tuple[str, bytes]] = []
        one = bus.subscribe(kind="callback", handler=lambda m: seen.append(("one", bytes(m))), max_public_id=7)
        two = bus.subscribe(kind="callback", handler=lambda m: seen.append(("two", bytes(m))), max_public_id=7)
        for subscriber, text in ((one, b"a"), (two, b"b")):
            draft = bus.allocate(100, 1)
            assert draft is not None
            draft.write(text)
            bus.publish_to(subscriber, draft)
        assert seen == [("one", b"a"), ("two", b"b")]


def test_private_messages_are_not_forwarded(house: House) -> None:
    first, second = house.subscribe("first", 0, kind="fifo"), house.subscribe("second", 0, kind="fifo")
    publish_to(first, house.bus.allocate(20, 8, house.slab))
    assert first.handle_queued(0)
    assert second.queued == 0


def test_ranges() -> None:
    subscriber = QueueSubscriber(max_public_id=9, max_peer_id=19)
    assert [subscriber.range_of(i) for i in (0, 9, 10, 19, 20, 65535)] == [
        "public",
        "public",
        "peer",
        "peer",
        "private",
        "private",
    ]
    with pytest.raises(InvalidArgument):
        subscriber.subscribe(10)
    with pytest.raises(InvalidArgument, match="below"):
        QueueSubscriber(max_public_id=9, max_peer_id=8)


def test_only_a_private_message_may_be_taken_writable() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, max_public_id=9, max_peer_id=19)
        peer = bus.allocate(15, 4)
        assert peer is not None
        with pytest.raises(InvalidArgument, match="peer-to-peer"):
            bus.publish_to(subscriber, peer, writable=True)
        bus.publish_to(subscriber, peer)
        message = subscriber.read(0)
        assert not message.writable
        with pytest.raises(TypeError):
            memoryview(message)[0] = 1
        private = bus.allocate(20, 4)
        bus.publish_to(subscriber, private, writable=True)
        mine = subscriber.read(0)
        memoryview(mine)[:] = b"mine"
        assert bytes(mine) == b"mine" and mine.writable
        bus.publish(b"public", 1)
        assert not subscriber.read(0).writable


def test_static_messages_go_to_one() -> None:
    subscriber = FifoSubscriber(max_public_id=7)
    static = StaticMessage(bytearray(b"abc"), 8)
    with pytest.raises(StateError, match="acquire"):
        publish_to(subscriber, static)
    publish_to(subscriber, static.acquire())
    assert static.queued
    with pytest.raises(StateError, match="in flight"):
        publish_to(subscriber, static)
    message = subscriber.read(0)
    assert bytes(message) == b"abc" and not static.queued
    message.release()
    assert static.reference_count == 0


def test_to_a_full_queue_it_waits_or_drops() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, max_public_id=7, depth=1, timeout=0.01)
        bus.publish_to(subscriber, bus.allocate(8, 1))
        with pytest.raises(TimeoutError, match="full"):
            bus.publish_to(subscriber, bus.allocate(8, 1))
        assert subscriber.ledger.dropped == {"overflow": 1} and subscriber.ledger.balanced
        assert bus.heap_in_use == 1


def test_bad_arguments() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, max_public_id=7)
        bad: list[Any] = [b"data", None, 7, "text"]
        for item in bad:
            with pytest.raises(TypeError):
                bus.publish_to(subscriber, item)
        with pytest.raises(TypeError, match="subscriber"):
            publish_to(bus, bus.allocate(9, 1))  # type: ignore[arg-type]
        draft = bus.allocate(9, 1)
        bus.publish_to(subscriber, draft)
        with pytest.raises(StateError, match="published before"):
            bus.publish_to(subscriber, draft)
        with pytest.raises(StateError, match="published before"):
            bus.publish_to(subscriber, subscriber.read(LONG))
        subscriber.close()
        with pytest.raises(ClosedError):
            bus.publish_to(subscriber, bus.allocate(9, 1))
        assert bus.heap_in_use == 0
