"""What a test run may leave behind: child processes, files in the shared-memory directory, listening ports."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

#: Set for everything that a run starts, so that it is found also after the process that started it has gone.
MARK = "PENSTOCK_TEST_RUN"


def look(before: set[str] | None = None, settle_s: float = 0) -> set[str]:
    """Everything that is there now and was not ``before``, a line each. Waits for what is just ending."""
    deadline = time.monotonic() + settle_s
    while True:
        gc.collect()
        processes = {f"process {pid}: {command[:120]}" for pid, command in _processes().items()}
        found = (processes | _shared_files() | _ports()) - (before or set())
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def end_processes(patience_s: float = 10) -> None:
    """Kill what an interrupted test has left running. Returns when all of it has gone."""
    deadline = time.monotonic() + patience_s
    while (found := _processes()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> dict[int, str]:
    """Living processes with their commands: descendants of this one, and whatever carries the mark of this run."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    commands: dict[int, str] = {}
    parents: dict[int, int] = {}
    ours = {os.getpid()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has gone, or it is another user's
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                pid = int(entry.name)
                commands[pid], parents[pid] = command, int(parent)
                if mark in environment:
                    ours.add(pid)
    while grown := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= grown
    return {pid: commands[pid] for pid in ours - {os.getpid()} if pid in commands}


def _shared_files() -> set[str]:
    """Files in the run's shared-memory directory, but those that stand as long as this process does."""
    from penstock import _core

    _core.counters_read()  # removes the pages of dead processes, as any participant does
    _core.shm.clean()  # likewise for channels
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    own = (f"counters.{os.getpid()}.", f"alive.{os.getpid()}")
    return {
        f"shared file {path}" for path in directory.rglob("*") if not path.is_dir() and not path.name.startswith(own)
    }


def _ports() -> set[str]:
    """TCP ports on which this process still listens."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(f"listening port {int(fields[1].rpartition(':')[2], 16)}")
    return found
