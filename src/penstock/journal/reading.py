"""Reading a journal: what ``Journal`` offers in both modes, below the durable frontier. Any thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._core import journal as native
from penstock.errors import ClosedError, CorruptionError, InvalidArgument
from penstock.history import check_start, start_ns
from penstock.journal import recovery
from penstock.topics import check_pattern

if TYPE_CHECKING:
    import pyarrow

    from penstock._core import Batch, Message
    from penstock.journal.commands import JournalInfo

MAX_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Details:
    """What a message carries beside its data and properties; empty where it has none."""

    message_id: str
    key: str


@dataclass(frozen=True, slots=True)
class Hole:
    """Positions that cannot be read, and why: ``retention``, ``compaction`` or ``lost``."""

    first: int
    last: int
    reason: str


class Reading:
    """The reading side of ``Journal``."""

    directory: Path
    _reader: native.Reader | None

    @property
    def frontier(self) -> int:
        """Every position below it is on disk; the next message gets it or a greater one."""
        return self._live_reader().frontier

    @property
    def first(self) -> int:
        """The least position kept."""
        return self._live_reader().first

    @property
    def topics(self) -> dict[str, int]:
        """Names of all topics and their ids."""
        return {name.decode("utf-8", "replace"): number for number, name in self._live_reader().topics()}

    def read(self, position: int) -> Message:
        """The message, as a view of the mapped file; LookupError if there is none, CorruptionError if it is damaged."""
        message = self._live_reader().read(check_position(position))
        if message is None:
            self._check_segments(position)
            raise LookupError(f"there is no message at position {position} ({self._why_missing(position)})")
        return message

    def _why_missing(self, position: int) -> str:
        if position >= self.frontier:
            return f"the next position is {self.frontier}"
        return f"the least kept is {self.first}" if position < self.first else "it went by compaction"

    def read_many(
        self,
        start: int,
        most: int = 1024,
        *,
        topics: Iterable[str] | None = None,
        most_bytes: int | None = None,
    ) -> Batch:
        """Up to ``most`` messages from ``start`` on, in order; fewer at a segment's border, none at the frontier."""
        return self.read_from(start, most, most_bytes, topic_filter(topics))[0]

    def read_from(
        self, start: int, most: int, most_bytes: int | None = None, chosen: native.TopicFilter | None = None
    ) -> tuple[Batch, int]:
        """``read_many`` with a filter from ``topic_filter``; also returns the position to continue from."""
        batch, following, _ = self.read_counted(start, most, most_bytes, chosen)
        return batch, following

    def read_counted(
        self, start: int, most: int, most_bytes: int | None = None, chosen: native.TopicFilter | None = None
    ) -> tuple[Batch, int, int]:
        """As ``read_from``; also returns how many positions from ``start`` on have been removed."""
        if most < 1:
            raise InvalidArgument(f"most={most} must be at least 1")
        limit = 2**63 if most_bytes is None else most_bytes
        found = self._live_reader().read_many(check_position(start), most, limit, chosen)
        if found[1] == start and not len(found[0]):
            self._check_segments(start)
        return found

    def _check_segments(self, start: int) -> None:
        """Raise ``CorruptionError`` where messages from ``start`` on were stored and all segments are missing: to the
        reader there is just nothing to read."""
        reader = self._live_reader()
        frontier = reader.frontier
        if start < frontier and not reader.segments():
            text = f"{self.directory}: positions 1 to {frontier - 1} are damaged: all segment files are missing"
            error = CorruptionError(f"{text}; {recovery.mended_by(self.directory)}", str(self.directory))
            error.positions = 1, frontier
            raise error

    def details(self, position: int) -> Details:
        """The message's id and key."""
        found = self._live_reader().details(check_position(position))
        if found is None:
            raise LookupError(f"there is no message at position {position} ({self._why_missing(position)})")
        return Details(found[0].decode("utf-8", "replace"), found[1].decode("utf-8", "replace"))

    def find_time(self, stored_ns: int, topic: str | None = None) -> int | None:
        """The first position that was stored at that time or later."""
        number = 0 if topic is None else self._live_reader().topic_id(topic)
        if topic is not None and not number:
            return None
        return self._live_reader().find_time(min(max(stored_ns, 0), MAX_NS), number) or None

    def place_of(self, start: object) -> int:
        """The position that the option ``start`` of a subscriber names."""
        text = check_start(start)
        if text in ("new", "first"):
            return self.frontier if text == "new" else self.first
        if text.isdigit():
            return int(text)
        return self.find_time(start_ns(text)) or self.frontier

    def find_ordinal(self, topic: str, ordinal: int) -> int | None:
        """The position of the topic's first message with that ordinal or a greater one."""
        number = self._live_reader().topic_id(topic)
        return (self._live_reader().find_ordinal(number, ordinal) or None) if number else None

    def batches(
        self,
        *,
        start: int | None = None,
        end: int | None = None,
        columns: Sequence[str] | None = None,
        topics: Iterable[str] | None = None,
        rows: int = 65536,
        bytes: int = 4 << 20,
        check: bool = True,
    ) -> Iterator[pyarrow.RecordBatch]:
        """Arrow record batches of a range of positions, gathered without a loop over messages.

        Every byte returned has been checked; ``check`` is accepted for callers of earlier versions.
        """
        from penstock.journal.arrow import record_batches

        reader = self._live_reader()
        begin, stop = reader.first if start is None else start, reader.frontier if end is None else end
        self._check_segments(begin)
        return record_batches(reader.columns, begin, stop, columns, topic_filter(topics), rows, bytes)

    @property
    def holes(self) -> list[Hole]:
        """Positions below the frontier that cannot be read, and why."""
        return [Hole(*hole) for hole in self._live_reader().holes()]

    def info(self) -> JournalInfo:
        """Topics, segments, queues, sizes."""
        from penstock.journal.commands import info

        self._live_reader()
        return info(self.directory)

    def verify(self) -> list[recovery.Damage]:
        """Check every byte against its checksums; empty if the journal is intact."""
        from penstock.journal.verify import verify

        self._live_reader()
        return verify(self.directory)

    def _live_reader(self) -> native.Reader:
        reader = self._reader
        if reader is None:
            raise ClosedError(f"journal {self.directory} was closed")
        return reader


def topic_filter(topics: Iterable[str] | None) -> native.TopicFilter | None:
    """What ``read_from`` selects by; None for all."""
    if topics is None:
        return None
    if isinstance(topics, str):
        raise TypeError("topics is a list of names or patterns, not one str")
    patterns = [check_pattern(pattern) for pattern in topics]
    return None if ">" in patterns else native.TopicFilter(patterns)


def check_position(position: Any) -> int:
    """A position as an int from 1."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise TypeError(f"a position is an int, not {type(position).__name__}")
    if not 1 <= position < 2**63:
        raise InvalidArgument(f"position={position} must be 1 or more")
    return position
