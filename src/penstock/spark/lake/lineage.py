"""Whether a journal is still the one whose messages the lake has: a copy of it has the same UUID and other messages.

Each commit of an archive records the last message that it moved a journal's position over (``Message``). Before a
round, before ``trim`` and before ``read_all`` the journal's message at that position is compared with it. Where the
commit has no record (an older lake), or the journal does not have the message any more, the last message that it has is
compared with its row in the table; where it has none of them, stored times are compared, which never go back.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow

from penstock.errors import CorruptionError, StateError
from penstock.spark.bounds import Bounds, from_options
from penstock.spark.lake import delta, schema
from penstock.spark.lake.files import read_rows
from penstock.spark.lake.planning import Span
from penstock.spark.lake.store import Store
from penstock.spark.places import DirectoryPlace, Place, Reading, shown

NAMES = ("position", "topic", "timestamp_ns", "stored_ns", "payload")
WINDOWS = (1, 1_000, 1_000_000)  # positions that are looked through for the last message: it may be compacted away
MOST_KNOWN = 10_000
_known: dict[tuple[str, str, int], Message] = {}  # by table, journal and position: a journal that rests is read once


@dataclass(frozen=True, slots=True)
class Message:
    """What tells a message from another one at the same position; ``checksum`` None if its payload is damaged."""

    position: int
    topic: str
    timestamp_ns: int
    stored_ns: int
    checksum: int | None

    def is_same(self, other: Message) -> bool:
        """Whether both are one message. Lakes of version 1 had one time; it is in both columns of their rows."""
        times = {self.timestamp_ns, self.stored_ns}, {other.timestamp_ns, other.stored_ns}
        same_times = bool(times[0] & times[1]) if 1 in map(len, times) else self._times() == other._times()
        damaged = None in (self.checksum, other.checksum)
        return self.topic == other.topic and same_times and (damaged or self.checksum == other.checksum)

    def _times(self) -> tuple[int, int]:
        return self.timestamp_ns, self.stored_ns

    def __str__(self) -> str:
        stored = datetime.fromtimestamp(self.stored_ns / 1e9, UTC).isoformat(timespec="microseconds")
        payload = "" if self.checksum is None else f", payload's CRC-32 {self.checksum:08x}"
        return f"topic {self.topic!r}, stored {stored.replace('+00:00', 'Z')}{payload}"


def last_of(spans: Sequence[Span]) -> dict[str, Message]:
    """The last message of each span; none for a journal whose last messages were compacted away."""
    found = ((span.place.uuid, _last(_fresh(span.place), span.start, span.end, Bounds())) for span in spans)
    return {uuid: message for uuid, message in found if message is not None}


def recorded(where: Store, table: Any, journal: str, reached: int) -> Message | None:
    """The message that the commit recorded which moved this journal's position to where it is; None if it has none."""
    key = (str(table.metadata().id), journal, reached)
    if key not in _known:
        try:
            fields = json.loads(delta.last_archived(where, table, journal) or "{}")[journal]
            message = Message(**fields)
        except (ValueError, KeyError, TypeError):
            return None
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = message
    return _known[key]


def text_of(messages: Mapping[str, Message]) -> str:
    """What a commit records."""
    return json.dumps({journal: asdict(message) for journal, message in messages.items()})


def check(where: Store, table: Any, text: str, place: Place) -> None:
    """Raise ``StateError`` if the journal is another one than the lake has, in spite of the same UUID."""
    delta.check_newest(where, table)
    reached = delta.reached(table, place.uuid)
    if reached is None:
        return
    journal, had = _fresh(place), recorded(where, table, place.uuid, reached)
    there = None if had is None else _last(journal, had.position, had.position + 1, Bounds())
    if there is None:
        bounds = from_options(delta.filters(table))
        there = _last(journal, max(1, journal.first), min(reached, journal.frontier), bounds)
        row = None if there is None else _row(where, table, place.uuid, there.position)
        if row is None:
            _check_times(where, table, text, journal, reached, had)
        had = row
    if had is not None and there is not None and not had.is_same(there):
        raise _other(where, text, f"at position {had.position} the lake has {had}; the journal has {there}")


