"""A subscriber that nobody reads: told of by name, bounded in memory; a bus that is dropped ends its thread."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock import CapacityError, ClosedError
from penstock._core import counters_read
from penstock.address import parse
from penstock.bus import Bus, CallbackSubscriber, Overflow, declare
from penstock.bus.bus import STUCK_AT_EXIT_S, _join
from penstock.bus.explain import explain

LONG = 30.0


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def test_a_stuck_subscriber_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.bus"), Bus("house", stuck_after=0.01) as bus:
        stuck = bus.subscribe(1, name="the stuck one", depth=2)
        bus.publish_many([b"x"] * 5, 1)
        until(lambda: "the stuck one" in caplog.text, "nobody was told")
        mine = [block for block in counters_read() if block["name"] == "house?subscriber=the stuck one"]
        assert mine and mine[0]["state"].startswith("stuck")
        assert any("'the stuck one'" in finding.text for finding in explain(parse("bus:house")))
        assert not any("stuck" in finding.text for finding in explain(parse("bus:other"))), "it is not on that bus"
        assert caplog.text.count("the stuck one") == 1
        assert len([message for message in (stuck.read(LONG) for _ in range(5)) if message is not None]) == 5
        assert bus.flush(LONG)
        assert not [block for block in counters_read() if block["name"] == "house?subscriber=the stuck one" and block["state"]]


@pytest.mark.parametrize("in_executor", [False, True])
def test_closing_without_draining_does_not_wait_for_a_stuck_subscriber(in_executor: bool) -> None:
    with ThreadPoolExecutor() as executor:
        bus = Bus("house", executor=executor if in_executor else None)
        stuck = bus.subscribe(1, depth=1)
        bus.publish_many([b"x"] * 3, 1)
        until(lambda: bus._waits, "the bus waits for room")
        closing = threading.Thread(target=bus.close, kwargs={"drain": False}, daemon=True)
        closing.start()
        closing.join(LONG)
        ended = not closing.is_alive()
        stuck.read(0)  # so that a test that fails ends
    assert ended and stuck.ledger.dropped == {"closed": 1} and stuck.ledger.balanced


def test_with_a_timeout_a_full_subscriber_drops_and_counts() -> None:
    with Bus("house") as bus:
        stuck = bus.subscribe(1, depth=2, timeout=0.01)
        bus.publish_many([b"x"] * 5, 1)
        assert bus.flush(LONG)
        assert stuck.ledger.dropped == {"overflow": 3} and stuck.ledger.balanced


def test_what_waits_for_dispatch_is_bounded() -> None:
    bus = Bus("house", pending_bytes=100_000)
    stuck = bus.subscribe(1, name="the stuck one", depth=1)
    until(lambda: "the stuck one" in _refusal(bus), "who holds it up is not named")
    assert 50 < bus.pending <= 100
    with pytest.raises(CapacityError) as raised:
        bus.publisher(1).publish_many([b"x" * 1000] * 3)
    assert raised.value.published == 0  # type: ignore[attr-defined]
    assert stuck.read(LONG) is not None  # room is given back as it is read
    until(lambda: _published(bus), "there is no room though something was read")
    bus.close(drain=False)


def _refusal(bus: Bus) -> str:
    """Fill the bus, and say why it takes no more: at first because its thread has not begun."""
    with pytest.raises(CapacityError) as raised:
        for _ in range(10_000):
            bus.publish(b"x" * 1000, 1)
    return str(raised.value)


def _published(bus: Bus) -> bool:
    try:
        bus.publish(b"x", 1)
    except CapacityError:
        return False
    return True


def test_a_message_larger_than_the_bound_goes_through_an_empty_bus() -> None:
    with Bus("house", pending_bytes=100) as bus:
        reader = bus.subscribe(1)
        bus.publish(b"x" * 1000, 1)
        message = reader.read(LONG)
        assert message is not None and message.size == 1000


@pytest.mark.parametrize("overflow", [Overflow.DROP_OLDEST, Overflow.DROP_NEWEST])
def test_the_bound_in_bytes_drops_where_that_was_asked_for(overflow: Overflow) -> None:
    bus = Bus("house", pending_bytes=10_000, pending_depth=1_000_000, pending_overflow=overflow)
    bus.subscribe(1, depth=1)
    for _ in range(200):
        bus.publish(b"x" * 1000, 1)
    assert bus.ledger.dropped["overflow"] > 100 and bus.pending <= 10
    bus.close(drain=False)


@pytest.mark.parametrize("used", [False, True])
def test_a_dropped_bus_ends_its_thread(used: bool) -> None:
    bus = Bus("dropped")
    calls: list[bytes] = []
    bus.add(CallbackSubscriber(lambda message: calls.append(bytes(message)), ids=(1,)))
    bus.publish(b"1", 1)
    if used:
        assert bus.flush(LONG)
    thread = bus._thread
    assert thread is not None
    gone = weakref.ref(bus)
    del bus
    until(lambda: (gc.collect(), gone() is None)[1], "the bus is still there")
    thread.join(LONG)
    assert not thread.is_alive()
    assert calls == [b"1"], "what was published is delivered first"


def test_closing_a_direct_bus_ends_the_wait_of_a_publisher() -> None:
    bus = Bus("direct", mode="direct")
    queue = bus.subscribe(1, depth=1)
    bus.publish(b"1", 1)
    outcome: list[Any] = []

    def publish() -> None:
        try:
            outcome.append(bus.publish(b"2", 1))
        except ClosedError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=publish)
    thread.start()
    until(lambda: queue.ledger.matched == 2, "it publishes")
    bus.close()
    thread.join(60)
    assert outcome == [
        f"bus 'direct' was closed while subscriber {queue.name!r} was full; the message was dropped for it and counted"
    ]
    assert queue.ledger.dropped == {"closed": 1}


def test_closing_a_publisher_ends_its_wait() -> None:
    with Bus("house", mode="direct") as bus:
        stuck = bus.subscribe(1, depth=1)
        publisher = bus.publisher(1)
        other = bus.publisher(1)
        publisher.publish(b"1")
        threading.Timer(0.05, publisher.close).start()
        with pytest.raises(ClosedError):
            publisher.publish(b"2")
        assert stuck.ledger.dropped == {"closed": 1}
        assert stuck.read(0) is not None
        other.publish(b"3")
        message = stuck.read(0)
        assert message is not None and bytes(message) == b"3" and stuck.ledger.balanced


def test_add_declared_without_names_adds_all() -> None:
    found: list[str] = []

    @declare(1001)
    def first(_: Any) -> None:
        found.append("first")

    @declare(1001)
    def second(_: Any) -> None:
        found.append("second")

    with Bus("house", mode="direct") as bus:
        bus.add_declared()
        bus.publish(b"", 1001)
        assert found[-2:] == ["first", "second"]
        bus.add_declared()  # they are on a bus now
        assert len(bus.subscribers) == len({id(one) for one in bus.subscribers})


def test_the_end_of_a_program_does_not_wait_for_a_reader_that_takes_nothing() -> None:
    bus = Bus("stuck-at-exit")
    queue = bus.subscribe(1, depth=1)
    for _ in range(3):
        bus.publish(b"x", 1)
    until(lambda: bus._waits, "the bus waits for room")
    thread = bus._thread
    assert thread is not None
    deadline = time.monotonic() + LONG
    _join(bus, thread, deadline)
    assert time.monotonic() < deadline and thread.is_alive()
    reading = threading.Thread(target=lambda: [queue.read(LONG) for _ in range(3)])
    reading.start()
    bus.close()
    reading.join()


def test_the_end_of_a_program_waits_for_a_handler_at_work() -> None:
    bus = Bus("busy-at-exit")
    begun, go_on = threading.Event(), threading.Event()
    bus.subscribe(1, kind="callback", handler=lambda _: (begun.set(), go_on.wait(LONG)))
    bus.publish(b"x", 1)
    assert begun.wait(LONG) and bus._thread is not None
    _join(bus, bus._thread, time.monotonic() + 3 * STUCK_AT_EXIT_S)
    assert not go_on.is_set() and bus._thread.is_alive()
    ended = threading.Thread(target=lambda: _join(bus, bus._thread, time.monotonic() + LONG))  # type: ignore[arg-type]
    bus._stop(False)
    ended.start()
    go_on.set()
    ended.join(LONG)
    assert not bus._thread.is_alive()
    bus.close()


def test_a_closing_bus_that_waits_says_how_to_end_that(caplog: pytest.LogCaptureFixture) -> None:
    for closing in (False, True):
        with Bus("house") as bus:
            stuck = bus.subscribe(1, depth=2)
            if closing:
                bus._stop(False)  # the first thing that close does
            stuck._tell_stuck(1.0)
            assert ("the bus is closing" in caplog.messages[-1]) == closing
