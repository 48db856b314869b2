"""Store: the interface behind which messages are stored, and its default, an embedded journal. The broker knows
messages only by position, an increasing number that may have gaps; it never assumes that there is a local file. A store
is used by the broker's one loop thread.

- ``stage`` takes messages and ``record`` takes state; ``commit`` makes all of it durable at once, or none of it.
- ``read`` returns durable messages, as views of the store's memory.
- ``records`` returns, after opening, what ``record`` has stored; a store may leave out what a later snapshot covers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock._core.broker import batch_bytes, batch_names, message_ids
from penstock._core.journal import TopicFilter
from penstock.broker.records import KINDS
from penstock.errors import InvalidArgument
from penstock.journal.layout import MARKER_NAME, latest_segments, segment_name
from penstock.journal.recovery import mended_by
from penstock.quantities import check_size, duration_s, is_duration, is_size, size_bytes
from penstock.topics import MAX_NAME_BYTES

if TYPE_CHECKING:
    from penstock._core import Batch, Message
    from penstock.channel import Buffer
    from penstock.journal.transaction import Transaction


log = logging.getLogger("penstock.broker")


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store says of itself."""

    first: int  # least position kept
    next: int  # the position that the next message gets
    stored_bytes: int
    commits: int


@dataclass(frozen=True, slots=True)
class Keep:
    """How much to keep of what every queue has passed: a number of bytes, or a duration, or everything."""

    bytes: int | None = None
    age_s: float | None = None

    @property
    def forever(self) -> bool:
        """Whether everything is kept."""
        return self.bytes is None and self.age_s is None

    @classmethod
    def parse(cls, text: str) -> Keep:
        """``1GiB``, ``7d`` or ``forever``."""
        if text == "forever":
            return cls()
        if is_duration(text) and not is_size(text):
            return cls(age_s=duration_s(text, "keep"))
        try:
            return cls(bytes=size_bytes(text, "keep"))
        except InvalidArgument:
            raise InvalidArgument(f"keep {text!r} is no size (1GiB), no age (7d) and not 'forever'") from None