def _check_times(where: Store, table: Any, text: str, journal: Place, reached: int, had: Message | None) -> None:
    """The journal has nothing any more that the lake has: what it has must have been stored later."""
    before = had.stored_ns if had is not None else _latest(table, journal.uuid)
    begin = max(reached, journal.first)
    for window in WINDOWS:
        after = _first(journal, begin, min(journal.frontier, begin + window))
        if after is not None:
            if before is not None and after.stored_ns < before:
                last = datetime.fromtimestamp(before / 1e9, UTC).isoformat(timespec="microseconds")
                raise _other(
                    where, text,
                    f"the last message that was archived was stored {last.replace('+00:00', 'Z')}; the journal's "
                    f"message after it, at position {after.position}, has {after}",
                )  # fmt: skip
            return


def _other(where: Store, text: str, difference: str) -> StateError:
    return StateError(
        f"{shown(text)} has the UUID of a journal in the lake {where.uri}, but other messages: {difference}. It was "
        "restored from a copy, or a copy of it was written too. Nothing was archived or trimmed: archive it to another "
        "lake"
    )


def _fresh(place: Place) -> Place:
    """The journal without what this process remembers of its segments: another one may have taken its directory."""
    if not isinstance(place, DirectoryPlace):
        return place
    fresh = DirectoryPlace(place.path)
    if fresh.uuid != place.uuid:
        raise StateError(f"{place.path} was made anew meanwhile: nothing was archived or trimmed")
    fresh.directory.remembers = False
    return fresh


def _last(place: Place, start: int, end: int, bounds: Bounds) -> Message | None:
    """The last message of positions ``start`` to ``end - 1``; it is looked for among the last million."""
    for window in WINDOWS:
        low = max(start, end - window)
        found = None
        for batch in place.batches(low, end, _reading(("position",), bounds)) if end > low else ():
            found = int(batch["position"][batch.num_rows - 1].as_py()) if batch.num_rows else found
        if found is not None:
            return _first(place, found, found + 1)
        if low == start:
            break
    return None


def _first(place: Place, start: int, end: int) -> Message | None:
    """The first message of these positions."""
    names: Sequence[str] = NAMES
    while end > start:
        try:
            for batch in place.batches(start, end, _reading(names, Bounds())):
                if batch.num_rows:
                    return _message(batch.slice(0, 1).to_pylist()[0])
            return None
        except CorruptionError:
            if names != NAMES:
                raise
            # a payload damaged after it was archived must not stop the archive: read the other columns
            names = NAMES[:-1]
    return None


def _reading(names: Sequence[str], bounds: Bounds) -> Reading:
    return Reading(pyarrow.schema([schema.SCHEMA.field(name) for name in names]), bounds, lossy=True)


def _message(row: Mapping[str, Any]) -> Message:
    checksum = zlib.crc32(row["payload"]) if row.get("payload") is not None else None
    return Message(row["position"], row["topic"], row["timestamp_ns"], row["stored_ns"], checksum)


def _row(where: Store, table: Any, journal: str, position: int) -> Message | None:
    """The lake's row of a position."""
    for action in delta.live_files(table):
        low, high = action["min"], action["max"]
        if low["journal"] <= journal <= high["journal"] and low["position"] <= position <= high["position"]:
            name = action["path"]
            try:
                found = read_rows(where, name, NAMES, journal, position, position + 1)
            except (pyarrow.ArrowException, OSError) as error:
                raise CorruptionError(f"{name} of {where.uri} cannot be read: {error}", name) from None
            if found.num_rows:
                return _message(found.slice(0, 1).to_pylist()[0])
    return None


def _latest(table: Any, journal: str) -> int | None:
    """The greatest stored time of a journal's rows, by the log's statistics of files that have no other journal."""
    files = ((action["min"], action["max"]) for action in delta.live_files(table))
    own = (high for low, high in files if low["journal"] == high["journal"] == journal)
    return max((int(high["stored_ns"]) for high in own), default=None)
