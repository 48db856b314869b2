"""How the suite opens each reach. A room joins by a row in docs/reaches.md and a class here.

A class gives connected pairs; the suite never knows which room it runs on but through the table.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import penstock

TABLE = Path(__file__).parents[2] / "docs" / "reaches.md"
_numbers = itertools.count(1)


def unique(prefix: str = "t") -> str:
    """A name that no other test, worker or run uses."""
    return f"{prefix}-{os.getpid()}-{next(_numbers)}"


def capabilities() -> dict[str, dict[str, str]]:
    """The table's rows by reach: {"shm": {"contiguous": "yes", ...}}."""
    header: list[str] | None = None
    rows: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip().strip("|").split("|")]
        if cells[0] == "reach" and "contiguous" in cells:
            header = cells
        elif header and line.startswith("|") and not set(line) <= set("|- "):
            rows[cells[0]] = dict(zip(header[1:], cells[1:], strict=True))
        elif header and not line.startswith("|"):
            break
    return rows


class Reach:
    """One reach under test. Everything opened through it is closed at the end of the test."""

    name: str
    flood_count = 2_000
    flood_padding = 0  # bytes added to each message, where buffers outside our count must be filled first

    def __init__(self, can: dict[str, str], directory: Path) -> None:
        self.can = can
        self.directory = directory
        self.stack = ExitStack()
        self.address = self.make_address()

    def make_address(self) -> str:
        raise NotImplementedError

    def publisher(self, **options: Any) -> penstock.Publisher:
        return self.stack.enter_context(penstock.publisher(self.address, **options))

    def subscriber(self, **options: Any) -> penstock.Subscriber:
        return self.stack.enter_context(penstock.subscriber(self.address, **options))

    def lossless(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of publisher and subscriber with which nothing is lost."""
        return {}, {}

    def bounded(self, depth: int, overflow: str, timeout: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options with which at most about ``depth`` messages wait for a subscriber, then ``overflow``."""
        options: dict[str, Any] = {"depth": depth, "overflow": overflow}
        if timeout is not None:
            options["timeout"] = timeout
        return ({}, options) if self.can["set on"] == "subscriber" else (options, {})

    def pair(
        self, options: tuple[dict[str, Any], dict[str, Any]] | None = None
    ) -> tuple[penstock.Publisher, penstock.Subscriber]:
        """A publisher and a subscriber that are connected."""
        for_publisher, for_subscriber = self.lossless() if options is None else options
        publisher = self.publisher(**for_publisher)
        subscriber = self.subscriber(**for_subscriber)
        assert publisher.wait_ready(1, timeout=30)
        return publisher, subscriber

    def close(self) -> None:
        self.stack.close()


REACHES: dict[str, Callable[[dict[str, str], Path], Reach]] = {}


def joins(name: str) -> Callable[[type[Reach]], type[Reach]]:
    """Class decorator: this is how the suite opens the reach ``name`` of the table."""

    def register(kind: type[Reach]) -> type[Reach]:
        kind.name = name
        REACHES[name] = kind
        return kind

    return register


@joins("bus")
class Bus(Reach):
    def make_address(self) -> str:
        return f"bus:{unique()}"


@joins("shm")
class SharedMemory(Reach):
    def make_address(self) -> str:
        return f"shm:/{unique()}"

    def lossless(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"slots": 64, "reliable": True}, {"reliable": True}

    def bounded(self, depth: int, overflow: str, timeout: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        options: dict[str, Any] = {"slots": depth, "overflow": overflow}
        if timeout is not None:
            options["timeout"] = timeout
        return options, {"overflow": overflow}


@joins("shm-virtual")
class VirtualChannel(SharedMemory):
    def make_address(self) -> str:
        return f"shm:/{unique()}?mux=/{unique('mux')}"


@joins("tcp")
class Tcp(Reach):
    flood_count = 200_000  # the kernel's socket buffers must be full before our bound is reached
    flood_padding = 4096

    def make_address(self) -> str:
        return "tcp://127.0.0.1:0"

    def publisher(self, **options: Any) -> penstock.Publisher:
        self.address = self.make_address()
        publisher = super().publisher(**options)
        self.address = f"tcp://127.0.0.1:{publisher.port}"  # type: ignore[attr-defined]
        return publisher


@joins("journal")
class Journal(Reach):
    def make_address(self) -> str:
        return f"journal:{self.directory / 'journal'}#{unique('topic')}"

    def lossless(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"start": "first"}


@joins("broker")
class Broker(Reach):
    """A broker in this process, with a queue that publisher and subscriber both name."""

    def make_address(self) -> str:
        from penstock.broker import Server

        self.server = self.stack.enter_context(Server(self.directory / "broker", 0).start())
        return f"broker://127.0.0.1:{self.server.port}/{unique('topic')}?queue={unique('queue')}"
