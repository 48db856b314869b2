"""Messages as Arrow record batches, built from the columns that a reader returns in one pass. Needs only pyarrow and
numpy.

The reader is the native one or its equivalent in Python (``penstock.journal.format``); ``Read`` is the type of their
method ``columns``. May be called by any thread that may use the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy
import pyarrow

from penstock.errors import InvalidArgument, nearest
from penstock.journal import layout

TYPES: Final[dict[str, Any]] = {
    "position": pyarrow.int64(),
    "ordinal": pyarrow.int64(),
    "timestamp_ns": pyarrow.int64(),
    "stored_ns": pyarrow.int64(),
    "timestamp": pyarrow.timestamp("us", "UTC"),
    "topic": pyarrow.string(),
    "size": pyarrow.int64(),
    "payload": pyarrow.binary(),
    "message_id": pyarrow.string(),
    "key": pyarrow.string(),
    "properties": pyarrow.map_(pyarrow.string(), pyarrow.string()),
}
DEFAULT: Final = ("position", "topic", "ordinal", "timestamp_ns", "payload")
_SOURCES: Final = {"timestamp": "timestamp_ns"}  # the reader's name for a column, where it differs

Found = tuple[dict[str, Any], Sequence[str], int, int]
Read = Callable[[int, int, int, int, Any, frozenset[str]], Found]


def schema(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """The columns' types, in the order asked for."""
    chosen = DEFAULT if columns is None else columns
    for name in chosen:
        if name not in TYPES:
            raise InvalidArgument(f"column {name!r} is not known; {nearest(name, TYPES)}")
    return pyarrow.schema([(name, TYPES[name]) for name in chosen])


def record_batches(
    read: Read, start: int, stop: int, columns: Sequence[str] | None, chosen: Any, rows: int, size: int
) -> Iterator[pyarrow.RecordBatch]:
    """The positions from ``start`` up to but without ``stop``. ``chosen``: the reader's filter, None for all."""
    wanted = schema(columns)
    if rows < 1 or size < 1:
        raise InvalidArgument(f"rows={rows} and bytes={size} must be at least 1")
    sources = frozenset(_SOURCES.get(name, name) for name in wanted.names)
    while start < stop:
        found, names, count, following = read(start, stop, rows, size, chosen, sources)
        if count:
            arrays = [_array(name, found[_SOURCES.get(name, name)], names, count) for name in wanted.names]
            yield pyarrow.record_batch(arrays, schema=wanted)
        elif following <= start:
            return
        start = following


def _array(name: str, column: Any, names: Sequence[str], count: int) -> Any:
    if name == "topic":
        return _topics(numpy.frombuffer(column, numpy.uint32), names)
    if name == "properties":
        return _maps(_values(column, pyarrow.binary(), count))
    if isinstance(column, tuple):
        return _values(column, TYPES[name], count)
    numbers = numpy.frombuffer(column, numpy.int64)
    return pyarrow.array(numbers // 1000).cast(TYPES[name]) if name == "timestamp" else pyarrow.array(numbers)


def _values(column: tuple[bytes, bytes], kind: Any, count: int) -> Any:
    return pyarrow.Array.from_buffers(kind, count, [None, *map(pyarrow.py_buffer, column)])


def _topics(numbers: Any, names: Sequence[str]) -> Any:
    if (numbers == numbers[0]).all():
        return pyarrow.repeat(names[int(numbers[0])], len(numbers))
    known, codes = numpy.unique(numbers, return_inverse=True)
    texts = pyarrow.array([names[number] for number in known.tolist()], pyarrow.string())
    return texts.take(pyarrow.array(codes.astype(numpy.int64)))


def _maps(encoded: Any) -> Any:
    """Properties as maps. They are rare and small, so they are decoded one by one, and empty ones skipped."""
    values = [list(layout.decode_properties(text).items()) if text else [] for text in encoded.to_pylist()]
    return pyarrow.array(values, TYPES["properties"])
