"""The last fifteen minutes of every series, one sample a second, in a bounded amount of memory.

One writer (the watcher's thread) and any number of readers; a lock guards the rings, and readers get copies.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict

__all__ = ["History", "SAMPLES"]

SAMPLES = 15 * 60
MAX_SERIES = 2000


class _Ring:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("d", [float("nan")]) * SAMPLES


class History:
    """Series by name. A series without a value at a tick has a hole there, which a plot shows as a gap."""

    def __init__(self) -> None:
        self._series: OrderedDict[str, _Ring] = OrderedDict()
        self._lock = threading.Lock()
        self._tick = 0
        self._times = array("d", [0.0]) * SAMPLES

    def add(self, time_s: float, values: dict[str, float]) -> None:
        """Add one sample of each series; when there are too many, drop the least recently updated one."""
        with self._lock:
            self._tick += 1
            slot = self._tick % SAMPLES
            self._times[slot] = time_s
            # Write every ring, also those without a new value: the slot still holds a sample of 15 minutes ago.
            for name, ring in self._series.items():
                ring.values[slot] = values.get(name, float("nan"))
            for name, value in values.items():
                if name not in self._series:
                    self._series[name] = _Ring()
                    self._series[name].values[slot] = value
                self._series.move_to_end(name)
            while len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)

    def series(self, names: list[str] | None = None, last: int = SAMPLES) -> dict[str, object]:
        """``{"times": [...], "series": {name: [...]}}``, oldest first, holes as None."""
        with self._lock:
            count = min(self._tick, SAMPLES, max(0, last))
            slots = [(self._tick - count + 1 + n) % SAMPLES for n in range(count)]
            chosen = self._series if names is None else {n: self._series[n] for n in names if n in self._series}
            return {
                "times": [self._times[slot] for slot in slots],
                "series": {name: [_none_if_nan(ring.values[slot]) for slot in slots] for name, ring in chosen.items()},
            }

    def names(self) -> list[str]:
        """Every series that is kept."""
        with self._lock:
            return list(self._series)


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
