"""Follower: a directory that follows a stream. Readers there use ``journal:DIRECTORY`` as they do on the broker's own.

It adds each commit byte for byte as the broker wrote it, with the index and the frontier that readers need. It never
writes to the stream. At the start, and every ``CHECK_S`` after that, all segments are checked; a damaged one is fetched
again, and this is reported; a file that somebody has removed or replaced is missed within ``LOOK_S``. What retention
has freed on the stream is removed here too. One thread.
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
from penstock.journal.journal import utf8_path
from penstock.journal.lock import WriterLock
from penstock.journal.rewrite import remove_segment
from penstock.replica.block import Block, decode
from penstock.replica.client import UnansweredError
from penstock.replica.history import Chains, History, Segment
from penstock.replica.outage import Outage
from penstock.replica.refill import UnsyncedDisk, mend, refill_held
from penstock.replica.stream import Blocks, Bounds, Seldom, StreamError

log = logging.getLogger("penstock.replica")
POLL_S = 0.02
CHECK_S = 3600.0
TRIM_S = 10.0
LOOK_S = 1.0
SEGMENT_BYTES = 1 << 62  # no limit: segments end where the broker ended them


def follow(directory: str | Path, blocks: Blocks) -> Follower:
    """Wait until there is something to follow (its broker may not have begun, or may be repairing the stream), and
    return a follower.
    """
    seldom = Seldom()
    while True:
        try:
            return Follower(directory, blocks)
        except (UnansweredError, ConnectionError, StreamError, CorruptionError, StateError) as error:
            seldom.warn("%s; trying again", error)
            time.sleep(0.1)


class Follower:
    """Made on a directory that is empty or was a follower's or a broker's of the same stream; ``step`` follows."""

    def __init__(self, directory: str | Path, blocks: Blocks) -> None:
        self.directory = Path(directory)
        self._place = utf8_path(self.directory.absolute())  # the monitor finds it by this, and errors name it
        self.blocks = blocks
        self.applied = 0  #: the last block that was processed
        self.mended: list[str] = []  #: files that were damaged or missing and have been rebuilt
        self._disk = UnsyncedDisk()
        self._chains = Chains()
        self._segments: list[Segment] = []
        self._files: list[int] = []
        self._begin = 0  # the block that began the segment that is being written
        self._copies = False  # copies of segments are arriving, which count once an epoch block follows
        self._writer: native.Writer | None = None
        self._check_at = time.monotonic() + CHECK_S
        self._trim_at = time.monotonic() + TRIM_S
        self._look_at = time.monotonic() + LOOK_S
        self._frontier_file = 0  # its inode
        self._told: list[str] = []  # files whose loss was told, and which are not here again yet
        self._lock: WriterLock | None = None
        self._follow_anew()

    def _follow_anew(self) -> None:
        """Make the directory a copy of the stream, and continue at its end."""
        self.close()
        history = History(self.blocks, self.blocks.bounds())
        if not history.segments:
            raise StateError(f"{self.blocks.name} has no segment yet: start its broker first")
        found, self._lock = refill_held(self.directory, history, check=True, told=self._told)
        self.mended += found.damaged
        self._chains, self._copies = Chains(), False
        try:
            with self._lock.naming():
                self._open(history, layout.segment_name(*found.segment) not in found.copied)
        except BaseException:
            self.close()
            raise
        self._told = []

    @property
    def position(self) -> int:
        """The position that the next message gets."""
        assert self._writer is not None
        return self._writer.committed_position

    @property
    def _held(self) -> Path:
        """The directory that is locked, wherever it was moved: what is in its place may be another journal."""
        assert self._lock is not None
        return self._lock.place

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open(self, history: History, was_here: bool) -> None:
        """Continue at the end of what was fetched. The last segment is processed batch by batch, as if it had just
        arrived.

        ``was_here``: it was not fetched, and caches of it that are missing or wrong are damage.
        """
        *older, last = history.segments
        self._segments = [*older, last]
        uuid = last.head.uuid
        following = [segment.name[0] for segment in history.segments[1:]]
        for segment, end in zip(older, following, strict=True):
            self._seal(segment.name, end)
        path = self._held / layout.segment_name(*last.name)
        data = read_all(path)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
        scan = native.scan(data, header.nonce, header.first, 2**63, 0, header.gaps)
        frontier = self._held / layout.FRONTIER_NAME
        # Readers need a frontier. A damaged or missing one is rebuilt from the log, which was just compared with the
        # stream.
        if recovery.read_frontier(self._held, uuid) is None:
            first = history.segments[0].name[0]
            words = layout.Frontier(os.getpid(), 0, scan["next_position"], header.first, scan["end"], 0, first)
            self._disk.write_file(frontier, layout.encode_frontier(uuid, words))
        file = open_regular(frontier, os.O_RDWR)
        try:
            self._writer = native.Writer(file, SEGMENT_BYTES, 512 << 20, False, None, self._place)
        finally:
            os.close(file)
        for number, name, flags, ordinal, stored_ns in scan["topics"]:
            self._writer.restore_topic(number, name.decode("utf-8", "replace"), flags, ordinal, stored_ns)
        wrong: list[str] = []
        sum_ = recovery.write_caches(self._held, last.name, header, data, scan, self._disk, sealed=False, damaged=wrong)
        for name in wrong if was_here else ():
            if name not in self._told:
                log.warning("%s: %s was damaged or missing and is made again", self.directory, name)
            self.mended.append(name)
        self._open_files(last.name)
        entries = len(scan["index"]) // layout.INDEX_ENTRY_BYTES
        log_file, index_file, sums_file = self._files
        self._writer.replace_segment(
            log_file, index_file, sums_file, header.nonce, header.first, scan["end"], scan["end"], entries, sum_,
            scan["next_position"], scan["state_records"],
        )  # fmt: skip
        # Only now do readers see the new segments: all files are in place.
        self._writer.publish_frontier(history.segments[0].name[0], 1)
        self._frontier_file = frontier.stat().st_ino
        self._begin = last.begin
        self._take_group(data, scan["end"])
        self.applied = history.bounds.last
        self._resume_chain(history)

    def _take_group(self, data: bytes, at: int) -> None:
        """Process batches of a group that has not ended: readers do not see them before its end."""
        assert self._writer is not None
        while data[at : at + 4] == layout.BATCH_MAGIC:
            size = layout.BATCH.unpack_from(data, at)[6]
            self._writer.commit_sealed(data[at : at + size])
            at += size

    def _resume_chain(self, history: History) -> None:
        """Go back to the first block of a commit that is not complete: its blocks are processed together with the last
        one.
        """
        sequence = history.bounds.last
        while sequence >= history.bounds.first and (block := history.read(sequence)).more:
            self.applied = sequence - 1
            if block.begins:
                return
            sequence -= 1

    def _open_files(self, segment: tuple[int, int]) -> None:
        self._close_files()
        for suffix in ("log", "index", "sums"):
            path = self._held / layout.segment_name(*segment, suffix)
            self._files.append(self._disk.open(path) if path.exists() else self._disk.create(path))

    def _close_files(self) -> None:
        while self._files:
            self._disk.close(self._files.pop())

    # -- following --------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Add new blocks of the stream; returns how many. UnansweredError, ConnectionError, StreamError: try again.
        CorruptionError: the stream has lost something, which its broker may restore; ``close``, then try again.
        """
        before = self.applied
        if self._writer is None:  # closed by a failure of the stream or of this disk: read the stream again
            self._follow_anew()
            return 1
        bounds = self.blocks.bounds()
        if bounds.last < before:  # the stream has lost its last blocks, and their numbers will be used again
            self._follow_anew()
            return 1
        for sequence, data in self.blocks.read_range(self.applied + 1, bounds.last):
            # a block is lost: it may have been restored under another number, otherwise this is reported
            if sequence != self.applied + 1:
                self._follow_anew()
                return self.applied - before
            commit = self._chains.add(sequence, decode(data, f"block {sequence} of {self.blocks.name}"))
            self.applied = sequence
            try:
                goes_on = commit is None or self._apply(*commit)
            except OSError:  # a full disk say: the directory, whose writer takes nothing more, is read again
                self.close()
                raise
            if not goes_on:
                self._follow_anew()
                return self.applied - before
        if self.applied < min(bounds.last, bounds.first - 1):
            purged = f"{self.blocks.name} was purged up to block {bounds.first - 1}, past what this follower has read"
            raise CorruptionError(f"{purged}: close it and follow the stream again", None)
        self._keep_house(bounds)
        return self.applied - before

    def _apply(self, sequence: int, block: Block) -> bool:
        """Add a commit; False: it follows restored blocks, so the stream must be read again."""
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
        path = self._held / layout.segment_name(*name)
        self._close_files()
        # The log gets its name last: a crash before that leaves files that opening ignores.
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
            remove_segment(self._held, *segment.name, self._disk)
        self._segments = [*kept, Segment(sequence, sequence, block)]
        self._begin = sequence
        self._writer.publish_frontier(self._segments[0].name[0], 1)

    def _seal(self, segment: tuple[int, int], following: int) -> None:
        path = self._held / layout.segment_name(*segment)
        data = read_all(path)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], path.name)
        if header.seal is None:
            scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
            recovery.seal_segment(self._held, segment, header, data, scan, following, self._disk)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def _keep_house(self, bounds: Bounds) -> None:
        assert self._writer is not None
        now = time.monotonic()
        if now >= min(self._look_at, self._check_at):
            self._look_at = now + LOOK_S
            if self.look():
                return
        if now >= self._trim_at:
            self._trim_at = now + TRIM_S
            freed = [segment for segment in self._segments[:-1] if segment.begin < bounds.first]
            for segment in freed:
                remove_segment(self._held, *segment.name, self._disk)
                self._segments.remove(segment)
            if freed:
                self._writer.publish_frontier(self._segments[0].name[0], 1)
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            self.check()

    def look(self) -> list[str]:
        """Make the directory anew if files of it were removed or replaced: what is written to those that are open is
        seen by nobody. Returns their names.
        """
        last = self._segments[-1].name
        ours = {layout.segment_name(*last, suffix): os.fstat(file).st_ino
                for suffix, file in zip(("log", "index", "sums"), self._files, strict=True)}  # fmt: skip
        ours[layout.FRONTIER_NAME] = self._frontier_file
        try:
            there = {entry.name: entry.inode() for entry in os.scandir(self.directory)}
        except FileNotFoundError:
            there = {}
        names = [layout.MARKER_NAME, *(layout.segment_name(*segment.name) for segment in self._segments[:-1])]
        gone = [name for name in names if name not in there]
        gone += [name for name, inode in ours.items() if there.get(name) != inode]
        if gone:
            what = "the directory" if not there else ", ".join(gone[:3]) + (" and more" if len(gone) > 3 else "")
            log.warning("%s: %s was removed or replaced: taken from %s again", self.directory, what, self.blocks.name)
            self._told = gone
            self._follow_anew()
            self.mended += [name for name in gone if name not in self.mended]
        return gone

    def check(self) -> list[str]:
        """Check every segment and fetch damaged ones again; returns the names of those logs."""
        before = len(self.mended)
        history = History(self.blocks, self.blocks.bounds())
        assert self._lock is not None
        self.mended += mend(self.directory, self._lock, history, {segment.name for segment in self._segments[:-1]})
        self._seal_all()
        if not self._last_is_whole():
            self._follow_anew()
        return self.mended[before:]

    def _last_is_whole(self) -> bool:
        """Whether the segment that is being written has all that readers may see of it."""
        assert self._writer is not None
        path = self._held / layout.segment_name(*self._segments[-1].name)
        data = read_all(path)[: self._writer.end]
        try:
            header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
        except CorruptionError:
            return False
        position = self._writer.committed_position
        scan = native.scan(data, header.nonce, header.first, 2**63, position, header.gaps)
        return not scan["damage"] and scan["next_position"] >= position

    def _seal_all(self) -> None:
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            self._seal(segment.name, following.name[0])

    def run(self, poll_s: float = POLL_S) -> None:
        """Follow until an exception ends it. Waits while the broker repairs the stream."""
        seldom, outage = Seldom(), Outage(self.blocks, "nothing new is copied until it answers again")
        while True:
            try:
                if self._writer is None:
                    self._follow_anew()
                if not self.step():
                    time.sleep(poll_s)
                outage.end()
                outage.begin()
            except (UnansweredError, ConnectionError) as error:
                outage.note(error)
                time.sleep(max(poll_s, 0.1))
            except (StreamError, CorruptionError) as error:
                if isinstance(error, CorruptionError):
                    self.close()  # then the stream is read again
                seldom.warn("%s: %s; trying again", self.blocks.name, str(error).removeprefix(f"{self.blocks.name}: "))
                time.sleep(max(poll_s, 0.1))

    def close(self) -> None:
        """Release the directory. The connection belongs to the caller."""
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