DEFAULT_KEEP = "1GiB"
KEEP_NOTHING = Keep(bytes=0)
ROLL_BYTES = 1 << 20  # a segment with less than this is not ended early
# a segment is ended when it has more state than this, and state is at least an eighth of it
STATE_BYTES, STATE_PART = 4 << 20, 8
# with a quota a segment has this part of it, but at least so much: whole segments are freed, so room comes back while a
# queue is drained
QUOTA_PART, LEAST_SEGMENT_BYTES = 8, 256 << 10
# each segment begins with the whole state: it is not full before it has so many times that, within so much more
SNAPSHOT_TIMES, SNAPSHOT_BEYOND_BYTES = 4, 32 << 20
AHEAD_BYTES = 1 << 20  # how far the journal allocates ahead of its end
MESSAGE_BYTES, INDEX_BYTES = 128, 64  # approximate overhead of a message, and the part of it that is in the index
CACHED_NAMES = 65_536  # most topic names that are cached, for messages and for filters
RESERVE_NAME = "reserve"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store(Protocol):
    """What the broker needs of a store."""

    identity: str  #: changes when the store is created again: positions of one identity mean nothing in another

    @property
    def next(self) -> int:
        """The position after the last durable one."""

    @property
    def next_position(self) -> int:
        """What the next message gets, whether or not those before it are durable."""

    @property
    def topics(self) -> Collection[str]:
        """The names of all topics there are."""

    @property
    def first(self) -> int:
        """The least position kept."""

    @property
    def failed(self) -> bool:
        """Whether it can store nothing until it is opened again."""

    @property
    def full(self) -> bool:
        """Whether there is no room for messages: only state may be stored, and the caller should free what it can."""

    def stage(
        self,
        batch: Batch,
        *,
        topic: str | None = None,
        properties: bytes | None = None,
        more: bytes = b"",
        message_id: bytes = b"",
        timestamps_ns: Buffer = b"",
    ) -> Sequence[int]:
        """Stage a batch; returns the position of each message, as a ``range`` if there are no gaps.

        Its channels are the topics, unless one is given. Each message keeps its key, and its properties and message id
        (``batch_details``) unless others are given; ``more`` is added to the properties. ``timestamps_ns``: signed
        64-bit times, one a message; a message without one, or with ``TIME_NOW``, gets the time of storing.
        """

    def record(self, kind: int, data: bytes) -> None:
        """Stage a state record, to be stored with the staged messages."""

    def commit(self) -> None:
        """Make everything staged durable and visible, in one step. OSError: nothing of it is."""

    def begin_parts(self) -> None:
        """Begin a large commit, which is written in parts that become visible only at its end. Nothing else may be
        staged yet. After an OSError, here, in ``write_part`` or in the commit, the store must be opened again.
        """

    def write_part(self) -> None:
        """Write what is staged."""

    def read(
        self, start: int, most: int, most_bytes: int, topics: tuple[str, ...] | None = None
    ) -> tuple[Batch, int, int]:
        """Durable messages at or after ``start`` (all topics, or those of patterns), where to continue, and how many
        positions from ``start`` on have been freed.
        """

    def find(self, *, ordinal: int | None = None, timestamp_ns: int | None = None, topic: str | None = None) -> int:
        """The position of the first message at or after an ordinal (of a topic) or a time; if there is none, the next
        position.
        """

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The state records since the last snapshot, in order."""

    def identifiers(self, start: int) -> Iterator[tuple[Message, str]]:
        """The messages from ``start`` on that were staged with an id, and their ids."""

    def trim(self, below: int, queues: bool, urgent: bool) -> bool:
        """Free what the store's retention rules allow. No queue needs the positions before ``below``; ``queues``:
        whether there are queues. ``urgent``: the quota is reached, or the disk is full. True: more can be freed a
        little later.
        """

    def statistics(self) -> StoreStatistics:
        """Counts and bounds."""

    def close(self) -> None:
        """Release everything."""


class Reserve:
    """Disk space that is allocated in advance and released when the disk is full, for the writes that free other space.
    One part is for records (acknowledgements, queues), the other for beginning a new segment, so that the old one can
    be freed. A partition without even this much space at the first start is used without a reserve. A file that is not
    complete says at a later start that the disk was full.
    """

    FOR_ROLLING = 2 << 20
    BYTES = 2 * FOR_ROLLING

    def __init__(self, path: Path) -> None:
        self._path = path
        was_there = path.exists()
        allocated = self._allocate()
        self.given = was_there and not allocated
        if not (was_there or allocated):
            with contextlib.suppress(OSError):
                path.unlink()

    def give(self, left: int) -> None:
        """The disk is full: release the reserve except for ``left`` bytes."""
        self.given = True
        with contextlib.suppress(OSError):
            if self._path.stat().st_size > left:
                os.truncate(self._path, left)

    def take(self) -> bool:
        """Whether the reserve exists, or could be allocated again."""
        if self.given:
            self.given = not self._allocate()
        return not self.given

    def _allocate(self) -> bool:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file, 0, self.BYTES)
                elif os.fstat(file).st_size < self.BYTES:
                    os.pwrite(file, bytes(self.BYTES), 0)
            finally:
                os.close(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            return False
        return True


class JournalStore:
    """The default: an embedded journal in a directory."""

    def __init__(
        self,
        directory: str | Path,
        snapshot: Callable[[], Iterable[tuple[int, bytes]]],
        *,
        keep: str = DEFAULT_KEEP,
        quota_bytes: int = 0,
        **options: Any,
    ) -> None:
        from penstock.journal import Journal
        from penstock.journal.journal import SEGMENT_BYTES
        from penstock.journal.upgrade import upgrade

        if (Path(directory) / MARKER_NAME).exists() and (converted := upgrade(directory)):
            log.info("%s: %d segments converted to this version's format", directory, converted)
        self.keep = KEEP_NOTHING if options.pop("retain_queues", False) else Keep.parse(str(keep))
        self.kept = "0" if self.keep is KEEP_NOTHING else str(keep)  #: what ``--keep`` says
        self._needs_queues = self.keep is KEEP_NOTHING
        if quota_bytes:
            asked = check_size(options.get("segment_bytes", SEGMENT_BYTES), "segment_bytes")
            options["segment_bytes"] = min(asked, max(quota_bytes // QUOTA_PART, LEAST_SEGMENT_BYTES))
        # A queue whose record is damaged would disappear silently, so a damaged journal is refused.
        self._journal = Journal(directory, retain_queues=not self.keep.forever, refuse_damage=True, **options)
        self.mended_by = mended_by(self._journal.directory)
        self._journal.on_snapshot(snapshot, KINDS)
        self._writer = self._journal.writer
        self.identity = str(self._journal.uuid)
        self.topics: set[str] = set(self._journal.topics)
        self._ids: dict[tuple[str, ...], bytes] = {}
        self._filters: dict[tuple[str, ...], Any] = {}
        self._ids_names = self._filters_names = 0  # names in all cached rows together: a row may have any length
        # bytes of all files but the active log, and when they were measured
        self._looked_bytes, self._looked_at = 0, 0.0
        self._index_bytes = self._staged_bytes = 0  # index bytes since then; bytes staged for the next commit
        # state bytes of the active segment, and of the snapshot at its head
        self._state_bytes = sum(len(data) + MESSAGE_BYTES for _, data in self._journal.state_records())
        self._snapshot_bytes = 0
        self._group: Transaction | None = None  # the commit in parts that is in progress
        self._reserve = Reserve(self._journal.directory / RESERVE_NAME)

    def stage(
        self,
        batch: Batch,
        *,
        topic: str | None = None,
        properties: bytes | None = None,
        more: bytes = b"",
        message_id: bytes = b"",
        timestamps_ns: Buffer = b"",
    ) -> range:
        """Copy the messages into the journal's staging buffer: the only copy between socket and segment."""
        names = batch_names(batch) if topic is None else (topic,)
        ids = self._ids.get(names)
        if ids is None:
            self._ids_names += len(names)
            if self._ids_names > CACHED_NAMES:
                self._ids.clear()
                self._ids_names = len(names)
            numbers = [self._journal.topic_id(name) for name in names]
            self.topics.update(names)
            ids = self._ids[names] = struct.pack(f"<{len(numbers)}I", *numbers)
        self._staged_bytes += batch_bytes(batch) + MESSAGE_BYTES * len(batch)
        self._index_bytes += INDEX_BYTES * len(batch)
        first, last = self._writer.stage_batch(batch, ids, properties, message_id, more, timestamps_ns)
        return range(first, last + 1)

    def record(self, kind: int, data: bytes) -> None:
        """State goes into the same batch as what is staged."""
        self._staged_bytes += len(data) + MESSAGE_BYTES
        self._state_bytes += len(data) + MESSAGE_BYTES
        self._writer.stage_state(kind, data)

    def commit(self) -> None:
        """One write, one sync. A new segment is begun after the commit, because only then does the broker's state equal
        what is on disk.
        """
        self._staged_bytes = 0
        group, self._group = self._group, None
        try:
            (group or self._writer).commit()
        except OSError as error:
            if error.errno in DISK_FULL:
                self._reserve.give(0 if group else Reserve.FOR_ROLLING)
            raise
        most_state = max(STATE_BYTES + self._writer.end // STATE_PART, 2 * self._snapshot_bytes)
        if self._state_bytes > most_state:
            self._roll(full=False)
        elif self._writer.end >= min(
            SNAPSHOT_TIMES * self._snapshot_bytes, self._journal.segment_bytes + SNAPSHOT_BEYOND_BYTES
        ):
            self._roll()

    def begin_parts(self) -> None:
        """A group of batches, in a segment of its own."""
        self._group = self._journal.transaction()
        self.write_part()

    def write_part(self) -> None:
        """One batch of the group, synced."""
        assert self._group is not None
        self._staged_bytes = 0
        try:
            self._group.spill(roll=False)
        except OSError as error:
            if error.errno in DISK_FULL:
                self._reserve.give(0)  # opening again needs room for a new segment before this one can be removed
            raise

    def _roll(self, full: bool = True) -> None:
        """Begin a new segment; with ``full``, only if the active one is full."""
        if self._journal.roll(full=full) or not full:
            self._state_bytes, self._snapshot_bytes, self._looked_at = 0, self._writer.end, 0.0

    def read(
        self, start: int, most: int, most_bytes: int, topics: tuple[str, ...] | None = None
    ) -> tuple[Batch, int, int]:
        """Views of the mapped segments."""
        return self._journal.read_counted(max(1, start), most, most_bytes, self._filter(topics))

    def _filter(self, topics: tuple[str, ...] | None) -> Any:
        if topics is None:
            return None
        if topics not in self._filters:
            self._filters_names += len(topics)
            if self._filters_names > CACHED_NAMES:
                self._filters.clear()
                self._filters_names = len(topics)
            # The patterns were checked when the client gave them. The broker's internal topics may be longer than
            # users' topics.
            self._filters[topics] = None if ">" in topics else TopicFilter(list(topics))
        return self._filters[topics]

    def find(self, *, ordinal: int | None = None, timestamp_ns: int | None = None, topic: str | None = None) -> int:
        """By the journal's own index."""
        found: int | None = None
        if ordinal is not None and topic is not None:
            found = self._journal.find_ordinal(topic, ordinal)
        elif timestamp_ns is not None:
            found = self._journal.find_time(timestamp_ns, topic)
        return found or self._journal.frontier

    def records(self) -> Iterator[tuple[int, bytes]]:
        """As of opening."""
        return iter(self._journal.state_records())

    def identifiers(self, start: int) -> Iterator[tuple[Message, str]]:
        """Ids that are longer than publishing allows are left out."""
        while True:
            batch, following, _ = self.read(start, 4096, 1 << 40)
            for number, identifier in message_ids(batch, len(batch), MAX_NAME_BYTES):
                yield batch[number], identifier
            if following >= self._journal.frontier or following <= start:
                return
            start = following

    def trim(self, below: int, queues: bool, urgent: bool) -> bool:
        """The journal itself applies retention by age and size; the broker says what the queues have passed."""
        journal = self._journal
        if self._group is not None:  # no segment may begin or end during a commit in parts
            return False
        passed: int | None = None
        if not self.keep.forever and (queues or not self._needs_queues):
            passed = below - 1
            if not (urgent or self.keep is KEEP_NOTHING):
                passed = min(passed, self._first_to_keep() - 1)
        self._looked_at = 0.0
        removed = journal.retain(passed=passed, wait=False)
        unneeded = passed is not None and passed >= journal.frontier - 1 and journal.first < journal.frontier
        if unneeded and (urgent or self._writer.end >= ROLL_BYTES):
            if self._reserve.given:
                self._reserve.give(0)
            self._roll(full=False)  # nothing in the active segment is needed: end it, so that it can be removed
            return True
        return bool(removed)

    def _first_to_keep(self) -> int:
        """The first position that ``--keep`` keeps."""
        if self.keep.age_s is not None:
            found = self._journal.find_time(time.time_ns() - int(self.keep.age_s * 1e9), None)
            return found or self._journal.frontier
        kept = 0
        first = self._journal.frontier
        for position, revision in reversed(latest_segments(os.listdir(self._journal.directory))):
            if kept >= (self.keep.bytes or 0):
                break
            first = position
            with contextlib.suppress(FileNotFoundError):
                kept += (self._journal.directory / segment_name(position, revision)).stat().st_blocks * 512
        return first

    @property
    def failed(self) -> bool:
        """After a failed sync nothing is known about the file."""
        return self._writer.failed

    @property
    def full(self) -> bool:
        """True from a write that found no room until the reserve can be allocated again."""
        return not self._reserve.take()

    def statistics(self) -> StoreStatistics:
        """Positions are exact; sizes are measured once a second and include space that is about to be allocated
        ahead.
        """
        journal = self._journal
        now = time.monotonic()
        if now - self._looked_at > 1.0:
            self._looked_at = now
            self._looked_bytes = self._index_bytes = 0
            active = latest_segments(os.listdir(journal.directory))[-1:]
            apart = {RESERVE_NAME, *(segment_name(*segment) for segment in active)}
            for entry in os.scandir(journal.directory):
                if entry.name in apart:
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed by retention meanwhile
                    self._looked_bytes += entry.stat().st_blocks * 512
        stored_bytes = self._looked_bytes + self._index_bytes + self._writer.end + self._staged_bytes
        stored_bytes += min(AHEAD_BYTES, journal.segment_bytes)
        return StoreStatistics(journal.first, journal.frontier, stored_bytes, self._writer.commits)

    @property
    def first(self) -> int:
        """The least position kept."""
        return self._journal.first

    @property
    def next(self) -> int:
        """The position after the last durable one."""
        return self._journal.frontier

    @property
    def next_position(self) -> int:
        """What the next message gets, whether or not those before it are durable."""
        return self._writer.next_position

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
