
"""Waiting and waking: what sleeps on what, descriptors and when they are given back, closing while somebody waits."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import shm

LONG = 30.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fifos() -> list[str]:
    return [path.name for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir() if ".wake." in path.name]


def asleep(name: str) -> bool:
    return any(member.asleep for channel in shm.channels() if channel.name == name for member in channel.members)


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        os.sched_yield()


def test_close_gives_descriptors_back_at_once(name: str) -> None:
    with shm.Publisher(f"{name}/warm"), shm.Subscriber(f"{name}/warm"):
        pass  # what the process keeps for good is open now
    before = descriptors()
    publisher, subscriber = shm.Publisher(name, slot_size=64, reliable=True), shm.Subscriber(name, reliable=True)
    subscriber.fileno()
    publisher.fileno()
    publisher.publish(b"x" * 1000)  # a second payload
    assert descriptors() > before
    message = subscriber.read(0)
    assert message is not None
    view = memoryview(message)
    subscriber.close()
    publisher.close()
    assert bytes(view) == b"x" * 1000, "what is held stays whole after close"
    view.release()
    message.release()
    assert descriptors() == before
    assert subscriber.closed and publisher.closed  # both handles are still there


def test_reads_that_sleep_need_no_descriptor(name: str) -> None:
    with shm.Publisher(name) as publisher, shm.Subscriber(name) as subscriber:
        before = descriptors()
        for i in range(5):
            thread = threading.Thread(target=lambda: (until(lambda: asleep(name)), publisher.publish(b"x")))
            thread.start()
            assert subscriber.read(LONG) is not None, i
            thread.join()
        assert (descriptors(), fifos()) == (before, [])
        subscriber.fileno()
        assert len(fifos()) == 1


def test_close_ends_a_sleep_of_another_thread(name: str) -> None:
    for handle, wait in (
        (subscriber := shm.Subscriber(name), subscriber.read),
        (publisher := shm.Publisher(name, reliable=True), lambda: publisher.publish(b"x")),
    ):
        closer = threading.Thread(target=lambda handle=handle: (until(lambda: asleep(name)), handle.close()))
        closer.start()
        with pytest.raises(penstock.ClosedError, match="closed"):
            wait()
        closer.join()


def test_close_ends_a_wait_of_an_event_loop(name: str) -> None:
    async def main() -> None:
        subscriber = shm.Subscriber(name)
        waiting = asyncio.ensure_future(subscriber.read_async())
        await asyncio.sleep(0)
        subscriber.close()
        with pytest.raises(penstock.ClosedError):
            await asyncio.wait_for(waiting, LONG)

    asyncio.run(main())
    with shm.Publisher(name):  # and it has left
        assert len([member for channel in shm.channels() for member in channel.members]) == 1


def test_a_reliable_publisher_is_woken_through_its_descriptor(name: str) -> None:
    with shm.Publisher(name, slots=4, reliable=True) as publisher, shm.Subscriber(name, reliable=True) as subscriber:
        assert select.select([publisher], [], [], 0)[0], "a slot may be had"
        publisher.publish_many([b"x"] * 4)
        with pytest.raises(TimeoutError):
            publisher.publish(b"x", timeout=0)
        assert not select.select([publisher], [], [], 0)[0]
        timer = threading.Timer(0.02, lambda: subscriber.read(0))
        timer.start()
        assert select.select([publisher], [], [], LONG)[0]
        timer.join()
        publisher.publish(b"x", timeout=0)


@pytest.mark.parametrize("timeout", [LONG, None, 0])
def test_waiting_with_a_descriptor_that_is_not_open_is_refused(name: str, timeout: float | None) -> None:
    never = 999_999
    with shm.Publisher(name, slots=4, reliable=True) as publisher, shm.Subscriber(name, reliable=True) as subscriber:
        with pytest.raises(penstock.InvalidArgument, match=f"descriptor {never} is not open"):
            subscriber.wait(timeout, never)
        with pytest.raises(penstock.InvalidArgument, match=f"descriptor {never} is not open"):
            publisher.wait(timeout, never)  # there is room
        publisher.publish_many([b"x"] * 4)
        with pytest.raises(penstock.InvalidArgument, match=f"descriptor {never} is not open"):
            publisher.wait(timeout, never)
        with pytest.raises(penstock.InvalidArgument, match=f"descriptor {never} is not open"):
            subscriber.wait(timeout, never)  # there is a message
        assert subscriber.wait(timeout)


def test_who_never_waits_finds_the_dead_too(name: str) -> None:
    code = """
import os, sys, signal
from penstock import shm
subscriber = shm.Subscriber(sys.argv[1], reliable=True)
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with shm.Publisher(name, slots=8, reliable=True) as publisher, shm.Subscriber(name):
        dead = subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert dead.stdout is not None and dead.stdout.readline() == b"ready\n"
        publisher.publish_many([b"x"] * 8)
        with pytest.raises(TimeoutError):
            publisher.publish(b"x", timeout=0)
        dead.communicate(b"\n", timeout=LONG)
        assert dead.returncode == -signal.SIGKILL
        for _ in range(1_000_000):
            try:
                assert publisher.publish(b"x", timeout=0) == 9
                break
            except TimeoutError:
                os.sched_yield()
        else:
            raise AssertionError("the dead subscriber held it up for ever")


@pytest.mark.parametrize("way", ["read", "for", "read_many", "async"])
def test_a_reader_that_holds_all_it_may_is_told_without_a_time_limit(name: str, way: str) -> None:
    """It stands still: after a second it is told why, once."""

    async def read_async(subscriber: shm.Subscriber) -> list[Any]:
        return [await subscriber.read_async() for _ in range(2)]

    ways: dict[str, Callable[[shm.Subscriber], list[Any]]] = {
        "read": lambda subscriber: [subscriber.read(), subscriber.read()],
        "for": lambda subscriber: list(itertools.islice(subscriber, 2)),
        "read_many": lambda subscriber: [*(first := subscriber.read_many()), *subscriber.read_many(), first],
        "async": lambda subscriber: asyncio.run(read_async(subscriber)),
    }
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name, max_active_messages=1) as subscriber:
        publisher.publish_many([b"1", b"2", b"3"])
        told = threading.Event()

        def hear(message: Warning | str, *_: Any, **__: Any) -> None:
            assert "may hold no more" in str(message)
            told.set()
            threading.Thread(target=subscriber.close).start()

        with warnings.catch_warnings(), pytest.raises(penstock.ClosedError):
            warnings.simplefilter("always")
            warnings.showwarning = hear
            ways[way](subscriber)
            raise penstock.ClosedError("iteration ends where the subscriber was closed")
        assert told.is_set()
