"""A stretch of a segment as Arrow batches, without a loop over messages.

Numbers come from the index by column. Payloads, message ids and keys come from the mapped log by one Arrow ``take``
each (``penstock.journal.stretches``). Properties are split at their NULs by numpy. Needs numpy and pyarrow only; a
function here may run in any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import pyarrow

from penstock.errors import CorruptionError
from penstock.journal import layout
from penstock.journal.format import RECORD
from penstock.journal.stretches import stretches, texts

Array = numpy.ndarray[Any, Any]
HEADER_BYTES = layout.RECORD.size
MAX_BATCH_ROWS = 65536
_ROW_BYTES = {"topic": 16, "properties": 16, "message_id": 8, "key": 8, "payload": 4}


def cuts(
    lengths: Array, row_bytes: int, batch_bytes: int, batch_rows: int = MAX_BATCH_ROWS
) -> Iterator[tuple[int, int]]:
    """The indexes at which to cut rows with payloads of ``lengths`` into batches of about ``batch_bytes``."""
    total = numpy.cumsum(lengths.astype(numpy.int64) + row_bytes)
    begin = 0
    while begin < len(lengths):
        reached = int(total[begin - 1]) if begin else 0
        end = int(numpy.searchsorted(total, reached + batch_bytes, side="right"))
        end = min(max(end, begin + 1), begin + batch_rows)
        yield begin, end
        begin = end


def row_bytes(columns: Sequence[str]) -> int:
    """The approximate size of a row besides its payload."""
    return max(1, sum(_ROW_BYTES.get(name, 8) for name in columns))


def batch(
    index: Array,
    log: Array | None,
    topics: Mapping[int, str],
    schema: pyarrow.Schema,
    *,
    journal: str = "",
    damaged: Array | None = None,
) -> pyarrow.RecordBatch:
    """The messages of ``index`` as a batch of ``schema``; ``log`` is the segment's bytes, None if not needed."""
    return IndexedRows(index, log, topics, journal, damaged).batch(schema)


