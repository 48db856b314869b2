"""Stillness: for how long a process has made no progress although messages wait for it. One thread. A process that gets
no processor time is runnable, and one that works uses processor time: neither is still, however long it takes. A still
process is stopped or asleep at every check, and has used no processor time since the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

STILL = "TtS"  # stopped, traced, asleep; not: runnable, waiting for a disk, dead
MAX_LOOK_S = 0.5  # a longer time between two checks does not count: the checking process may have been stopped itself


def state_of(pid: int) -> tuple[str, int] | None:
    """The state of a process and the processor time that it has used, in ticks; None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None


class Stillness:
    """The checks of one process."""

    def __init__(self, look: Callable[[int], tuple[str, int] | None] = state_of) -> None:
        self._look = look
        self._evidence: tuple[int, int] | None = None  # messages handled and processor time used, at the last check
        self._last_s = 0.0
        self.seconds = 0.0

    def look(self, pid: int, now_s: float, handled: int) -> float:
        """Check the process while messages wait for it; returns for how many seconds it has been still."""
        found = self._look(pid)
        if found is None or found[0] not in STILL:
            self.clear()
            return 0.0
        evidence = handled, found[1]
        self.seconds = self.seconds + min(now_s - self._last_s, MAX_LOOK_S) if evidence == self._evidence else 0.0
        self._evidence, self._last_s = evidence, now_s
        return self.seconds

    def clear(self) -> None:
        """Reset, because no message waits for it."""
        self._evidence, self.seconds = None, 0.0
