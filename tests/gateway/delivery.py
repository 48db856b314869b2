"""What the tests of deliveries share: sinks that fail or wait, and a durable source."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from penstock.gateway import (
    Delivery,
    Gateway,
    GatewayMessage,
    LinkOptions,
    Module,
)
from penstock.gateway.durable import Forwarder
from penstock.gateway.marks import Mark
from tests.gateway.conftest import Collector

ALO = Delivery.AT_LEAST_ONCE
AGAIN = LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02)


class Fails(Collector):
    """Fails at what begins with "bad" until it is well."""

    def __init__(self) -> None:
        super().__init__()
        self.well = threading.Event()
        self.tried: list[bytes] = []

    def receive(self, message: GatewayMessage) -> None:
        self.tried.append(bytes(message))
        if bytes(message).startswith(b"bad") and not self.well.is_set():
            raise OSError("not well")
        super().receive(message)


class NeverStarts(Collector):
    def start(self) -> None:
        raise OSError("it never starts")


def say(gateway: Gateway, source: str, *contents: bytes) -> None:
    for content in contents:
        gateway.module(source).publish(content)


def marked(gateway: Gateway, name: str) -> Mark:
    return gateway.broker.mark(gateway.module(name))


class Backlog:
    """A durable queue that is full from the beginning."""

    def __init__(self, count: int) -> None:
        self.left = deque(range(count))
        self.acked: list[int] = []

    def read_many(self, most: int, timeout: float) -> list[int]:
        if not self.left:
            time.sleep(timeout)
        return [self.left.popleft() for _ in range(min(most, len(self.left)))]

    def ack_many(self, batch: list[int], begin: int, end: int) -> None:
        self.acked += batch[begin:end]

    def nack_many(self, batch: list[int], begin: int, end: int) -> None:
        self.left.extend(batch[begin:end])


class FromBacklog(Module):
    durable = True

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.queue = Backlog(2000)
        self.forwarder = Forwarder(self, lambda: self.queue, lambda n: self.publish(b"%d" % n))

    def start(self) -> None:
        self.forwarder.start()

    def stop(self) -> None:
        self.forwarder.cut()
        self.forwarder.stop()


class OneByOne(Collector):
    """Takes as many as it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def receive(self, message: GatewayMessage) -> None:
        self.allowed.acquire()
        super().receive(message)

    def kill(self) -> None:
        self.allowed.release(10000)


class Backlogged(FromBacklog):
    """Gives ten; with ``many`` in the configuration, so many."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.queue.left = deque(range((configuration or {}).get("many", 10)))
