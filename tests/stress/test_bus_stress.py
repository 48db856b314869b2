"""Eight publishing threads and eight subscribers of all kinds, with adding and removing while it runs.

Checked: order per publisher at every subscriber, books that balance against an independent count, no message left
behind. The seed is printed; PENSTOCK_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.bus import Bus, CallbackSubscriber, FifoSubscriber, QueueSubscriber, SlabAllocator

PUBLISHERS = 8
MESSAGES = 3000
LONG = 60.0
RECORD = struct.Struct("<HI")


class Receiver:
    """One subscriber and what it saw: the last number of each publisher.

    A fifo subscriber gets an id straight from the bus or through other fifos, as they subscribed to it or not: so its
    order is checked per publisher and id.
    """

    def __init__(self, index: int, chance: random.Random) -> None:
        kind = (CallbackSubscriber, QueueSubscriber, FifoSubscriber)[index % 3]
        options: dict[str, Any] = {"name": f"{kind.__name__}-{index}", "priority": chance.randrange(256)}
        if kind is QueueSubscriber:
            options["depth"] = chance.choice([1, 7, 64, 1000])
            options["overflow"] = chance.choice(["block", "drop_oldest", "drop_newest"])
        if index == 5:
            options["predicate"] = lambda message: message.id % 2 == 0
        self.ids = set(chance.sample(range(16), 10))
        self.subscriber: Any = kind(self.handle, ids=self.ids, **options)
        self.callback = kind is CallbackSubscriber
        self.fifo = kind is FifoSubscriber
        self.last: dict[tuple[int, int], int] = {}
        self.received = 0
        self.disorder: list[str] = []
        self.lock = threading.Lock()

    def handle(self, message: Any) -> None:
        publisher, number = RECORD.unpack(message)
        with self.lock:
            self.received += 1
            key = (publisher, message.id if self.fifo else -1)
            before = self.last.get(key, -1)
            if message.id not in self.ids:
                self.disorder.append(f"{self.subscriber.name}: id {message.id} was not subscribed")
            if number <= before:
                self.disorder.append(f"{self.subscriber.name}: {number} of publisher {publisher} after {before}")
            self.last[key] = number

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.subscriber.handle_queued(0.01)
        self.subscriber.process_all()


@pytest.mark.parametrize("mode", ["direct", "thread", "executor"])
def test_eight_and_eight(mode: str) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PENSTOCK_SEED={seed}")
    chance = random.Random(seed)
    pool = ThreadPoolExecutor(2) if mode == "executor" else None
    bus = Bus(executor=pool) if pool else Bus(mode=mode)
    slab = SlabAllocator(RECORD.size, 256)
    bus.add_allocator(slab)
    receivers = [Receiver(index, chance) for index in range(8)]
    for receiver in receivers:
        bus.add(receiver.subscriber)
    stop, quiet = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def guarded(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    def publish(index: int) -> None:
        mine = random.Random(seed + index)
        for number in range(MESSAGES):
            identifier = mine.randrange(16)
            data = RECORD.pack(index, number)
            if mine.random() < 0.5:
                bus.publish(data, identifier)
            else:
                draft = slab.allocate(identifier, RECORD.size, timeout=LONG)
                assert draft is not None, slab.outstanding()
                draft.write(data)
                bus.publish(draft)

    def shake() -> None:
        """Adds, removes and subscribes while messages fly."""
        mine = random.Random(seed - 1)
        while not quiet.is_set():
            receiver = mine.choice(receivers)
            bus.remove(receiver.subscriber)
            extra = bus.subscribe(mine.randrange(16), depth=4, overflow="drop_newest")
            time.sleep(0)
            bus.add(receiver.subscriber)
            extra.subscribe(mine.randrange(16)).unsubscribe(*extra.ids)
            assert extra.ledger.balanced
            extra.close()
            assert extra.ledger.balanced

    readers = [
        threading.Thread(target=guarded, args=(receiver.run, stop)) for receiver in receivers if not receiver.callback
    ]
    publishers = [threading.Thread(target=guarded, args=(publish, index)) for index in range(PUBLISHERS)]
    shaker = threading.Thread(target=guarded, args=(shake,))
    for thread in [*readers, *publishers, shaker]:
        thread.start()
    for thread in publishers:
        thread.join(LONG)
        assert not thread.is_alive(), "a publisher hangs"
    quiet.set()
    shaker.join(LONG)
    assert bus.flush(LONG)
    stop.set()
    for thread in readers:
        thread.join(LONG)
    for subscriber in bus.subscribers:  # fifos hand on in this order
        if not isinstance(subscriber, CallbackSubscriber):
            subscriber.process_all()
    assert not failures, failures
    assert bus.ledger.balanced and bus.ledger.delivered == PUBLISHERS * MESSAGES and bus.ledger.in_flight == 0
    for receiver in receivers:
        assert receiver.disorder == []
        ledger = receiver.subscriber.ledger
        assert ledger.balanced and ledger.in_flight == 0, (receiver.subscriber, ledger)
        assert ledger.delivered == receiver.received > 0
        assert receiver.subscriber.errors == 0
    bus.close()
    if pool:
        pool.shutdown()
    assert slab.in_use == 0 and bus.heap_in_use == 0


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_nothing_is_lost_where_nothing_may_be(mode: str) -> None:
    """The same load with blocking queues only and nobody leaving: every number arrives, in order."""
    bus = Bus(mode=mode)
    queues = [bus.subscribe(*range(4), depth=depth) for depth in (1, 16, 1000)]
    calls: list[tuple[int, int]] = []
    bus.subscribe(*range(4), kind="callback", handler=lambda message: calls.append(RECORD.unpack(message)))
    found: list[list[tuple[int, int]]] = [[] for _ in queues]
    total = PUBLISHERS * 500

    def read(index: int) -> None:
        while len(found[index]) < total:
            found[index].extend(RECORD.unpack(message) for message in queues[index].read_many(64, LONG))

    def publish(index: int) -> None:
        for number in range(500):
            bus.publish(RECORD.pack(index, number), number % 4)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(queues))]
    threads += [threading.Thread(target=publish, args=(index,)) for index in range(PUBLISHERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert bus.flush(LONG)
    for seen in [*found, calls]:
        assert len(seen) == total
        for index in range(PUBLISHERS):
            assert [number for publisher, number in seen if publisher == index] == list(range(500))
    assert all(queue.ledger.balanced and queue.ledger.lost == 0 for queue in queues)
    bus.close()
    assert bus.heap_in_use == 0
