"""What a scenario found: a row for each promise, with the counts it was judged by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SETTLE_S = 60.0


@dataclass(frozen=True)
class Check:
    """One promise: what was counted, and whether it held."""

    promise: str
    counted: str
    held: bool


@dataclass
class Report:
    scenario: str
    kills: int
    seed: int
    directory: Path
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, promise: str, counted: object, held: bool) -> None:
        """Add a row."""
        self.checks.append(Check(promise, str(counted), held))

    def check_descriptors(self, whose: str, counts: list[int], now: Callable[[], int]) -> None:
        """A row: what is open ``now`` comes down to no more than the first third of the samples had at most.

        A sample may miss a connection that is not made yet, or catch one that is just closing: so the most of the
        first ones counts, and the end is waited for. A leak of one a kill is twice as high again by then.
        """
        most = max(counts[: max(1, len(counts) // 3)])
        deadline = time.monotonic() + SETTLE_S
        while (last := now()) > most and time.monotonic() < deadline:
            time.sleep(0.05)
        self.check(f"no descriptor leaks: {whose}", f"{most} at first, {last} at last", last <= most)

    @property
    def whole(self) -> bool:
        """Whether every promise held (and there was one)."""
        return bool(self.checks) and all(check.held for check in self.checks)

    def text(self) -> str:
        """The table for people."""
        width = max(len(check.promise) for check in self.checks)
        torn = f"{self.kills} kills, seed {self.seed}, " if self.kills else ""  # nothing is killed in a soak
        lines = [f"{self.scenario}: {torn}{self.seconds:.1f} s"]
        lines += [f"  {'ok  ' if c.held else 'FAIL'}  {c.promise:<{width}}  {c.counted}" for c in self.checks]
        lines += [f"        {name}: {value}" for name, value in self.facts.items()]
        if not self.whole:
            lines.append(f"  what the workers wrote is in {self.directory}")
            if self.kills:
                lines.append(f"  replay: penstock torture {self.scenario} --kills {self.kills} --seed {self.seed}")
        return "\n".join(lines)
