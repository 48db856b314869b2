"""Closing from another thread in the midst of every method of a handle: ClosedError, soon, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock
from penstock.observe.snapshot import live

from .reaches import Reach
from .reading import LONG

ROUNDS = 12


def _reserve(publisher: penstock.Publisher) -> None:
    with publisher.reserve(3) as draft:
        draft.write(b"abc")


PUBLISHING: dict[str, Callable[[penstock.Publisher], Any]] = {
    "publish": lambda publisher: publisher.publish(b"abc"),
    "publish_many": lambda publisher: publisher.publish_many([b"abc", b"def"]),
    "forward": lambda publisher: publisher.forward([penstock.Message(b"abc")]),
    "reserve": _reserve,
    "wait_ready": lambda publisher: publisher.wait_ready(50, None),
    "publish_async": lambda publisher: asyncio.run(publisher.publish_async(b"abc")),
}
READING: dict[str, Callable[[penstock.Subscriber], Any]] = {
    "read": lambda subscriber: subscriber.read(None),
    "read(0)": lambda subscriber: subscriber.read(0),
    "read_many": lambda subscriber: subscriber.read_many(10, None),
    "receive": lambda subscriber: subscriber.receive(None),
    "wait": lambda subscriber: subscriber.wait(None),
    "fileno": lambda subscriber: subscriber.fileno(),
    "read_async": lambda subscriber: asyncio.run(subscriber.read_async(None)),
}


def test_a_closed_handle_is_listed_no_more(reach: Reach) -> None:
    """Though its program still has it: others would take it for a reader that is stuck, or a publisher that lives."""

    def listed() -> set[tuple[str, str]]:
        """Handles of this process; a broker's queue is the broker's own."""
        mine = [block for block in live() if block.pid == os.getpid() and (block.room, block.kind) != ("broker", "queue")]
        return {(block.kind, block.address) for block in mine if block.kind in ("publisher", "subscriber", "queue")}

    before = listed()
    publisher, subscriber = reach.pair()
    publisher.publish(b"abc")
    assert len(listed() - before) == 2
    publisher.close()
    assert len(listed() - before) == 1
    subscriber.close()
    assert listed() == before
    assert publisher.ledger.balanced and subscriber.ledger.balanced


def test_process_all_of_a_closed_subscriber_is_refused_with_a_function_and_without(reach: Reach) -> None:
    for function in (None, print):
        _, subscriber = reach.pair()
        subscriber.on_message(function)
        subscriber.close()
        with pytest.raises(penstock.ClosedError):
            subscriber.process_all()


def _close_in_the_midst(handle: Any, use: Callable[[Any], Any], round_: int) -> BaseException:
    """Another thread uses the handle again and again; closed meanwhile: what its last use raised."""
    ends: list[BaseException] = []
    began = threading.Event()

    def run() -> None:
        try:
            while True:
                began.set()
                use(handle)
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert began.wait(LONG)
    thread.join(0.002 * (round_ % 4))  # at different moments
    handle.close()
    thread.join(LONG)
    assert not thread.is_alive(), "close did not end it"
    return ends[0]


@pytest.mark.parametrize("method", PUBLISHING)
def test_closing_while_a_thread_publishes(reach: Reach, method: str) -> None:
    for round_ in range(ROUNDS):
        for_publisher, for_subscriber = reach.lossless()
        publisher = reach.publisher(**for_publisher)
        subscriber = reach.subscriber(**for_subscriber)
        assert publisher.wait_ready(1, LONG)
        stop = threading.Event()

        def take(subscriber: penstock.Subscriber = subscriber, stop: threading.Event = stop) -> None:
            while not stop.is_set():  # so that it does not stay full
                for message in subscriber.read_many(100, 0.01):
                    message.release()

        reader = threading.Thread(target=take)
        reader.start()
        try:
            ended = _close_in_the_midst(publisher, PUBLISHING[method], round_)
        finally:
            stop.set()
            reader.join(LONG)
        assert isinstance(ended, penstock.ClosedError), repr(ended)
        assert publisher.closed and publisher.ledger.balanced
        subscriber.close()
        assert subscriber.ledger.balanced


@pytest.mark.parametrize("method", READING)
def test_closing_while_a_thread_reads(reach: Reach, method: str) -> None:
    publisher = reach.publisher(**reach.lossless()[0])
    for round_ in range(ROUNDS):
        subscriber = reach.subscriber(**reach.lossless()[1])
        assert publisher.wait_ready(1, LONG)
        if round_ % 2:
            publisher.publish(b"abc")
        ended = _close_in_the_midst(subscriber, READING[method], round_)
        assert isinstance(ended, penstock.ClosedError), repr(ended)
        assert subscriber.closed and subscriber.ledger.balanced


class _Closes:
    """A number that closes the handle when it is converted, as a finaliser or another thread may do at that moment."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __index__(self) -> int:
        self.handle.close()
        return 1

    def __float__(self) -> float:
        return float(self.__index__())


