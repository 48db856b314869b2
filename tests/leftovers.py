"""What a test run may leave behind: child processes, files in the shared-memory directory, listening ports."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path


def look(before: set[str] | None = None, settle_s: float = 0) -> set[str]:
    """Everything that is there now and was not ``before``, a line each. Waits for what is just ending."""
    deadline = time.monotonic() + settle_s
    while True:
        gc.collect()
        found = (_children() | _shared_files() | _ports()) - (before or set())
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def _children() -> set[str]:
    """Living descendants of this process."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = (int(parent), command)
    ours = {os.getpid()}
    while grown := {pid for pid, (parent, _) in parents.items() if parent in ours} - ours:
        ours |= grown
    return {f"process {pid}: {parents[pid][1][:120]}" for pid in ours - {os.getpid()} if pid in parents}


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
