"""``spark.read.format("penstock")``: a journal as a table.

The planner (on the driver) turns options and, where asked for, pushed-down filters into ranges of positions of even
bytes; each task reads its ranges as Arrow batches. A reader is pickled to executors, so it holds options and no open
file. Filters that are used here go back to Spark as well: ours may be too wide, never too narrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition

from penstock.errors import InvalidArgument, PenstockError, StateError
from penstock.spark import columns
from penstock.spark.bounds import Bounds, from_options, integer, push
from penstock.spark.described import Values, table_schema, texts_of
from penstock.spark.executor import open_range
from penstock.spark.options import check_batch_options, check_options, choice, folded
from penstock.spark.places import BATCH_BYTES, Place, Range, Reading, log_skipped, open_places, resolve

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

PARTITION_BYTES = 128 << 20
LEAST_PARTITION_BYTES = 1 << 20
PIECES = 8  # a task gets at least so many pieces, so that tasks differ by about a sixteenth at most
MAX_PARTITIONS = 100_000


class PenstockSource(DataSource):
    """The data source that Spark knows as ``penstock``."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        check_options(self.options)
        return table_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        return JournalReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.stream import JournalStreamReader, RefusedStreamReader

        try:
            return JournalStreamReader(dict(self.options), schema)
        except (PenstockError, OSError) as error:
            return RefusedStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.sink import stream_writer

        return stream_writer(dict(self.options), schema)


def reading(
    options: Mapping[str, str], schema: StructType, bounds: Bounds, *, fail_if_deleted: bool = False
) -> Reading:
    """The ``Reading`` that the options ask for. Without ``failOnDataLoss``, ``fail_if_deleted`` applies. Raises for a
    schema with columns that a journal does not have.
    """
    texts = texts_of(options)
    columns.check_schema(schema, () if texts is None else columns.DECODED)
    outer = columns.arrow_schema(schema)
    decoded = texts is not None and any(name in columns.DECODED for name in outer.names)
    values = Values(texts, outer) if texts is not None and decoded else None
    size = integer(options.get("batchBytes", str(BATCH_BYTES)), "batchBytes")
    if not 1 <= size <= 1 << 30:
        raise InvalidArgument(f"batchBytes={size} must be 1 to {1 << 30}")
    return Reading(
        outer if values is None else values.inner,
        bounds,
        permissive=choice(options, "mode", ("failfast", "permissive"), "failfast") == "permissive",
        check=choice(options, "check", ("true", "false"), "true") == "true",
        batch_bytes=size,
        fail_if_deleted=choice(options, "failOnDataLoss", ("true", "false"), str(fail_if_deleted).lower()) == "true",
        lossy=options.get("failOnDataLoss", "").lower() == "false",
        values=values,
    )


class Part(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[Range]) -> None:
        super().__init__(None)
        self.ranges = ranges


