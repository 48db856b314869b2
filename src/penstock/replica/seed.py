"""Seed: copies segments that a directory has to a stream, which is empty or has lost them.

The copies have epoch 0, and an epoch block follows the last one: without it none of them counts. A stream that is
nothing but copies without that end is refused. One thread; no broker may be running on the directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import Journal, layout
from penstock.journal.disk import Disk, read_all, read_part
from penstock.journal.lock import WriterLock
from penstock.printable import command
from penstock.replica.appender import PAUSE_S, Appender
from penstock.replica.block import BEGIN, EPOCH, Block, decode
from penstock.replica.history import FILL_ANOTHER, Chains, History, Segment, kept_segments
from penstock.replica.refill import mend, same_boot
from penstock.replica.stream import Blocks, Bounds
from penstock.replica.writers import Writers

log = logging.getLogger("penstock.replica")


class _CopyDisk(Disk):
    for_copies = True


def seed(directory: Path, blocks: Blocks, *, pause: Callable[[], None] = lambda: time.sleep(PAUSE_S)) -> int:
    """Append everything that the directory has; returns how many segments. Refused if the stream is not empty."""
    if not (directory / layout.MARKER_NAME).exists():
        raise InvalidArgument(f"{directory} is not a journal: there is nothing to fill {blocks.name} with")
    bounds = blocks.bounds()
    if bounds.last:
        with contextlib.suppress(CorruptionError):
            if unfinished := History(blocks, bounds).unfinished:
                raise InvalidArgument(f"{unfinished}: {FILL_ANOTHER}")
        text = f"{blocks.name} has blocks already: leave --seed out if {directory} is its copy"
        raise InvalidArgument(f"{text}, or name another stream for what it has")
    # opened, so that nobody else writes to it and its torn tail is cut off
    with Journal(directory, refuse_damage=True, disk=_CopyDisk()) as journal:
        segments = layout.latest_segments(os.listdir(directory))
        writer = secrets.randbits(64)
        blocks.make()
        _copy(directory, journal, segments, Appender(blocks, 0, writer, pause=pause), writer, 0, 1)
    log.info("%s: %d segment%s copied to %s", directory, len(segments), "s"[: len(segments) - 1], blocks.name)
    return len(segments)


def restore(
    directory: Path,
    blocks: Blocks,
    writers: Writers,
    *,
    whole: bool,
    pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
) -> int:
    """Append the first segment that is not complete on the stream, and those after it; returns how many. ``whole``: the
    stream may have all of them; otherwise the last one is appended in any case. CorruptionError: what the stream has
    lost is not in the directory, or that cannot be known; nothing is appended.
    """
    bounds = blocks.bounds()
    survey = Survey(directory, blocks, bounds)
    elsewhere = f"{directory} is not where {blocks.name} was written last: what is lost may be in another directory"
    if not writers.were_last(survey.epoch, survey.writer):
        raise CorruptionError(elsewhere, blocks.name)
    _mend_older(directory, blocks, bounds)
    with Journal(directory, refuse_damage=True, disk=_CopyDisk()) as journal:
        if survey.uuids - {journal.uuid.bytes}:
            raise CorruptionError(f"{blocks.name} has blocks of another journal than {directory}", blocks.name)
        # after a restart of the machine unsynced files may be incomplete
        if survey.next > journal.frontier and not same_boot(directory):
            raise CorruptionError(elsewhere, blocks.name)
        segments = layout.latest_segments(os.listdir(directory))
        ends = [following for following, _ in segments[1:]] + [journal.frontier]
        sizes = {
            name: len(_unsealed_log(directory / layout.segment_name(*name), following))
            for name, following in zip(segments, ends, strict=True)
        }
        kept = len(segments) if whole else len(segments) - 1
        while kept and not (link := survey.find(segments[:kept], sizes)):
            kept -= 1
        if kept == len(segments):
            return 0
        epoch = max(survey.epoch, writers.epoch) + 1
        writer = writers.begin(epoch)
        appender = Appender(blocks, bounds.last, writer, missing=bounds.missing, pause=pause)
        _copy(directory, journal, segments[kept:], appender, writer, link if kept else 0, epoch)
        writers.note_led()
    return len(segments) - kept


def _mend_older(directory: Path, blocks: Blocks, bounds: Bounds) -> None:
    """Take damaged segments of the directory from the stream, as far as it has them. With damage in an older one the
    directory could restore nothing, though what the stream has lost is in the last one.
    """
    with contextlib.suppress(CorruptionError):  # the stream has lost these too: the directory stays as it is
        history = History(blocks, bounds)
        if not history.segments:
            return
        lock = WriterLock(directory)
        try:
            mend(directory, lock, history, {segment.name for segment in history.segments[:-1]})
        finally:
            lock.release()


@dataclass
class Survey:
    """What can still be read of a stream, compared with a directory."""

    directory: Path
    blocks: Blocks
    bounds: Bounds
    uuids: set[bytes] = field(default_factory=set)
    next: int = 0  #: the highest position in any block
    epoch: int = 0  #: the highest epoch, and its writer
    writer: int = 0

    def __post_init__(self) -> None:
        self._begins: dict[int, Block] = {}  # blocks that begin a segment
        self._same: dict[int, int] = {}  # by such a block: how many bytes equal those of the directory
        chains = Chains()
        for sequence, data in self.blocks.read_range(max(1, self.bounds.first), self.bounds.last):
            try:
                block = decode(data, f"block {sequence} of {self.blocks.name}")
            except CorruptionError:
                continue
            self.uuids.add(block.uuid.bytes)
            self.next = max(self.next, block.next)
            if block.epoch > self.epoch:
                self.epoch, self.writer = block.epoch, block.writer
            if (commit := chains.add(sequence, block)) is not None and not block.is_epoch:
                self._compare(*commit)

    def _compare(self, sequence: int, block: Block) -> None:
        begin = block.begin_sequence(sequence)
        if block.begins:
            self._begins[sequence] = replace(block, data=b"")
            self._same[sequence] = 0
        elif self._same.get(begin) != block.offset:
            return
        path = self.directory / layout.segment_name(block.segment, block.revision)
        data, seal = block.data, layout.SEAL_OFFSET
        try:
            here = read_part(path, block.offset, len(data))
        except (FileNotFoundError, CorruptionError):
            return
        if block.begins:  # the local log was sealed since then
            here = here[:seal] + bytes(layout.SEAL_BYTES) + here[seal + layout.SEAL_BYTES :]
        if here == data:
            self._same[begin] = block.offset + len(data)

    def find(self, segments: list[tuple[int, int]], sizes: dict[tuple[int, int], int]) -> int:
        """Where the last of these segments begins, if the stream has all of them identically; else 0."""
        for begin in sorted(self._begins, reverse=True):
            if (self._begins[begin].segment, self._begins[begin].revision) == segments[-1]:
                found = kept_segments(self._path(begin))
                whole = all(self._same[each.begin] == sizes.get(each.name) for each in found)
                if whole and [each.name for each in found] == segments:
                    return begin
        return 0

    def _path(self, begin: int) -> list[Segment]:
        """The segments from this one back to the oldest; empty if one of them is missing."""
        found: list[Segment] = []
        while begin >= max(1, self.bounds.first):
            if begin not in self._begins:
                return []
            found.append(Segment(begin, begin, self._begins[begin]))
            begin = self._begins[begin].link
        return found[::-1]


def _copy(
    directory: Path,
    journal: Journal,
    segments: list[tuple[int, int]],
    appender: Appender,
    writer: int,
    begin: int,
    epoch: int,
) -> None:
    """Append the last segments of a journal, and the block that makes them count. ``begin``: that of the segment before
    them.
    """
    block = Block(journal.uuid, epoch, writer, 1, 1, 0, 0, 0, 0, EPOCH)
    for at, name in enumerate(segments):
        following = segments[at + 1][0] if at + 1 < len(segments) else journal.frontier
        data = _unsealed_log(directory / layout.segment_name(*name), following)
        begin = appender.append(Block(journal.uuid, 0, writer, name[0], following, *name, 0, begin, BEGIN, data))
        block = Block(journal.uuid, epoch, writer, following, following, *name, len(data), begin, EPOCH)
    appender.append(block)


def _unsealed_log(path: Path, following: int) -> bytes:
    """A segment's log up to its end, without its seal, as it was first written."""
    data = read_all(path)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
    if scan["damage"]:
        raise InvalidArgument(f"{path} is damaged: {command('journal', 'repair', path.parent)} keeps all that is whole")
    seal_end = layout.SEAL_OFFSET + layout.SEAL_BYTES
    return data[: layout.SEAL_OFFSET] + bytes(layout.SEAL_BYTES) + data[seal_end : scan["end"]]
