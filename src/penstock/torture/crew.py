"""Starts, kills, pauses and ends the worker processes of a scenario. It signals only processes that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.torture import record


class Worker:
    """One process, with what it needs to be started again."""

    def __init__(self, name: str, command: list[str], log: Path, own_session: bool = False) -> None:
        self.own_session = own_session  # then its descendants, which may have groups of their own, are killed with it
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
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=self.own_session,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def descriptors(self) -> int:
        """How many descriptors it has open."""
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def pause(self, seconds: float) -> None:
        """SIGSTOP for a while, as a machine that swaps or a debugger does."""
        self.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 and wait for the end."""
        if self.process is None:
            return
        for pid in processes_of_session(self):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        wait_until(lambda: not processes_of_session(self), 60, f"all of {self.name} has ended")

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
    """All workers of a scenario. Leaving the block kills those that still run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[Worker] = []

    def add(self, name: str, *arguments: object, start: bool = True) -> Worker:
        """A worker of ``python -m penstock.torture.worker`` with these arguments."""
        command = [sys.executable, "-m", "penstock.torture.worker", *(_text(argument) for argument in arguments)]
        return self.add_command(name, command, start)

    def add_command(self, name: str, command: list[str], start: bool = True, own_session: bool = False) -> Worker:
        worker = Worker(name, command, self.directory / f"{name}.out", own_session)
        self.workers.append(worker)
        if start:
            worker.start()
        return worker

    def record_of(self, worker: Worker) -> Path:
        """The log file of a worker's current process."""
        return self.directory / f"{worker.name}.{worker.started}.log"

    def wait_moving(self, worker: Worker) -> None:
        """Wait until the worker has logged its first message, or has ended."""
        path = self.record_of(worker)
        wait_until(lambda: grown(path, record.ENTRY.size) or not worker.alive, 60, f"{worker.name} does something")

    def moves(self, worker: Worker) -> bool:
        """Whether the worker is alive and logs ten more messages within a minute."""
        path = self.record_of(worker)
        size = path.stat().st_size if path.exists() else 0
        try:
            wait_until(lambda: grown(path, size + 10 * record.ENTRY.size), 60, f"{worker.name} goes on")
        except TimeoutError:
            return False
        return worker.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.kill()


def descriptors(workers: list[Worker]) -> int:
    """How many descriptors the living workers have open in total."""
    return sum(worker.descriptors() for worker in workers if worker.alive)


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until the condition holds; ``TimeoutError`` names what did not happen."""
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


def processes_of_session(worker: Worker) -> list[int]:
    """The living processes of a worker that leads a session of its own; none for others."""
    if not worker.own_session or worker.process is None:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z" and int(session) == worker.process.pid:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def own_shared_directory(directory: Path) -> Iterator[None]:
    """Put shared-memory files into a directory of this scenario's own, so that all leftovers there are ours. Those whom
    it kills are no deaths of the user's (``penstock autopsy``)."""
    own = {"PENSTOCK_SHM_DIR": directory / "shm", "XDG_STATE_HOME": directory / "state"}
    before = {name: os.environ.get(name) for name in own}
    for name, place in own.items():
        place.mkdir(mode=0o700)
        os.environ[name] = str(place)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shared_files_left(directory: Path) -> list[str]:
    """Shared files that remain after the counter pages of dead processes are removed, as any participant would."""
    from penstock import _core

    _core.counters_read()
    own = (f"counters.{os.getpid()}.", f"alive.{os.getpid()}")
    found = (path.name for path in (directory / "shm").rglob("*") if path.is_file())
    return [name for name in found if not name.startswith(own)]


Options = dict[str, Any]
