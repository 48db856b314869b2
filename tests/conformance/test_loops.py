"""The natural reading loops, on every reach: the last message, the last batch or both still have a name while the next
ones are read.
"""

from __future__ import annotations

import asyncio
import threading
import weakref

import penstock
from tests.conformance.reaches import Reach

LONG = 30
COUNT = 500


def publish_all(publisher: penstock.Publisher) -> threading.Thread:
    thread = threading.Thread(target=lambda: [publisher.publish(b"%d" % i) for i in range(COUNT)])
    thread.start()
    return thread


def check(got: list[int], thread: threading.Thread) -> None:
    thread.join(LONG)
    assert got == list(range(COUNT))


def test_a_loop_over_batches(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    thread, got = publish_all(publisher), []
    while len(got) < COUNT:
        batch = subscriber.read_many(1024, LONG)
        assert len(batch) > 0
        for message in batch:
            got.append(int(bytes(message)))
    check(got, thread)


def test_a_loop_over_what_a_batch_gives(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    thread, got = publish_all(publisher), []
    while len(got) < COUNT:
        for message in subscriber.read_many(8, LONG):
            got.append(int(bytes(message)))
    check(got, thread)


def test_an_empty_message_does_not_end_a_loop(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for data in (b"", b"1", b"", b"end"):
        publisher.publish(data)
    got = []
    while message := subscriber.read(LONG):
        got.append(bytes(message))
        if got[-1] == b"end":
            break
    assert got == [b"", b"1", b"", b"end"]


def test_a_loop_over_the_subscriber(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    thread, got = publish_all(publisher), []
    for message in subscriber:
        got.append(int(bytes(message)))
        if len(got) == COUNT:
            break
    check(got, thread)


def test_an_asynchronous_loop_over_the_subscriber(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    thread = publish_all(publisher)

    async def read() -> list[int]:
        got = []
        async for message in subscriber:
            got.append(int(bytes(message)))
            if len(got) == COUNT:
                break
        return got

    check(asyncio.run(asyncio.wait_for(read(), LONG)), thread)


def test_loops_do_not_keep_the_message_that_they_gave(reach: Reach) -> None:
    """So that a loop that drops its own name releases the message, where one may be held at a time for example."""
    publisher, subscriber = reach.pair()

    async def loop_of_async() -> None:
        async for message in subscriber:
            there = weakref.ref(message)
            del message
            assert there() is None
            return

    publisher.publish_many([b"x"] * 3)
    for message in subscriber:
        there = weakref.ref(message)
        del message
        assert there() is None
        break
    asyncio.run(loop_of_async())
    given = [weakref.ref(message) for message in subscriber._available_messages()]
    assert len(given) == 1 and given[0]() is None


def test_a_message_of_a_batch_outlives_it(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"%d" % i for i in range(4)])
    kept: list[penstock.Message] = []
    while len(kept) < 4:
        kept += list(subscriber.read_many(4, LONG))
    for _ in range(COUNT):
        publisher.publish(b"next")
        message = subscriber.read(LONG)
        assert message is not None and bytes(message) == b"next"
    assert [bytes(message) for message in kept] == [b"0", b"1", b"2", b"3"]
