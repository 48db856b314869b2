"""Who delivers: the bus's thread, the caller, an executor; errors of handlers; closing."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.bus import Bus, CallbackSubscriber, default_bus, disable_default_bus, enable_default_bus, named_bus
from penstock.errors import ClosedError, InvalidArgument, StateError

from .conftest import LONG


def test_thread_mode_delivers_on_one_thread_of_its_own() -> None:
    with Bus("worker") as bus:
        threads: set[str] = set()
        bus.subscribe(1, kind="callback", handler=lambda message: threads.add(threading.current_thread().name))
        assert not [t for t in threading.enumerate() if t.name == "penstock-bus-worker"], "no thread before it is needed"
        for _ in range(100):
            bus.publish(b"", 1)
        assert bus.flush(LONG)
        assert threads == {"penstock-bus-worker"}
    assert not [t for t in threading.enumerate() if t.name == "penstock-bus-worker"]


def test_direct_mode_delivers_in_the_caller() -> None:
    with Bus(mode="direct") as bus:
        threads: list[int] = []
        bus.subscribe(1, kind="callback", handler=lambda message: threads.append(threading.get_ident()))
        bus.publish(b"", 1)
        assert threads == [threading.get_ident()]


def test_executor_mode_delivers_one_at_a_time_in_order() -> None:
    with ThreadPoolExecutor(4, thread_name_prefix="pool") as pool:
        bus = Bus(executor=pool)
        seen: list[int] = []
        threads: set[str] = set()
        inside = 0

        @bus.on(1)
        def handler(message: Any) -> None:
            nonlocal inside
            inside += 1
            assert inside == 1
            seen.append(message.ordinal)
            threads.add(threading.current_thread().name.split("_")[0])
            inside -= 1

        for _ in range(1000):
            bus.publish(b"", 1)
        assert bus.flush(LONG)
        assert seen == list(range(1, 1001)) and threads == {"pool"}
        bus.close()
        assert bus.ledger.balanced and bus.ledger.delivered == 1000


def test_executor_that_was_shut_down() -> None:
    pool = ThreadPoolExecutor(1)
    bus = Bus(executor=pool)
    queue = bus.subscribe(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        bus.publish(b"x", 1)
    bus.close()  # delivers what is pending itself
    assert queue.queued == 1


def test_bad_modes() -> None:
    with pytest.raises(InvalidArgument, match="direct"):
        Bus(mode="dirct")
    with pytest.raises(InvalidArgument, match="pending_depth"):
        Bus(pending_depth=0)
    with pytest.raises(InvalidArgument, match="pending_overflow"):
        Bus(pending_overflow="sometimes")
    with pytest.raises(InvalidArgument, match="pending_timeout"):
        Bus(pending_timeout=-1)


@pytest.mark.parametrize("mode", ["thread", "direct"])
def test_a_handler_that_raises_is_told_and_the_others_receive(mode: str) -> None:
    told: list[tuple[str, int, str]] = []
    with Bus(mode=mode, on_error=lambda s, m, e: told.append((s.name, m.id, str(e)))) as bus:
        bad = bus.subscribe(1, kind="callback", handler=lambda message: 1 / 0, name="bad")
        seen: list[int] = []
        bus.subscribe(1, kind="callback", handler=lambda message: seen.append(message.id))
        queue = bus.subscribe(1)
        bus.publish(b"", 1)
        bus.publish(b"", 1)
        assert bus.flush(LONG)
        assert told == [("bad", 1, "division by zero")] * 2
        assert seen == [1, 1] and queue.queued == 2
        assert bad.errors == 2 and bad.ledger.balanced and bad.ledger.delivered == 2


def test_without_on_error_it_is_logged_once_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with Bus(mode="direct") as bus, caplog.at_level(logging.ERROR, "penstock.bus"):
        bad = bus.subscribe(1, kind="callback", handler=lambda message: 1 / 0, name="bad")
        for _ in range(5):
            bus.publish(b"", 1)
        assert bad.errors == 5
        [record] = caplog.records
        assert "'bad'" in record.getMessage() and record.exc_info is not None
        assert record.exc_info[1].__traceback__ is not None  # type: ignore[union-attr]


def test_on_error_of_the_subscriber_comes_first() -> None:
    told: list[str] = []
    with Bus(mode="direct", on_error=lambda *_: told.append("bus")) as bus:
        subscriber = bus.subscribe(1, handler=lambda message: 1 / 0)
        subscriber.on_error = lambda *_: told.append("subscriber")
        bus.publish(b"", 1)
        assert subscriber.handle_queued(0) is True
        assert told == ["subscriber"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_on_error_that_raises_does_not_stop_the_bus() -> None:
    def worse(*_: Any) -> None:
        raise RuntimeError("worse")

    with Bus(mode="direct", on_error=worse) as bus:
        bus.subscribe(1, kind="callback", handler=lambda message: 1 / 0)
        queue = bus.subscribe(1)
        bus.publish(b"", 1)
        assert queue.queued == 1


def test_keyboard_interrupt_in_a_handler_reaches_the_publisher_after_the_others_received() -> None:
    def stop(message: Any) -> None:
        raise KeyboardInterrupt

    with Bus(mode="direct") as bus:
        bus.subscribe(1, kind="callback", handler=stop)
        queue = bus.subscribe(1)
        with pytest.raises(KeyboardInterrupt):
            bus.publish(b"", 1)
        assert queue.queued == 1
        assert bus.publish(b"", 2) == 1, "the bus is as before"


def test_close_drains() -> None:
    bus = Bus()
    queue = bus.subscribe(1)
    for i in range(100):
        bus.publish(b"%d" % i, 1)
    bus.close()
    assert bus.closed
    bus.close()
    assert len(queue.read_many(1000, 0)) == 100, "what a queue holds can still be read"
    with pytest.raises(ClosedError, match="bus"):
        queue.read(0)
    assert bus.ledger.balanced and bus.heap_in_use == 0


def test_an_error_in_the_block_is_not_hidden_by_a_queue_that_nobody_reads() -> None:
    with pytest.raises(ValueError, match="a bug"), Bus("stuck") as bus:
        bus.subscribe(0, depth=2)
        for _ in range(10):
            bus.publish(b"x")
        raise ValueError("a bug")
    assert bus.closed


def test_close_delivers_what_was_published_before_the_thread_was_started() -> None:
    scheduling, go = threading.Event(), threading.Event()

    class Slow(Bus):
        def _schedule(self) -> None:
            scheduling.set()
            assert go.wait(LONG)
            super()._schedule()

    got: list[bytes] = []
    bus = Slow()
    bus.on(1)(lambda message: got.append(bytes(message)))
    publishing = threading.Thread(target=bus.publish, args=(b"first", 1))
    publishing.start()
    assert scheduling.wait(LONG)
    bus.close()
    assert got == [b"first"] and bus.ledger.delivered == 1 and bus.ledger.balanced
    go.set()
    publishing.join(LONG)
    assert not publishing.is_alive() and got == [b"first"]


def test_close_discards_where_asked() -> None:
    gate, entered = threading.Event(), threading.Event()
    bus = Bus()

    @bus.on(1)
    def handler(message: Any) -> None:
        entered.set()
        assert gate.wait(LONG)

    for _ in range(5):
        bus.publish(b"", 1)
    assert entered.wait(LONG)
    threading.Timer(0.05, gate.set).start()
    bus.close(drain=False)
    assert bus.ledger.dropped == {"closed": 4} and bus.ledger.delivered == 1 and bus.ledger.balanced


def test_closing_while_the_thread_waits_for_a_full_subscriber() -> None:
    bus = Bus()
    queue = bus.subscribe(1, depth=1)
    for _ in range(3):
        bus.publish(b"", 1)
    assert queue.wait(LONG)  # the thread has begun
    bus.close(timeout=0.05)
    assert queue.queued == 1 and queue.ledger.balanced
    assert bus.heap_in_use == 1


def test_closing_inside_a_handler() -> None:
    bus = Bus()
    done = threading.Event()

    @bus.on(1)
    def handler(message: Any) -> None:
        bus.close()
        done.set()

    bus.publish(b"", 1)
    assert done.wait(LONG)
    assert bus.closed


def test_a_closed_bus_refuses() -> None:
    bus = Bus()
    bus.close()
    for use in (
        lambda: bus.publish(b"", 1),
        lambda: bus.publish_many([b""], 1),
        lambda: bus.allocate(1, 1),
        lambda: bus.subscribe(1),
        lambda: bus.publisher(1),
        lambda: bus.add_declared(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_readers_wake_when_the_bus_closes() -> None:
    bus = Bus(mode="direct")
    queue = bus.subscribe(1)
    outcome: list[Any] = []

    def read() -> None:
        try:
            outcome.append(queue.read(None))
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    bus.close()
    thread.join(LONG)
    assert isinstance(outcome[0], ClosedError)


def test_flush_inside_a_handler_is_refused() -> None:
    errors: list[BaseException] = []
    with Bus(on_error=lambda s, m, e: errors.append(e)) as bus:
        bus.subscribe(1, kind="callback", handler=lambda message: bus.flush())
        bus.publish(b"", 1)
        assert bus.flush(LONG)
    assert isinstance(errors[0], StateError)


def test_the_default_bus() -> None:
    bus = default_bus()
    assert default_bus() is bus and bus.mode == "thread"
    disable_default_bus()
    try:
        assert bus.closed
        with pytest.raises(StateError, match="switched off"):
            default_bus()
    finally:
        enable_default_bus()
    assert default_bus() is not bus
    default_bus().close()
    assert not default_bus().closed


def test_named_buses_live_as_long_as_a_handle() -> None:
    import gc
    import weakref

    bus = named_bus("short-lived")
    assert named_bus("short-lived") is bus
    gone = weakref.ref(bus)
    queue = bus.subscribe(1)
    del bus
    gc.collect()
    assert gone() is not None, "a subscriber holds its bus"
    queue.close()
    del queue
    gc.collect()
    assert gone() is None


def test_start_up_out_of_order_names_the_step() -> None:
    with Bus() as bus:
        with pytest.raises(StateError, match="handler; set it before adding"):
            bus.add(CallbackSubscriber())
        subscriber = CallbackSubscriber(print)
        with pytest.raises(StateError, match="not on bus"):
            bus.remove(subscriber)
        bus.add(subscriber)
        with pytest.raises(StateError, match="already"):
            bus.add(subscriber)
        with Bus() as other, pytest.raises(StateError, match="one bus"):
            other.add(subscriber)
