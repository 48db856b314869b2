"""Latency percentiles (median and 99th) out of the histograms that readers keep.

A reader counts each latency it measures in one of 52 buckets, two per doubling from 1 us to 34 s, so a percentile is
known to within a third. ``Windows`` keeps two earlier histograms of each handle, to subtract what was measured before
the last minute. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.observe.snapshot import Block, Key

__all__ = ["BOUNDS_NS", "Spread", "Windows", "quantile", "spread"]

#: The upper bound of each bucket, up to 34 s; the last bucket has none.
BOUNDS_NS: tuple[int, ...] = (
    1024, *(bound for octave in range(25) for bound in (1536 << octave, 2048 << octave)),
)  # fmt: skip

#: A window reaches back at least so far, and at most twice as far.
WINDOW_NS = 30_000_000_000


@dataclass(frozen=True, slots=True)
class Spread:
    """The percentiles of the latencies that were measured."""

    measured: int
    p50_ns: float
    p99_ns: float


def quantile(counts: Sequence[int], part: float) -> float:
    """The latency in nanoseconds that ``part`` of the messages do not exceed; interpolates within a bucket."""
    wanted = part * sum(counts)
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            low = BOUNDS_NS[bucket - 1] if bucket else 0
            high = BOUNDS_NS[bucket] if bucket < len(BOUNDS_NS) else low  # the last bucket: shown as "> 34 s"
            return low + (high - low) * (wanted - below) / count
        below += count
    return 0.0


def spread(counts: Sequence[int]) -> Spread | None:
    """None when nothing was measured."""
    measured = sum(counts)
    return Spread(measured, quantile(counts, 0.5), quantile(counts, 0.99)) if measured else None


class Windows:
    """What each handle measured in the last 30 to 60 s; in the first 30 s of watching, since it was opened."""

    def __init__(self) -> None:
        self._older: dict[Key, tuple[int, ...]] = {}
        self._newer: dict[Key, tuple[int, ...]] = {}
        self._window_began_ns = 0

    def look(self, blocks: Iterable[Block], now_ns: int) -> dict[Key, Spread]:
        """The spread of each handle that measured something in its window."""
        counts = {block.key: block.latency_counts for block in blocks if block.latency_counts}
        self._window_began_ns = self._window_began_ns or now_ns
        if now_ns - self._window_began_ns >= WINDOW_NS:
            self._older, self._newer, self._window_began_ns = self._newer, counts, now_ns
        found = {}
        for key, now in counts.items():
            before = self._older.get(key)
            made = spread(now if before is None else [a - b for a, b in zip(now, before, strict=True)])
            if made is not None:
                found[key] = made
        return found
