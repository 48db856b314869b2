"""Shared memory by size of the payload (beside pyzmq), by number of slots and by number of subscribers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from harness import Candidate, Curve, compare, options
from shm_peers import FIRST, made, penstock_one_way, zmq_one_way

from penstock import shm

SIZES = (64, 1024, 16 << 10, 256 << 10, 4 << 20)
SLOTS = (10, 100, 1000, 10_000)
SUBSCRIBERS = (1, 2, 4, 8)


def by_size(arguments: object) -> None:
    for size in SIZES:
        count = max(100, min(200_000, (1 << 30) // size))
        slots = 8 if size >= 256 << 10 else 256
        candidates = made("penstock", lambda s=size, n=slots: penstock_one_way(False, s, n), count, quantity=size)
        candidates += made("pyzmq ipc nodrop", lambda s=size: zmq_one_way(s), count // 4, quantity=size)
        curve = Curve("shm: bytes a second one way, by size of the payload", "payload bytes", size)
        compare(f"shm: one way, {size} B", candidates, "pyzmq ipc nodrop", arguments, unit="B/s", curve=curve)


def by_slots(arguments: object) -> None:
    for slots in SLOTS:
        curve = Curve("shm: publishes a second, by number of slots", "slots", slots)
        compare(f"shm: publish with {slots} slots", [publishing(slots, 0)], "penstock", arguments, curve=curve)


def by_subscribers(arguments: object) -> None:
    for subscribers in SUBSCRIBERS:
        curve = Curve("shm: publishes a second, by number of subscribers", "subscribers", subscribers)
        question = f"shm: publish beside {subscribers} subscribers"
        compare(question, [publishing(256, subscribers)], "penstock", arguments, curve=curve)


def publishing(slots: int, subscribers: int) -> Candidate:
    """One publisher alone; the subscribers of this process are there and read nothing: the oldest is overwritten."""
    name = f"/bench/curves/{os.getpid()}/{slots}/{subscribers}"
    publisher = shm.Publisher(name, slots=slots, slot_size=64)
    readers = [shm.Subscriber(name) for _ in range(subscribers)]
    data = bytes(64)

    def run(count: int) -> float:
        publish: Callable[[bytes], object] = publisher.publish
        began = time.perf_counter()
        for _ in range(count):
            publish(data)
        return time.perf_counter() - began

    def close() -> None:
        for reader in readers:
            reader.close()
        publisher.close()

    return Candidate("penstock", run, 200_000, close=close)


def main() -> None:
    arguments = options()
    os.sched_setaffinity(0, {FIRST})
    by_size(arguments)
    by_slots(arguments)
    by_subscribers(arguments)


if __name__ == "__main__":
    main()
