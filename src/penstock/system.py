"""Processes and memory as the operating system reports them in /proc. Any thread may call this."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.secrecy import hidden

__all__ = ["Process", "dying_with_parent", "process", "shared_memory", "state_directory", "tree_bytes", "who"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_HZ = os.sysconf("SC_CLK_TCK")
_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_COMMAND_BYTES = 16384  # at most so much of a command line is read; it can have megabytes


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its resident memory, its processor time up to now, its threads and its command line, without
    secrets."""

    pid: int
    resident_bytes: int
    processor_s: float
    threads: int
    command: str

    @property
    def program(self) -> str:
        """Its short name: its script or module; for a module with commands, the command. Empty for code in the line."""
        words = self.command.split()
        if words[1:2] == ["-c"]:
            return ""
        if not words or "python" not in words[0].rpartition("/")[2]:
            return words[0].rpartition("/")[2] if words else ""
        module = "-m" in words
        rest = words[words.index("-m") + 1 :] if module else [word for word in words[1:] if not word.startswith("-")]
        if len(rest) > 1 and (module or rest[0].endswith("/penstock")) and not rest[1].startswith(("-", "/")):
            return rest[1]
        return rest[0].rpartition("/")[2] if rest else ""


def process(pid: int) -> Process | None:
    """What /proc says of a process; None if it has ended or may not be read."""
    root = Path("/proc") / str(pid)
    try:
        resident = int((root / "statm").read_text().split()[1]) * _PAGE_BYTES
        # The program's name comes first, in parentheses, and may itself contain blanks and parentheses.
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        with (root / "cmdline").open("rb") as file:
            words = file.read(_COMMAND_BYTES).decode("utf-8", "replace").split("\0")
    except (OSError, IndexError, ValueError):
        return None
    command = " ".join(hidden(words)).strip()[:300]
    return Process(pid, resident, (int(fields[11]) + int(fields[12])) / _TICKS_HZ, int(fields[17]), command)


def who(pid: int) -> str:
    """A process for a message to the user: its pid and the beginning of its command line, without secrets."""
    found = process(pid)
    words = found.command.split() if found else []
    return f"pid {pid} ({' '.join(words[:3])[:60]})" if words else f"pid {pid}"


def state_directory() -> Path:
    """Where programs of this user keep what should outlive them and is no configuration; it may not exist yet."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"


def shared_memory(directory: str) -> dict[str, int]:
    """Size and free space of the file system that holds ``directory``, and the space that Penstock's files use."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return {"total_bytes": 0, "free_bytes": 0, "penstock_bytes": 0}
    own = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                own += Path(root, name).stat().st_blocks * 512  # not st_size: the files are sparse
            except OSError:
                continue
    return {"total_bytes": usage.total, "free_bytes": usage.free, "penstock_bytes": own}


def tree_bytes(root: int | None = None) -> int:
    """Memory of a process and all its descendants; shared pages are split among the processes that map them (PSS)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    family = {root or os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(_proportional_bytes(pid) for pid in family)


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    found = process(pid)
    return found.resident_bytes if found else 0


def dying_with_parent() -> Callable[[], None]:
    """For ``preexec_fn`` of a child: the kernel kills it when the thread that starts it ends, by kill -9 too.

    What the child has started itself is not killed with it.
    """
    # looked up before the fork: the child must not load anything
    prctl, parent, exit_now = ctypes.CDLL(None).prctl, os.getpid(), os._exit

    def die_with_parent() -> None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            exit_now(1)

    return die_with_parent
