"""The executor: shared threads, bounded, whatever is asked of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import tcp

from .plain import LONG
from .test_sessions import eventually


def threads() -> int:
    """All threads of this process, the native ones too."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_500_publishers_and_500_subscribers_share_a_few_threads() -> None:
    before = threads()
    with tcp.Executor(threads=4) as executor:
        publishers = [tcp.Publisher(executor=executor) for _ in range(500)]
        subscribers = [tcp.Subscriber(executor=executor) for _ in range(500)]
        found: list[bytes] = []
        try:
            for publisher, subscriber in zip(publishers, subscribers, strict=True):
                subscriber.on_message(lambda message: found.append(bytes(message)), delivery="synchronous")
                subscriber.add_session("127.0.0.1", publisher.port)
            for publisher in publishers:
                assert publisher.wait_ready(1, LONG)
            assert threads() - before <= 4 + 1  # and the one that sends
            for round_ in range(3):
                for i, publisher in enumerate(publishers):
                    publisher.publish(b"%d %d" % (round_, i))
            eventually(lambda: len(found) == 1500)
            assert sorted(found) == sorted(b"%d %d" % (r, i) for r in range(3) for i in range(500))
            assert threads() - before <= 4 + 1
        finally:
            for handle in (*subscribers, *publishers):
                handle.close()  # type: ignore[attr-defined]


def test_one_publisher_500_sessions() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        for _ in range(500):
            subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(500, LONG)
        publisher.publish_many([b"a", b"b"])
        found: dict[Any, list[bytes]] = {}
        for _ in range(1000):
            message = subscriber.read(LONG)
            assert message is not None
            found.setdefault(message.source, []).append(bytes(message))
        assert len(found) == 500 and all(got == [b"a", b"b"] for got in found.values())


def test_timers_and_tasks_run_in_bounded_threads() -> None:
    with tcp.Executor(threads=2) as executor:
        running, most = 0, 0
        lock = threading.Lock()
        done = threading.Semaphore(0)

        def task() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with lock:
                running -= 1
            done.release()

        for i in range(20):
            executor.call_soon(task)
            executor.call_later(i * 0.001, task)
        called_off = executor.call_later(0.001, lambda: done.release(100))
        called_off.cancel()
        for _ in range(40):
            assert done.acquire(timeout=LONG)
        assert most <= 2
        assert not done.acquire(timeout=0.01)


def test_a_closed_executor_says_so() -> None:
    executor = tcp.Executor()
    executor.close()
    executor.close()
    with pytest.raises(penstock.ClosedError):
        tcp.Publisher(executor=executor)
    for bad in (0, -1, True, 1.5):
        with pytest.raises(penstock.InvalidArgument):
            tcp.Executor(bad)  # type: ignore[arg-type]


def test_what_is_asked_for_does_not_wait_for_a_busy_thread_while_another_is_free() -> None:
    for _ in range(20):
        with tcp.Executor(threads=2) as executor:
            both = threading.Barrier(3)
            for _ in range(2):
                executor.call_soon(lambda both=both: both.wait(LONG))  # type: ignore[misc]
            both.wait(LONG)
            served = threading.Event()
            found: list[bool] = []
            executor.call_soon(lambda found=found, served=served: found.append(served.wait(LONG)))  # type: ignore[misc]
            executor.call_soon(served.set)
            eventually(lambda found=found: bool(found))  # type: ignore[misc]
            assert found == [True]


def test_a_timer_does_not_wait_for_a_busy_thread_while_another_is_free() -> None:
    for _ in range(20):
        with tcp.Executor(threads=2) as executor:
            both = threading.Barrier(3)
            for _ in range(2):
                executor.call_soon(lambda both=both: both.wait(LONG))  # type: ignore[misc]
            both.wait(LONG)
            served = threading.Event()
            found: list[bool] = []
            executor.call_later(0.02, served.set)
            executor.call_soon(lambda found=found, served=served: found.append(served.wait(LONG)))  # type: ignore[misc]
            eventually(lambda found=found: bool(found))  # type: ignore[misc]
            assert found == [True]


def test_close_wakes_all_threads_also_while_they_take_a_wake_up() -> None:
    """The byte of ``close`` is for every thread: whoever reads older ones must leave it in the pipe."""
    for _ in range(1000):
        executor = tcp.Executor(threads=2)
        barrier = threading.Barrier(3)
        for _ in range(2):
            executor.call_soon(barrier.wait)
        barrier.wait(LONG)
        executor.call_soon(lambda: None)
        closing = threading.Thread(target=executor.close)
        closing.start()
        closing.join(LONG)
        assert not closing.is_alive()
