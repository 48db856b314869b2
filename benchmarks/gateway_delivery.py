"""Messages of a broker's durable queue through a gateway to a module that counts them, acknowledged when handled.

The queue is full before the clock starts; a run ends when the module has had the last message and the broker knows
that all were handled.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from harness import Candidate, compare, options
from wishes import reaching

from penstock.broker import Client, Server
from penstock.gateway import Gateway, GatewayMessage, Module

CONTENT = bytes(256)


class Counter(Module):
    """Counts; sets an event at the number wished for."""

    wanted = count = 0
    reached = threading.Event()

    def receive(self, message: GatewayMessage) -> None:
        Counter.count += 1
        if Counter.count == Counter.wanted:
            Counter.reached.set()


def fill(port: int, name: str, count: int) -> None:
    with Client(port=port) as client:
        client.queue(name, topics="t")
        for _ in range(0, count, 1000):
            client.publish_many("t", [CONTENT] * 1000)


def wait_acknowledged(port: int, name: str) -> None:
    with Client(port=port) as client:
        while any(queue["queue"] == name and queue["depth"] for queue in client.queues()):
            time.sleep(0.001)


def through_gateway(port: int, count: int) -> float:
    name = f"q{time.monotonic_ns()}"
    fill(port, name, count)
    Counter.count, Counter.wanted = 0, count
    Counter.reached.clear()
    with Gateway() as gateway:
        gateway.add_module("counter", Counter)
        gateway.add_link(f"broker://127.0.0.1:{port}/t?queue={name}", "counter")
        began = time.perf_counter()
        gateway.start()
        if not Counter.reached.wait(120):
            raise RuntimeError(f"lost: {Counter.count} of {count} arrived")
        wait_acknowledged(port, name)
        return time.perf_counter() - began


def main() -> None:
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory, Server(directory, 0) as server:
        server.start()
        candidate = Candidate("penstock gateway", lambda count: through_gateway(server.port, count), 200_000)
        candidate.wishes = (reaching(100_000),)
        compare("gateway: at least once from a broker's queue", [candidate], "penstock gateway", options())


if __name__ == "__main__":
    main()
