"""One task's work: read a range of positions as Arrow, sort it by day and topic, write a Parquet file a day.

It runs on executors (or in a thread of the driver) and commits nothing: it returns a description of each file, and how
many entries the journal's index has in the range. File names contain a UUID, so an attempt that Spark runs twice only
leaves a file that no version names. Memory is bounded: Arrow's offsets of binary columns end at 2 GiB.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from penstock.errors import CorruptionError, StateError
from penstock.spark.bounds import Bounds
from penstock.spark.executor import open_range
from penstock.spark.lake import schema
from penstock.spark.lake.store import LOG, Store, entry_name
from penstock.spark.places import DirectoryPlace, Place, Range, Reading

Array = numpy.ndarray[Any, Any]
GROUP_ROWS = 65_536
BATCH_BYTES = 16 << 20
HELD_BYTES = 512 << 20
FEW_TOPICS = 1 << 16
_POSITION = pyarrow.schema([("position", pyarrow.int64())])
_DICTIONARY = ["topic", "journal", "key", "vchan_id", "properties.key_value.key", "properties.key_value.value"]
_MEASURED = [name for name in schema.SCHEMA.names if name not in ("payload", "properties")]


@dataclass(frozen=True, slots=True)
class File:
    """A file that a task wrote, as the log will name it."""

    name: str
    size: int
    rows: int
    day: str
    payload_bytes: int
    statistics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that tasks need to know; task ``number`` takes ``ranges[number]``."""

    store: Store
    version: int  # the table's version, as the driver sees it
    ranges: tuple[Range, ...]
    bounds: Bounds
    lossy: bool = False  # a segment that is missing, or that retention deletes meanwhile, is skipped

    def __call__(self, number: int) -> dict[str, Any]:
        """Write one range; gives the files, the entries of the index, the node and what retention had deleted."""
        check_sees(self.store, self.version)
        piece = self.ranges[number]
        place = open_range(piece)
        reading = Reading(
            schema.READ, self.bounds, batch_bytes=BATCH_BYTES, fail_if_deleted=not self.lossy, lossy=self.lossy
        )
        positions: list[Array] = []
        found = write(self.store, _noting(place.batches(piece.start, piece.end, reading), positions), piece.journal)
        deleted = list(place.directory.deleted) if isinstance(place, DirectoryPlace) else []
        entries = _entries(place, piece, reading, positions)
        files = [asdict(file) for file in found]
        return {"node": node(), "number": number, "entries": entries, "files": files, "deleted": deleted}


def node() -> str:
    """This machine's name, for error messages."""
    return os.environ.get("SPARK_LOCAL_HOSTNAME") or socket.gethostname()


def check_sees(where: Store, version: int) -> None:
    """Raise ``StateError`` if this node's directory of the same name is not the driver's."""
    path = where.path
    if path is not None and not (path / LOG / entry_name(version)).exists():
        raise StateError(
            f"node {node()} does not see the lake {path} as the driver does: name a directory that every node mounts, "
            "or an object store such as s3://"
        )


def _noting(batches: Iterable[pyarrow.RecordBatch], positions: list[Array]) -> Iterator[pyarrow.RecordBatch]:
    for batch in batches:
        positions.append(batch.column("position").to_numpy())
        yield batch


def _entries(place: Place, piece: Range, reading: Reading, read: Sequence[Array]) -> int:
    """How many entries the index has, counted independently of the read; a broker has already checked its own.

    Where positions may be lost, retention may have deleted some since they were read: those count as they were read.
    """
    rows = sum(len(part) for part in read)
    if not isinstance(place, DirectoryPlace):
        return rows
    batches = place.batches(piece.start, piece.end, replace(reading, schema=_POSITION))
    index = [batch.column("position").to_numpy() for batch in batches]
    first = place.directory.segments()[0].first if reading.lossy else 0
    return sum(int((part >= first).sum()) for part in index) + sum(int((part < first).sum()) for part in read)


