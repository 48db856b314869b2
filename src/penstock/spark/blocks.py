"""Rows encoded for a journal or broker as ranges: an index of fixed width, and the bytes it points to.

The same form as a broker's range fetch (docs/formats.md), made of Arrow columns without a loop over rows: executors
send it to a broker, the driver stages it in a journal. Needs numpy and pyarrow only; a function here may run in any
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pyarrow
import pyarrow.compute

from penstock.broker.ranges import ENTRY_FIELDS
from penstock.errors import InvalidArgument
from penstock.journal import layout
from penstock.spark import rows

SHAPE = pyarrow.schema(
    [
        ("topic", pyarrow.string()),
        ("payload", pyarrow.binary()),
        ("timestamp_ns", pyarrow.int64()),
        ("properties", pyarrow.map_(pyarrow.string(), pyarrow.string())),
        ("message_id", pyarrow.string()),
        ("key", pyarrow.string()),
    ]
)
BLOCK_BYTES, BLOCK_ROWS = 2 << 20, 8192
MAX_NAME_BYTES = 65_535  # the longest message id or key
ENTRY = numpy.dtype(ENTRY_FIELDS)


@dataclass(frozen=True, slots=True)
class Block:
    """Messages: the names of their topics by number, the index, the bytes."""

    topics: list[str]
    index: bytes
    data: Any


def check_nulls(topic: pyarrow.Array, payload: pyarrow.Array) -> None:
    """Raise ``InvalidArgument`` for rows without a topic or a payload: empty bytes would be another message."""
    if topic.null_count:
        raise InvalidArgument(f"{topic.null_count} rows have no topic")
    if payload.null_count:
        raise InvalidArgument(
            f"{payload.null_count} rows have a null payload, as damaged messages have that were read with "
            "mode=permissive: leave them out (frame.where('payload is not null')), or give them one"
        )


def encode(batch: pyarrow.RecordBatch, own: Collection[str] | None = None) -> Iterator[Block]:
    """Rows of ``SHAPE`` in blocks that a broker takes.

    ``own``: properties that the receiver sets itself; they are left out, and others that begin with ``$`` are refused.
    """
    if not batch.schema.equals(SHAPE):
        found = ", ".join(batch.schema.names)
        raise InvalidArgument(f"staged rows have the columns {', '.join(SHAPE.names)} and their types, not {found}")
    topic, payload, time_ns, properties, message_id, key = batch.columns
    check_nulls(topic, payload)
    parts = [_bytes(payload), encode_properties(properties, own), _bytes(message_id), _bytes(key)]
    sizes = [pyarrow.compute.binary_length(part).to_numpy(zero_copy_only=False).astype(numpy.int64) for part in parts]
    for name, lengths in (("message_id", sizes[2]), ("key", sizes[3])):
        if lengths.max(initial=0) > MAX_NAME_BYTES:
            raise InvalidArgument(f"{name} has at most {MAX_NAME_BYTES} bytes, not {lengths.max()}")
    if pyarrow.compute.any(pyarrow.compute.equal(time_ns, layout.TIME_NOW)).as_py():
        raise InvalidArgument(f"timestamp_ns={layout.TIME_NOW} is no time; leave it null for the time of storing")
    times = pyarrow.compute.fill_null(time_ns, layout.TIME_NOW).to_numpy()
    row_sizes = sum(sizes[1:], sizes[0])
    for low, high in rows.cuts(row_sizes, ENTRY.itemsize, BLOCK_BYTES, BLOCK_ROWS):
        names = topic[low:high].dictionary_encode()
        index = numpy.zeros(high - low, ENTRY)
        index["position"] = -1
        index["timestamp_ns"] = times[low:high]
        index["offset"][1:] = numpy.cumsum(row_sizes[low : high - 1])
        index["topic"] = names.indices.to_numpy()
        lengths = ("length", "properties_length", "message_id_length", "key_length")
        for field, size in zip(lengths, sizes, strict=True):
            index[field] = size[low:high]
        yield Block(names.dictionary.to_pylist(), index.tobytes(), _interleaved([part[low:high] for part in parts]))


def _bytes(column: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.compute.fill_null(column.cast(pyarrow.binary()), b"")


def _interleaved(parts: list[pyarrow.Array]) -> Any:
    """The bytes of all parts of the first row, then of the second, and so on."""
    there = [part for part in parts if _edges(part)[0] != _edges(part)[-1]]
    if not there:
        return b""
    joined = there[0] if len(there) == 1 else pyarrow.compute.binary_join_element_wise(*there, b"")
    edges = _edges(joined)
    return memoryview(joined.buffers()[2])[int(edges[0]) : int(edges[-1])]


def _edges(values: pyarrow.Array) -> Any:
    """Where the values of a binary array begin in its buffer, and where the last one ends."""
    return numpy.frombuffer(values.buffers()[1], numpy.int32)[values.offset : values.offset + len(values) + 1]


def encode_properties(column: pyarrow.Array, own: Collection[str] | None = None) -> pyarrow.Array:
    """A map array in the form that a journal stores: key NUL value NUL ..., empty if there are none."""
    count = len(column)
    if column.null_count:
        column = pyarrow.compute.if_else(column.is_valid(), column, pyarrow.scalar([], column.type))
    edges = column.offsets.to_numpy()[: count + 1]
    keys, items = column.keys, column.items  # of the whole buffer: a sliced column begins somewhere inside
    low, high = int(edges[0]), int(edges[-1])
    keys, items, edges = keys[low:high], items[low:high], edges - low
    if items.null_count:
        raise InvalidArgument(f"{items.null_count} properties have no value; leave them out or make them ''")
    for texts in (keys, items):
        if pyarrow.compute.any(pyarrow.compute.match_substring(texts, "\0")).as_py():
            raise InvalidArgument("a property has a NUL in it")
    if own is not None and len(keys):
        keys, items, edges = _without_own(keys, items, edges, own)
    words = [keys.cast(pyarrow.binary()), items.cast(pyarrow.binary()), b""]
    pairs = pyarrow.compute.binary_join_element_wise(*words, b"\0")
    offsets = pyarrow.py_buffer(numpy.ascontiguousarray(_edges(pairs)[edges], numpy.int32))
    return pyarrow.Array.from_buffers(pyarrow.binary(), count, [None, offsets, pairs.buffers()[2]])


def _without_own(keys: Any, items: Any, edges: Any, own: Collection[str]) -> tuple[Any, Any, Any]:
    """Remove the receiver's own properties; refuse others that begin with ``$``, which is reserved for it."""
    marked = pyarrow.compute.starts_with(keys, "$")
    if not pyarrow.compute.any(marked).as_py():
        return keys, items, edges
    theirs = pyarrow.compute.is_in(keys, pyarrow.array(sorted(own), keys.type))
    wrong = keys.filter(pyarrow.compute.and_not(marked, theirs))
    if len(wrong):
        raise InvalidArgument(f"property {wrong[0].as_py()!r}: names that begin with $ are the broker's own")
    kept = pyarrow.compute.invert(theirs)
    reached = numpy.concatenate([[0], numpy.cumsum(kept.to_numpy(zero_copy_only=False))])
    return keys.filter(kept), items.filter(kept), reached[edges]
