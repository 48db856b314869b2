"""What the gateway's tests share: modules that note what they get, and waiting without guessing how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.gateway import GatewayMessage, Module


class Collector(Module):
    """Notes the content of everything; ``gate`` holds it back when cleared."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.messages: list[GatewayMessage] = []
        self.steps: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.steps.append("create")

    def start(self) -> None:
        self.steps.append("start")

    def receive(self, message: GatewayMessage) -> None:
        assert self.gate.wait(60)
        self.messages.append(message)
        self.got.append(bytes(message))

    def stop(self) -> None:
        self.steps.append("stop")

    def destroy(self) -> None:
        self.steps.append("destroy")


class Passer(Collector):
    """Publishes on whatever it receives."""

    def receive(self, message: GatewayMessage) -> None:
        super().receive(message)
        self.broker.publish(self, message)


class Doubler(Collector):
    """Two for one, until told otherwise: a cycle through it runs full."""

    doubling = True

    def receive(self, message: GatewayMessage) -> None:
        for _ in range(2 if self.doubling else 0):
            self.broker.publish(self, message)


class Failing(Collector):
    """Raises on every content that says so."""

    def receive(self, message: GatewayMessage) -> None:
        super().receive(message)
        if bytes(message).startswith(b"bad"):
            raise RuntimeError(f"cannot take {bytes(message)!r}")


def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float = 60) -> None:
    """Wait until it is so; the test fails when it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what or condition}"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    """Every test gives the gateway's threads back; other rooms may keep a thread for the whole process."""
    words = ("module ", " source", " process", " reader", " keeper", " events")

    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if any(word in thread.name for word in words)}

    before = ours()
    yield
    eventually(lambda: ours() <= before, "the test's threads have ended", 30)