def planned(spans: Sequence[tuple[Place, int, int]], options: Mapping[str, str], how: Reading) -> list[InputPartition]:
    """Cut spans (place, start, end) into tasks of about equal size."""

    def pieces(most_bytes: int) -> Iterator[Range]:
        for place, start, end in spans:
            yield from place.ranges(
                start, end, how.bounds, most_bytes,
                log=how.needs_log, fail_if_deleted=how.fail_if_deleted, lossy=how.lossy, permissive=how.permissive,
            )  # fmt: skip

    if how.lossy:
        for place, start, end in spans:
            log_skipped(place, start, end)
    # Two passes, since the size of a task depends on the total; the second finds sealed segments in the cache.
    most = partition_bytes(options, sum(piece.size for piece in pieces(1 << 62)))
    return list(plan(pieces(max(1, most // PIECES)), most))


def plan(ranges: Iterable[Range], most_bytes: int) -> list[Part]:
    """Join ranges into tasks of about ``most_bytes``; adjacent ranges become one."""
    parts: list[Part] = []
    reached, number = 0, -1
    for piece in ranges:
        middle = (reached + piece.size // 2) // most_bytes  # by the running sum, so that errors do not add up
        reached += piece.size
        if middle != number:
            parts.append(Part([]))
            number = middle
        taken = parts[-1].ranges
        if taken and (taken[-1].place, taken[-1].end) == (piece.place, piece.start):
            joined = taken.pop()
            taken.append(Range(piece.place, piece.journal, joined.start, piece.end, joined.size + piece.size))
        else:
            taken.append(piece)
        if len(parts) > MAX_PARTITIONS:
            raise InvalidArgument(f"more than {MAX_PARTITIONS} tasks: raise partitionBytes above {most_bytes}")
    return parts


def partition_bytes(options: Mapping[str, str], total_bytes: int) -> int:
    """How much one task reads: at most the option's value, or such that every core gets an equal share."""
    if "partitionBytes" in options:
        most = integer(options["partitionBytes"], "partitionBytes")
        if most < 1:
            raise InvalidArgument(f"partitionBytes={most} must be 1 or more")
        return max(1, _even_size(total_bytes, most, 1))
    return max(LEAST_PARTITION_BYTES, _even_size(total_bytes, PARTITION_BYTES, os.cpu_count() or 1))


def _even_size(total: int, most: int, multiple: int) -> int:
    """The size of a part if ``total`` is divided evenly into a multiple of ``multiple`` parts, none above ``most``."""
    rounds = max(1, -(-total // (most * multiple)))
    return -(-total // (rounds * multiple))


def read_part(part: InputPartition, how: Reading) -> Iterator[pyarrow.RecordBatch]:
    """The batches of one task."""
    place: Place | None = None
    before: Range | None = None
    for piece in getattr(part, "ranges", ()):
        if place is None or before is None or (before.place, before.journal) != (piece.place, piece.journal):
            place = open_range(piece)  # one for all ranges of a journal: it lists the directory once
        before = piece
        batches = place.batches(piece.start, piece.end, how)
        values = how.values
        yield from batches if values is None else (values.extend(piece.journal, batch) for batch in batches)


class JournalReader(DataSourceReader):
    """Plans and reads a batch query."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.options = folded(options)
        check_options(self.options)
        check_batch_options(self.options)
        self.bounds = from_options(self.options)
        self.how = reading(self.options, schema, self.bounds)
        self.start = max(1, self.bounds.positions[0]) if "startPosition" in self.options else None
        self.places = resolve(self.options)
        self.ends = _ends(self.options)
        if choice(self.options, "pushdown", ("true", "false"), "false") == "true":
            self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        opened = open_places(self.places)
        if gone := (self.ends or {}).keys() - {place.uuid for place in opened}:
            raise StateError(
                f"journal {min(gone)} was deleted or created anew since this frame was loaded; load the frame again"
            )
        start = self.start if self.how.fail_if_deleted else None
        spans = [(place, place.first if start is None else start, self._end(place)) for place in opened]
        return planned(spans, self.options, self.how) or [Part([])]

    def _end(self, place: Place) -> int:
        """The end of this frame: as recorded when it was loaded, or now. A journal created later is not part of it."""
        return place.frontier if self.ends is None else min(place.frontier, self.ends.get(place.uuid, 0))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_part(partition, self.how)


def _ends(options: Mapping[str, str]) -> dict[str, int] | None:
    """The option ``ends`` (see ``relation``): the position after the last one of each journal."""
    if "ends" not in options:
        return None
    try:
        return {str(uuid): int(end) for uuid, end in json.loads(options["ends"]).items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(f"ends={options['ends']!r} is not of the form {{journal UUID: position}}") from None


class _PushFilters:
    """Stands in for ``pushFilters`` when the option ``pushdown`` asks for it.

    Frames of ``session()`` ask for it, since each of their scans has a source of its own (see ``relation``); in any
    other session such a frame must serve one query only. It is an object and not a method, because Spark refuses a
    reader that overrides ``pushFilters`` while push-down is off; it recognises the default by its ``__func__``.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: JournalReader) -> None:
        self.reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        reader = self.reader
        for filter_ in filters:
            reader.bounds = push(reader.bounds, filter_)
        reader.how = replace(reader.how, bounds=reader.bounds)
        return filters
