"""Threads that wait beside each other: nobody sleeps beside what it waits for, whoever gives up, closes or dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.bus import Bus, DelayedMessage, FifoSubscriber, QueueSubscriber, SlabAllocator
from penstock.clock import SystemClock
from penstock.errors import ClosedError, StateError

from .conftest import LONG


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def asleep(thread: threading.Thread) -> None:
    """Wait until the thread sleeps, as far as can be seen from outside."""
    status = Path(f"/proc/self/task/{thread.native_id}/stat")
    seen = 0
    while seen < 10:
        seen = seen + 1 if status.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.001)


def started(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    asleep(thread)
    return thread


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)


def test_a_list_wakes_a_reader_for_each_of_its_messages() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        bus.publish(b"first", 1)
        assert queue.read(0) is not None
        got: list[bytes] = []
        readers = [started(lambda: got.append(bytes(queue.read()))) for _ in range(4)]
        bus.publish_many([b"a", b"b", b"c", b"d"], 1)
        ended(*readers)
        assert sorted(got) == [b"a", b"b", b"c", b"d"]


def test_who_only_waits_leaves_the_message_to_who_reads() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        waiting = started(queue.wait)
        reading = started(queue.read)
        bus.publish(b"", 1)
        ended(waiting, reading)


def test_a_handler_may_be_unset_while_a_message_is_waited_for() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1, handler=lambda message: None)
        errors: list[BaseException] = []

        def handle() -> None:
            try:
                queue.handle_queued()
            except StateError as error:
                errors.append(error)

        thread = started(handle)
        queue.handler = None
        bus.publish(b"kept", 1)
        ended(thread)
        assert "has no handler" in str(errors[0])
        message = queue.read(0)
        assert message is not None and bytes(message) == b"kept"


def test_a_subscriber_that_dies_is_not_taken_hold_of_again() -> None:
    bus = Bus(mode="direct")
    seen: list[Any] = []

    class Last:
        def __init__(self, look: Callable[[], Any]) -> None:
            self.look = look

        def __del__(self) -> None:
            seen.append(self.look())

    looks: list[Callable[[], Any]] = [
        lambda: len(bus.subscribers),
        lambda: bus.publish(b"", 1),
        bus.close,
    ]
    for look in looks:
        queue = bus.subscribe(1, predicate=lambda message: True)
        queue.on_error = Last(look)
        del queue
    assert seen == [0, 1, None]


class Interrupted(Exception):
    pass


def interrupt_when_asleep(before: Callable[[], Any], second: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Another thread joins this one in its wait; then a signal handler does ``before`` here, and raises."""
    main, threads = threading.main_thread(), []

    def handler(*_: Any) -> None:
        before()
        raise Interrupted

    def arrange() -> None:
        asleep(main)
        threads.append(started(second))
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    helper = threading.Thread(target=arrange)
    helper.start()
    return helper, threads


@pytest.fixture
def signals() -> Any:
    previous = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, previous)


def test_who_is_interrupted_leaves_the_room_to_the_next(signals: None) -> None:
    bus = Bus(pending_depth=1)
    entered, go = threading.Event(), threading.Event()
    bus.subscribe(1, kind="callback", handler=lambda message: (entered.set(), go.wait(LONG)))
    bus.publish(b"", 1)
    assert entered.wait(LONG)
    bus.publish(b"", 1)  # now the queue is full

    def make_room() -> None:
        go.set()
        until(lambda: bus.pending == 0)

    helper, threads = interrupt_when_asleep(make_room, lambda: bus.publish(b"", 1))
    with pytest.raises(Interrupted):
        bus.publish(b"", 1)
    helper.join()
    ended(*threads)
    bus.close()
    assert bus.ledger.matched == bus.ledger.delivered == 3


def test_who_is_interrupted_leaves_the_message_to_the_next(signals: None) -> None:
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        taken = slab.allocate(1, 8)
        assert taken is not None
        helper, threads = interrupt_when_asleep(taken.cancel, lambda: slab.allocate(1, 8, timeout=None))
        with pytest.raises(Interrupted):
            slab.allocate(1, 8, timeout=None)
        helper.join()
        ended(*threads)
        assert slab.in_use == 0


def test_closing_ends_the_wait_for_a_message_to_publish() -> None:
    bus = Bus(mode="direct")
    slab = SlabAllocator(8, 1)
    bus.add_allocator(slab)
    taken = slab.allocate(1, 8)
    errors: list[BaseException] = []

    def allocate() -> None:
        try:
            bus.allocate(1, 8, slab, timeout=None)
        except ClosedError as error:
            errors.append(error)

    thread = started(allocate)
    bus.close()
    ended(thread)
    assert len(errors) == 1
    del taken


def test_many_threads_close_one_bus() -> None:
    for _ in range(50):
        bus = Bus()
        bus.add_allocator(SlabAllocator(8, 1))
        bus.publish(b"", 1)
        barrier = threading.Barrier(4)
        errors: list[BaseException] = []

        def close(bus: Bus = bus, barrier: threading.Barrier = barrier, errors: list[Any] = errors) -> None:
            barrier.wait(LONG)
            try:
                bus.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        ended(*threads)
        assert not errors


def test_nothing_that_fires_stops_the_clock() -> None:
    fifo, queue = FifoSubscriber(depth=1), QueueSubscriber()
    clock = SystemClock()
    first, second = DelayedMessage(fifo, 5000, clock=clock), DelayedMessage(fifo, 5001, clock=clock)
    first.start(0)
    until(lambda: fifo.queued == 1)
    second.start(0)  # finds it full

    def leave() -> None:
        raise SystemExit

    clock.call_at(0, leave)
    last = DelayedMessage(queue, 5002, clock=clock)
    last.start(0)
    assert queue.read(LONG) is not None
    got = [fifo.read(LONG), fifo.read(LONG)]
    assert [message.id for message in got if message is not None] == [5000, 5001], "tried again when there was room"


def test_a_message_for_which_there_is_no_handler_may_be_started_again() -> None:
    from penstock.bus import CallbackSubscriber

    got: list[int] = []
    subscriber = CallbackSubscriber(lambda message: None)
    subscriber.handler = None
    message = DelayedMessage(subscriber, 5000)
    message.start(0)
    until(lambda: message.fired == 1 and message.reference_count == 0)
    subscriber.handler = lambda message: got.append(message.id)
    message.start(0)
    until(lambda: got == [5000])


def test_a_finaliser_may_start_a_timer_whatever_its_thread_does() -> None:
    clock, fired = SystemClock(), []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            clock.call_at(0, lambda: fired.append(1))

    def run() -> None:
        for _ in range(300):
            Garbage()
            clock.call_at(0, lambda: fired.append(1)).cancel()

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        ended(thread)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    until(lambda: len(fired) >= 300)
