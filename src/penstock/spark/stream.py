"""``spark.readStream.format("penstock")``: a journal as a stream.

An offset is ``{journal UUID: the next position to read}``, so that a journal created anew under the old name is
detected and never mistaken for the old one. Positions are durable and never reused, so a batch that is run again has
the same rows. The reader lives in one Python process beside the driver for as long as its query; ``read`` runs on
executors.
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

    # -- offsets ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        start = self.options.get("startingOffset", "earliest")
        return {uuid: self._start_position(place, start) for uuid, place in self._places().items()}

    def _start_position(self, place: Place, text: str) -> int:
        kind, _, value = text.partition(":")
        if kind == "earliest":
            return place.first
        if kind == "latest":
            return place.frontier
        if kind == "position" and value:
            return max(1, integer(value, "startingOffset"))  # one that is gone is a loss, as ``startPosition``'s is
        if kind == "ordinal" and value:
            return place.find(ordinal=integer(value, "startingOffset"), bounds=self.bounds)
        if kind == "time" and value:
            return place.find(time_ns=time_ns(value, "startingOffset"), bounds=self.bounds)
        raise InvalidArgument(
            f"startingOffset={text!r} is not one of earliest, latest, position:N, ordinal:N, time:2026-11-15T20:00:00Z"
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        return self.limit

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        places = self._places()
        self._check_not_lost(start, places)
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
        places = self._places()
        self._check_not_lost(start, places)
        spans = [
            (places[uuid], int(start.get(uuid, places[uuid].first)), stop)
            for uuid, stop in end.items()
            if uuid in places
        ]
        return planned(spans, self.options, self.how)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_part(partition, self.how)

    def commit(self, end: dict[str, Any]) -> None:
        for uuid, place in self._places().items():
            done = getattr(place, "committed", None)
            if done is not None and uuid in end:
                done(int(end[uuid]))

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
    return sum(max(0, int(position) - int(reached.get(uuid, 0))) for uuid, position in newest.items())


__all__ = ["JournalStreamReader", "Range", "lag"]