def _closing_items(publisher: penstock.Publisher) -> Iterator[bytes]:
    yield b"abc"
    publisher.close()
    yield b"def"


def test_an_iterable_that_closes_its_publisher(reach: Reach) -> None:
    publisher = reach.publisher(**reach.lossless()[0])
    with pytest.raises(penstock.ClosedError):
        publisher.publish_many(_closing_items(publisher))
    assert publisher.closed and publisher.ledger.balanced


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "reserve": lambda publisher: publisher.reserve(_Closes(publisher)),
    "wait_ready": lambda publisher: publisher.wait_ready(_Closes(publisher), 0),
    "wait_ready, timeout": lambda publisher: publisher.wait_ready(1, _Closes(publisher)),
    "read": lambda subscriber: subscriber.read(_Closes(subscriber)),
    "read_many": lambda subscriber: subscriber.read_many(_Closes(subscriber), 0),
    "read_many, timeout": lambda subscriber: subscriber.read_many(1, _Closes(subscriber)),
    "wait": lambda subscriber: subscriber.wait(_Closes(subscriber)),
}


@pytest.mark.parametrize("method", CONVERTED)
def test_an_argument_that_closes_its_handle(reach: Reach, method: str) -> None:
    """Refused, or the method ends as it does on a closed handle: nothing is used after it was given back."""
    publisher, subscriber = reach.pair()
    handle: Any = publisher if method.startswith(("reserve", "wait_ready")) else subscriber
    with contextlib.suppress(penstock.ClosedError, TypeError, penstock.InvalidArgument):
        CONVERTED[method](handle)
    handle.close()
    with pytest.raises(penstock.ClosedError):
        (READING | PUBLISHING)[method.partition(",")[0]](handle)
    assert handle.closed and handle.ledger.balanced


@pytest.mark.needs("block")
@pytest.mark.parametrize("method", ["publish", "publish_many", "reserve"])
def test_closing_a_publisher_that_waits_for_room(reach: Reach, method: str) -> None:
    publisher, _ = reach.pair(reach.bounded(4, "block"))
    payload = b"x" * (reach.flood_padding or 8)
    uses: dict[str, Callable[[Any], Any]] = {
        "publish": lambda publisher: publisher.publish(payload),
        "publish_many": lambda publisher: publisher.publish_many([payload] * 10),
        "reserve": lambda publisher: _reserve_and_fill(publisher, payload),
    }
    ended = _close_when_full(publisher, uses[method])
    assert isinstance(ended, penstock.ClosedError), repr(ended)
    assert publisher.ledger.matched > 0


def _reserve_and_fill(publisher: penstock.Publisher, payload: bytes) -> None:
    with publisher.reserve(len(payload)) as draft:
        draft.write(payload)


def _close_when_full(publisher: penstock.Publisher, use: Callable[[Any], Any]) -> BaseException:
    ends: list[BaseException] = []
    count = 0

    def run() -> None:
        nonlocal count
        try:
            while True:
                use(publisher)
                count += 1
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    seen = -1
    while seen != count:  # until it waits
        seen = count
        thread.join(0.3)
    publisher.close()
    thread.join(LONG)
    assert not thread.is_alive(), "close did not end it"
    return ends[0]


@pytest.mark.needs("ordinal")
def test_what_a_closed_publish_refused_was_not_published(reach: Reach) -> None:
    """Every publish that returned has been published, and no other."""
    for round_ in range(ROUNDS):
        publisher = reach.publisher(**reach.lossless()[0])
        returned = 0

        def publish(publisher: penstock.Publisher) -> None:
            nonlocal returned
            publisher.publish(b"abc")
            returned += 1

        if reach.name.startswith("shm"):  # a reliable one waits without a subscriber
            publisher.close()
            publisher = reach.publisher(slots=64)
        ended = _close_in_the_midst(publisher, publish, round_)
        assert isinstance(ended, penstock.ClosedError), repr(ended)
        assert publisher.ledger.matched == returned
