"""Follower: a directory that follows a stream. Readers there use ``journal:DIRECTORY`` as they do on the broker's own.

It adds each commit as the broker wrote it, byte for byte, with the index and the frontier that readers need. It never
writes to the stream. When it begins, and every ``CHECK_S`` after that, all sealed segments are checked; one that is
damaged is fetched again, and said so. What retention has freed on the stream goes here too. One thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from pathlib import Path

from penstock._core import journal as native
from penstock.errors import CorruptionError, StateError
from penstock.journal import layout, recovery
from penstock.journal.disk import open_regular, read_all
from penstock.journal.lock import WriterLock
from penstock.journal.rewrite import remove_segment
from penstock.replica.block import Block, decode
from penstock.replica.client import UnansweredError
from penstock.replica.history import Chains, History, Segment
from penstock.replica.refill import UnsyncedDisk, mend, refill
from penstock.replica.stream import Blocks, Bounds

log = logging.getLogger("penstock.replica")
POLL_S = 0.02
CHECK_S = 3600.0
TRIM_S = 10.0
TELL_S = 10.0
SEGMENT_BYTES = 1 << 62  # segments end where the broker ended them


class Follower:
    """Made on a directory that is empty or was a follower's or a broker's of the same stream; ``step`` follows."""

    def __init__(self, directory: str | Path, blocks: Blocks) -> None:
        self.directory = Path(directory)
        self.blocks = blocks
        self.applied = 0  #: the last block that was looked at
        self.mended: list[str] = []  #: the logs that were fetched again for being damaged
        self._disk = UnsyncedDisk()
        self._chains = Chains()
        self._segments: list[Segment] = []
        self._files: list[int] = []
        self._begin = 0  # the block that began the segment that is being written
        self._copies = False  # of segments, which count once an epoch block has come
        self._writer: native.Writer | None = None
        self._check_at = time.monotonic() + CHECK_S
        self._trim_at = time.monotonic() + TRIM_S
        self._lock: WriterLock | None = None
        self._follow_anew()

    def _follow_anew(self) -> None:
        """Make the directory what the stream says, and go on at its end."""
        self.close()
        history = History(self.blocks, self.blocks.bounds())
        if not history.segments:
            raise StateError(f"{self.blocks.name} has no segment yet: start its broker first")
        before = set(layout.latest_segments(os.listdir(self.directory))) if self.directory.exists() else set()
        found = refill(self.directory, history, check=True)
        self.mended += [name for name in found.copied if layout.parse_segment_name(name) in before]
        self._chains, self._copies = Chains(), False
        self._lock = WriterLock(self.directory)
        try:
            self._open(history)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        """The position that the next message gets."""
        assert self._writer is not None
        return self._writer.committed_position

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open(self, history: History) -> None:
        """Go on at the end of what was fetched. The last segment is taken batch by batch, as if it came just now."""
        *older, last = history.segments
        self._segments = [*older, last]
        uuid = last.head.uuid
        following = [segment.name[0] for segment in history.segments[1:]]
        for segment, end in zip(older, following, strict=True):
            self._seal(segment.name, end)
        path = self.directory / layout.segment_name(*last.name)
        data = read_all(path)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
        scan = native.scan(data, header.nonce, header.first, 2**63, 0, header.gaps)
        frontier = self.directory / layout.FRONTIER_NAME
        if recovery.read_frontier(self.directory, uuid) is None:
            first = history.segments[0].name[0]
            words = layout.Frontier(os.getpid(), 0, scan["next_position"], header.first, scan["end"], 0, first)
            self._disk.write_file(frontier, layout.encode_frontier(uuid, words))
        file = open_regular(frontier, os.O_RDWR)
        try:
            self._writer = native.Writer(file, SEGMENT_BYTES, 512 << 20, False, None, str(self.directory))
        finally:
            os.close(file)
        for number, name, flags, ordinal, stored_ns in scan["topics"]:
            self._writer.restore_topic(number, name.decode("utf-8", "replace"), flags, ordinal, stored_ns)
        sum_ = recovery.write_caches(self.directory, last.name, header, data, scan, self._disk, sealed=False)
        self._open_files(last.name)
        entries = len(scan["index"]) // layout.INDEX_ENTRY_BYTES
        log_file, index_file, sums_file = self._files
        self._writer.replace_segment(
            log_file, index_file, sums_file, header.nonce, header.first, scan["end"], scan["end"], entries, sum_,
            scan["next_position"], scan["state_records"],
        )  # fmt: skip
        self._writer.publish_frontier(history.segments[0].name[0], 1)
        self._begin = last.begin
        self._take_group(data, scan["end"])
        self.applied = history.bounds.last
        self._resume_chain(history)

    def _take_group(self, data: bytes, at: int) -> None:
        """Batches of a group that has not ended: nobody sees them before its end comes."""
        assert self._writer is not None
        while data[at : at + 4] == layout.BATCH_MAGIC:
            size = layout.BATCH.unpack_from(data, at)[6]
            self._writer.commit_sealed(data[at : at + size])
            at += size

    def _resume_chain(self, history: History) -> None:
        """The blocks of a commit that has not ended are looked at again with its last one."""
        sequence = history.bounds.last
        while sequence >= history.bounds.first and (block := history.read(sequence)).more:
            self.applied = sequence - 1
            if block.begins:
                return
            sequence -= 1

    def _open_files(self, segment: tuple[int, int]) -> None:
        self._close_files()
        for suffix in ("log", "index", "sums"):
            path = self.directory / layout.segment_name(*segment, suffix)
            self._files.append(self._disk.open(path) if path.exists() else self._disk.create(path))

    def _close_files(self) -> None:
        while self._files:
            self._disk.close(self._files.pop())

    # -- following --------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Add what the stream has more; gives how many blocks. UnansweredError, ConnectionError: try again."""
        bounds = self.blocks.bounds()
        before = self.applied
        if bounds.last < before:  # it lost its last blocks, and others will have their numbers
            self._follow_anew()
            return 1
        for sequence, data in self.blocks.read_range(self.applied + 1, bounds.last):
            if sequence != self.applied + 1:  # lost: put back under another number, or that is told
                self._follow_anew()
                return self.applied - before
            commit = self._chains.add(sequence, decode(data, f"block {sequence} of {self.blocks.name}"))
            self.applied = sequence
            if commit is not None and not self._apply(*commit):
                self._follow_anew()
                return self.applied - before
        if self.applied < min(bounds.last, bounds.first - 1):
            raise CorruptionError(f"{self.blocks.name} was purged up to block {bounds.first - 1}: begin anew", None)
        self._keep_house(bounds)
        return self.applied - before

    def _apply(self, sequence: int, block: Block) -> bool:
        """Add a commit; False: it follows something that was put back, and the stream must be read anew."""
        assert self._writer is not None
        if block.epoch == 0:
            self._copies = True
        elif block.is_epoch:
            return not self._copies
        elif block.begins:
            self._begin_segment(sequence, block)
        elif block.link != self._begin:
            return False
        else:
            if block.offset != self._writer.end:
                place = f"block {sequence} of {self.blocks.name}"
                raise CorruptionError(f"{place} does not go on where the one before ends", place)
            self._writer.commit_sealed(block.data)
        return True

    def _begin_segment(self, sequence: int, block: Block) -> None:
        """A new segment, which replaces those that begin where it does or later."""
        assert self._writer is not None
        name = block.segment, block.revision
        kept = [segment for segment in self._segments if segment.name[0] < block.segment]
        replaced = [segment for segment in self._segments if segment.name[0] >= block.segment and segment.name != name]
        head, batch = block.data[: layout.SEGMENT_HEADER_BYTES], block.data[layout.SEGMENT_HEADER_BYTES :]
        header = layout.decode_segment_header(head, f"block {sequence} of {self.blocks.name}")
        path = self.directory / layout.segment_name(*name)
        self._close_files()
        for each in (path.with_suffix(".log.new"), path.with_suffix(".index"), path.with_suffix(".sums")):
            self._files.append(self._disk.create(each))
        self._disk.write(self._files[0], head, 0, 0)
        end = len(head)
        log_file, index_file, sums_file = self._files
        self._writer.replace_segment(
            log_file, index_file, sums_file, header.nonce, header.first, end, end, 0, zlib.crc32(head), header.first
        )
        self._disk.rename(path.with_suffix(".log.new"), path)
        self._writer.commit_sealed(batch)
        if kept:
            self._seal(kept[-1].name, block.segment)
        for segment in replaced:
            remove_segment(self.directory, *segment.name, self._disk)
        self._segments = [*kept, Segment(sequence, sequence, block)]
        self._begin = sequence
        self._writer.publish_frontier(self._segments[0].name[0], 1)

    def _seal(self, segment: tuple[int, int], following: int) -> None:
        path = self.directory / layout.segment_name(*segment)
        data = read_all(path)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
        if header.seal is None:
            scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
            recovery.seal_segment(self.directory, segment, header, data, scan, following, self._disk)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def _keep_house(self, bounds: Bounds) -> None:
        assert self._writer is not None
        now = time.monotonic()
        if now >= self._trim_at:
            self._trim_at = now + TRIM_S
            freed = [segment for segment in self._segments[:-1] if segment.begin < bounds.first]
            for segment in freed:
                remove_segment(self.directory, *segment.name, self._disk)
                self._segments.remove(segment)
            if freed:
                self._writer.publish_frontier(self._segments[0].name[0], 1)
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            self.check()

    def check(self) -> list[str]:
        """Look at every sealed segment and fetch again what is damaged; gives the names of those logs."""
        history = History(self.blocks, self.blocks.bounds())
        mended = mend(self.directory, history, {segment.name for segment in self._segments[:-1]})
        for name in mended:
            log.warning("%s: %s was damaged and is fetched from %s", self.directory, name, self.blocks.name)
        self._seal_all()
        self.mended += mended
        return mended

    def _seal_all(self) -> None:
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            self._seal(segment.name, following.name[0])

    def run(self, poll_s: float = POLL_S) -> None:
        """Follow until an exception ends it."""
        told = -TELL_S
        while True:
            try:
                if not self.step():
                    time.sleep(poll_s)
            except (UnansweredError, ConnectionError) as error:
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    log.warning("%s: %s", self.blocks.name, str(error).removeprefix(f"{self.blocks.name}: "))
                time.sleep(max(poll_s, 0.1))

    def close(self) -> None:
        """Let go of the directory. The connection is the caller's."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with contextlib.suppress(OSError):
            self._close_files()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
