"""A full subscriber: block, drop_oldest, drop_newest, drop_above; the books balance."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.bus import Bus, QueueSubscriber

from .conftest import LONG


def contents(subscriber: QueueSubscriber) -> list[bytes]:
    return [bytes(message) for message in subscriber.read_many(1000, 0)]


def fill(bus: Bus, count: int, identifier: int = 1) -> None:
    for i in range(count):
        bus.publish(b"%d" % i, identifier)


def test_drop_oldest() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, depth=3, overflow="drop_oldest")
        fill(bus, 10)
        assert subscriber.ledger.dropped == {"overflow": 7} and subscriber.ledger.in_flight == 3
        assert contents(subscriber) == [b"7", b"8", b"9"]
        assert subscriber.ledger.balanced and subscriber.ledger.matched == 10


def test_drop_newest() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, depth=3, overflow="drop_newest")
        fill(bus, 10)
        assert contents(subscriber) == [b"0", b"1", b"2"]
        assert subscriber.ledger.dropped == {"overflow": 7} and subscriber.ledger.balanced


def test_drop_above() -> None:
    """Ids above the level are dropped when full; the others wait."""
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1, 5, 6, depth=2, drop_above=5, timeout=0.01)
        fill(bus, 2)
        bus.publish(b"dropped", 6)
        assert subscriber.ledger.dropped == {"overflow": 1}
        with pytest.raises(TimeoutError):
            bus.publish(b"waited for", 5)
        assert contents(subscriber) == [b"0", b"1"]
        bus.publish(b"room", 6)
        assert contents(subscriber) == [b"room"]
        assert subscriber.ledger.balanced


def test_block_in_a_direct_publisher_raises_after_the_time_and_the_others_receive() -> None:
    with Bus(mode="direct") as bus:
        slow = bus.subscribe(1, depth=1, timeout=0.01, name="slow", priority=0)
        other = bus.subscribe(1, depth=10, priority=1)
        bus.publish(b"a", 1)
        with pytest.raises(TimeoutError, match="'slow' was full"):
            bus.publish(b"b", 1)
        assert contents(slow) == [b"a"] and contents(other) == [b"a", b"b"]
        assert slow.ledger.dropped == {"overflow": 1} and slow.ledger.balanced and other.ledger.lost == 0


def test_block_on_the_bus_thread_is_a_counted_drop() -> None:
    with Bus() as bus:
        slow = bus.subscribe(1, depth=1, timeout=0.01)
        other = bus.subscribe(1)
        fill(bus, 3)
        assert bus.flush(LONG)
        assert slow.ledger.dropped == {"overflow": 2} and other.queued == 3


def test_block_without_a_timeout_waits_without_the_gil_or_a_lock() -> None:
    with Bus(mode="direct") as bus:
        slow = bus.subscribe(1, depth=1)
        bus.publish(b"0", 1)
        done = threading.Event()
        thread = threading.Thread(target=lambda: (bus.publish(b"1", 1), done.set()))
        thread.start()
        other = bus.subscribe(2)  # subscribing and publishing elsewhere go on meanwhile
        for _ in range(100):
            bus.publish(b"x", 2)
        assert len(contents(other)) == 100 and not done.is_set()
        assert bytes(slow.read(LONG)) == b"0"
        assert done.wait(LONG)
        thread.join()
        assert contents(slow) == [b"1"]


@pytest.mark.parametrize("how", ["remove", "close", "drop"])
def test_a_blocked_publisher_is_woken_when_the_subscriber_goes(how: str) -> None:
    bus = Bus(mode="direct")
    slow = bus.subscribe(1, depth=1)
    bus.publish(b"0", 1)
    waiting = threading.Event()

    def publish() -> None:
        waiting.set()
        bus.publish(b"1", 1)

    thread = threading.Thread(target=publish)
    thread.start()
    assert waiting.wait(LONG)
    deadline = time.monotonic() + LONG
    while slow.ledger.matched < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    if how == "remove":
        bus.remove(slow)
    elif how == "close":
        slow.close()
    else:
        del slow
    thread.join(LONG)
    assert not thread.is_alive()
    if how != "drop":
        assert slow.ledger.balanced
    bus.close()
    if how != "remove":
        assert bus.heap_in_use == 0


def test_publishers_are_served_in_the_order_they_came() -> None:
    with Bus(mode="direct") as bus:
        slow = bus.subscribe(1, depth=1)
        bus.publish(b"first", 1)
        threads = []
        for i in range(5):
            threads.append(threading.Thread(target=bus.publish, args=(b"%d" % i, 1)))
            threads[-1].start()
            deadline = time.monotonic() + LONG
            while slow.ledger.matched < i + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        found = [bytes(slow.read(LONG)) for _ in range(6)]
        for thread in threads:
            thread.join()
        assert found == [b"first", b"0", b"1", b"2", b"3", b"4"]


def test_closing_counts_what_was_queued() -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe(1)
        fill(bus, 4)
        subscriber.close()
        assert subscriber.ledger.dropped == {"closed": 4} and subscriber.ledger.balanced
        assert bus.heap_in_use == 0


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "block"])
def test_a_bounded_publish_queue(overflow: str) -> None:
    """The bus thread is held up in a handler while the publish queue fills."""
    gate, entered = threading.Event(), threading.Event()
    bus = Bus(pending_depth=2, pending_overflow=overflow, pending_timeout=0.01)
    seen: list[bytes] = []

    @bus.on(1)
    def handler(message: object) -> None:
        entered.set()
        seen.append(bytes(message))  # type: ignore[call-overload]
        assert gate.wait(LONG)

    bus.publish(b"0", 1)
    assert entered.wait(LONG)
    bus.publish(b"1", 1)
    bus.publish(b"2", 1)
    if overflow == "block":
        with pytest.raises(TimeoutError, match="nothing was published"):
            bus.publish(b"3", 1)
    else:
        bus.publish(b"3", 1)
    gate.set()
    bus.close()
    assert seen == {"drop_oldest": [b"0", b"2", b"3"]}.get(overflow, [b"0", b"1", b"2"])
    assert bus.ledger.balanced and bus.heap_in_use == 0
    assert bus.ledger.dropped == ({} if overflow == "block" else {"overflow": 1})


def test_publish_many_stops_at_the_first_time_out() -> None:
    """What was published is counted; the rest is not published, and nothing leaks."""
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1, depth=300, timeout=0.01)
        publisher = bus.publisher(1)
        batch = [b"%d" % i for i in range(1000)]
        with pytest.raises(TimeoutError):
            publisher.publish_many(batch)
        assert queue.ledger.matched == publisher.ledger.matched == 301
        assert queue.ledger.dropped == {"overflow": 1}
        assert contents(queue) == batch[:300]
        assert bus.heap_in_use == 0
        assert publisher.publish(b"next") == 302


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
def test_publish_many_drops_like_publish(overflow: str) -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1, depth=50, overflow=overflow)
        batch = [b"%d" % i for i in range(1000)]
        assert bus.publish_many(batch, 1) == 1000
        assert queue.ledger.dropped == {"overflow": 950} and queue.ledger.balanced
        assert contents(queue) == (batch[-50:] if overflow == "drop_oldest" else batch[:50])


def test_publish_many_with_a_bad_item_publishes_those_before_it() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        with pytest.raises(TypeError):
            bus.publish_many([b"a", b"b", 7, b"c"], 1)
        assert contents(queue) == [b"a", b"b"]
        assert bus.heap_in_use == 0


def test_two_full_subscribers_are_told_in_one_error() -> None:
    with Bus(mode="direct") as bus:
        first = bus.subscribe(1, depth=1, timeout=0.01, name="first")
        second = bus.subscribe(1, depth=1, timeout=0.01, name="second")
        publisher = bus.publisher(1)
        publisher.publish(b"fits")
        with pytest.raises(TimeoutError, match="first") as told:
            publisher.publish(b"too much")
        assert len(told.value.__notes__) == 1 and "second" in told.value.__notes__[0]
        assert first.ledger.lost == second.ledger.lost == 1
