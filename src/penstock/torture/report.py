"""The report of a scenario: a row for each promise, with the counts that decide whether it held."""

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
        """Add a row: the number open ``now`` must fall to at most the maximum of the first third of the samples.

        A sample may miss a connection that is not open yet, or count one that is closing: hence the maximum of the
        first samples, and the wait at the end. A leak of one per kill would be three times as high by then.
        """
        most = max(counts[: max(1, len(counts) // 3)])
        deadline = time.monotonic() + SETTLE_S
        while (last := now()) > most and time.monotonic() < deadline:
            time.sleep(0.05)
        self.check(f"no descriptor leaks: {whose}", f"{most} at first, {last} at last", last <= most)

    @property
    def passed(self) -> bool:
        """Whether every promise held (and there was one)."""
        return bool(self.checks) and all(check.held for check in self.checks)

    def text(self) -> str:
        """The report as a text table."""
        width = max(len(check.promise) for check in self.checks)
        torn = f"{self.kills} kills, seed {self.seed}, " if self.kills else ""  # nothing is killed in a soak
        lines = [f"{self.scenario}: {torn}{self.seconds:.1f} s"]
        lines += [f"  {'ok  ' if c.held else 'FAIL'}  {c.promise:<{width}}  {c.counted}" for c in self.checks]
        lines += [f"        {name}: {value}" for name, value in self.facts.items()]
        if not self.passed:
            lines.append(f"  what the workers wrote is in {self.directory}")
            if self.kills:
                lines.append(f"  replay: penstock torture {self.scenario} --kills {self.kills} --seed {self.seed}")
        return "\n".join(lines)
