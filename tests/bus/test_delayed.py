"""Delayed messages on a clock that the test drives, and on the machine's."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.bus import Bus, CallbackSubscriber, Caught, DelayedMessage, QueueSubscriber, VirtualClock
from penstock.errors import InvalidArgument

from .conftest import LONG

PRIVATE = 100
KINDS = ["callback", "queue", "fifo"]


class Setting:
    def __init__(self, kind: str = "queue", **options: Any) -> None:
        self.clock = VirtualClock()
        self.bus = Bus(mode="direct")
        self.seen: list[tuple[int, bool]] = []
        self.subscriber = self.bus.subscribe(kind=kind, handler=self.handler, max_public_id=7, **options)
        self.delayed = DelayedMessage(self.subscriber, PRIVATE, bytearray(b"tick"), clock=self.clock)
        self.restarts = 0

    def handler(self, message: Any) -> None:
        assert bytes(message) == b"tick" and message.id == PRIVATE
        self.seen.append((message.generation, message.cancelled))
        if self.restarts:
            self.restarts -= 1
            self.delayed.start(0.5)

    def handle(self) -> int:
        if isinstance(self.subscriber, CallbackSubscriber):
            return 0
        return int(self.subscriber.process_all())


@pytest.mark.parametrize("kind", KINDS)
def test_not_before_its_time(kind: str) -> None:
    it = Setting(kind)
    assert it.delayed.start(0.5) is Caught.IDLE
    it.clock.advance(0.499)
    it.handle()
    assert it.seen == [] and it.delayed.state is Caught.PENDING
    it.clock.advance(0.001)
    it.handle()
    assert it.seen == [(1, False)] and it.delayed.state is Caught.IDLE
    assert it.delayed.reference_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_abort_in_time(kind: str) -> None:
    it = Setting(kind)
    assert it.delayed.abort() is Caught.IDLE
    it.delayed.start(0.5)
    assert it.delayed.abort() is Caught.PENDING
    it.clock.advance(10)
    it.handle()
    assert it.seen == []


def test_abort_after_it_fired() -> None:
    it = Setting()
    it.delayed.start(0.5)
    it.clock.advance(0.5)
    caught = it.delayed.abort()
    assert caught is Caught.QUEUED and not caught.in_time
    it.handle()
    assert it.seen == [(1, True)], "it still arrives, and says that it was cancelled"


@pytest.mark.parametrize("kind", KINDS)
def test_update_in_time(kind: str) -> None:
    it = Setting(kind)
    it.delayed.start(0.5)
    it.clock.advance(0.4)
    assert it.delayed.update(0.5) is Caught.PENDING
    it.clock.advance(0.499)
    it.handle()
    assert it.seen == []
    it.clock.advance(0.001)
    it.handle()
    assert it.seen == [(2, False)]


def test_update_after_it_fired_arrives_twice() -> None:
    it = Setting()
    it.delayed.start(0.5)
    it.clock.advance(0.5)
    assert it.delayed.update(0.5) is Caught.QUEUED
    it.handle()
    it.clock.advance(0.5)
    it.handle()
    assert it.seen == [(1, True), (2, False)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_restarts_it_ten_times(kind: str) -> None:
    it = Setting(kind)
    it.restarts = 10
    it.delayed.start(0.5)
    for _ in range(20):
        it.clock.advance(0.5)
        it.handle()
    assert it.seen == [(generation, False) for generation in range(1, 12)]


def test_it_is_never_queued_twice() -> None:
    it = Setting()
    it.delayed.start(0.5)
    it.clock.advance(0.5)
    it.delayed.start(0.1)
    it.clock.advance(0.1)
    assert it.subscriber.queued == 1 and it.delayed.deferred == 1
    assert it.subscriber.handle_queued(0)
    assert it.seen == [(1, False)]
    assert it.subscriber.queued == 1, "the second firing waited for the first handling"
    assert it.subscriber.handle_queued(0)
    assert it.seen == [(1, False), (2, False)]
    assert it.subscriber.queued == 0


def test_aborting_a_firing_that_waits() -> None:
    it = Setting()
    it.delayed.start(0.5)
    it.clock.advance(0.5)
    it.delayed.start(0.1)
    it.clock.advance(0.1)
    assert it.delayed.abort() is Caught.QUEUED
    it.handle()
    assert it.seen == [(1, True)]


def test_what_a_handler_catches_of_itself() -> None:
    caught: list[Caught] = []
    clock = VirtualClock()
    subscriber = QueueSubscriber(lambda message: caught.append(delayed.start(1)), max_public_id=7)
    delayed = DelayedMessage(subscriber, PRIVATE, clock=clock)
    delayed.start(0)
    clock.advance(0)
    assert subscriber.handle_queued(0)
    assert caught == [Caught.HANDLED] and delayed.state is Caught.PENDING


def test_starting_while_pending_leaves_it_alone() -> None:
    it = Setting()
    it.delayed.start(0.5)
    assert it.delayed.start(5) is Caught.PENDING
    it.clock.advance(0.5)
    it.handle()
    assert it.seen == [(1, False)] and it.delayed.generation == 1


def test_a_full_subscriber_is_tried_again_and_the_clock_does_not_wait() -> None:
    it = Setting(depth=1)
    it.bus.publish_to(it.subscriber, it.bus.allocate(PRIVATE + 1, 0))
    it.delayed.start(0.5)
    it.clock.advance(0.5)
    assert it.subscriber.queued == 1
    assert it.subscriber.read(0) is not None
    it.clock.advance(0.005)
    it.handle()
    assert it.seen == [(1, False)]
    assert it.subscriber.ledger.balanced and it.subscriber.ledger.lost == 0


def test_a_closed_subscriber() -> None:
    it = Setting()
    it.delayed.start(0.5)
    it.subscriber.close()
    it.clock.advance(0.5)
    assert it.delayed.state is Caught.IDLE and it.delayed.reference_count == 0


def test_bad_arguments() -> None:
    it = Setting(max_peer_id=50)
    for public in (0, 7, 50):
        with pytest.raises(InvalidArgument, match="private"):
            DelayedMessage(it.subscriber, public)
    for method in (it.delayed.start, it.delayed.update):
        for bad in (-1, float("nan")):
            with pytest.raises(InvalidArgument, match=f"^delay={bad} must be 0 or more seconds$"):
                method(bad)
        for nothing, kind in ((None, "NoneType"), ("a", "str")):
            with pytest.raises(TypeError, match=f"^delay must be seconds as a number, not {kind}$"):
                method(nothing)  # type: ignore[arg-type]
    assert it.delayed.state is Caught.IDLE
    with pytest.raises(InvalidArgument, match="forward"):
        it.clock.advance(-1)


def test_on_the_machines_clock() -> None:
    import time

    done = threading.Event()
    subscriber = CallbackSubscriber(lambda message: done.set(), max_public_id=7)
    delayed = DelayedMessage(subscriber, PRIVATE)
    began = time.monotonic()
    delayed.start(0.05)
    assert done.wait(LONG)
    assert time.monotonic() - began >= 0.05


def test_from_many_threads_nothing_is_queued_twice_or_lost() -> None:
    """Start, update and abort race with firing and handling; at the end one more start arrives exactly once."""
    clock = VirtualClock()
    most = 0
    subscriber = QueueSubscriber(max_public_id=7)
    delayed = DelayedMessage(subscriber, PRIVATE, clock=clock)
    stop = threading.Event()

    def poke(method: str) -> None:
        while not stop.is_set():
            getattr(delayed, method)(*([0.001] if method != "abort" else []))

    def tick() -> None:
        while not stop.is_set():
            clock.advance(0.001)

    threads = [threading.Thread(target=poke, args=(name,)) for name in ("start", "update", "abort")]
    threads.append(threading.Thread(target=tick))
    for thread in threads:
        thread.start()
    for _ in range(300):
        most = max(most, subscriber.queued)
        message = subscriber.read(0.001)
        del message
    stop.set()
    for thread in threads:
        thread.join()
    assert most <= 1
    delayed.abort()
    while subscriber.read(0) is not None:
        pass
    assert delayed.state is Caught.IDLE
    delayed.start(1)
    clock.advance(1)
    message = subscriber.read(0)
    assert message is not None and message.generation == delayed.generation and not message.cancelled
    assert subscriber.read(0) is None
