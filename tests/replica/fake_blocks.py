"""Blocks in memory, with the failures that a cluster has: lost answers, late landings, refusals for want of a quorum."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence

from penstock.replica.client import UnansweredError
from penstock.replica.stream import Bounds, NoStreamError, StreamError, WrongLastError


class FakeStream:
    """The stream itself, shared by all who are connected to it."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.first, self.last = 1, 0
        self.identities: dict[str, int] = {}
        self.deleted = False
        self._lock = threading.Lock()

    def append(self, data: bytes, after: int, identity: str = "") -> None:
        with self._lock:
            if (has := self.identities.get(identity)) is not None:  # whatever this one holds, and came after it
                if has != after + 1:
                    raise WrongLastError(f"the block is number {has}, not {after + 1}")
                return
            if after != self.last:
                raise WrongLastError(f"wrong last sequence: {self.last}")
            self.blocks[self.last + 1] = data
            self.last += 1
            if identity:
                self.identities[identity] = self.last

    def delete(self) -> None:
        self.deleted = True

    def make(self) -> None:
        with self._lock:
            if self.deleted:
                self.blocks, self.identities, self.first, self.last, self.deleted = {}, {}, 1, 0, False

    def purge(self, below: int) -> None:
        self.first = max(self.first, min(below, self.last + 1))
        for sequence in [found for found in self.blocks if found < self.first]:
            del self.blocks[sequence]


class FakeBlocks:
    """One connection, or one after the other: each takes blocks up to one of ``limits``. ``chance`` makes it as
    unreliable as ``trouble`` (0 to 1) says.
    """

    def __init__(
        self,
        stream: FakeStream,
        chance: random.Random | None = None,
        trouble: float = 0.0,
        limits: Sequence[int] = (1 << 20,),
    ) -> None:
        self.name = "stream fake"
        self.limits = limits
        self.max_bytes = limits[0]
        self.stream = stream
        self._chance = chance or random.Random(0)
        self.trouble = trouble
        self.cut = False  # nothing gets through
        self.cut_answers = False  # blocks do, and nothing comes back
        self._late: list[tuple[bytes, int, str]] = []  # sent, not answered, still on their way

    def _land(self) -> None:
        if self.cut:
            raise ConnectionError("cut off")
        self._land_late()

    def _land_late(self) -> None:
        """Something that timed out lands now, or never."""
        if self._late and self._chance.random() < 0.5:
            with contextlib.suppress(WrongLastError):
                self.stream.append(*self._late.pop(self._chance.randrange(len(self._late))))

    def _stumble(self) -> None:
        self._land()
        if self._chance.random() < self.trouble:
            raise self._chance.choice([UnansweredError("lost"), ConnectionError("cut"), StreamError("no quorum")])

    def make(self) -> None:
        self.stream.make()

    def bounds(self) -> Bounds:
        self._stumble()
        if self.stream.deleted:
            raise NoStreamError(f"{self.name}: stream not found")
        first, last = self.stream.first, self.stream.last
        return Bounds(first, last, last - first + 1 - len(self.stream.blocks))

    def append(self, data: bytes, after: int, identity: str = "") -> None:
        self._land()
        if self.stream.deleted:
            raise UnansweredError(f"no server answers for {self.name} at the moment")
        if len(data) > self.max_bytes:
            raise UnansweredError("connection reset by peer")
        fate = self._chance.random()
        if fate < self.trouble:
            self.max_bytes = self._chance.choice(self.limits)  # of the next connection
        if fate < self.trouble / 3:  # it never gets there, or gets there late
            self._late.append((data, after, identity))
            raise UnansweredError("no answer")
        self.stream.append(data, after, identity)
        if fate < self.trouble or self.cut_answers:
            raise UnansweredError("the answer was lost")

    def read(self, sequence: int) -> bytes | None:
        self._stumble()
        if self.stream.deleted:
            raise NoStreamError(f"{self.name}: stream not found")
        return self.stream.blocks.get(sequence)

    def read_range(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        if self.cut:
            raise ConnectionError("cut off")
        for sequence in range(first, last + 1):
            if (data := self.stream.blocks.get(sequence)) is not None:
                yield sequence, data

    def purge(self, below: int) -> None:
        self._stumble()
        self.stream.purge(below)

    def reach(self) -> str:
        return "none of 3 nodes answers" if self.cut else "3 of 3 nodes answer"

    def close(self) -> None:
        pass
