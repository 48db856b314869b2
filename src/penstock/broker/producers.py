"""Producers: how many messages of each numbered producer are stored, and the positions of the last ones. Pure values.

A client that reconnects is told both, so that it sends again only what is not stored, and knows the positions of the
rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RUNS = 64  # runs of positions without gaps that are remembered


@dataclass(frozen=True, slots=True)
class Producer:
    """One producer."""

    count: int = 0
    runs: tuple[tuple[int, int], ...] = ()  #: positions of its last messages, in the order in which it sent them

    def stored(self, positions: Sequence[int]) -> Producer:
        """Note messages that were stored at these positions."""
        return self._advanced(self.count + len(positions), _runs(positions))

    def _advanced(self, count: int, runs: Sequence[tuple[int, int]]) -> Producer:
        merged = list(self.runs)
        for first, last in runs:
            if merged and merged[-1][1] + 1 == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        return Producer(count, tuple(merged[-MAX_RUNS:]))

    def encode(self, before: Producer | None = None) -> bytes:
        """The record for the disk; with ``before``, only what has changed since that record."""
        runs = list(self.runs)
        if before is not None:
            runs = _tail(runs, self.count - before.count)
        return struct.pack(f"<Q{2 * len(runs)}Q", self.count, *(number for run in runs for number in run))

    def decode(self, data: bytes) -> Producer:
        """The producer after a record of ``encode``."""
        count, *numbers = struct.unpack(f"<{len(data) // 8}Q", data)
        runs = list(zip(numbers[::2], numbers[1::2], strict=True))
        fresh = _tail(runs, count - self.count) if count > self.count else []
        return self._advanced(max(count, self.count), fresh)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    if isinstance(positions, range):
        return [(positions[0], positions[-1])]
    return [(int(position), int(position)) for position in positions]


def _tail(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Only the last ``count`` positions."""
    found: list[tuple[int, int]] = []
    for first, last in reversed(runs):
        if count <= 0:
            break
        begin = max(first, last - count + 1)
        found.insert(0, (begin, last))
        count -= last - begin + 1
    return found
