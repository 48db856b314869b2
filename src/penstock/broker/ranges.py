"""Range: many messages as an index of fixed width and the bytes that it describes (docs/formats.md, "Range fetch").

FETCH returns one, LOAD sends one. Pure Python; numpy and pyarrow are needed only for columns. Everything in a range is
checked before it is used: ``ProtocolError`` says what is wrong. One thread at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.errors import InvalidArgument, ProtocolError, nearest
from penstock.journal.layout import decode_properties

#: position, ordinal, timestamp_ns, offset, lengths of data, topic, lengths of properties, message id, key
ENTRY = struct.Struct("<qQqQIIIHH")
ENTRY_FIELDS = [
    ("position", "<i8"), ("ordinal", "<u8"), ("timestamp_ns", "<i8"), ("offset", "<u8"), ("length", "<u4"),
    ("topic", "<u4"), ("properties_length", "<u4"), ("message_id_length", "<u2"), ("key_length", "<u2"),
]  # fmt: skip
STORED_BYTES = 8  # the time of storing of one message, if it was requested
COLUMNS = ("position", "topic", "ordinal", "timestamp_ns", "payload")
MORE_COLUMNS = ("size", "message_id", "key", "stored_ns")


class Fetched(NamedTuple):
    """One message of a range."""

    position: int
    topic: str
    ordinal: int
    timestamp_ns: int
    payload: bytes
    properties: dict[str, str]
    message_id: str | None = None
    key: str | None = None
    stored_ns: int | None = None  # None if it was not requested


class Range:
    """A part of a journal as a broker sent it."""

    def __init__(self, head: Any, body: memoryview) -> None:
        try:
            self.count: int = non_negative_int(head["count"])
            self.next: int = non_negative_int(head["next"])  #: the position to continue from
            self.first: int = non_negative_int(head["first"])  #: least position kept
            self.frontier: int = non_negative_int(head["frontier"])
            self.journal: str = str(head["journal"])
            self.topics: dict[int, str] = topic_names(head)
            self.has_stored = head.get("stored") is True
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the head of a range is not one: {str(error)[:100]}") from None
        index_end = self.count * ENTRY.size
        stored_end = index_end + self.count * STORED_BYTES * self.has_stored
        if stored_end > len(body):
            raise ProtocolError(f"a range of {self.count} messages has {len(body)} bytes")
        self.index = body[:index_end]
        self.stored = body[index_end:stored_end]
        self.payload = body[stored_end:]
        self._entries: Any = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Fetched]:
        entries = ENTRY.iter_unpack(self.index)
        times = struct.unpack(f"<{self.count}q", self.stored) if self.has_stored else (None,) * self.count
        for entry, stored_ns in zip(entries, times, strict=True):
            position, ordinal, timestamp_ns, offset, length, topic, *sizes = entry
            if offset + length + sum(sizes) > len(self.payload) or topic not in self.topics:
                raise _protocol_error()
            at, parts = offset, []
            for size in (length, *sizes):
                parts.append(bytes(self.payload[at : at + size]))
                at += size
            data, encoded, message_id, key = parts
            name, key_text = (part.decode(errors="replace") or None for part in (message_id, key))
            properties = decode_properties(encoded) if encoded else {}
            where = (position, self.topics[topic], ordinal, timestamp_ns)
            yield Fetched(*where, data, properties, name, key_text, stored_ns)

    def entries(self) -> Any:
        """The index as a numpy array of records, each of which lies inside the payload, after the one before.

        The records have a field ``stored_ns`` if the times of storing were asked for.
        """
        if self._entries is None:
            import numpy

            found = numpy.frombuffer(self.index, numpy.dtype(ENTRY_FIELDS))
            size = numpy.uint64(len(self.payload))
            near = numpy.minimum(found["offset"], size + numpy.uint64(1)).astype("i8")  # no sum can overflow
            lengths = ("length", "properties_length", "message_id_length", "key_length")
            ends = near + sum(found[name].astype("i8") for name in lengths)
            known = numpy.isin(found["topic"], numpy.array(list(self.topics), "u4"))
            if (ends > len(self.payload)).any() or (near[1:] < ends[:-1]).any() or not known.all():
                raise _protocol_error()
            self._entries = self._with_stored(found) if self.has_stored else found
        return self._entries

    def _with_stored(self, found: Any) -> Any:
        import numpy

        made = numpy.empty(len(found), [*ENTRY_FIELDS, ("stored_ns", "<i8")])
        for name in found.dtype.names:
            made[name] = found[name]
        made["stored_ns"] = numpy.frombuffer(self.stored, "<i8")
        return made

    def cut(self, end: int) -> None:
        """Remove the messages at position ``end`` and after."""
        while self.count and self.last >= end:
            self.count -= 1
        self.index = self.index[: self.count * ENTRY.size]
        self.stored = self.stored[: self.count * STORED_BYTES]
        self.next = end
        self._entries = None

    @property
    def last(self) -> int:
        """The position of the last message; there is one."""
        return int(ENTRY.unpack_from(self.index, (self.count - 1) * ENTRY.size)[0])

    def record_batch(self, columns: Sequence[str] = COLUMNS) -> Any:
        """The range as an Arrow record batch, without a loop over messages."""
        import pyarrow

        for name in columns:
            if name not in (*COLUMNS, *MORE_COLUMNS):
                raise InvalidArgument(f"column {name!r} is not known; {nearest(name, (*COLUMNS, *MORE_COLUMNS))}")
            if name == "stored_ns" and not self.has_stored:
                raise InvalidArgument("stored_ns was not fetched: fetch(..., stored=True)")
        return pyarrow.record_batch([self._column(name) for name in columns], names=list(columns))

    def _column(self, name: str) -> Any:
        import numpy
        import pyarrow

        from penstock.journal.stretches import stretches, texts

        entries = self.entries()
        if name in ("payload", "message_id", "key"):
            data = numpy.frombuffer(self.payload, "u1")
            at = entries["offset"].astype("i8")
            if name == "payload":
                return stretches(data, at, entries["length"].astype("i8"))
            at = at + entries["length"] + entries["properties_length"]
            if name == "key":
                at = at + entries["message_id_length"]
            return texts(data, at, entries[f"{name}_length"].astype("i8"))
        if name == "topic":
            known, codes = numpy.unique(entries["topic"], return_inverse=True)
            names = pyarrow.array([self.topics[int(number)] for number in known], pyarrow.string())
            return names.take(pyarrow.array(codes.astype("i8")))
        return pyarrow.array(entries["length" if name == "size" else name].astype("i8"))


def decode_range(data: bytes) -> Range:
    """Decode the data of FETCH's answer."""
    head, newline, _ = data.partition(b"\n")
    try:
        fields = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the head of a range is no JSON: {str(error)[:100]}") from None
    return Range(fields, memoryview(data)[len(head) + len(newline) :])


