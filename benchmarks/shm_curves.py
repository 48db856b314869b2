"""Shared memory by size of the payload (beside pyzmq), by number of slots, by number of subscribers and of channels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from crowds import TOGETHER, curves
from harness import Candidate, Curve, compare, options
from shm_peers import FIRST, made, penstock_one_way, zmq_one_way

from penstock import shm

SIZES = (8, 64, 1024, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
SLOTS = (10, 100, 1000, 10_000)


def by_size(arguments: object) -> None:
    for size in SIZES:
        count = max(20, min(200_000, (1 << 30) // size))
        slots = 8 if size >= 256 << 10 else 256
        candidates = made("penstock", lambda s=size, n=slots: penstock_one_way(False, s, n), count, quantity=size)
        candidates += made("pyzmq ipc nodrop", lambda s=size: zmq_one_way(s), count // 4, quantity=size)
        curve = Curve("shm: bytes a second one way, by size of the payload", "payload bytes", size)
        compare(f"shm: one way, {size} B", candidates, "pyzmq ipc nodrop", arguments, unit="B/s", curve=curve)


def by_slots(arguments: object) -> None:
    for slots in SLOTS:
        curve = Curve("shm: publishes a second, by number of slots", "slots", slots)
        compare(f"shm: publish with {slots} slots", [publishing(slots)], "penstock", arguments, curve=curve)


def publishing(slots: int) -> Candidate:
    """One publisher alone: the oldest message is overwritten."""
    publisher = shm.Publisher(f"/bench/curves/{os.getpid()}/{slots}", slots=slots, slot_size=64)
    data = bytes(64)

    def run(count: int) -> float:
        publish: Callable[[bytes], object] = publisher.publish
        began = time.perf_counter()
        for _ in range(count):
            publish(data)
        return time.perf_counter() - began

    return Candidate("penstock", run, 200_000, close=publisher.close)


def places(number: int) -> list[str]:
    return [f"shm:/bench/crowd/{os.getpid()}/{index}" for index in range(number)]


def slots_for(subscribers: int) -> int:
    """Two for each subscriber, and what waits."""
    return 2 * subscribers + 2 * TOGETHER


def main() -> None:
    arguments = options()
    os.sched_setaffinity(0, {FIRST})
    by_size(arguments)
    by_slots(arguments)
    publishers = {"slots": slots_for, "slot_size": 64, "reliable": True, "max_subscribers": lambda n: max(64, n)}
    curves("shm", places, "ipc", arguments, **publishers)


if __name__ == "__main__":
    main()
