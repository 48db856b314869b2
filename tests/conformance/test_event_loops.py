"""Event loops: no call stops them, on every reach; asyncio, uvloop, and anyio over asyncio and trio."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


def _run_with(loop: str) -> Run:
    if loop == "asyncio":
        return lambda main: asyncio.run(asyncio.wait_for(main(), LONG))
    try:
        if loop == "uvloop":
            uvloop = importlib.import_module("uvloop")
            return lambda main: uvloop.run(asyncio.wait_for(main(), LONG))
        anyio = importlib.import_module("anyio")
        if loop == "anyio-trio":
            importlib.import_module("trio")
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    return lambda main: anyio.run(main, backend=loop.removeprefix("anyio-"))


@pytest.fixture(params=["asyncio", "uvloop", "anyio-asyncio", "anyio-trio"])
def run(request: pytest.FixtureRequest) -> Run:
    return _run_with(request.param)


def test_a_message_is_awaited(reach: Reach, run: Run) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> tuple[bytes, bytes]:
        assert await subscriber.read_async(0) is None
        assert await subscriber.read_async(0.01) is None
        threading.Timer(0.02, publisher.publish, args=(b"1",)).start()
        first = await subscriber.receive_async(LONG)
        threading.Timer(0.02, publisher.publish, args=(b"2",)).start()
        found = [bytes(first)]
        del first
        async for message in subscriber:
            found.append(bytes(message))
            break
        with pytest.raises(TimeoutError):
            await subscriber.receive_async(0.001)
        return found[0], found[1]

    assert run(main) == (b"1", b"2")


def test_everything_is_published(reach: Reach, run: Run) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> None:
        await publisher.publish_async(b"1")
        assert await publisher.publish_many_async(part for part in (b"2", b"3")) == 2
        async with publisher.reserve_async(1) as draft:
            draft.write(b"4")
        await publisher.publish_async(b"5")

    run(main)
    assert read_all(subscriber, 5) == [b"1", b"2", b"3", b"4", b"5"]


def test_tasks_that_publish_keep_their_order(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> None:
        await asyncio.gather(*(publisher.publish_async(b"%d" % i) for i in range(20)))

    asyncio.run(main())
    assert read_all(subscriber, 20) == [b"%d" % i for i in range(20)]


@pytest.mark.needs("block")
@pytest.mark.parametrize("method", ["publish", "publish_many", "reserve"])
def test_a_full_channel_does_not_stop_the_loop(reach: Reach, method: str) -> None:
    publisher, subscriber = reach.pair(reach.bounded(4, "block"))
    payload = b"x" * (reach.flood_padding or 8)
    turns = 0

    async def publish_one() -> None:
        if method == "publish":
            await publisher.publish_async(payload)
        elif method == "publish_many":
            await publisher.publish_many_async([payload])
        else:
            async with publisher.reserve_async(len(payload)) as draft:
                draft.write(payload)

    async def main() -> None:
        nonlocal turns
        sent = 0
        while sent < reach.flood_count:  # until it is full
            waiting = asyncio.ensure_future(publish_one())
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            if not done:
                break
            waiting.result()
            sent += 1
        assert not waiting.done(), "nothing was full"
        for _ in range(20):
            await asyncio.sleep(0.001)
            turns += 1
        assert not waiting.done()
        while not waiting.done():
            if (message := await subscriber.read_async(0.01)) is not None:
                message.release()
        await waiting

    asyncio.run(asyncio.wait_for(main(), 2 * LONG))
    assert turns == 20


@pytest.mark.needs("block")
def test_many_that_time_out_say_how_many_went(reach: Reach) -> None:
    publisher, _ = reach.pair(reach.bounded(4, "block"))
    payload = b"x" * (reach.flood_padding or 8)
    sent = 0

    async def main() -> None:
        nonlocal sent
        while True:
            try:
                sent += await publisher.publish_many_async([payload] * 50, timeout=0.2)
            except TimeoutError as error:
                sent += error.published  # type: ignore[attr-defined]
                return

    asyncio.run(asyncio.wait_for(main(), 2 * LONG))
    assert sent == publisher.ledger.matched - publisher.ledger.lost


@pytest.mark.needs("block")
def test_close_ends_a_publish_that_is_awaited(reach: Reach) -> None:
    publisher, _ = reach.pair(reach.bounded(4, "block"))
    payload = b"x" * (reach.flood_padding or 8)

    async def main() -> None:
        waiting = asyncio.ensure_future(publisher.publish_async(payload))
        while (await asyncio.wait([waiting], timeout=0.5))[0]:
            waiting = asyncio.ensure_future(publisher.publish_async(payload))
        threading.Thread(target=publisher.close).start()
        with pytest.raises(penstock.ClosedError):
            await waiting
        with pytest.raises(penstock.ClosedError):
            await publisher.publish_async(payload)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_two_tasks_that_read_one_handle_are_refused(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> bytes:
        first = asyncio.ensure_future(subscriber.read_async(LONG))
        await asyncio.sleep(0.01)
        with pytest.raises(penstock.StateError):
            await subscriber.read_async(LONG)
        publisher.publish(b"1")
        message = await first
        assert message is not None
        return bytes(message)

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == b"1"


def test_a_cancelled_read_loses_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> None:
        waiting = asyncio.ensure_future(subscriber.read_async(LONG))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    publisher.publish(b"1")
    assert read_all(subscriber, 1) == [b"1"]


def test_closing_ends_async_for(reach: Reach) -> None:
    _, subscriber = reach.pair()

    async def main() -> int:
        threading.Timer(0.05, subscriber.close).start()
        count = 0
        async for _ in subscriber:
            count += 1
        return count

    began = time.monotonic()
    assert asyncio.run(asyncio.wait_for(main(), LONG)) == 0
    assert time.monotonic() - began < LONG


@pytest.mark.needs("block")
def test_a_time_limit_counts_the_turn_too(reach: Reach) -> None:
    """Behind a publish that was cancelled and still waits: the next one's time is over all the same."""
    publisher, subscriber = reach.pair(reach.bounded(4, "block"))
    publish: Any = publisher.publish_async
    payload = b"x" * (reach.flood_padding or 8)
    try:
        asyncio.run(publish(payload, timeout=LONG))
    except TypeError:
        pytest.skip(f"publish() has no timeout= on {reach.name}")

    async def main() -> None:
        waiting = asyncio.ensure_future(publish(payload))
        while (await asyncio.wait([waiting], timeout=0.5))[0]:
            waiting = asyncio.ensure_future(publish(payload))
        waiting.cancel()
        with pytest.raises(TimeoutError):
            await publish(payload, timeout=0.05)
        with pytest.raises(TimeoutError):
            await publish(payload, timeout=0)
        last = asyncio.ensure_future(publish(b"last", timeout=LONG))
        while (message := await subscriber.receive_async(LONG)) is not None and bytes(message) != b"last":
            message.release()
        await last

    asyncio.run(asyncio.wait_for(main(), 2 * LONG))
