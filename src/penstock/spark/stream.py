"""``spark.readStream.format("penstock")``: a journal as a stream.

An offset is ``{journal UUID: the next position to read}``, so that a journal created anew under the old name is
detected and never mistaken for the old one. Positions are durable and never reused, so a batch that is run again has
the same rows. The reader lives in one Python process beside the driver for as long as its query; ``read`` runs on
executors.

An offset that was asked for by an ordinal or time that no message had yet also holds this text, as ``AWAITED``, until
a message has it: the batches until then leave out what comes before that message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import InvalidArgument, StateError
from penstock.spark.bounds import from_options, integer, time_ns
from penstock.spark.options import check_options, folded
from penstock.spark.places import Place, Range, open_places, resolve, shown
from penstock.spark.source import planned, read_part, reading

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

Offset = dict[str, int]
AWAITED = "startingOffset"  # a key of offsets, beside those of the journals


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads a streaming query."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.options = folded(options)
        check_options(self.options)
        self.bounds = from_options(self.options)
        self.how = reading(self.options, schema, self.bounds, fail_if_deleted=True)
        self.fail = self.how.fail_if_deleted
        self.limit = read_limit(self.options)
        self.paths = resolve(self.options)
        self.target: Offset | None = None  # where Trigger.AvailableNow ends
        self.held: Offset = {}  # where the queues are
        self.searched: dict[tuple[str, str], int] = {}  # how far each journal was searched for what is awaited

    # -- offsets ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        start = self.options.get("startingOffset", "earliest")
        places = self._places()
        found: Offset = {uuid: self._start_position(place, start) for uuid, place in places.items()}
        return self._awaiting(start, found, places)

    def _awaiting(self, text: str | None, ends: Offset, places: Mapping[str, Place]) -> dict[str, Any]:
        """The offset of these positions, with what is still awaited at one of them."""
        if text is None or not text.startswith(("ordinal:", "time:")):
            return dict(ends)
        begins = {uuid: self._begin(place, text) for uuid, place in places.items() if uuid in ends}
        reached = all(begin is not None and begin <= ends[uuid] for uuid, begin in begins.items())
        return dict(ends) if reached else {**ends, AWAITED: text}

    def _begin(self, place: Place, text: str) -> int | None:
        """The position of the first message with this ordinal or time, None while there is none."""
        key, frontier = (place.uuid, text), place.frontier
        self.searched[key] = found = self._start_position(place, text, self.searched.get(key, 1))
        return found if found < frontier else None

    def _start_position(self, place: Place, text: str, after: int = 1) -> int:
        kind, _, value = text.partition(":")
        if kind == "earliest":
            return place.first
        if kind == "latest":
            return place.frontier
        if kind == "position" and value:
            return max(1, integer(value, "startingOffset"))  # one that is gone is a loss, as ``startPosition``'s is
        if kind == "ordinal" and value:
            return place.find(ordinal=integer(value, "startingOffset"), bounds=self.bounds, start=after)
        if kind == "time" and value:
            return place.find(time_ns=time_ns(value, "startingOffset"), bounds=self.bounds, start=after)
        raise InvalidArgument(
            f"startingOffset={text!r} is not one of earliest, latest, position:N, ordinal:N, time:2026-11-15T20:00:00Z"
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        return self.limit

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        awaited, start = start.get(AWAITED), positions_of(start)
        places = self._places()
        self._check_not_lost(start, places)
        self._move_queues(start, places)  # all before it is done: Spark asks for the next batch only then
        return self._awaiting(awaited, self._latest(start, limit, places), places)

    def _latest(self, start: Offset, limit: ReadLimit, places: Mapping[str, Place]) -> Offset:
        known = {uuid: self._skip_deleted(place, int(start.get(uuid, place.first))) for uuid, place in places.items()}
        ends = {uuid: max(known[uuid], place.frontier) for uuid, place in places.items()}
        if self.target is not None:
            ends = {uuid: max(known[uuid], min(end, self.target.get(uuid, 0))) for uuid, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            shared = share(known, ends, max(1, limit.max_rows))
            return {uuid: self._skip_deleted(places[uuid], end) for uuid, end in shared.items()}
        if isinstance(limit, ReadMaxBytes):
            return self._limit_bytes(places, known, ends, max(1, limit.max_bytes))
        return ends

    def _skip_deleted(self, place: Place, position: int) -> int:
        """``position``, or with ``failOnDataLoss=false`` the first one after it that still exists. What a batch
        skips is logged by ``planned``.
        """
        if self.fail:
            return position
        kept = max(position, place.first)
        for low, high in place.missing(kept, place.frontier):
            if low == kept:
                kept = high
        return kept

    def _limit_bytes(self, places: Mapping[str, Place], known: Offset, ends: Offset, most_bytes: int) -> Offset:
        """The offset that ``most_bytes`` reach, journal by journal; at least one message, however large."""
        reached, left = dict(known), most_bytes
        for uuid, place in places.items():
            at, stop, piece_bytes = known[uuid], ends[uuid], max(1, most_bytes // 4)
            while at < ends[uuid]:
                for piece in place.ranges(
                    at, stop, self.bounds, piece_bytes, lossy=not self.fail, permissive=self.how.permissive
                ):
                    if piece.size > left and (piece_bytes > 1 or left < most_bytes):
                        break  # cut it into smaller pieces, down to one message
                    at, left = piece.end, left - piece.size
                else:
                    at, stop = stop, ends[uuid]
                    continue
                if piece_bytes == 1 or left <= 0:
                    return reached | {uuid: at}
                stop, piece_bytes = piece.end, max(1, min(piece_bytes, left) // 8)
            reached[uuid] = at
        return reached

    def reportLatestOffset(self) -> Offset | None:
        return {uuid: place.frontier for uuid, place in self._places().items()}

    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self.reportLatestOffset()

    # -- reading ------------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        awaited, start, end = start.get(AWAITED), positions_of(start), positions_of(end)
        places = self._places()
        self._check_not_lost(start, places)
        spans = [
            (places[uuid], int(start.get(uuid, places[uuid].first)), stop)
            for uuid, stop in end.items()
            if uuid in places
        ]
        if awaited is not None:
            begins = ((span, self._begin(span[0], awaited)) for span in spans)
            spans = [
                (place, stop if begin is None else min(max(low, begin), stop), stop)
                for (place, low, stop), begin in begins
            ]
        return planned(spans, self.options, self.how)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_part(partition, self.how)

    def commit(self, end: dict[str, Any]) -> None:
        self._move_queues(positions_of(end), self._places())

    def _move_queues(self, end: Mapping[str, Any], places: Mapping[str, Place]) -> None:
        for uuid, place in places.items():
            done = getattr(place, "committed", None)
            if done is not None and uuid in end and self.held.get(uuid) != end[uuid]:
                done(int(end[uuid]))
                self.held[uuid] = end[uuid]

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def _places(self) -> dict[str, Place]:
        return {place.uuid: place for place in open_places(self.paths)}

    def _check_not_lost(self, start: Mapping[str, Any], places: Mapping[str, Place]) -> None:
        """Unless ``failOnDataLoss=false``: raise if a journal was replaced, or if messages were deleted unread."""
        if not self.fail:
            return
        for uuid, position in start.items():
            place = places.get(uuid)
            if place is None:
                named = ", ".join(map(shown, self.paths))
                raise StateError(
                    f"the checkpoint was reading journal {uuid}, which is not among {named} any more: the directory "
                    "was made anew or not named. Name it again, begin with a new checkpoint, or set "
                    "failOnDataLoss=false to go on with what is there."
                )
            if int(position) < place.first:
                raise StateError(
                    f"positions {position} to {place.first - 1} of journal {uuid} were deleted by retention before "
                    "this query read them. Keep more, begin with a new checkpoint (and a startingOffset that is kept, "
                    "such as earliest), or set failOnDataLoss=false to go on without."
                )


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stands in for a reader whose options are wrong: each call raises what is wrong with them.

    PySpark 4.3 hides what a reader's constructor raises behind an error of its own.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self.error

    def initialOffset(self) -> dict[str, Any]:
        raise self.error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self.error

    def reportLatestOffset(self) -> dict[str, Any] | None:
        raise self.error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self.error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self.error

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        raise self.error


def positions_of(offset: Mapping[str, Any]) -> Offset:
    """The positions of an offset, by journal."""
    return {uuid: int(position) for uuid, position in offset.items() if uuid != AWAITED}


def read_limit(options: Mapping[str, str]) -> ReadLimit:
    """The limit for one trigger, from the options."""
    rows, size = options.get("maxMessagesPerTrigger"), options.get("maxBytesPerTrigger")
    if rows is not None and size is not None:
        raise InvalidArgument("give maxMessagesPerTrigger or maxBytesPerTrigger, not both")
    for name, text, kind in (("maxMessagesPerTrigger", rows, ReadMaxRows), ("maxBytesPerTrigger", size, ReadMaxBytes)):
        if text is not None:
            most = integer(text, name)
            if most < 1:
                raise InvalidArgument(f"{name}={most} must be at least 1")
            return kind(most)
    return ReadAllAvailable()


def share(known: Offset, ends: Offset, most: int) -> Offset:
    """Divide ``most`` positions evenly among the journals; what one does not need goes to the others."""
    reached = dict(known)
    left = most
    waiting = sorted(uuid for uuid in known if ends[uuid] > known[uuid])
    while waiting and left > 0:
        portion = max(1, left // len(waiting))
        for uuid in list(waiting):
            step = min(portion, ends[uuid] - reached[uuid], left)
            reached[uuid] += step
            left -= step
            if reached[uuid] == ends[uuid]:
                waiting.remove(uuid)
    return reached


def lag(query: StreamingQuery) -> int | None:
    """How many positions the query is behind its journals, from its last progress report; None before the first."""
    progress = query.lastProgress
    if progress is None:
        return None
    return sum(behind(source["latestOffset"], source["endOffset"]) for source in progress["sources"])


def behind(latest: Any, end: Any) -> int:
    """Positions between two offsets of a progress, which are JSON text or dicts."""
    newest, reached = (json.loads(item) if isinstance(item, str) else item or {} for item in (latest, end))
    known = positions_of(reached)
    return sum(max(0, position - known.get(uuid, 0)) for uuid, position in positions_of(newest).items())


__all__ = ["JournalStreamReader", "Range", "lag"]
