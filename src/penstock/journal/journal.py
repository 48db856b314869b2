"""Journal: the durable log on disk. One process writes it, any number read it at the same time.

Rules:

- ``append`` returns when the message is on disk; threads that append at the same time share one sync.
- After a failed sync nothing is acknowledged any more: close the journal and open it again.
- A failed write (a full disk) stores nothing and says so; appending goes on when there is room again.
- Readers see what is below the durable frontier, in this process as in any other.

Any thread may call anything; after a fork the child must open its own.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock._core import journal as native
from penstock.channel import called
from penstock.clock import refuse_if_replayed
from penstock.errors import ClosedError, CorruptionError, InvalidArgument, StateError, nearest
from penstock.journal import layout, recovery, segments
from penstock.journal.disk import Disk, open_regular, read_all
from penstock.journal.queue_notes import QueueSettings, QueueState, restore
from penstock.journal.reading import Details, Reading, check_position, topic_filter
from penstock.journal.rewrite import remove_segment
from penstock.journal.schemas import KIND as SCHEMA_KIND
from penstock.journal.schemas import Schemas, read_schemas, records_in
from penstock.journal.transaction import Entry, Transaction
from penstock.journal.upkeep import Full, Upkeep
from penstock.printable import printable
from penstock.quantities import check_duration, check_size
from penstock.throttle import Throttle
from penstock.topics import check_pattern, check_topic, matches

if TYPE_CHECKING:
    from penstock.channel import Buffer, Terms
    from penstock.journal.follow import Follower
    from penstock.journal.queue import Queue

LOG = logging.getLogger("penstock.journal")
SEGMENT_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 1 << 40
MAX_MESSAGE_BYTES = 64 << 20
MAX_KIND = 65535
QUEUE_KIND = 1  # kind of the journal's own state records


def utf8_path(path: Path) -> str:
    """A path for the native core, whatever the locale."""
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{printable(str(path))}: the path of a journal must be UTF-8") from None


class Journal(Reading):
    """A journal's directory, opened. ``mode="write"`` makes it where it is missing."""

    _refused_in_replay = True  # else a module would write to the real disk

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        mode: Literal["write", "read"] = "write",
        segment_bytes: int | str = SEGMENT_BYTES,
        max_message_bytes: int | str = MAX_MESSAGE_BYTES,
        retain_age_s: float | str | None = None,
        retain_bytes: int | str | None = None,
        retain_queues: bool = False,
        compact_topics: Sequence[str] = (),
        sync: bool = True,
        refuse_damage: bool = False,
        disk: Disk | None = None,
    ) -> None:
        if mode not in ("write", "read"):
            raise InvalidArgument(f"mode={mode!r} is not a choice; valid: read, write")
        segment_bytes = check_size(segment_bytes, "segment_bytes")
        if not layout.BLOCK_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise InvalidArgument(f"segment_bytes={segment_bytes} must be {layout.BLOCK_BYTES} to {MAX_SEGMENT_BYTES}")
        max_message_bytes = check_size(max_message_bytes, "max_message_bytes")
        if not 0 < max_message_bytes <= 512 << 20:
            raise InvalidArgument(f"max_message_bytes={max_message_bytes} must be 1 to {512 << 20}")
        self.directory = Path(directory)
        place = utf8_path(self.directory)
        if mode == "write" and self._refused_in_replay:
            refuse_if_replayed(f"journal {self.directory} (opened for writing)")
        self.mode = mode
        self.segment_bytes = segment_bytes
        self.max_message_bytes = max_message_bytes
        self.retain_age_s = None if retain_age_s is None else check_duration(retain_age_s, "retain_age_s")
        self.retain_bytes = None if retain_bytes is None else check_size(retain_bytes, "retain_bytes")
        self.retain_queues = retain_queues
        self.compact_topics = tuple(check_pattern(pattern) for pattern in compact_topics)
        self._disk = disk or Disk()
        self._closed = False
        self._topic_ids: dict[str, int] = {}
        self._snapshots: list[Callable[[], Iterable[tuple[int, bytes]]]] = []
        # kinds of state records that the snapshot functions return; None: every kind
        self._given_kinds: set[int] | None = set()
        self._stored_kinds: set[int] = set()  # since opening
        self._states: list[segments.State] = []
        self._schemas = Schemas()
        self._schema_lock = threading.Lock()  # held while a topic's schema is compared and said
        self._roll_lock = threading.Lock()
        self._rolling: int | None = None  # the thread that begins a segment
        self._group: Transaction | None = None  # it has spilled, and holds the roll lock and the writer's lead
        self._sleepers: weakref.WeakSet[Any] = weakref.WeakSet()  # followers and queues: ``close`` wakes them
        self._sleepers_lock = threading.Lock()
        self.queue_lock = threading.RLock()  # held for looking at or changing any queue's state, never while waiting
        self.queue_states: dict[str, QueueState] = {}
        self._deleted: dict[str, QueueState] = {}
        self._dirty: set[str] = set()
        self._failures = 0
        self._trouble = Throttle(LOG)
        self._upkeep = Upkeep(self._disk, self._retain_at_roll)
        self.recovery = recovery.Recovery()
        self._reader = None
        _opened.add(self)
        if mode == "read":
            self._open_reader()
            self._reader = native.Reader(place, segment_bytes)
            if self._reader.uuid != self.uuid.bytes:
                place = str(self.directory / layout.MARKER_NAME)
                raise CorruptionError(f"{place} and the frontier file are of different journals", place)
            return
        self._open_writer(sync, refuse_damage)
        try:
            self._reader = native.Reader(place, segment_bytes)
        except BaseException:
            self.close()
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open_reader(self) -> None:
        marker = self.directory / layout.MARKER_NAME
        try:
            self.uuid = layout.decode_marker(read_all(marker), str(marker))
        except FileNotFoundError:
            raise InvalidArgument(f"{self.directory} is not a journal (no {layout.MARKER_NAME} in it)") from None

    def _open_writer(self, sync: bool, refuse_damage: bool) -> None:
        self.uuid, self._lock, created = recovery.prepare(self.directory, self._disk)
        self._upkeep.hold(self._lock)
        self._segment: segments.ActiveSegment | None = None
        self._frontier_file = -1
        try:
            found = recovery.recover(self.directory, self.uuid, self._disk, refuse_damage=refuse_damage)
            found.report.created = created
            self.recovery = found.report
            self._open_frontier(found)
            disk = None if self._disk.native else self._disk
            place = utf8_path(self.directory.absolute())  # so that the monitor can find it from another process
            self.writer = native.Writer(
                self._frontier_file, self.segment_bytes, self.max_message_bytes, sync, disk, place
            )
            for topic in found.topics:
                number, name, flags, ordinal, stored_ns = topic
                self.writer.restore_topic(number, name.decode("utf-8", "replace"), flags, ordinal, stored_ns)
            self._states = list(found.states)
            kept = [data for kind, flags, data in found.states if flags & layout.FLAG_INTERNAL and kind == QUEUE_KIND]
            self.queue_states = restore(kept)
            self._schemas = Schemas(records_in(found.states))
            with self._lock.naming():
                self._go_on(found)
        except BaseException:
            self._give_back_files()
            raise
        self._log_recovery(found.report)

    def _open_frontier(self, found: recovery.Recovered) -> None:
        path = self.directory / layout.FRONTIER_NAME
        if recovery.read_frontier(self.directory, self.uuid) is None:
            words = layout.Frontier(os.getpid(), 0, found.next_position, 0, 0, 0, found.first)
            self._disk.write_file(path, layout.encode_frontier(self.uuid, words))
            self._disk.sync_directory(self.directory)
        self._frontier_file = open_regular(path, os.O_RDWR)

    def _go_on(self, found: recovery.Recovered) -> None:
        if found.resume is not None:
            self._segment = segments.resume(
                self._lock.place, found.resume, self.writer, found.next_position, self._disk
            )
        else:
            flags = layout.SEGMENT_AFTER_LOSS if found.after_loss else 0
            self._segment = segments.begin(
                self._lock.place, self.uuid, self.writer, found.next_position, self._states, self._disk,
                flags=flags, next_position=found.next_position,
            )  # fmt: skip
        self.writer.publish_frontier(found.first, 1)

    def _log_recovery(self, report: recovery.Recovery) -> None:
        if report.torn_bytes:
            LOG.warning("cut off %d bytes that were never confirmed, at %s", report.torn_bytes, report.torn_place)
        for damage in report.damage:
            LOG.error("damage in the last segment: %s; run: penstock journal verify %s", damage, self.directory)

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        message_id: str | None = None,
        key: str | None = None,
        timestamp_ns: int | None = None,
    ) -> int:
        """Store one message; returns its position when it is on disk."""
        return self.append_numbered(topic, data, properties, message_id, key, timestamp_ns)[0]

    def append_numbered(
        self,
        topic: str,
        data: Buffer,
        properties: Mapping[str, str] | None = None,
        message_id: str | None = None,
        key: str | None = None,
        timestamp_ns: int | None = None,
    ) -> tuple[int, int]:
        """``append`` that returns the position and the ordinal."""
        number = self._topic_ids.get(topic) or self._topic(topic)
        if self._dirty or self.writer.end >= self.segment_bytes:
            self._prepare()
        if properties is None and message_id is None and key is None and timestamp_ns is None:
            numbers = self.writer.append(number, data)
        else:
            numbers = self.writer.append(
                number,
                data,
                layout.encode_properties(properties),
                layout.encode_text("message_id", message_id),
                layout.encode_text("key", key),
                layout.TIME_NOW if timestamp_ns is None else timestamp_ns,
            )
        return numbers

    def append_many(
        self,
        topic: str,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | None = None,
        timestamp_ns: int | None = None,
    ) -> tuple[int, int]:
        """Store them in order as one atomic batch; gives the first and the last position (last < first: none)."""
        number = self._topic_ids.get(topic) or self._topic(topic)
        items = batch if isinstance(batch, list | tuple) else list(batch)
        if not items:
            return self.writer.next_position, self.writer.next_position - 1
        if self._dirty or self.writer.end >= self.segment_bytes:
            self._prepare()
        time_ns = layout.TIME_NOW if timestamp_ns is None else timestamp_ns
        return self.writer.stage_buffers(number, items, layout.encode_properties(properties), time_ns, True)

    def transaction(self) -> Transaction:
        """Messages of many topics and state records that are stored together or not at all."""
        self._check_writing()
        return Transaction(self)

    def commit(
        self, messages: Iterable[tuple[str, Buffer] | Entry] = (), states: Iterable[tuple[int, bytes]] = ()
    ) -> tuple[int, int] | None:
        """The same in one call; gives the first and last position, None without messages."""
        with self.transaction() as transaction:
            for message in messages:
                transaction.add(message if isinstance(message, Entry) else Entry(*message))
            for kind, data in states:
                transaction.state(kind, data)
        return None if transaction.first is None else (transaction.first, transaction.last or 0)

    def commit_staged(self) -> None:
        """Write and sync what was staged through ``writer``, in a new segment when this one is full."""
        self._prepare()
        self.writer.commit()

    def commit_queues(self) -> None:
        """Return when all notes of the queues so far are on disk.

        They are stored with the next commit of any thread. If that commit fails, only its own thread gets the error, so
        the complete states are stored again.
        """
        failures = -1
        while failures != self.writer.failures:
            failures = self.writer.failures
            self._prepare()
            self.writer.commit()

    def _prepare(self) -> None:
        """Prepare a commit: begin a new segment if this one is full, and add the queues' notes to the batch."""
        if self.writer.end >= self.segment_bytes:
            self._roll()
        if not self._dirty and self._failures == self.writer.failures:
            return
        with self.queue_lock:
            dirty, self._dirty = self._dirty, set()
            lost = self.writer.failures != self._failures  # notes were staged and dropped: store the complete states
            self._failures = self.writer.failures
            for name in {*self.queue_states, *self._deleted} if lost else dirty:
                state = self.queue_states.get(name) or self._deleted.get(name)
                notes = b"" if state is None else state.encode() if lost else state.changes()
                if notes:
                    self.writer.stage_state(QUEUE_KIND, notes, layout.FLAG_INTERNAL)

    def touch_queue(self, state: QueueState) -> None:
        """Mark the queue: it has notes to be stored with the next commit."""
        self._dirty.add(state.name)

    def roll(self, *, full: bool = True) -> bool:
        """Begin a new segment now if the active one is full, as committing would do before it writes. Whether one was
        begun.

        For callers that change their state while they stage: right after a commit their state equals what is on disk.
        With ``full=False`` a segment that is not full is ended too, so that retention can free it; one that contains
        only state is replaced by its next revision, which begins with the snapshot.
        """
        before = self._segment
        if not full or self.writer.end >= self.segment_bytes:
            self._roll(full)
        return self._segment is not before

    def topic_id(self, name: str) -> int:
        """The number of a topic for ``writer``, assigned if new."""
        return self._topic_ids.get(name) or self._topic(name)

    def _topic(self, name: str) -> int:
        self._check_writing()
        check_topic(name)
        compacted = any(matches(pattern, name) for pattern in self.compact_topics)
        number = self.writer.topic(name, layout.FLAG_COMPACTED_TOPIC if compacted else 0)
        self._topic_ids[name] = number
        return number

    # -- state ------------------------------------------------------------------------------------------------------

    def state_records(self) -> Iterator[tuple[int, bytes]]:
        """The state records since the last snapshot, in order, as they were when the journal was opened."""
        return ((kind, data) for kind, flags, data in self._states if not flags & layout.FLAG_INTERNAL)

    @called
    def on_snapshot(
        self, function: Callable[[], Iterable[tuple[int, bytes]]], kinds: Iterable[int] | None = None
    ) -> None:
        """Call ``function`` for the complete state at the head of each new segment (see docs/rooms/journal.md).

        ``kinds``: the kinds of its records, None for all. Records of kinds without a function are copied.
        """
        self._check_writing()
        given = None if kinds is None else set(map(check_kind, kinds))
        self._given_kinds = None if given is None or self._given_kinds is None else self._given_kinds | given
        self._snapshots.append(function)

    def snapshot(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Write the whole state now: opening replays from here."""
        self._check_writing()
        states = [(check_kind(kind), 0, bytes(data)) for kind, data in records]
        if not self.writer.take_lead():
            self.writer.commit()  # raises what went wrong
            raise StateError("the journal failed: open it again")
        try:
            states += self._internal_states()  # not earlier: it must contain what another thread commits meanwhile
            encoded = [layout.encode_record(layout.KIND_STATE, kind, data, flags=flags) for kind, flags, data in states]
            self.writer.commit_records(b"".join(encoded), len(encoded), layout.BATCH_SNAPSHOT)
            self._states = states
        finally:
            self.writer.give_lead()

    def _internal_states(self) -> list[segments.State]:
        with self.queue_lock:
            queues = [(QUEUE_KIND, layout.FLAG_INTERNAL, state.encode()) for state in self.queue_states.values()]
        return queues + [(SCHEMA_KIND, layout.FLAG_INTERNAL, record) for record in self._schemas.records()]

    def _state_for_roll(self) -> list[segments.State]:
        """The state from the registered functions, and the sealed segment's records of all other kinds."""
        kept = [(check_kind(kind), 0, bytes(data)) for give in self._snapshots for kind, data in give()]
        return [*self._carried_states(), *kept, *self._internal_states()]

    def _carried_states(self) -> list[segments.State]:
        """Records of kinds without a function. The log is read only if one may have been stored since opening."""
        given = self._given_kinds
        if given is None or not self.writer.states:
            return []
        known = bool(self._snapshots) and self._stored_kinds <= given
        states = self._states if known else self._states_of_segment()
        return [state for state in states if not state[1] & layout.FLAG_INTERNAL and state[0] not in given]

    def _states_of_segment(self) -> list[segments.State]:
        assert self._segment is not None
        header = self._segment.header
        scan = native.scan(
            read_all(self._segment.path()), header.nonce, header.first, 2**63, self.writer.committed_position, False
        )
        return list(scan["states"])

    # -- schemas --------------------------------------------------------------------------------------------------

    @property
    def schemas(self) -> Schemas:
        """The schemas of the topics that have any, by version."""
        return self._schemas if self.mode == "write" else read_schemas(self.directory)

    def agree(self, topic: str, terms: Terms) -> None:
        """Add a version to a topic's schemas; refused if it is not compatible with those before."""
        self._check_writing()
        with self._schema_lock:
            versions = list(self._schemas.versions(topic).values())
            if terms.added_to(versions, f"topic {topic!r} of {self.directory}") is not None:
                self._declare(topic, terms.text)

    def declare_schema(self, topic: str, text: str) -> None:
        """Add a version without comparing it with those before; on disk when this returns."""
        self._check_writing()
        with self._schema_lock:
            if self._schemas.newest(check_topic(topic))[1] != text:
                self._declare(topic, text)

    def _declare(self, topic: str, text: str) -> None:
        # First, so that a segment that begins meanwhile has it in its head.
        record = self._schemas.add(topic, text, self.writer.next_position)
        try:
            with self.transaction() as transaction:
                transaction.state(SCHEMA_KIND, record, internal=True)
        except BaseException:
            self._schemas.remove_newest(topic)
            raise

    def note_kind(self, kind: int) -> None:
        """A state record of this kind is about to be stored."""
        self._stored_kinds.add(kind)

    # -- segments ---------------------------------------------------------------------------------------------------

    def _roll(self, only_if_full: bool = True) -> None:
        """Begin a new segment if the active one is full. If that fails, it is tried again later."""
        self._check_not_rolling()
        with self._roll_lock:
            self._upkeep.wait()
            full = None
            if not self.writer.take_lead(only_if_full):
                return
            try:
                full = self._try_to_begin_segment(replace_state=not only_if_full)
            finally:
                self.writer.give_lead()
            if full is not None:
                self._upkeep.begin(full)

    def _try_to_begin_segment(self, replace_state: bool = False) -> Full | None:
        self._rolling = threading.get_ident()
        try:
            with self._lock.naming():
                return self._begin_segment(replace_state)
        except OSError as error:
            told = LOG if self.writer.failed else self._trouble  # each commit tries again
            told.error("cannot begin a new segment%s: %s", self._going_on(), error)
            return None
        finally:
            self._rolling = None

    def _open_group(self, transaction: Transaction) -> None:
        """For ``Transaction.spill``: from here to ``_leave_group`` the transaction holds the roll lock and the lead.

        The group begins in a segment of its own, whose first position is the frontier until the group ends: no reader
        looks past it.
        """
        self._prepare()
        self._check_not_rolling()
        self._roll_lock.acquire()
        self._upkeep.wait()
        if not self.writer.take_lead():
            self._roll_lock.release()
            self.writer.commit_part()  # raises what went wrong
            raise StateError("the journal failed: open it again")
        self._group = transaction
        self._rolling = threading.get_ident()
        try:
            with self._lock.naming():
                full = self._begin_segment()
        except BaseException:
            self.writer.give_lead()
            self._leave_group()
            raise
        finally:
            self._rolling = None
        self.writer.open_group()
        if full is not None:
            self._upkeep.begin(full)

    def _roll_in_group(self) -> None:
        if self.writer.end >= self.segment_bytes:
            self._upkeep.wait()
            full = self._try_to_begin_segment()
            if full is not None:
                self._upkeep.begin(full)

    def _leave_group(self) -> None:
        self._group = None
        self._roll_lock.release()
        self._announce()  # what retention has removed meanwhile

    def _check_not_rolling(self) -> None:
        if self._rolling == threading.get_ident():
            raise StateError("a function given to on_snapshot must not write to or close the journal that asks it")

    def _going_on(self) -> str:
        return (
            ", nothing is stored until the journal is opened again" if self.writer.failed else ", going on with the old"
        )

    def _begin_segment(self, replace_state: bool = False) -> Full | None:
        old = self._segment
        first, end, tail = self.writer.committed_position, self.writer.end, self.writer.block_crc
        sums_whole = self.writer.sums_whole
        if old is None:
            return None
        revision = 0
        if first == old.header.first:  # it contains only state: two segments cannot begin at one position
            revision = old.header.revision + 1
            if not replace_state or revision > layout.MAX_REVISION:
                return None
        self._lock.check()
        first_kept, states = self._first_kept(), self._state_for_roll()
        self._segment = segments.begin(
            self._lock.place, self.uuid, self.writer, first, states, self._disk, revision=revision
        )
        self.writer.publish_frontier(first_kept, 1)  # nothing may fail between the two
        old.close()
        if revision:
            remove_segment(self._lock.place, *old.name, self._disk)
            return None
        return Full(old.header, first, end, tail if sums_whole else None)

    def _first_kept(self) -> int:
        found = layout.latest_segments(os.listdir(self._lock.place))
        return found[0][0] if found else 1

    # -- queues, retention, compaction -------------------------------------------------------------------------------

    def queue(
        self,
        name: str,
        *,
        topics: Iterable[str] | None = None,
        start: int | str = "new",
        ack_timeout_s: float | None = None,
        max_tries: int | None = None,
        dead_letter: str | None = None,
        max_in_flight: int | None = None,
    ) -> Queue:
        """The durable queue of that name, made if new (then from ``start`` on: ``new``, ``first`` or a position)."""
        from penstock.journal.queue import Queue

        self._check_writing()
        topic_filter(topics)  # refuses invalid patterns
        topics = None if topics is None else tuple(topics)
        with self.queue_lock:
            state = self.queue_states.get(name)
            if state is None:
                place = {"new": self.frontier, "first": self.first}.get(str(start)) or check_position(start)
                state = QueueState(name, floor=place - 1)
                state.seek(place)
            given: dict[str, Any] = {
                "topics": topics,
                "ack_timeout_ns": None if ack_timeout_s is None else int(ack_timeout_s * 1e9),
                "max_tries": max_tries,
                "dead_letter": dead_letter,
                "max_in_flight": max_in_flight,
            }
            changed = {option: value for option, value in given.items() if value is not None}
            state.change(replace(state.settings or QueueSettings(), **changed))
            self.queue_states[name] = state
            self._deleted.pop(name, None)
            self.touch_queue(state)
        self.commit_queues()
        return Queue(self, state)

    def delete_queue(self, name: str) -> None:
        """Delete the queue; its messages stay as long as retention keeps them."""
        self._check_writing()
        with self.queue_lock:
            state = self.queue_states.pop(name, None)
            if state is None:
                raise LookupError(f"there is no queue {name!r}; {nearest(name, self.queue_states)}")
            state.delete()
            self._deleted[name] = state
            self.touch_queue(state)
        self.commit_queues()
        with self.queue_lock:
            self._deleted.pop(name, None)  # not before it is on disk: the commit may fail

    def retain(self, *, passed: int | None = None, wait: bool = True) -> int:
        """Remove the segments that retention allows to remove; returns how many.

        ``passed``: queues outside of this journal have handled all positions up to it. With ``wait=False`` nothing is
        done while a segment is being sealed; call again later.
        """
        self._check_writing()
        if wait:
            self._upkeep.wait()
        if not self._upkeep.lock.acquire(blocking=wait):
            return 0
        try:
            self._check_writing()  # not closed meanwhile
            self._upkeep.seal_rest()
            return self._retain_at_roll(passed)
        finally:
            self._upkeep.lock.release()

    def _retain_at_roll(self, passed: int | None = None) -> int:
        removed = self._retain(passed)
        if removed:
            self._announce()
        return removed

    def _announce(self) -> None:
        """Tell readers that files were added or removed. Only the thread with the lead moves the frontier."""
        if self._group is not None or not self.writer.take_lead():  # the end of the group will tell them
            return
        try:
            self.writer.publish_frontier(self._first_kept(), 1)
        finally:
            self.writer.give_lead()

    def _retain(self, passed: int | None = None) -> int:
        from penstock.journal.retention import Limits, apply

        if self.retain_queues and passed is None and self.queue_states:
            with self.queue_lock:
                passed = min(state.floor for state in self.queue_states.values())
        limits = Limits(self.retain_age_s, self.retain_bytes, passed if self.retain_queues else None)
        if limits == Limits() or self._group is not None:  # must not remove what no reader can have seen yet
            return 0
        self._lock.check()
        with self._upkeep.lock, self._lock.naming():
            return apply(self._lock.place, limits, self._disk, self.frontier - 1)

    def compact(self) -> int:
        """Remove from sealed segments all but the last message of each key, in topics compacted by key; returns how
        many."""
        from penstock.journal.compaction import compact

        self._check_writing()
        self._check_not_rolling()
        with self._roll_lock, self._upkeep.idle(), self._lock.naming():
            self._check_writing()  # not closed meanwhile
            self._lock.check()
            assert self._segment is not None
            asked = layout.FLAG_COMPACTED_TOPIC
            compacted = {number for number, _, flags, _, _ in self.writer.topics() if flags & asked}
            removed = compact(self._lock.place, compacted, self._segment.header.first, self.frontier, self._disk)
        if removed:
            self._announce()
        return removed

    # -- following --------------------------------------------------------------------------------------------------

    def follow(self, start: int | None = None, *, topics: Iterable[str] | None = None) -> Follower:
        """A subscriber from ``start`` on (None: new messages only)."""
        from penstock.journal.follow import Follower

        return Follower(self, self.frontier if start is None else check_position(start), topics)

    # -- closing ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Release the files and the lock; messages already read stay valid. Closing twice does nothing."""
        if self._closed:
            return
        self._check_not_rolling()
        if self.mode == "write":
            self._upkeep.wait()  # its retention needs an open journal
        if self._closed:  # by another thread meanwhile
            return
        self._closed = True
        self._reader = None  # close the descriptors now, not at garbage collection; messages keep their mappings
        with self._sleepers_lock:
            sleepers = list(self._sleepers)
        for sleeper in sleepers:
            sleeper.wake()
        if self._group is not None:
            self._group.drop()
        if self.mode == "write":
            with self._roll_lock:  # no segment begins from now on; wait for the work on the last one
                self.writer.close()
                self._upkeep.end()
            self._give_back_files()

    def _give_back_files(self) -> None:
        if self._segment is not None:
            self._segment.close()
        if self._frontier_file >= 0:
            os.close(self._frontier_file)
            self._frontier_file = -1
        self._lock.release()

    def add_sleeper(self, sleeper: Any) -> None:
        """Register a sleeper (weakly): ``close`` calls its ``wake``."""
        with self._sleepers_lock:
            self._sleepers.add(sleeper)

    def _forget_locks(self) -> None:
        """Replace the locks in a forked child. The journal belongs to the parent, but closing it here must not hang."""
        self._roll_lock, self._sleepers_lock = threading.Lock(), threading.Lock()
        self.queue_lock = threading.RLock()
        self._schema_lock = threading.Lock()
        self._rolling = None
        self._upkeep.forget_locks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Journal {self.directory} ({self.mode}{', closed' if self._closed else ''})>"

    def _check_writing(self) -> None:
        if self._closed:
            raise ClosedError(f"journal {self.directory} was closed")
        if self.mode != "write":
            raise StateError(f"journal {self.directory} was opened with mode='read'")


_opened: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork() -> None:
    for journal in list(_opened):
        journal._forget_locks()


os.register_at_fork(after_in_child=_after_fork)


def check_kind(kind: int) -> int:
    """A state record's kind."""
    if not 0 <= kind <= MAX_KIND:
        raise InvalidArgument(f"kind={kind} must be 0 to {MAX_KIND}")
    return kind


__all__ = ["CorruptionError", "Details", "Journal", "check_position", "topic_filter"]
