"""Descriptors: select, several subscribers on one selector, asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import threading

import pytest

from penstock.bus import Bus
from penstock.errors import ClosedError

from .conftest import LONG, House


def readable(subscriber: object) -> bool:
    return bool(select.select([subscriber], [], [], 0)[0])


@pytest.mark.parametrize("kind", ["queue", "fifo"])
def test_four_messages_then_nothing(house: House, kind: str) -> None:
    subscriber = house.subscribe("a", 0, 1, 2, 3, kind=kind)
    subscriber.fileno()
    house.publish(0, 1, 2, 3)
    for expected in range(4):
        assert readable(subscriber)
        assert subscriber.handle_queued(0)
        assert house.take("a") == [expected]
    assert not subscriber.handle_queued(0)
    assert not readable(subscriber)


def test_a_descriptor_asked_for_late_is_readable_at_once() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        bus.publish(b"x", 1)
        assert readable(queue)


def test_several_subscribers_on_one_selector() -> None:
    with Bus(mode="direct") as bus, selectors.DefaultSelector() as selector:
        subscribers = [bus.subscribe(i, kind="fifo" if i % 2 else "queue") for i in range(6)]
        for subscriber in subscribers:
            selector.register(subscriber, selectors.EVENT_READ, subscriber)
        assert selector.select(0) == []
        for i in (1, 4):
            bus.publish(b"%d" % i, i)
        ready = [key.data for key, _ in selector.select(LONG)]
        assert sorted(ready, key=subscribers.index) == [subscribers[1], subscribers[4]]
        for subscriber in ready:
            assert subscriber.read(0) is not None
            assert subscriber.read(0) is None
        assert selector.select(0) == []


def test_no_system_call_while_nobody_waits() -> None:
    """The descriptor is written once however many messages come, and not at all before it is asked for."""
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        descriptor = queue.fileno()
        for _ in range(100):
            bus.publish(b"", 1)
        assert int.from_bytes(os.read(descriptor, 8), "little") == 1


def test_wakes_while_a_thread_publishes() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1, depth=10)
        thread = threading.Thread(target=lambda: [bus.publish(b"", 1) for _ in range(5000)])
        thread.start()
        count = 0
        while count < 5000:
            assert select.select([queue], [], [], LONG)[0]
            while queue.read(0) is not None:
                count += 1
        thread.join()


def test_asyncio_reads_two_subscribers() -> None:
    async def main() -> tuple[int, int]:
        with Bus() as bus:
            queues = [bus.subscribe(1), bus.subscribe(1, depth=5)]

            async def count(queue: object) -> int:
                total = 0
                async for _ in queue:  # type: ignore[attr-defined]
                    total += 1
                    if total == 500:
                        break
                return total

            tasks = [asyncio.create_task(count(queue)) for queue in queues]
            for i in range(500):
                bus.publish(b"", 1)
                if i % 100 == 0:
                    await asyncio.sleep(0)
            first, second = await asyncio.gather(*tasks)
            return first, second

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == (500, 500)


def test_closing_wakes_an_asyncio_reader() -> None:
    async def main() -> None:
        with Bus(mode="direct") as bus:
            queue = bus.subscribe(1)
            asyncio.get_running_loop().call_later(0.02, queue.close)
            with pytest.raises(ClosedError):
                await queue.read_async(LONG)

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_closing_the_bus_wakes_an_asyncio_reader() -> None:
    async def main() -> None:
        bus = Bus(mode="direct")
        queue = bus.subscribe(1)
        asyncio.get_running_loop().call_later(0.02, bus.close)
        with pytest.raises(ClosedError):
            await queue.read_async(LONG)

    asyncio.run(asyncio.wait_for(main(), LONG))
