"""The clock in use: the machine's unless a virtual one is, and threads of a virtual clock that run one at a time."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path

import pytest

import penstock
from penstock import clock
from penstock.broker import Client
from penstock.bus import Bus, CallbackSubscriber, DelayedMessage
from penstock.clock import SystemClock, VirtualClock, using
from penstock.errors import InvalidArgument, RefusedError, StateError
from penstock.gateway import Gateway
from penstock.journal import Journal


def test_it_is_the_machine_s_unless_another_is_in_use() -> None:
    assert isinstance(clock.current(), SystemClock)
    before_ns = time.time_ns()
    assert before_ns <= clock.time_ns() <= time.time_ns()
    with using(VirtualClock(5_000_000_000)) as virtual:
        assert clock.current() is virtual
        assert (clock.time_ns(), clock.time(), clock.monotonic()) == (5_000_000_000, 5.0, 0.0)
        virtual.advance(1.5)
        assert (clock.time_ns(), clock.monotonic()) == (6_500_000_000, 1.5)
    assert clock.time_ns() >= before_ns


def test_two_are_not_in_use_at_a_time() -> None:
    with using(VirtualClock()), pytest.raises(StateError), using(VirtualClock()):
        pass
    assert isinstance(clock.current(), SystemClock)


def test_what_a_bus_publishes_has_the_time_of_the_clock_in_use() -> None:
    bus, times = Bus(mode="direct"), []
    subscriber = CallbackSubscriber(lambda message: times.append(message.timestamp_ns), ids=(1,))
    bus.add(subscriber)
    with using(VirtualClock(1000)) as virtual:
        bus.publisher(1).publish(b"a")
        virtual.set_time_ns(2000)
        bus.publisher(1).publish(b"b")
    began_ns = time.time_ns()
    bus.publisher(1).publish(b"c")
    assert times[:2] == [1000, 2000] and times[2] >= began_ns


def test_a_delayed_message_takes_the_clock_that_is_in_use_when_it_is_made() -> None:
    got: list[int] = []
    with using(VirtualClock(10**9)) as virtual:
        subscriber = CallbackSubscriber(lambda message: got.append(message.timestamp_ns))
        message = DelayedMessage(subscriber, 5000)
        message.start(2.0)
        clock.call_later(1.0, lambda: got.append(clock.time_ns()))
        virtual.advance(3.0)
    assert got == [2 * 10**9, 3 * 10**9]


def test_threads_of_a_virtual_clock_run_one_at_a_time_in_the_order_of_their_moments() -> None:
    virtual, seen = VirtualClock(), []
    stopping = virtual.event()

    def run(name: str, period_s: float) -> None:
        while not stopping.wait(period_s):
            seen.append((name, virtual.now()))

    threads = [virtual.thread(lambda n=n, p=p: run(n, p), n) for n, p in (("a", 2.0), ("b", 3.0))]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    virtual.advance(6.0)
    assert seen == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0), ("a", 6.0)]  # b began to wait for 6.0 before a did
    stopping.set()
    for thread in threads:
        thread.join()
    virtual.advance(10.0)
    assert len(seen) == 5


def test_an_event_without_a_time_is_waited_for_until_it_is_set() -> None:
    virtual, seen = VirtualClock(), []
    event = virtual.event()

    def run() -> None:
        seen.append(event.wait())
        seen.append(event.wait(5.0))

    thread = virtual.thread(run, "waits")
    thread.start()
    virtual.advance(100.0)
    assert seen == []
    event.set()
    virtual.advance(0.0)
    assert seen == [True, True]
    thread.join()


def test_only_threads_of_the_clock_wait_under_it() -> None:
    with pytest.raises(StateError):
        VirtualClock().event().wait(1.0)


def test_what_cannot_be_the_same_twice_is_refused_by_name() -> None:
    with using(VirtualClock()):
        with pytest.raises(RefusedError, match="shm:/camera"):
            penstock.publisher("shm:/camera")
        with pytest.raises(RefusedError, match="'plant'"):
            Bus("plant")
        with pytest.raises(RefusedError, match="on_message"):
            penstock.subscriber("bus:plant", on_message=print)
        with pytest.raises(RefusedError, match=r"gateway 'plant'.*penstock.replay"):
            Gateway(name="plant")
        with pytest.raises(RefusedError, match=r"the broker at 127\.0\.0\.1:1 "):
            Client("127.0.0.1", 1)
        with pytest.raises(RefusedError, match=r"a server at tcp://127\.0\.0\.1:0"):
            penstock.server("tcp://127.0.0.1:0", print)
        penstock.subscriber("bus:plant").close()


def test_a_journal_is_not_written_in_a_replay(tmp_path: Path) -> None:
    with using(VirtualClock()) as clock:
        Journal(tmp_path / "of a test").close()
        clock.replayed = True
        with pytest.raises(RefusedError, match="out of place"):
            Journal(tmp_path / "out of place")
        Journal(tmp_path / "of a test", mode="read").close()
    assert not (tmp_path / "out of place").exists()


def test_what_is_no_time_is_refused_and_changes_nothing() -> None:
    for start in ("x", 1.5, -(2**63) - 1, 2**63, 2**70, None):
        with pytest.raises(InvalidArgument, match="start_ns"):
            VirtualClock(start)  # type: ignore[arg-type]
    for wrong in (5, VirtualClock, None):
        with pytest.raises(InvalidArgument, match=r"VirtualClock\(\)"), using(wrong):  # type: ignore[arg-type]
            pass
    with using(VirtualClock(10**18)) as virtual:
        with pytest.raises(InvalidArgument, match="seconds"):
            virtual.advance(10**12)
        with pytest.raises(InvalidArgument, match="delay"):
            clock.call_later("1", print)  # type: ignore[arg-type]
        virtual.advance(1)
        assert clock.time_ns() == 10**18 + 10**9
    assert clock.time() > 1_000_000_000


def test_what_was_refused_is_known_though_it_was_caught() -> None:
    with using(VirtualClock()) as virtual:
        assert virtual.refused is None
        with pytest.raises(RefusedError) as first:
            penstock.publisher("shm:/camera")
        with pytest.raises(RefusedError):
            penstock.publisher("shm:/other")
        assert virtual.refused is first.value


def test_a_handler_that_fails_on_a_bus_is_noted_by_the_clock_in_use() -> None:
    def fails(message: object) -> None:
        raise ValueError("no good")

    bus = Bus(mode="direct")
    subscriber = CallbackSubscriber(fails, ids=(1,), name="fails")
    bus.add(subscriber)
    with using(VirtualClock()) as virtual:
        bus.publisher(1).publish(b"a")
    ((where, error),) = virtual.failures
    assert "'fails'" in where and str(error) == "no good"


def test_a_thread_that_does_not_wait_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "TELL_TURN_S", 0.01)
    monkeypatch.setattr(clock, "MAX_TURN_S", 0.02)
    virtual, over, ended = VirtualClock(), threading.Event(), threading.Event()
    stopping = virtual.event()

    def run() -> None:
        try:
            over.wait(120)  # as time.sleep in a loop would: the clock does not know of it
            stopping.wait(1.0)
        finally:
            ended.set()

    thread = virtual.thread(run, "sleeps")
    thread.start()
    with pytest.raises(StateError, match="'sleeps' was given up"):
        virtual.advance(1.0)
    virtual.advance(1.0)  # the others go on
    thread.join()  # and nobody waits for it
    assert not ended.is_set()
    over.set()
    assert ended.wait(120)  # where it waits at last, it ends


def test_a_clock_that_a_timer_advances_further_does_not_go_back() -> None:
    virtual = VirtualClock(10)
    seen = []
    with using(virtual):
        clock.call_later(1, lambda: virtual.advance(5))
        clock.call_later(5.5, lambda: seen.append(clock.monotonic()))
        virtual.advance(3)
        assert (clock.monotonic(), clock.time_ns(), seen) == (6.0, 10 + 6 * 10**9, [5.5])


def test_a_clock_may_begin_before_1970() -> None:
    virtual = VirtualClock(-5 * 10**9)
    with using(virtual):
        virtual.advance(2)
        assert clock.time_ns() == -3 * 10**9


@pytest.mark.parametrize("seconds", [1e300, 1e10])
def test_a_clock_ends_with_what_a_message_can_hold(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="too far"):
        VirtualClock().advance(seconds)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_clock_goes_forward_by_a_finite_time(seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        VirtualClock().advance(seconds)


def test_a_timer_is_due_at_a_number() -> None:
    with pytest.raises(InvalidArgument):
        clock.call_later(math.nan, print)
    for one in (VirtualClock(), clock.system_clock()):
        with pytest.raises(InvalidArgument):
            one.call_at(math.nan, print)


@pytest.mark.parametrize("far_s", [math.inf, 1e300, threading.TIMEOUT_MAX * 2])
def test_a_timer_due_later_than_a_thread_can_wait_stops_no_other_timer(far_s: float) -> None:
    system, fired, far = SystemClock(), threading.Event(), threading.Event()
    late = system.call_at(far_s, far.set)  # the clock's thread waits for this one
    for _ in range(3):
        system.call_at(system.now() + 0.01, fired.set)
        assert fired.wait(30.0)
        fired.clear()
    assert late.cancel() and not far.is_set()


def test_sleep_waits_by_the_clock_in_use() -> None:
    began = time.monotonic()
    clock.sleep(0.01)
    assert time.monotonic() - began >= 0.01
    with using(VirtualClock()) as virtual:
        times: list[float] = []
        thread = virtual.thread(lambda: (clock.sleep(1000.0), times.append(clock.monotonic())), "sleeps")
        thread.start()
        virtual.advance(2000.0)
        assert times == [1000.0]
        with pytest.raises(StateError):
            clock.sleep(1.0)


AGES_S = 1e6  # nobody waits so long for a test


@pytest.mark.parametrize("name", ["read", "read_many", "wait", "handle_queued"])
def test_reads_of_a_bus_take_no_real_time_under_a_virtual_clock(name: str) -> None:
    with clock.using(clock.VirtualClock()) as virtual, Bus("still", mode="direct") as bus:
        queue = bus.subscribe(1, handler=bytes) if name == "handle_queued" else bus.subscribe(1)
        assert not getattr(queue, name)(timeout=AGES_S)
        with pytest.raises(RefusedError, match="without a time-out"):
            getattr(queue, name)()
        assert virtual.refused is not None
        bus.publish(b"there", 1)
        assert getattr(queue, name)(timeout=AGES_S)


def test_a_thread_of_the_clock_reads_again_when_its_time_is_over() -> None:
    found = []
    with clock.using(clock.VirtualClock()) as virtual, Bus("still", mode="direct") as bus:
        queue = bus.subscribe(1)
        thread = virtual.thread(lambda: found.append((queue.read(timeout=5.0), clock.monotonic())), "reads")
        thread.start()
        clock.call_later(2.0, lambda: bus.publish(b"late", 1))
        virtual.advance(4.0)
        assert found == []
        virtual.advance(1.0)
        ((message, at_s),) = found
        assert message is not None and bytes(message) == b"late" and at_s == 5.0


def test_a_full_queue_stops_nobody_for_ever_under_a_virtual_clock() -> None:
    with clock.using(clock.VirtualClock()), Bus("still", mode="direct") as bus:
        queue = bus.subscribe(1, depth=1)
        bus.publish(b"first", 1)
        with pytest.raises(TimeoutError, match="full"):
            bus.publish(b"second", 1)
        assert queue.ledger.dropped


def test_what_is_no_time_or_no_function_is_refused_at_once() -> None:
    virtual = VirtualClock()
    for seconds in (-1, math.nan, math.inf, "1", None):
        with pytest.raises(InvalidArgument, match="finite number of seconds"):
            virtual.advance(seconds)  # type: ignore[arg-type]
    for one in (virtual, SystemClock()):
        with pytest.raises(TypeError, match="calls a function"):
            one.call_at(1.0, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["read_async", "receive_async", "async for"])
def test_an_async_read_that_nothing_can_end_is_refused_under_a_virtual_clock(name: str) -> None:
    async def wait() -> None:
        if name == "async for":
            async for _ in subscriber:
                pass
        else:
            await getattr(subscriber, name)()

    with clock.using(clock.VirtualClock()) as virtual, penstock.subscriber("bus:alone") as subscriber:
        late = threading.Timer(20, subscriber.close)  # so that a read that is not refused ends
        late.start()
        with pytest.raises(RefusedError, match=r"an async read of .* without a time-out by the only task of its loop"):
            asyncio.run(wait())
        late.cancel()
        assert virtual.refused is not None
        assert asyncio.run(subscriber.read_async(0)) is None


def test_a_task_may_wait_for_what_another_one_publishes_under_a_virtual_clock() -> None:
    async def publish() -> list[bytes]:
        reading = asyncio.create_task(read())
        for data in (b"1", b"2"):
            await asyncio.sleep(0)
            publisher.publish(data)
        return await reading

    async def read() -> list[bytes]:
        return [bytes(await subscriber.receive_async()) for _ in range(2)]

    with (
        clock.using(clock.VirtualClock()),
        penstock.subscriber("bus:tasks") as subscriber,
        penstock.publisher("bus:tasks") as publisher,
    ):
        assert asyncio.run(asyncio.wait_for(publish(), 20)) == [b"1", b"2"]
