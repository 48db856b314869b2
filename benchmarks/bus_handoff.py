"""Handing messages from one thread to another, and from a thread to asyncio, against the standard queues and peers."""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from harness import Candidate, compare, options
from wishes import ahead_of, at_least

from penstock.bus import Bus

DATA = b"x" * 64
BATCH = 100


def timed(produce: Callable[[int], None], consume: Callable[[int], None]) -> Callable[[int], float]:
    def run(count: int) -> float:
        thread = threading.Thread(target=produce, args=(count,))
        began = time.perf_counter()
        thread.start()
        consume(count)
        took = time.perf_counter() - began
        thread.join()
        return took

    return run


def standard(made: Any) -> tuple[Callable[[int], None], Callable[[int], None]]:
    def produce(count: int) -> None:
        put = made.put
        for _ in range(count):
            put(DATA)

    def consume(count: int) -> None:
        get = made.get
        for _ in range(count):
            get()

    return produce, consume


def bus_one_by_one(depth: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    bus = Bus(mode="direct")
    subscriber = bus.subscribe(0, depth=depth)

    def produce(count: int) -> None:
        publish = bus.publisher(0).publish
        for _ in range(count):
            publish(DATA)

    def consume(count: int) -> None:
        read = subscriber.read
        for _ in range(count):
            read()

    return produce, consume


def bus_batched(depth: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    bus = Bus(mode="direct")
    subscriber = bus.subscribe(0, depth=depth)
    batch = [DATA] * BATCH

    def produce(count: int) -> None:
        publish_many = bus.publisher(0).publish_many
        for _ in range(count // BATCH):
            publish_many(batch)

    def consume(count: int) -> None:
        left = count // BATCH * BATCH
        while left:
            for _ in (messages := subscriber.read_many(1024)):
                pass
            left -= len(messages)

    return produce, consume


def throughput(arguments: Any) -> None:
    count = 200_000
    batched, single = "penstock publish_many, read_many, depth 1000", "penstock one by one, depth 1000"
    compare(
        "bus hand-off",
        [
            Candidate("SimpleQueue", timed(*standard(queue.SimpleQueue())), count),
            Candidate("Queue(1000)", timed(*standard(queue.Queue(1000))), count // 4),
            Candidate(
                batched,
                timed(*bus_batched(1000)),
                count,
                wishes=[ahead_of("SimpleQueue", "Queue(1000)")],
            ),
            Candidate(
                single,
                timed(*bus_one_by_one(1000)),
                count,
                wishes=[at_least(3, "Queue(1000)")],
            ),
            Candidate("penstock publish_many, read_many, depth 1000000", timed(*bus_batched(1_000_000)), count),
            Candidate("penstock one by one, depth 1000000", timed(*bus_one_by_one(1_000_000)), count),
        ],
        "SimpleQueue",
        arguments,
    )


def round_trips(
    send: Callable[[Any], Any], receive: Callable[[], Any], echo: Callable[[], None]
) -> Callable[[int], float]:
    """Median seconds from sending to having the answer; the other thread sleeps in between."""

    def run(count: int) -> float:
        stop = False

        def answer() -> None:
            while not stop:
                echo()

        thread = threading.Thread(target=answer)
        thread.start()
        samples = []
        for _ in range(count):
            began = time.perf_counter()
            send(DATA)
            receive()
            samples.append(time.perf_counter() - began)
        stop = True
        send(DATA)
        receive()
        thread.join()
        return statistics.median(samples)

    return run


def standard_trip(make: Callable[[], Any]) -> Callable[[int], float]:
    there, back = make(), make()
    return round_trips(there.put, back.get, lambda: back.put(there.get()))


def bus_trip() -> Callable[[int], float]:
    bus = Bus(mode="direct")
    there, back = bus.subscribe(1), bus.subscribe(2)
    to, fro = bus.publisher(1).publish, bus.publisher(2).publish
    return round_trips(to, back.read, lambda: fro(there.read()))


def latency(arguments: Any) -> None:
    compare(
        "bus round trip",
        [
            Candidate("SimpleQueue", standard_trip(queue.SimpleQueue), 3000, latency=True),
            Candidate("Queue(1000)", standard_trip(lambda: queue.Queue(1000)), 3000, latency=True),
            Candidate(
                "penstock",
                bus_trip(),
                3000,
                latency=True,
                wishes=[at_least(0.95, "SimpleQueue")],  # no worse than it
            ),
        ],
        "SimpleQueue",
        arguments,
        unit="s",
    )


def to_asyncio(produce: Callable[[Any, int], None], start: Callable[[], Any], read: Any) -> Callable[[int], float]:
    """A thread produces, a coroutine reads them all."""

    async def main(count: int) -> float:
        made = start()
        thread = threading.Thread(target=produce, args=(made, count))
        began = time.perf_counter()
        thread.start()
        await read(made, count)
        took = time.perf_counter() - began
        thread.join()
        return took

    return lambda count: asyncio.run(main(count))


def peer_async(name: str) -> Candidate:
    def start() -> Any:
        if name == "janus":
            import janus

            return janus.Queue(1000)
        import culsans

        return culsans.Queue(1000)

    def produce(made: Any, count: int) -> None:
        for _ in range(count):
            made.sync_q.put(DATA)

    async def read(made: Any, count: int) -> None:
        for _ in range(count):
            await made.async_q.get()

    return Candidate(name, to_asyncio(produce, start, read), 10_000)


def bus_async() -> Candidate:
    def start() -> Any:
        return Bus(mode="direct").subscribe(0, depth=1000)

    def produce(subscriber: Any, count: int) -> None:
        publish = subscriber.bus.publisher(0).publish
        for _ in range(count):
            publish(DATA)

    async def read(subscriber: Any, count: int) -> None:
        left = count
        async for _ in subscriber:
            left -= 1
            if not left:
                break

    return Candidate("penstock async for", to_asyncio(produce, start, read), 100_000)


def thread_to_asyncio(arguments: Any) -> None:
    candidates = []
    for name in ("culsans", "janus"):
        try:
            __import__(name)
            candidates.append(peer_async(name))
        except ImportError:
            print(f"{name} is not installed: pip install penstock[bench]")
    ours = bus_async()
    reference = candidates[0].name if candidates else ours.name
    ours.wishes = (ahead_of("culsans", "janus", times=3),)
    compare("bus thread to asyncio", [*candidates, ours], reference, arguments)


def main() -> None:
    arguments = options()
    throughput(arguments)
    latency(arguments)
    thread_to_asyncio(arguments)


if __name__ == "__main__":
    main()
