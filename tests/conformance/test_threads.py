"""Several threads on one handle, on every reach: every message goes to one of them, and none sleeps over one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all

THREADS = 4


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns in the midst of Python code much more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(functions: list[Callable[[], Any]]) -> None:
    """Run them in threads of their own; what one raises is raised here."""
    failed: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LONG)
    assert not failed, failed
    assert not [thread for thread in threads if thread.is_alive()]


def take_one(subscriber: penstock.Subscriber) -> list[bytes]:
    message = subscriber.read(LONG)
    assert message is not None
    return [bytes(message)]


def take_many(subscriber: penstock.Subscriber) -> list[bytes]:
    return [bytes(message) for message in subscriber.read_many(3, LONG)]


@pytest.mark.parametrize("take", [take_one, take_many])
def test_each_message_goes_to_one_of_the_threads_that_read(reach: Reach, take: Any) -> None:
    publisher, subscriber = reach.pair()
    sent = [b"%d" % i for i in range(300)]
    found: list[bytes] = []
    stop = b"stop"

    def read() -> None:
        while True:
            taken = take(subscriber)
            found.extend(data for data in taken if data != stop)
            if stop in taken:
                for _ in range(taken.count(stop) - 1):  # meant for others
                    publisher.publish(stop)
                return

    def publish() -> None:
        for begin in range(0, len(sent), 7):
            publisher.publish_many(sent[begin : begin + 7])
        for _ in range(THREADS):
            publisher.publish(stop)

    together([read] * THREADS + [publish])
    assert sorted(found, key=int) == sent
    ledger = subscriber.ledger
    assert ledger.balanced and not ledger.lost, ledger


def test_no_thread_sleeps_over_a_message(reach: Reach) -> None:
    """As many messages as threads, which come together: whoever wakes first leaves the others theirs."""
    publisher, subscriber = reach.pair()
    for _ in range(10):
        found: list[bytes] = []
        together(
            [lambda: found.extend(take_one(subscriber))] * THREADS  # noqa: B023
            + [lambda: publisher.publish_many([b"%d" % i for i in range(THREADS)])]
        )
        assert sorted(found) == [b"%d" % i for i in range(THREADS)]


def test_several_threads_publish(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    def publish(name: int) -> None:
        for i in range(20):
            publisher.publish(b"%d %d" % (name, i))

    found: list[bytes] = []
    together(
        [lambda name=name: publish(name) for name in range(THREADS)]  # type: ignore[misc]
        + [lambda: found.extend(read_all(subscriber, 20 * THREADS))]
    )
    for name in range(THREADS):
        mine = [data for data in found if data.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, i) for i in range(20)], "each thread's messages keep their order"


def test_close_ends_the_waits_of_all_threads(reach: Reach) -> None:
    _, subscriber = reach.pair()
    began = threading.Semaphore(0)
    ended: list[BaseException] = []

    def read() -> None:
        began.release()
        try:
            subscriber.read(None)
        except penstock.ClosedError as error:
            ended.append(error)

    def close() -> None:
        for _ in range(THREADS):
            assert began.acquire(timeout=LONG)
        subscriber.close()

    together([read] * THREADS + [close])
    assert len(ended) == THREADS


def test_a_look_beside_a_thread_that_waits(reach: Reach) -> None:
    """It gives nothing at once: it does not wait for the one that waits."""
    publisher, subscriber = reach.pair()
    looked, found = threading.Event(), []

    def wait() -> None:
        found.extend(take_one(subscriber))

    def look() -> None:
        for _ in range(20):
            assert subscriber.read(0) is None and not len(subscriber.read_many(5, 0))
            assert not subscriber.wait(0)
        looked.set()

    def publish() -> None:
        assert looked.wait(LONG)
        publisher.publish(b"1")

    together([wait, look, publish])
    assert found == [b"1"]


@pytest.mark.needs("block")
def test_a_try_beside_a_thread_that_waits_for_room(reach: Reach) -> None:
    """It does not wait for the one that waits, and neither does an event loop."""
    publisher, subscriber = reach.pair(reach.bounded(4, "block"))
    publish: Any = publisher.publish
    payload = b"x" * max(10, reach.flood_padding)
    tried, waited = threading.Event(), threading.Event()
    sent = [0, 0]

    def wait() -> None:  # there is always one that waits, however much the way to the subscriber takes
        try:
            while not tried.is_set():
                publish(payload)
                sent[0] += 1
        finally:
            waited.set()

    def refused(call: Callable[[], Any]) -> bool:
        try:
            call()
        except TimeoutError:
            return True
        sent[1] += 1
        return False

    def look() -> None:
        try:
            for call in (
                lambda: publish(payload, timeout=0),
                lambda: asyncio.run(publisher.publish_async(payload, timeout=0)),  # type: ignore[call-arg]
            ):
                refusals = 0
                while refusals < 20:
                    assert sum(sent) < reach.flood_count, "it took everything"
                    refusals += refused(call)
        finally:
            tried.set()

    def read() -> None:
        assert tried.wait(4 * LONG)
        taken = 0
        while not waited.is_set() or taken < sum(sent):
            message = subscriber.read(0.01)
            if message is not None:
                taken += 1
        assert taken == sum(sent)

    together([wait, look, read])
