"""Backlog: counts the messages that wait in a queue, piece by piece, each once. The broker's loop thread only.

A piece is a range of positions and how many of the queue's messages it has. So when retention frees positions, the
number of lost messages is known as far as they were counted; beyond that only the number of positions is known, which
includes all topics.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock._core.broker import QueueState
    from penstock.broker.store import Store

PIECE_MESSAGES = 16_384


class Backlog:
    """What waits from a queue's cursor on."""

    def __init__(self, state: QueueState, store: Store) -> None:
        self.count = 0  # from the cursor up to ``end``
        self.end = state.cursor
        self.certain = True  # False: something before ``end`` could not be read
        self.skipped = 0  # positions (of all topics) that were freed before they were counted
        self._state = state
        self._store = store
        self._pieces: deque[tuple[int, int]] = deque()

    def restart(self, end: int | None = None) -> None:
        """Forget all counts: nothing was counted from the cursor on, or nothing waits up to ``end``."""
        self.count, self.end, self.certain = 0, self._state.cursor if end is None else end, True
        self._pieces.clear()

    def look(self, patterns: tuple[str, ...], internal: tuple[str, ...], most: int, most_looks: int) -> int:
        """Continue counting, up to ``most`` messages; returns how many were examined."""
        last, looked = self._store.next, 0
        while self.end < last and self.count < most and looked < most_looks:
            try:
                batch, following, skipped = self._store.read(self.end, PIECE_MESSAGES, 1 << 62, patterns)
                found = self._state.count(batch, internal)
            except (PenstockError, OSError):
                following, found, skipped, self.certain = self._readable(last), 1, 0, False
            following = max(following, self.end + 1)
            looked += following - self.end
            self.count += found
            self.skipped += skipped
            self.end = following
            # merge small pieces; otherwise a slow publisher would create one piece per message
            if self._pieces and self._pieces[-1][1] + found <= PIECE_MESSAGES:
                found += self._pieces.pop()[1]
            self._pieces.append((following, found))
        return looked

    def _readable(self, last: int) -> int:
        """The position after messages that cannot be read; the queue's consumers are told of them."""
        step = 1
        while self.end + step < last:
            try:
                self._store.read(self.end + step, 1, 1 << 62)
                return self.end + step
            except (PenstockError, OSError):
                step *= 2
        return last

    def taken(self, count: int, following: int, caught_up: bool) -> None:
        """This many were delivered or have expired; the cursor moves to ``following``."""
        if caught_up or following > self.end:
            self.restart(max(self.end, following))
            return
        self.count = max(0, self.count - count)
        while self._pieces and self._pieces[0][0] <= following:
            self._pieces.popleft()

    def freed(self, first: int, patterns: tuple[str, ...], internal: tuple[str, ...]) -> int:
        """Everything before ``first`` was removed; returns how many of the counted messages that were."""
        kept = deque(piece for piece in self._pieces if piece[0] > first)
        if kept:
            end, _ = kept.popleft()
            kept.appendleft((end, self._between(first, end, patterns, internal)))
        before, self._pieces = self.count, kept
        self.skipped += max(0, first - max(self._state.cursor, self.end))
        self.count = min(before, sum(found for _, found in kept))
        self.end = max(self.end, first)
        return before - self.count

    def _between(self, first: int, end: int, patterns: tuple[str, ...], internal: tuple[str, ...]) -> int:
        return sum(self.pieces(first, end, patterns, internal))

    def pieces(self, first: int, end: int, patterns: tuple[str, ...], internal: tuple[str, ...]) -> Iterator[int]:
        """The messages from ``first`` up to ``end``, counted a piece at a time."""
        while first < end:
            batch, following, _ = self._store.read(first, PIECE_MESSAGES, 1 << 62, patterns)
            inside = bisect.bisect_left(batch.positions, end)
            if 0 < inside < len(batch):
                batch, *_ = self._store.read(first, inside, 1 << 62, patterns)
            yield self._state.count(batch, internal) if inside else 0
            first = max(following, first + 1)
