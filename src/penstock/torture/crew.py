"""The worker processes of a scenario: started, killed, stopped for a while, ended. Only its own are ever signalled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Worker:
    """One process, with what it needs to be started again."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.started = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; ``{incarnation}`` in its command becomes the number of this start."""
        self.started += 1
        command = [part.replace("{incarnation}", str(self.started)) for part in self.command]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9 and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self, timeout: float = 60) -> int:
        """SIGTERM, then wait; gives the exit code. One that does not end is killed and counts as -9."""
        assert self.process is not None
        if self.alive:
            self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9


class Crew:
    """All workers of a scenario. Leaving the block kills whoever is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[Worker] = []

    def add(self, name: str, *arguments: object, start: bool = True) -> Worker:
        """A worker of ``python -m penstock.torture.worker`` with these arguments."""
        command = [sys.executable, "-m", "penstock.torture.worker", *(_text(argument) for argument in arguments)]
        return self.add_command(name, command, start)

    def add_command(self, name: str, command: list[str], start: bool = True) -> Worker:
        worker = Worker(name, command, self.directory / f"{name}.out")
        self.workers.append(worker)
        if start:
            worker.start()
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.kill()


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until the condition holds; ``TimeoutError`` names what did not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout} s still not: {what}")
        time.sleep(0.01)


def grown(path: Path, size: int) -> bool:
    """Whether the file has at least so many bytes."""
    return path.exists() and path.stat().st_size >= size


def _text(argument: object) -> str:
    return json.dumps(argument) if isinstance(argument, dict) else str(argument)


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


Options = dict[str, Any]
