"""Latencies of many messages in little memory: all of them counted, an even sample of them kept."""

from __future__ import annotations

import random
import threading
from typing import Any

__all__ = ["Latencies"]

KEPT = 20_000


class Latencies:
    """One writer, any reader."""

    def __init__(self) -> None:
        self.count = 0
        self._sample: list[int] = []
        self._lock = threading.Lock()
        self._chance = random.Random(1)  # noqa: S311 - which ones are kept is no secret

    def add(self, nanoseconds: int) -> None:
        """Count one; after ``KEPT`` of them each has the same chance to be in the sample."""
        with self._lock:
            self.count += 1
            if len(self._sample) < KEPT:
                self._sample.append(nanoseconds)
            else:
                at = self._chance.randrange(self.count)
                if at < KEPT:
                    self._sample[at] = nanoseconds

    def figures(self) -> dict[str, Any]:
        """Median, ninety-ninth of a hundred and greatest, in microseconds."""
        with self._lock:
            kept = sorted(self._sample)
        if not kept:
            return {}
        return {
            "p50_us": kept[len(kept) // 2] / 1000,
            "p99_us": kept[min(len(kept) - 1, len(kept) * 99 // 100)] / 1000,
            "most_us": kept[-1] / 1000,
        }
