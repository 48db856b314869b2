"""A module in its own process against the same module in this one: 256 bytes and two properties, counted there.

The message goes source -> counter; the counter tells by a message when it has seen them all, so a run ends when the
last one has been handled, wherever that is.
"""

from __future__ import annotations

import threading
import time

from harness import Candidate, compare, options
from wishes import at_least

from penstock.gateway import Gateway, GatewayMessage, Module, QueueOptions

CONTENT = bytes(256)
PROPERTIES = {"deviceId": "0123456789abcdef", "sequence": "fedcba9876543210"}
END = b"end"


class Counting(Module):
    """Counts until a message says that it was the last."""

    count = 0

    def receive(self, message: GatewayMessage) -> None:
        self.count += 1
        if message.size == len(END):
            self.publish(b"%d" % self.count)
            self.count = 0


class Waiter(Module):
    """Notes what the counter says."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.number = 0

    def receive(self, message: GatewayMessage) -> None:
        self.number = int(bytes(message))
        self.told.set()


def candidate(loader: str, name: str) -> Candidate:
    made = Gateway()
    made.add_module("source", Module)
    made.add_module("waiter", Waiter)
    made.add_module("counting", "gateway_process:Counting", loader=loader, queue=QueueOptions(depth=1024))
    made.add_link("source", "counting")
    made.add_link("counting", "waiter")
    made.start()
    source, waiter = made.module("source"), made.module("waiter")

    def run(count: int) -> float:
        waiter.told.clear()
        publish = made.broker.publish
        began = time.perf_counter()
        for _ in range(count - 1):
            publish(source, GatewayMessage(CONTENT, PROPERTIES))
        publish(source, GatewayMessage(END))
        if not waiter.told.wait(60) or waiter.number != count:
            raise RuntimeError(f"lost: {waiter.number} of {count} arrived")
        return time.perf_counter() - began

    if loader == "python":
        return Candidate(name, run, 200_000, close=made.destroy)
    return Candidate(name, run, 200_000, wishes=[at_least(0.5, "in this process")], close=made.destroy)


def main() -> None:
    candidates = [candidate("python", "in this process"), candidate("process", "in its own process")]
    compare("gateway: a module in its own process", candidates, "in this process", options())


if __name__ == "__main__":
    main()
