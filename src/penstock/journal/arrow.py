"""Messages as Arrow record batches, gathered from index and log without a loop over messages. numpy and pyarrow alone.

One thread at a time per ``Directory``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy
import pyarrow
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, StateError, nearest
from penstock.journal import layout
from penstock.journal.disk import LISTINGS
from penstock.journal.format import HEAD
from penstock.journal.stretches import stretches

if TYPE_CHECKING:
    from penstock.journal.format import Directory, Entries, Segment

TYPES: Final[dict[str, Any]] = {
    "position": pyarrow.int64(),
    "ordinal": pyarrow.int64(),
    "timestamp_ns": pyarrow.int64(),
    "stored_ns": pyarrow.int64(),
    "timestamp": pyarrow.timestamp("us", "UTC"),
    "topic": pyarrow.string(),
    "size": pyarrow.int64(),
    "data": pyarrow.binary(),
    "message_id": pyarrow.string(),
    "key": pyarrow.string(),
    "properties": pyarrow.map_(pyarrow.string(), pyarrow.string()),
}
MOST: Final = (1 << 64) - 1
DEFAULT: Final = ("position", "topic", "ordinal", "timestamp_ns", "data")
_FROM_RECORD = ("data", "message_id", "key", "properties")


def schema(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """The columns' types, in the order asked for."""
    chosen = DEFAULT if columns is None else columns
    for name in chosen:
        if name not in TYPES:
            raise InvalidArgument(f"column {name!r} is not known; {nearest(name, TYPES)}")
    return pyarrow.schema([(name, TYPES[name]) for name in chosen])


def record_batches(
    directory: Directory,
    start: int | None,
    end: int | None,
    columns: Sequence[str] | None,
    topics: Iterable[str] | None,
    rows: int,
    size: int,
    check: bool,
) -> Iterator[pyarrow.RecordBatch]:
    """See ``Directory.batches``."""
    wanted = schema(columns)
    if rows < 1 or size < 1:
        raise InvalidArgument(f"rows={rows} and bytes={size} must be at least 1")
    at = directory.first if start is None else start
    for _ in range(LISTINGS):
        try:
            for batch, following in _batches(directory, at, end, wanted, topics, rows, size, check):
                yield batch
                at = following
            return
        except FileNotFoundError:  # retention or compaction took a segment: go on with what there is
            directory.refresh()
    raise StateError(f"the segments of {directory.path} go faster than they can be read")


def _batches(
    directory: Directory,
    start: int,
    end: int | None,
    wanted: pyarrow.Schema,
    topics: Iterable[str] | None,
    rows: int,
    size: int,
    check: bool,
) -> Iterator[tuple[pyarrow.RecordBatch, int]]:
    """Batches, and the position after each."""
    names = directory.topics()
    for segment, entries in directory.entries(start, end, topics=topics):
        if int(entries["topic"].max()) > max(names, default=0):
            names = directory.topics()
        for part in _parts(entries, rows, size):
            yield _batch(segment, part, wanted, names, check), int(part["position"][-1]) + 1


def _parts(entries: Entries, rows: int, size: int) -> Iterator[Entries]:
    """Slices of at most so many rows and bytes of log; at least one row each."""
    ends = entries["offset"] + entries["length"]
    at = 0
    while at < len(entries):
        # Of the array's own type, or all of it would be converted. A damaged index may say anything; `read` tells it.
        limit = numpy.uint64(min(int(ends[at]) + size, MOST))
        stop = min(at + rows, int(ends.searchsorted(limit, side="right")))
        stop = max(stop, at + 1)
        yield entries[at:stop]
        at = stop


def _batch(
    segment: Segment, entries: Entries, wanted: pyarrow.Schema, names: dict[int, str], check: bool
) -> pyarrow.RecordBatch:
    arrays: dict[str, Any] = {}
    if any(name in _FROM_RECORD for name in wanted.names):
        data, begin = segment.read(entries, check=check)
        arrays = _from_records(entries, data, begin, wanted.names)
    for name in wanted.names:
        if name not in arrays:
            arrays[name] = _from_index(entries, name, names)
    return pyarrow.record_batch([arrays[name] for name in wanted.names], schema=wanted)


def _from_index(entries: Entries, name: str, names: dict[int, str]) -> Any:
    if name == "topic":
        return _topics(entries["topic"], names)
    if name == "timestamp":
        return pyarrow.array(entries["timestamp_ns"] // 1000).cast(TYPES["timestamp"])
    field = "length" if name == "size" else name
    return pyarrow.array(entries[field].astype(numpy.int64))


def _topics(numbers: NDArray[numpy.uint32], names: dict[int, str]) -> Any:
    if (numbers == numbers[0]).all():
        number = int(numbers[0])
        return pyarrow.repeat(names.get(number, f"unknown#{number}"), len(numbers))
    known, codes = numpy.unique(numbers, return_inverse=True)
    texts = pyarrow.array([names.get(number, f"unknown#{number}") for number in known.tolist()], pyarrow.string())
    return texts.take(pyarrow.array(codes.astype(numpy.int64)))


def _from_records(entries: Entries, data: NDArray[numpy.uint8], begin: int, wanted: Sequence[str]) -> dict[str, Any]:
    starts = entries["offset"].astype(numpy.int64) - begin
    lengths = entries["length"].astype(numpy.int64)
    found: dict[str, Any] = {}
    if "data" in wanted:
        found["data"] = stretches(data, starts + HEAD, lengths)
    if any(name in wanted for name in ("message_id", "key", "properties")):
        halves = data[: len(data) // 2 * 2].view("<u2")
        properties = data[: len(data) // 4 * 4].view("<u4")[(starts + 20) // 4].astype(numpy.int64)
        identities = halves[(starts + 10) // 2].astype(numpy.int64)
        keys = halves[(starts + 12) // 2].astype(numpy.int64)
        at = starts + HEAD + lengths
        if "properties" in wanted:
            found["properties"] = _maps(stretches(data, at, properties))
        at = at + properties
        if "message_id" in wanted:
            found["message_id"] = _text(stretches(data, at, identities))
        if "key" in wanted:
            found["key"] = _text(stretches(data, at + identities, keys))
    return found


def _text(values: Any) -> Any:
    """Bytes that the writer made of text, taken as text again."""
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers(), offset=values.offset)


def _maps(encoded: Any) -> Any:
    """Properties are rare and small: decoded one by one, the empty ones without a look."""
    values = [list(layout.decode_properties(text).items()) if text else [] for text in encoded.to_pylist()]
    return pyarrow.array(values, TYPES["properties"])