def write(where: Store, batches: Iterable[pyarrow.RecordBatch], journal: str) -> list[File]:
    """Write batches, which come in order of position, as files."""
    written = []
    for held in _groups(batches):
        table = pyarrow.Table.from_batches(held).combine_chunks()
        column = pyarrow.DictionaryArray.from_arrays(numpy.zeros(table.num_rows, numpy.int8), [journal])
        table = table.append_column("journal", column).select(schema.SCHEMA.names)
        written += [write_file(where, part, day) for day, part in sorted_parts(table)]
    return written


def _groups(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[list[pyarrow.RecordBatch]]:
    held: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        if held and size + batch.nbytes > HELD_BYTES:
            yield held
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield held


def sorted_parts(table: pyarrow.Table) -> Iterator[tuple[str, pyarrow.Table]]:
    """The table split by day; each day's rows are sorted by topic, stably."""
    if not table.num_rows:
        return
    topics = table["topic"]
    if not pyarrow.types.is_dictionary(topics.type):
        topics = topics.dictionary_encode()
    topics = topics.unify_dictionaries().combine_chunks()
    if isinstance(topics, pyarrow.ChunkedArray):
        topics = topics.chunk(0)
    names = topics.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    ranks = numpy.empty(len(names), numpy.uint16 if len(names) < FEW_TOPICS else numpy.uint32)  # 16 bits sort by radix
    ranks[order] = numpy.arange(len(names))
    keys = ranks[topics.indices.to_numpy()]
    known_days = schema.days(table[schema.STORED_NS].to_numpy())
    table = table.set_column(table.schema.get_field_index("topic"), "topic", topics)
    for day in numpy.unique(known_days).tolist():
        rows = numpy.flatnonzero(known_days == day)
        chosen = rows[numpy.argsort(keys[rows], kind="stable")]
        in_order = len(chosen) == table.num_rows and bool((numpy.diff(chosen) > 0).all())
        yield schema.day_text(day), table if in_order else table.take(pyarrow.array(chosen))


def read_rows(where: Store, name: str, columns: Sequence[str], journal: str, start: int, end: int) -> pyarrow.Table:
    """These columns of a file's rows of a journal, from position ``start`` to ``end - 1``."""
    import pyarrow.dataset

    key, position = pyarrow.dataset.field("journal"), pyarrow.dataset.field("position")
    # By our types: other programs write texts as string_view, which Arrow cannot compare with a string.
    file = pyarrow.dataset.dataset(name, schema.SCHEMA, format="parquet", filesystem=where.filesystem())
    return file.to_table(list(columns), filter=(key == journal) & (position >= start) & (position < end))


def read_parts(where: Store, name: str) -> Iterator[pyarrow.RecordBatch]:
    """A file's rows, each page compared with its checksum; ``CorruptionError`` names the file.

    Without that most flipped bits would be read as other values: neither Parquet nor Zstandard notices them.
    """
    try:
        with (
            where.filesystem().open_input_file(name) as opened,
            pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True) as file,
        ):
            yield from file.iter_batches(GROUP_ROWS)
    except FileNotFoundError:  # vacuum took it: no damage
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptionError(f"{name} is damaged: {error}", name) from None


def write_file(where: Store, table: pyarrow.Table, day: str) -> File:
    """One file of the lake."""
    name = f"date={day}/{where.prefix}{uuid.uuid4().hex}.parquet"
    with where.create(name) as stream:
        with pyarrow.parquet.ParquetWriter(
            stream, table.schema, compression="zstd", compression_level=1, store_schema=False,
            use_dictionary=_DICTIONARY, write_statistics=_MEASURED, write_page_checksum=True,
        ) as writer:  # fmt: skip
            writer.write_table(table, row_group_size=GROUP_ROWS)
        size = stream.tell()
    lengths = pyarrow.compute.sum(pyarrow.compute.binary_length(table["payload"])).as_py()
    return File(name, int(size), table.num_rows, day, int(lengths or 0), schema.statistics(table))

