"""Messages from one module to 1 and to 4 others that count them: 256 bytes of content and two properties, nothing lost.

The peer is what one would write without a library: a thread and a queue.Queue for each module. The reference gateway in
C reached about 100,000 messages/s to one sink and 20,000 to four on this kind of machine; it is not run here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness import Candidate, compare, options
from wishes import at_least, reaching

from penstock.gateway import Gateway, GatewayMessage, Module, QueueOptions

CONTENT = bytes(256)
REFERENCE = {1: 100_000, 4: 20_000}  # messages a second of the reference in C, by number of sinks
PROPERTIES = {"deviceId": "0123456789abcdef", "sequence": "fedcba9876543210"}
DEPTH = 1024


class Counter(Module):
    """Counts; sets an event at the number wished for."""

    def __init__(self) -> None:
        self.count = self.wanted = 0
        self.reached = threading.Event()

    def expect(self, count: int) -> None:
        self.count, self.wanted = 0, count
        self.reached.clear()

    def receive(self, message: GatewayMessage) -> None:
        self.count += 1
        if self.count == self.wanted:
            self.reached.set()


def finished(counters: list[Any], count: int) -> None:
    for counter in counters:
        if not counter.reached.wait(60) or counter.count != count:
            raise RuntimeError(f"lost: {counter.count} of {count} arrived")


def gateway(sinks: int) -> Candidate:
    made = Gateway()
    made.add_module("source", Module)
    for number in range(sinks):
        made.add_module(f"sink-{number}", Counter, queue=QueueOptions(depth=DEPTH))
        made.add_link("source", f"sink-{number}")
    made.start()
    source = made.module("source")
    counters = [made.module(f"sink-{number}") for number in range(sinks)]

    def run(count: int) -> float:
        for counter in counters:
            counter.expect(count)
        publish = made.broker.publish
        began = time.perf_counter()
        for _ in range(count):
            publish(source, GatewayMessage(CONTENT, PROPERTIES))
        finished(counters, count)
        return time.perf_counter() - began

    wishes = (at_least(3, "thread and queue.Queue"), reaching(2 * REFERENCE[sinks]))
    note = f"reference in C: about {REFERENCE[sinks]}/s, another machine of this kind"
    return Candidate("penstock gateway", run, 200_000, wishes=wishes, note=note, close=made.destroy)


@dataclass(slots=True)
class PlainMessage:
    content: bytes
    properties: dict[str, str]


class PlainModule:
    """A thread and a queue."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self.queue: queue.Queue[Any] = queue.Queue(DEPTH)
        self.receive = receive
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while (message := self.queue.get()) is not None:
            self.receive(message)


def plain(sinks: int) -> Candidate:
    counters = [Counter() for _ in range(sinks)]
    modules = [PlainModule(counter.receive) for counter in counters]

    def run(count: int) -> float:
        for counter in counters:
            counter.expect(count)
        began = time.perf_counter()
        for _ in range(count):
            message = PlainMessage(CONTENT, dict(PROPERTIES))
            for module in modules:
                module.queue.put(message)
        finished(counters, count)
        return time.perf_counter() - began

    def close() -> None:
        for module in modules:
            module.queue.put(None)
            module.thread.join()

    return Candidate("thread and queue.Queue", run, 50_000, close=close)


def main() -> None:
    arguments = options()
    for sinks in (1, 4):
        question = f"gateway: 1 source to {sinks} {'sink' if sinks == 1 else 'sinks'}"
        compare(question, [gateway(sinks), plain(sinks)], "thread and queue.Queue", arguments)


if __name__ == "__main__":
    main()
