"""Kinds, order, subscribing, priorities: what arrives where."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.bus import Bus, CallbackSubscriber, FifoSubscriber, QueueSubscriber, declare
from penstock.errors import InvalidArgument, StateError

from .conftest import LONG, House

KINDS = ["callback", "queue", "fifo"]


@pytest.mark.parametrize("kind", KINDS)
def test_adding_and_removing(house: House, kind: str) -> None:
    subscriber = house.subscribe("a", 0, kind=kind)
    house.publish(0)
    house.handle(subscriber)
    assert house.take("a") == [0]
    house.bus.remove(subscriber)
    house.publish(0)
    house.handle(subscriber)
    assert house.take("a") == []
    house.bus.add(subscriber)  # its subscriptions are still there
    house.publish(0)
    house.handle(subscriber)
    assert house.take("a") == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_subscribing(house: House, kind: str) -> None:
    subscriber = house.subscribe("a", 0, 2, 4, 6, kind=kind)
    house.publish(*range(8))
    house.handle(subscriber)
    assert house.take("a") == [0, 2, 4, 6]
    subscriber.unsubscribe(2, 6)
    assert subscriber.ids == [0, 4]
    house.publish(*range(8))
    house.handle(subscriber)
    assert house.take("a") == [0, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_four_subscribers(house: House, kind: str) -> None:
    subscribers = [house.subscribe(i, 2 * i, kind=kind) for i in range(4)]
    house.publish(*range(8))
    house.handle(*subscribers)
    assert [house.take(i) for i in range(4)] == [[0], [2], [4], [6]]
    for subscriber in subscribers:
        subscriber.subscribe(0, 2, 4, 6)
    house.publish(*range(8))
    house.handle(*subscribers)
    assert [house.take(i) for i in range(4)] == [[0, 2, 4, 6]] * 4


@pytest.mark.parametrize("kind", ["queue", "fifo"])
def test_handled_one_at_a_time(house: House, kind: str) -> None:
    subscriber = house.subscribe("a", 0, 1, 2, 3, kind=kind)
    house.publish(0, 1, 2, 3)
    for expected in range(4):
        assert subscriber.handle_queued(LONG) is True
        assert house.take("a") == [expected]
    assert subscriber.handle_queued(0) is False
    assert subscriber.handle_queued(0.001) is False


def test_a_queue_of_one_blocks_and_loses_nothing(house: House) -> None:
    subscriber = house.subscribe("a", 0, 1, 2, 3, kind="queue", depth=1)
    for number in range(4):
        house.bus.publish(house.bus.allocate(number, 8, house.slab))
    for _ in range(4):
        assert subscriber.handle_queued(LONG)
    assert house.take("a") == [0, 1, 2, 3]
    assert house.bus.flush(LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_priorities(house: House, kind: str) -> None:
    subscribers = {priority: house.subscribe(priority, 0, kind=kind, priority=priority) for priority in (4, 3, 2, 1)}
    assert house.bus.subscribers == [subscribers[priority] for priority in (1, 2, 3, 4)]
    house.publish(0)
    house.handle(*(subscribers[priority] for priority in (1, 2, 3, 4)))
    assert house.order == [1, 2, 3, 4]


def test_equal_priorities_by_order_of_adding(house: House) -> None:
    for key in "abc":
        house.subscribe(key, 0)
    house.publish(0)
    assert house.order == ["a", "b", "c"]


def test_priority_is_read_when_added(house: House) -> None:
    first, second = house.subscribe("first", 0, priority=1), house.subscribe("second", 0, priority=2)
    second.priority = 0
    house.publish(0)
    assert house.order == ["first", "second"]
    house.bus.remove(second)
    house.bus.add(second)
    house.order.clear()
    house.publish(0)
    assert house.order == ["second", "first"]
    assert first.priority == 1


@pytest.mark.parametrize("order", list(itertools.permutations(KINDS)))
def test_kinds_in_any_order_of_adding(house: House, order: tuple[str, ...]) -> None:
    subscribers = {kind: house.subscribe(kind, 0, kind=kind, priority=255 - i) for i, kind in enumerate(order)}
    assert [type(s) for s in house.bus.subscribers] == [CallbackSubscriber, QueueSubscriber, FifoSubscriber]
    house.publish(0, 0)
    house.handle(*subscribers.values())
    assert [house.take(kind) for kind in KINDS] == [[0, 0]] * 3


def test_unsubscribing_does_not_purge(house: House) -> None:
    subscriber = house.subscribe("a", 0, kind="queue")
    house.publish(0)
    subscriber.unsubscribe(0)
    house.publish(0)
    house.handle(subscriber)
    assert house.take("a") == [0]


@pytest.mark.parametrize("mode", ["thread", "direct"])
def test_what_a_handler_publishes_comes_after_the_current_message(mode: str) -> None:
    with Bus(mode=mode) as bus:
        seen: list[tuple[str, int]] = []

        @bus.on(1, 2)
        def first(message: Any) -> None:
            seen.append(("first", message.id))
            if message.id == 1:
                bus.publish(b"", 2)

        @bus.on(1, 2)
        def second(message: Any) -> None:
            seen.append(("second", message.id))

        bus.publish(b"", 1)
        assert bus.flush(LONG)
        if mode == "thread":
            assert bus.flush(LONG)
        assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


@pytest.mark.parametrize("mode", ["thread", "direct"])
def test_a_subscriber_may_remove_itself_and_others(mode: str) -> None:
    with Bus(mode=mode) as bus:
        seen: list[str] = []

        @bus.on(1)
        def once(message: Any) -> None:
            seen.append("once")
            bus.remove(once.subscriber)
            bus.remove(victim.subscriber)
            once.__dict__.clear()  # the last reference to the subscriber but the bus's own

        @bus.on(1)
        def victim(message: Any) -> None:
            seen.append("victim")

        @bus.on(1)
        def stays(message: Any) -> None:
            seen.append("stays")

        bus.publish(b"", 1)
        bus.publish(b"", 1)
        assert bus.flush(LONG)
        assert seen == ["once", "stays", "stays"]


def test_a_subscriber_added_in_a_handler_gets_the_next_message() -> None:
    with Bus(mode="direct") as bus:
        seen: list[int] = []

        @bus.on(1)
        def grow(message: Any) -> None:
            bus.subscribe(1, kind="callback", handler=lambda later: seen.append(later.ordinal))

        bus.publish(b"", 1)
        assert seen == []
        bus.publish(b"", 1)
        assert seen == [2]


def test_predicates(house: House) -> None:
    even = house.subscribe("even", kind="queue", predicate=lambda message: message.id % 2 == 0)
    narrowed = house.subscribe("narrowed", 1, 2, predicate=lambda message: message.id > 1)
    house.publish(*range(8))
    house.handle(even)
    assert house.take("even") == [0, 2, 4, 6]
    assert house.take("narrowed") == [2]
    assert narrowed.ledger.matched == 1
    even.predicate = None
    house.publish(0)
    assert even.queued == 0


def test_a_predicate_that_raises_is_told_and_the_others_receive() -> None:
    errors: list[BaseException] = []
    with Bus(mode="direct", on_error=lambda subscriber, message, error: errors.append(error)) as bus:
        bad = bus.subscribe(kind="callback", handler=print, predicate=lambda message: 1 / 0)
        good = bus.subscribe(1)
        bus.publish(b"x", 1)
        assert good.queued == 1
        assert [type(error) for error in errors] == [ZeroDivisionError]
        assert bad.ledger.dropped == {"error": 1} and bad.ledger.balanced


def test_a_predicate_may_keep_the_message(house: House) -> None:
    kept: list[Any] = []
    house.subscribe("a", predicate=lambda message: kept.append(message) or True)
    house.publish(3)
    assert house.take("a") == [3]
    assert bytes(kept.pop()) == bytes([3] * 8)


def test_no_match_gives_the_memory_back(house: House) -> None:
    house.subscribe("a", 1)
    house.publish(0, 2, 3)
    assert house.slab.in_use == 0


def test_declared_before_there_is_a_bus() -> None:
    seen: list[int] = []

    @declare(5, 6, priority=3)
    def handler(message: Any) -> None:
        seen.append(message.id)

    with Bus(mode="direct") as bus:
        bus.add_declared(handler)
        bus.publish(b"", 6)
        assert seen == [6]
        with pytest.raises(StateError, match="declare"):
            bus.add_declared(print)


# --- fifo -------------------------------------------------------------------------------------------------------------


def test_a_fifo_message_is_on_one_fifo_at_a_time(house: House) -> None:
    first, second, third = (house.subscribe(i, 0, kind="fifo") for i in range(3))
    house.publish(0)
    assert [s.queued for s in (first, second, third)] == [1, 0, 0]
    assert first.handle_queued(0)
    assert [s.queued for s in (first, second, third)] == [0, 1, 0]
    assert not third.handle_queued(0)
    assert second.handle_queued(0) and third.handle_queued(0)
    assert house.order == [0, 1, 2]


def test_a_fifo_forwards_before_its_own_handler_runs(house: House) -> None:
    second = FifoSubscriber(lambda message: None, ids=[0])
    seen = []
    first = house.bus.subscribe(0, kind="fifo", handler=lambda message: seen.append(second.queued))
    house.bus.add(second)
    house.publish(0)
    assert first.handle_queued(0)
    assert seen == [1]
    assert second.handle_queued(0)


def test_removing_a_fifo_with_messages_queued(house: House) -> None:
    first, second = house.subscribe("first", 0, kind="fifo"), house.subscribe("second", 0, kind="fifo")
    house.publish(0, 0, 0)
    assert first.handle_queued(0)
    house.bus.remove(first)
    assert second.queued == 3, "the next one loses nothing"
    house.handle(first, second)
    assert house.take("first") == [0, 0, 0], "what is queued already still arrives"
    assert house.take("second") == [0, 0, 0], "once each"
    assert first.ledger.balanced and second.ledger.balanced


def test_closing_a_fifo_with_messages_queued(house: House) -> None:
    first, second = house.subscribe("first", 0, kind="fifo"), house.subscribe("second", 0, kind="fifo")
    house.publish(0, 0)
    first.close()
    house.handle(second)
    assert house.take("second") == [0, 0]
    assert first.ledger.dropped == {"closed": 2} and first.ledger.balanced


def test_a_fifo_nobody_holds_passes_on_what_it_has(house: House) -> None:
    house.subscribe("first", 0, kind="fifo")  # dropped at once
    first, second = house.subscribe("held", 0, kind="fifo"), house.subscribe("second", 0, kind="fifo")
    house.publish(0)
    del first
    house.handle(second)
    assert house.take("second") == [0]


def test_a_full_fifo_passes_on_what_it_cannot_take(house: House) -> None:
    first, second = house.subscribe("first", 0, kind="fifo", depth=1), house.subscribe("second", 0, kind="fifo")
    house.publish(0, 0)
    assert first.ledger.dropped == {"overflow": 1}
    house.handle(first, second)
    assert house.take("second") == [0, 0]


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_callback_subscriber_needs_a_handler() -> None:
    with Bus() as bus:
        with pytest.raises(StateError, match="handler"):
            bus.add(CallbackSubscriber(ids=[1]))
        subscriber = bus.add(CallbackSubscriber(print, ids=[1]))
        with pytest.raises(StateError, match="handler"):
            subscriber.handler = None


def test_queue_subscribers_without_a_handler_can_only_be_read() -> None:
    with Bus(mode="direct") as bus:
        for kind in ("queue", "fifo"):
            subscriber = bus.subscribe(1, kind=kind)
            bus.publish(b"x", 1)
            with pytest.raises(StateError, match="no handler"):
                subscriber.handle_queued(0)
            message = subscriber.read(0)
            assert message is not None and bytes(message) == b"x"
            subscriber.close()


def test_a_callback_subscriber_has_no_queue() -> None:
    subscriber = CallbackSubscriber(print)
    for method in (subscriber.handle_queued, subscriber.read, subscriber.read_many, subscriber.wait, subscriber.fileno):
        with pytest.raises(StateError, match="callback"):
            method()


def test_the_subscription_bits_are_sized_from_max_public_id() -> None:
    assert QueueSubscriber(max_public_id=7).subscription_bytes == 8
    assert QueueSubscriber(max_public_id=64).subscription_bytes == 16
    assert QueueSubscriber(max_public_id=65535).subscription_bytes == 8192
    edge = QueueSubscriber(max_public_id=65535, ids=[0, 63, 64, 65535])
    assert edge.ids == [0, 63, 64, 65535]
    with pytest.raises(InvalidArgument, match="private"):
        QueueSubscriber(max_public_id=7).subscribe(8)
