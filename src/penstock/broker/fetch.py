"""Reading ranges and staging messages in bulk, without native code: what Spark's executors use.

Python alone; numpy and pyarrow only where columns are asked for. A fetched range is an index of fixed width and the
bytes after it (docs/formats.md, "Range fetch"), so that columns come out of it without a loop over messages.

    with RangeClient("127.0.0.1", 9876) as client:
        for part in client.ranges(1, client.frontier, topics=["sensors.>"]):
            table = part.record_batch(["position", "topic", "data"])

One thread at a time.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from penstock.broker.words import encode_properties
from penstock.errors import ClosedError, InvalidArgument, ProtocolError, RefusedError, nearest

ENTRY = struct.Struct("<qQqQIIII")  # position, ordinal, timestamp_ns, offset, length, topic, properties length, 0
ENTRY_FIELDS = [
    ("position", "<i8"), ("ordinal", "<u8"), ("timestamp_ns", "<i8"), ("offset", "<u8"), ("length", "<u4"),
    ("topic", "<u4"), ("properties_length", "<u4"), ("reserved", "<u4"),
]  # fmt: skip
COLUMNS = ("position", "topic", "ordinal", "timestamp_ns", "data")
MAX_LINE_BYTES = 65_536


class Fetched(NamedTuple):
    """One message of a range."""

    position: int
    topic: str
    ordinal: int
    timestamp_ns: int
    data: bytes
    properties: dict[str, str]


class Range:
    """A part of the journal as the broker sent it."""

    def __init__(self, head: dict[str, Any], body: memoryview) -> None:
        self.count: int = head["count"]
        self.next: int = head["next"]  #: where to go on from
        self.first: int = head["first"]  #: least position kept
        self.frontier: int = head["frontier"]
        self.journal: str = head["journal"]
        self.topics: dict[int, str] = {int(number): name for number, name in head["topics"].items()}
        self.index = body[: self.count * ENTRY.size]
        self.payload = body[self.count * ENTRY.size :]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Fetched]:
        for position, ordinal, timestamp_ns, offset, length, topic, more, _ in ENTRY.iter_unpack(self.index):
            data = bytes(self.payload[offset : offset + length])
            properties = _properties(bytes(self.payload[offset + length : offset + length + more])) if more else {}
            yield Fetched(position, self.topics.get(topic, ""), ordinal, timestamp_ns, data, properties)

    def entries(self) -> Any:
        """The index as a numpy array of records."""
        import numpy

        return numpy.frombuffer(self.index, numpy.dtype(ENTRY_FIELDS))

    def record_batch(self, columns: Sequence[str] = COLUMNS) -> Any:
        """The range as an Arrow record batch, without a loop over messages."""
        import pyarrow

        for name in columns:
            if name not in (*COLUMNS, "size"):
                raise InvalidArgument(f"column {name!r} is not known; {nearest(name, (*COLUMNS, 'size'))}")
        return pyarrow.record_batch([self._column(name) for name in columns], names=list(columns))

    def _column(self, name: str) -> Any:
        import numpy
        import pyarrow

        entries = self.entries()
        if name == "data":
            return _gather(self.payload, entries["offset"].astype("i8"), entries["length"].astype("i8"))
        if name == "topic":
            known, codes = numpy.unique(entries["topic"], return_inverse=True)
            texts = pyarrow.array([self.topics.get(int(number), "") for number in known], pyarrow.string())
            return texts.take(pyarrow.array(codes.astype("i8")))
        return pyarrow.array(entries["length" if name == "size" else name].astype("i8"))


class RangeClient:
    """A connection for reading by position and for staging."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9876,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 30.0,
    ) -> None:
        sock: socket.socket = socket.create_connection((host, port), timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = tls.wrap_socket(sock, server_hostname=host) if tls is not None else sock
            self._file = self._socket.makefile("rb", 1 << 20)
            hello = "HELLO 1" + (f" token={token}" if token else "")
            answer = self._ask(hello)
        except BaseException:
            sock.close()
            raise
        fields = dict(word.partition("=")[::2] for word in answer.split()[2:])
        self.journal: str = fields["journal"]

    # --- reading

    @property
    def first(self) -> int:
        """The least position kept, now."""
        return self.fetch(1 << 62, 1).first

    @property
    def frontier(self) -> int:
        """The position after the last durable one, now."""
        return self.fetch(1 << 62, 1).frontier

    def fetch(
        self, start: int, most: int = 65_536, *, most_bytes: int = 4 << 20, topics: Iterable[str] | None = None
    ) -> Range:
        """Messages from position ``start`` on; the next call goes on from ``.next``."""
        line = f"FETCH {start} {most} bytes={most_bytes}"
        if topics is not None:
            line += f" topics={','.join(topics)}"
        answer = self._ask(line)
        verb, _, length = answer.partition(" ")
        if verb != "DATA" or not length.isdigit():
            raise ProtocolError(f"the broker did not answer with data but {answer[:100]!r}")
        body = self._read(int(length) + 1)
        head, _, _ = body.partition(b"\n")
        return Range(json.loads(head), memoryview(body)[len(head) + 1 : -1])

    def ranges(
        self, start: int, end: int, *, most_bytes: int = 4 << 20, topics: Iterable[str] | None = None
    ) -> Iterator[Range]:
        """Everything from ``start`` to ``end - 1``, a part at a time."""
        chosen = None if topics is None else list(topics)
        while start < end:
            part = self.fetch(start, min(end - start, 1 << 20), most_bytes=most_bytes, topics=chosen)
            if part.next <= start:
                return
            if part.count and ENTRY.unpack_from(part.index, (part.count - 1) * ENTRY.size)[0] >= end:
                part = _cut(part, end)
            if part.count:
                yield part
            start = part.next

    def hold(self, queue: str, position: int) -> None:
        """Make the queue if need be and put it at ``position``; retention that waits for queues waits for it."""
        self._ask(f"QUEUE {queue} topics=> from_position={position}")

    # --- staging

    def stage(
        self,
        transaction: str,
        topic: str,
        batch: Iterable[bytes],
        *,
        properties: Iterable[Mapping[str, str] | None] | None = None,
    ) -> int:
        """Keep messages (with the properties of each) at the broker until their transaction is committed; how many."""
        head = f"STAGE {transaction} {topic} ".encode()
        count, waiting = 0, 0
        pieces: list[bytes] = []
        size = 0
        pairs = ((data, None) for data in batch) if properties is None else zip(batch, properties, strict=True)
        for data, one in pairs:
            more = encode_properties(one)
            lengths = b"%d+%d\n" % (len(data), len(more)) if more else b"%d\n" % len(data)
            pieces += (head, lengths, data, more, b"\n")
            size += len(data) + len(more) + 64
            waiting += 1
            if size >= 1 << 18:
                count += self._staged(pieces, waiting)
                size = waiting = 0
        return count + (self._staged(pieces, waiting) if waiting else 0)

    def _staged(self, pieces: list[bytes], wanted: int) -> int:
        self._socket.sendall(b"".join(pieces))
        pieces.clear()
        done = 0
        while done < wanted:
            answer = self._answer()
            verb, _, number = answer.partition(" ")
            if verb != "STAGED":
                raise ProtocolError(f"the broker did not answer STAGE but {answer[:100]!r}")
            done += int(number)
        return done

    def commit(self, transaction: str, parts: Iterable[str] = ()) -> tuple[int, int, bool]:
        """Publish what was staged under the id, or under the parts, once per id; (first, last, whether before)."""
        answer = self._ask(" ".join(["COMMIT", transaction, *parts]))
        _, span, *again = answer.split()
        first, _, last = span.partition("-")
        return int(first), int(last), bool(again)

    def abort(self, transaction: str) -> None:
        """Forget what was staged."""
        self._ask(f"ABORT {transaction}")

    # --- lines

    def _ask(self, line: str) -> str:
        self._socket.sendall(line.encode() + b"\n")
        return self._answer()

    def _answer(self) -> str:
        line = b"\n"
        while line == b"\n":  # what follows data
            line = self._file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ClosedError("the broker closed the connection")
        text = line.decode(errors="replace").rstrip("\n")
        if text.startswith("ERR "):
            _, code, reason = text.split(" ", 2)
            raise RefusedError(f"the broker refused: {reason} ({code})")
        return text

    def _read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        if len(data) != count:
            raise ClosedError("the broker closed the connection")
        return data

    def close(self) -> None:
        """Give the connection back."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(part: Range, end: int) -> Range:
    """Without what lies at ``end`` or after it."""
    count = part.count
    while count and ENTRY.unpack_from(part.index, (count - 1) * ENTRY.size)[0] >= end:
        count -= 1
    part.index = part.index[: count * ENTRY.size]
    part.count = count
    part.next = end
    return part


def _properties(encoded: bytes) -> dict[str, str]:
    words = encoded.decode(errors="surrogateescape").split("\0")
    return dict(zip(words[0:-1:2], words[1:-1:2], strict=False))


def _gather(payload: memoryview, starts: Any, lengths: Any) -> Any:
    """Ranges of the payload as an Arrow array: data and what lies between alternate, every second one is taken."""
    import numpy
    import pyarrow

    edges = numpy.empty(2 * len(starts), numpy.int32)
    edges[0::2] = starts
    edges[1::2] = starts + lengths
    if not len(starts):
        return pyarrow.array([], pyarrow.binary())
    buffers = [None, pyarrow.py_buffer(edges), pyarrow.py_buffer(payload)]
    alternating = pyarrow.Array.from_buffers(pyarrow.binary(), len(edges) - 1, buffers)
    return alternating.take(pyarrow.array(numpy.arange(0, len(edges) - 1, 2)))
