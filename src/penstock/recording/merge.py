"""Merge: sorts the messages of several channels by time.

Channels are read in rounds, one after another. In each round every channel that may be read gives what it has; then
``take`` gives what may be stored, oldest first. Rules:

- The order within a channel never changes, whatever its times are.
- A message waits while a channel that may have more has only given older ones. A channel whose last read gave nothing
  has nothing before the moment at which the round began; what was published during the round waits for the next one.
  So nothing waits once all channels have been read to their ends.
- A channel that loses what is not read in time (``patient=False``) waits for the others for ``HOLD_S`` and
  ``HOLD_ROUNDS``, and holds at most ``max_held`` messages and its part of ``max_bytes``; then it goes first, out of
  order. A patient one (a journal, a queue) waits as long as it takes, and is read again when what it gave is stored.

Pure logic, for one thread.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["HOLD_S", "Lane", "Merge"]

Item = TypeVar("Item")

HOLD_S = 1.0
HOLD_ROUNDS = 100
MAX_HELD = 16_384
MAX_BYTES = 256 << 20  # of all channels together


@dataclass(slots=True)
class _Held(Generic[Item]):
    time_ns: int
    size: int
    round: int
    read_at: float
    item: Item


@dataclass(slots=True, eq=False)
class Lane(Generic[Item]):
    """One channel of a merge."""

    patient: bool
    held: deque[_Held[Item]] = field(default_factory=deque)
    held_bytes: int = 0
    latest_ns: int = 0  # the greatest time of its messages so far
    empty_round: int = 0  # the last round in which a read gave nothing more
    ended: bool = False

    @property
    def readable(self) -> bool:
        """Whether it may be read: a patient channel is read again only when what it gave is stored."""
        return not self.ended and not (self.patient and self.held)


class Merge(Generic[Item]):
    """``keep`` is called once for each message that has to wait, to copy it: it may lie in memory that its channel
    needs again.
    """

    def __init__(
        self,
        keep: Callable[[Item], Item] = lambda item: item,
        *,
        hold_s: float = HOLD_S,
        max_held: int = MAX_HELD,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._keep = keep
        self._hold_s, self._max_held, self._max_bytes = hold_s, max_held, max_bytes
        self._lanes: list[Lane[Item]] = []
        self._round = 0
        self._began_ns = 0
        self._now = 0.0

    def lane(self, *, patient: bool) -> Lane[Item]:
        """Add a channel."""
        self._lanes.append(Lane(patient))
        return self._lanes[-1]

    def begin_round(self, time_ns: int, now: float) -> None:
        """Call this before the reads of a round, with the time of day (as in messages' times) and the time of a
        monotonic clock.
        """
        self._round += 1
        self._began_ns, self._now = time_ns, now

    def add(self, lane: Lane[Item], items: Iterable[tuple[int, int, Item]]) -> None:
        """Add the result of a read, in order: for each message its time (0: none), its size, and the message."""
        for time_ns, size, item in items:
            at_ns = time_ns or self._began_ns
            lane.held.append(_Held(at_ns, size, self._round, self._now, item))
            lane.held_bytes += size
            lane.latest_ns = max(lane.latest_ns, at_ns)

    def at_end(self, lane: Lane[Item]) -> None:
        """Note that a read of this round gave nothing more."""
        lane.empty_round = self._round

    def end(self, lane: Lane[Item]) -> None:
        """Note that the channel has ended; what it has given is still returned."""
        lane.ended = True

    @property
    def holding(self) -> bool:
        """Whether anything waits."""
        return any(lane.held for lane in self._lanes)

    def take(self) -> list[Item]:
        """The messages that may be stored now, in order."""
        open_lanes = [lane for lane in self._lanes if not lane.ended]
        bound_ns = min((lane.latest_ns for lane in open_lanes if lane.empty_round < self._round), default=None)
        taken: list[Item] = []
        heads = [(lane.held[0].time_ns, number) for number, lane in enumerate(self._lanes) if lane.held]
        heapq.heapify(heads)
        while heads:
            _, number = heads[0]
            lane = self._lanes[number]
            if not self._may_be_taken(lane, bound_ns, len(open_lanes)):
                heapq.heappop(heads)  # nothing more of this channel in this round
                continue
            first = lane.held.popleft()
            lane.held_bytes -= first.size
            taken.append(first.item)
            if lane.held:
                heapq.heapreplace(heads, (lane.held[0].time_ns, number))
            else:
                heapq.heappop(heads)
        self._keep_rest()
        return taken

    def flush(self) -> list[Item]:
        """All waiting messages, in order: no channel will be read again."""
        for lane in self._lanes:
            lane.ended = True
        return self.take()

    def _may_be_taken(self, lane: Lane[Item], bound_ns: int | None, open_lanes: int) -> bool:
        first = lane.held[0]
        alone = open_lanes == 0 or (open_lanes == 1 and not lane.ended)
        if alone or (
            (bound_ns is None or first.time_ns <= bound_ns)
            # A publisher whose clock is ahead of ours waits one round too, and no longer.
            and (first.time_ns <= self._began_ns or first.round < self._round)
        ):
            return True
        if lane.patient:
            return False
        # Rounds count too: if the disk stalls for a second, no channel is far behind.
        late = self._now - first.read_at >= self._hold_s and self._round - first.round >= HOLD_ROUNDS
        return late or len(lane.held) > self._max_held or lane.held_bytes > self._max_bytes // len(self._lanes)

    def _keep_rest(self) -> None:
        for lane in self._lanes:
            for held in reversed(lane.held):
                if held.round < self._round:
                    break
                held.item = self._keep(held.item)