def encode_entry(
    offset: int, length: int, properties: int, message_id: int, key: int, topic: int = 0, *, time_ns: int = 0
) -> bytes:
    """The index entry of a message to be staged; the broker assigns position and ordinal. ``time_ns`` counts only
    where the head says that times do.
    """
    if message_id > 65535 or key > 65535:
        raise InvalidArgument("a message id and a key have at most 65535 bytes")
    return ENTRY.pack(-1, 0, time_ns, offset, length, topic, properties, message_id, key)


def encode_head(count: int, topics: Sequence[str], *, times: bool = False) -> bytes:
    """The head of a range to be staged; a topic's number is its index. ``times``: use the times of the index."""
    names = {str(number): name for number, name in enumerate(topics)}
    head = {"count": count, "topics": names, **({"times": True} if times else {})}
    return json.dumps(head, ensure_ascii=False).encode() + b"\n"


def topic_names(head: Any) -> dict[int, str]:
    """The names of the topic numbers in a head."""
    found = {int(number): name for number, name in head["topics"].items()}
    if any(not 0 <= number < 1 << 32 or not isinstance(name, str) for number, name in found.items()):
        raise ValueError("topics are numbers and names")
    return found


def non_negative_int(value: Any) -> int:
    """A number from 0 to the largest position; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no number of messages")
    return value


def _protocol_error() -> ProtocolError:
    return ProtocolError("a message of the range lies outside of its bytes, over another one or in no topic")