def _exact(values: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    return values if values.type.equals(kind, check_metadata=True) else values.cast(kind)


class IndexedRows:
    """The columns of one batch; intermediate results that several columns need are computed once."""

    def __init__(
        self, index: Array, log: Array | None, topics: Mapping[int, str], journal: str, damaged: Array | None
    ) -> None:
        self.index = index
        self.log = log
        self.topics = topics
        self.journal = journal
        self.damaged = damaged if damaged is not None and damaged.any() else None
        self._extras: tuple[Array, Array, Array] | None = None
        self._split: pyarrow.Array | None = None

    def batch(self, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
        """The columns of ``schema``."""
        arrays = [_exact(getattr(self, "_" + field.name)(), field.type) for field in schema]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)

    def _topic(self) -> pyarrow.Array:
        ids = numpy.ascontiguousarray(self.index["topic"])
        names = [self.topics.get(number) for number in range(max(self.topics, default=0) + 1)]
        known = int(ids.max(initial=0)) < len(names)
        found = pyarrow.array(names, pyarrow.string()).take(pyarrow.array(ids)) if known else None
        if found is None or found.null_count:
            raise CorruptionError(f"the name of a topic is damaged in journal {self.journal}", self.journal)
        return found

    def _whole(self, field: str) -> Array:
        """A field of the index, 0 for damaged messages: what is written of those may point outside of the log."""
        values = self.index[field].astype(numpy.int64)
        return values if self.damaged is None else numpy.where(self.damaged, 0, values)

    def _number(self, field: str) -> pyarrow.Array:
        return pyarrow.array(numpy.ascontiguousarray(self.index[field]).view(numpy.int64))

    def _ordinal(self) -> pyarrow.Array:
        return self._number("ordinal")

    def _position(self) -> pyarrow.Array:
        return self._number("position")

    def _timestamp_ns(self) -> pyarrow.Array:
        return self._number("timestamp_ns")

    def _stored_ns(self) -> pyarrow.Array:
        return self._number("stored_ns")

    def _timestamp(self) -> pyarrow.Array:
        return pyarrow.array(self.index["timestamp_ns"] // 1000).view(pyarrow.timestamp("us", tz="UTC"))

    def _journal(self) -> pyarrow.Array:
        return pyarrow.repeat(pyarrow.scalar(self.journal, pyarrow.string()), len(self.index))

    def _payload(self) -> pyarrow.Array:
        begins = self._whole("offset") + HEADER_BYTES
        return self._without_damaged(stretches(self._log(), begins, self._whole("length")))

    def _message_id(self) -> pyarrow.Array:
        _, identifiers, _ = self._parts()
        return self._text(identifiers)

    def _key(self) -> pyarrow.Array:
        _, _, keys = self._parts()
        return self._text(keys)

    def _properties(self) -> pyarrow.Array:
        if self._split is None and not self._has_extras():
            zeros = pyarrow.array(numpy.zeros(len(self.index) + 1, numpy.int32))
            nothing = pyarrow.nulls(0, pyarrow.string())
            self._split = pyarrow.MapArray.from_arrays(zeros, nothing, nothing)
        if self._split is None:
            extents, _, _ = self._parts()
            begins, sizes = extents
            split = split_properties(stretches(self._log_or_empty(), begins, sizes))
            self._split = split
        return self._split

    def _vchan_id(self) -> pyarrow.Array:
        """The property ``vchan_id`` if a message has one that is a number, else null."""
        if not self._has_extras():
            return pyarrow.nulls(len(self.index), pyarrow.int32())
        found = pyarrow.compute.map_lookup(self._properties(), pyarrow.scalar("vchan_id"), "first")
        good = pyarrow.compute.match_substring_regex(found, r"^-?\d{1,9}$")
        return pyarrow.compute.if_else(good, found, pyarrow.scalar(None, pyarrow.string())).cast(pyarrow.int32())

    def _log(self) -> Array:
        if self.log is None:
            raise AssertionError("a column that is in the log was asked for without the log")
        return self.log

    def _log_or_empty(self) -> Array:
        return self._log() if self._has_extras() else numpy.empty(0, numpy.uint8)

    def _has_extras(self) -> bool:
        return bool(self.index["extra_bytes"].any())

    def _parts(self) -> tuple[Any, Any, Any]:
        """The begins and sizes of each message's properties, message id and key."""
        count = len(self.index)
        if not self._has_extras():
            nothing = (numpy.zeros(count, numpy.int64), numpy.zeros(count, numpy.int64))
            return nothing, nothing, nothing
        offsets = self._whole("offset")
        begins = offsets + HEADER_BYTES + self._whole("length")
        extra = self.index["extra_bytes"].astype(numpy.int64)
        identifier_sizes = self._header(offsets, "id_bytes")
        key_sizes = self._header(offsets, "key_bytes")
        property_sizes = self._header(offsets, "properties_bytes")
        # A damaged header must not move a pointer. The rest is the account that the message id belongs to.
        wrong = property_sizes + identifier_sizes + key_sizes + self._header(offsets, "account_bytes") != extra
        if self.damaged is not None:
            wrong |= self.damaged
        for sizes in (identifier_sizes, key_sizes, property_sizes):
            sizes[wrong | (extra == 0)] = 0
        identifiers = begins + property_sizes
        return (begins, property_sizes), (identifiers, identifier_sizes), (identifiers + identifier_sizes, key_sizes)

    def _header(self, offsets: Array, field: str) -> Array:
        """A field of the headers of the records at ``offsets`` of the log."""
        log = self._log()
        assert RECORD.fields is not None
        kind, place = RECORD.fields[field][:2]
        value = numpy.zeros(len(offsets), numpy.int64)
        for byte in range(kind.itemsize):
            value |= log[offsets + (place + byte)].astype(numpy.int64) << (8 * byte)
        return value

    def _text(self, extents: tuple[Array, Array]) -> pyarrow.Array:
        """The text, or null if its size is 0."""
        return texts(self._log_or_empty(), *extents)

    def _without_damaged(self, values: pyarrow.Array) -> pyarrow.Array:
        if self.damaged is None:
            return values
        return pyarrow.compute.if_else(pyarrow.array(~self.damaged), values, pyarrow.scalar(None, values.type))


class FetchedRows(IndexedRows):
    """Messages that a broker sent: the parts of each are adjacent, without a record header.

    The entries are those of ``penstock.broker.fetch.Range.entries``, which has checked where they point to.
    """

    def __init__(self, entries: Array, data: Array, topics: Mapping[int, str], journal: str) -> None:
        super().__init__(entries, data, topics, journal, None)

    def _topic(self) -> pyarrow.Array:
        numbers = sorted(self.topics)  # a broker's topic numbers may have gaps
        ids = numpy.ascontiguousarray(self.index["topic"])
        places = numpy.searchsorted(numpy.array(numbers, numpy.uint32), ids)
        names = pyarrow.array([self.topics[number] for number in numbers], pyarrow.string())
        return names.take(pyarrow.array(places))

    def _payload(self) -> pyarrow.Array:
        return stretches(
            self._log(), self.index["offset"].astype(numpy.int64), self.index["length"].astype(numpy.int64)
        )

    def _has_extras(self) -> bool:
        lengths = ("properties_length", "message_id_length", "key_length")
        return any(bool(self.index[name].any()) for name in lengths)

    def _parts(self) -> tuple[Any, Any, Any]:
        at = self.index["offset"].astype(numpy.int64) + self.index["length"]
        parts = []
        for name in ("properties_length", "message_id_length", "key_length"):
            sizes = self.index[name].astype(numpy.int64)
            parts.append((at, sizes))
            at = at + sizes
        return parts[0], parts[1], parts[2]


def split_properties(encoded: pyarrow.Array) -> pyarrow.Array:
    """Properties in their encoded form (key NUL value NUL ...) as a map array."""
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    offsets = numpy.frombuffer(encoded.buffers()[1], numpy.int32)[encoded.offset : encoded.offset + len(encoded) + 1]
    values = encoded.buffers()[2]
    data = (
        numpy.frombuffer(values, numpy.uint8)[offsets[0] : offsets[-1]]
        if values is not None
        else numpy.empty(0, numpy.uint8)
    )
    nuls = numpy.flatnonzero(data == 0)
    counts = numpy.searchsorted(nuls, offsets[1:] - offsets[0]) - numpy.searchsorted(nuls, offsets[:-1] - offsets[0])
    if (counts % 2).any() or (len(data) and data[-1] != 0):
        raise ValueError("encoded properties do not come in pairs")
    text_offsets = numpy.concatenate([[0], nuls - numpy.arange(len(nuls))]).astype(numpy.int32)
    buffers = [None, pyarrow.py_buffer(text_offsets), pyarrow.py_buffer(numpy.ascontiguousarray(data[data != 0]))]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(nuls), buffers)
    keys, items = (texts.take(pyarrow.array(numpy.arange(start, len(nuls), 2))) for start in (0, 1))
    entries = numpy.concatenate([[0], numpy.cumsum(counts // 2)]).astype(numpy.int32)
    return pyarrow.MapArray.from_arrays(pyarrow.array(entries), keys, items).cast(kind)
