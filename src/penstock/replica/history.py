"""History: the segments of a stream and their commits, checked and assembled.

A block that is missing or damaged is named; nothing is skipped. Blocks of epoch 0 are copies of segments of a directory
(seed.py). They count once the epoch block after the last one exists: without it they are void. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.errors import CorruptionError
from penstock.journal import layout
from penstock.replica.block import MORE, Block, decode
from penstock.replica.stream import Blocks, Bounds

FILL_ANOTHER = "start the broker with --seed and the name of another stream, or delete this one first"
MAX_COMMIT_BYTES = 2 << 30  # the longest chain: more than a journal writes as one batch


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as the stream has it: its blocks are among the sequences ``begin`` to ``end``.

    ``head`` is the commit that begins it, with only the segment's header as data.
    """

    begin: int
    end: int
    head: Block

    @property
    def name(self) -> tuple[int, int]:
        """(first position, revision)."""
        return self.head.segment, self.head.revision


class History:
    """A stream up to its last block when this was created."""

    def __init__(self, blocks: Blocks, bounds: Bounds) -> None:
        self.blocks = blocks
        self.bounds = bounds
        self.end = bounds.last  # the last block that counts
        self.last: Block | None = None
        self.segments: list[Segment] = []  # in order, without those that a later one replaced
        if bounds.last >= max(1, bounds.first):
            self.end, self.last = self._last()
            self.segments = kept_segments(self._walk())
        elif bounds.last:
            raise CorruptionError(f"{blocks.name} has no block any more; its last one was {bounds.last}", blocks.name)

    @property
    def unfinished(self) -> str:
        """Why the stream is of no use, if it is only a part of a copy (``--seed`` was not completed); or nothing."""
        if self.last is None or self.last.epoch:
            return ""
        return f"{self.blocks.name} was not filled to its end"

    def _place(self, sequence: int) -> str:
        return f"block {sequence} of {self.blocks.name}"

    def read(self, sequence: int) -> Block:
        """One block, checked."""
        # waits and tries again if a server does not answer
        data = next((data for _, data in self.blocks.read_range(sequence, sequence)), None)
        if data is None:
            raise CorruptionError(f"{self._place(sequence)} is missing", self._place(sequence))
        return decode(data, self._place(sequence))

    def _last(self) -> tuple[int, Block]:
        """The last block that counts. If the stream is only a copy without its end, the last block of all."""
        last = self.read(self.bounds.last)
        sequence, block = self.bounds.last, last
        while block.epoch == 0:
            if sequence <= self.bounds.first:
                return self.bounds.last, last
            sequence -= 1
            block = self.read(sequence)
        return sequence, block

    def _walk(self) -> list[Segment]:
        """Walk back from the last block, from the beginning of each segment to that of the one before."""
        assert self.last is not None
        found: list[Segment] = []
        begin, end = self.last.begin_sequence(self.end), self.end
        while begin >= self.bounds.first:
            first = self.read(begin)
            if not first.begins or first.link >= begin:
                raise CorruptionError(f"{self._place(begin)} does not begin a segment", self._place(begin))
            if (head := self._first_commit(begin, first)) is not None:
                header = replace(head, data=head.data[: layout.SEGMENT_HEADER_BYTES])
                found.append(Segment(begin, end, header))
                end = begin - 1
            begin = first.link
        if begin and not found:
            raise CorruptionError(f"{self._place(begin)} is missing: the last segment begins there", self.blocks.name)
        return found[::-1]

    def _first_commit(self, begin: int, first: Block) -> Block | None:
        """The commit that begins a segment; None if its chain has no end."""
        items = [(begin, first)]
        while items[-1][1].more and items[-1][0] < self.end:
            items.append((items[-1][0] + 1, self.read(items[-1][0] + 1)))
        return next((block for sequence, block in chains(items) if sequence == begin), None)

    def commits(self, segment: Segment) -> Iterator[Block]:
        """All commits of a segment, in order, each where the one before ends.

        Blocks may be lost between a segment and a copy of those that followed it: what counts is that its commits
        go on up to where the next segment begins. The last segment has no such mark, and nothing of it may be lost.
        """
        following = next((later.name[0] for later in self.segments if later.begin > segment.begin), None)
        lost: list[CorruptionError] = []
        offset, position = 0, segment.head.first
        for sequence, block in chains(self._decoded(segment, lost)):
            if lost and following is None:
                break
            if block.is_epoch or block.begin_sequence(sequence) != segment.begin:
                continue
            if (block.offset, block.first) != (offset, position) or block.next < block.first:
                text = f"{self._place(sequence)} does not go on where the one before ends (position {position})"
                raise lost[0] if lost else CorruptionError(text, self._place(sequence))
            offset, position = offset + len(block.data), block.next
            yield block
        if lost and (following is None or position < following):
            raise lost[0]
        if following is not None and position < following:
            place = f"the segment before block {segment.end + 1} of {self.blocks.name}"
            raise CorruptionError(f"{place} ends at position {position - 1}, the next one begins at {following}", place)

    def _decoded(self, segment: Segment, lost: list[CorruptionError]) -> Iterator[tuple[int, Block]]:
        """The blocks that may be a segment's; those that are missing or damaged are added to ``lost``."""
        expected = segment.begin
        for sequence, data in self.blocks.read_range(segment.begin, segment.end):
            if sequence != expected and not lost:
                lost.append(CorruptionError(f"{self._place(expected)} is missing", self._place(expected)))
            expected = sequence + 1
            try:
                yield sequence, decode(data, self._place(sequence))
            except CorruptionError as error:
                lost.append(error)
        if expected <= segment.end and not lost:
            lost.append(CorruptionError(f"{self._place(expected)} is missing", self._place(expected)))


class Chains:
    """Assembles the blocks of a chain. A chain without its end is dropped when another block follows."""

    def __init__(self) -> None:
        self._begun: list[Block] = []
        self._first = self._bytes = 0

    def add(self, sequence: int, block: Block) -> tuple[int, Block] | None:
        """The commit that this block ends, with the sequence of its first one."""
        goes_on = self._begun and not block.begins and not block.is_epoch and _follows(self._begun[-1], block)
        if not goes_on:
            self._begun, self._first, self._bytes = [], sequence, 0
        self._begun.append(block)
        self._bytes += len(block.data)
        if self._bytes > MAX_COMMIT_BYTES:
            raise CorruptionError(f"the commit that begins with block {self._first} is too long to be one")
        if block.more:
            return None
        parts, self._begun = self._begun, []
        if len(parts) == 1:
            return self._first, block
        return self._first, replace(parts[0], flags=parts[0].flags & ~MORE, data=b"".join(one.data for one in parts))


def chains(items: Iterable[tuple[int, Block]]) -> Iterator[tuple[int, Block]]:
    """Group blocks with their sequences into commits, a chain into one; chains without an end are left out."""
    found = Chains()
    for sequence, block in items:
        if (commit := found.add(sequence, block)) is not None:
            yield commit


def _follows(before: Block, block: Block) -> bool:
    same = before.writer == block.writer and before.segment == block.segment and before.revision == block.revision
    return before.more and same and block.offset == before.offset + len(before.data)


def kept_segments(found: list[Segment]) -> list[Segment]:
    """The segments without those that a later one replaced: a segment begins where the valid data ended."""
    kept: list[Segment] = []
    for segment in found:
        while kept and kept[-1].head.segment >= segment.head.segment:
            kept.pop()
        kept.append(segment)
    return kept
