"""Reading ranges and staging messages in bulk, without native code: what Spark's executors use.

Python alone; numpy and pyarrow only where columns are asked for. Messages come and go as ranges (``ranges.py``), so
that columns come out of them without a loop over messages.

    with RangeClient("127.0.0.1", 9876) as client:
        for part in client.ranges(1, client.frontier, topics=["sensors.>"]):
            table = part.record_batch(["position", "topic", "payload"])

One thread at a time.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from penstock.broker.hosts import connect
from penstock.broker.ranges import ENTRY, Range, decode_range, encode_entry, encode_head
from penstock.broker.words import encode_properties
from penstock.errors import ClosedError, ProtocolError, RefusedError

MAX_LINE_BYTES = 65_536
MAX_DATA_BYTES = (1 << 30) + (128 << 20)  # the largest message of a journal, plus the largest index
MAX_SCHEMAS_BYTES = 64 << 20
STAGE_BYTES, STAGE_MESSAGES = 1 << 20, 8192  # sent at once, roughly


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
        self._hello = "HELLO 1" + (f" token={token}" if token else "")
        self._tls = tls
        self.journal: str = connect(host, port, timeout, self._greet)

    def _greet(self, sock: socket.socket, name: str) -> str:
        """The identity of the store of the broker at this connection."""
        place = f"{name}:{sock.getpeername()[1]}"
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=name)
        self._file = self._socket.makefile("rb", 1 << 20)
        try:
            answer = self._ask(self._hello)
            fields = dict(word.partition("=")[::2] for word in answer.split()[2:])
            if not fields.get("journal"):
                raise ProtocolError(f"what answers at {place} is no broker: {answer[:100]!r}")
            return fields["journal"]
        except BaseException:
            self.close()
            raise

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
        self,
        start: int,
        most: int = 65_536,
        *,
        most_bytes: int = 4 << 20,
        topics: Iterable[str] | None = None,
        queue: str | None = None,
        stored: bool = False,
    ) -> Range:
        """Messages from position ``start`` on, of some topics, or those that get into a queue (dead letters too).

        The next call goes on from ``.next``. ``stored``: with the time at which the broker stored each.
        """
        line = f"FETCH {start} {most} bytes={most_bytes}"
        if topics is not None:
            line += f" topics={','.join(topics)}"
        if queue is not None:
            line += f" queue={queue}"
        if stored:
            line += " stored"
        answer = self._ask(line)
        verb, _, length = answer.partition(" ")
        if verb != "DATA" or not 0 < _number(length) <= MAX_DATA_BYTES:
            raise ProtocolError(f"expected data from the broker, got {answer[:100]!r}")
        part = decode_range(self._read(_number(length)))
        if stored and not part.has_stored:
            raise ProtocolError("the broker did not send the times of storing")
        return part

    def ranges(
        self,
        start: int,
        end: int,
        *,
        most_bytes: int = 4 << 20,
        topics: Iterable[str] | None = None,
        stored: bool = False,
    ) -> Iterator[Range]:
        """Everything from ``start`` to ``end - 1``, one range at a time."""
        chosen = None if topics is None else list(topics)
        while start < end:
            most = min(end - start, 1 << 20)
            part = self.fetch(start, most, most_bytes=most_bytes, topics=chosen, stored=stored)
            if part.next <= start:
                return
            if part.count and part.last >= end:
                part.cut(end)
            if part.count:
                yield part
            start = part.next

    def hold(self, queue: str, position: int) -> None:
        """Create the queue if necessary and move it to ``position``, so that retention by queues keeps what follows."""
        self._ask(f"QUEUE {queue} topics=> from_position={position}")

    def schemas(self, pattern: str = ">") -> dict[str, str]:
        """The text of the newest schema of each described topic that the pattern matches and this client may read."""
        return self._schemas(pattern)[0]

    def schema_versions(self, pattern: str = ">") -> dict[str, str]:
        """The same with all versions, as one text (see ``penstock.types.versions``)."""
        newest, versions = self._schemas(pattern)
        return newest | versions

    def _schemas(self, pattern: str) -> tuple[dict[str, str], dict[str, str]]:
        answer = self._ask(f"SCHEMA {pattern}")
        verb, _, length = answer.partition(" ")
        if verb != "DATA" or not 0 < _number(length) <= MAX_SCHEMAS_BYTES:
            raise ProtocolError(f"expected data from the broker, got {answer[:100]!r}")
        try:
            found = json.loads(self._read(_number(length)))
            newest, versions = (
                {str(topic): str(text) for topic, text in part.items()}
                for part in (found["topics"], found.get("versions", {}))  # older brokers send only the newest
            )
            return newest, versions
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ProtocolError("the broker's schemas are not an object of topics") from None

    # --- staging

    def stage(
        self,
        transaction: str,
        topic: str,
        batch: Iterable[bytes],
        *,
        properties: Iterable[Mapping[str, str] | None] | None = None,
        message_ids: Iterable[str | None] | None = None,
        keys: Iterable[str | None] | None = None,
    ) -> int:
        """Stage messages, with their properties, ids and keys, until their transaction is committed; returns how
        many.
        """
        count = size = 0
        index: list[bytes] = []
        pieces: list[bytes] = []
        details = {"properties": properties, "message_id": message_ids, "key": keys}
        given = {name: values for name, values in details.items() if values is not None}
        for data, *values in zip(batch, *given.values(), strict=True):
            more: dict[str, Any] = dict(zip(given, values, strict=True))
            parts = (
                data,
                encode_properties(more.get("properties")),
                (more.get("message_id") or "").encode(),
                (more.get("key") or "").encode(),
            )
            index.append(encode_entry(size, *(len(part) for part in parts)))
            pieces += parts
            size += sum(len(part) for part in parts)
            if size >= STAGE_BYTES or len(index) >= STAGE_MESSAGES:
                count += self.load(transaction, [topic], b"".join(index), b"".join(pieces))
                size = 0
                index.clear()
                pieces.clear()
        return count + (self.load(transaction, [topic], b"".join(index), b"".join(pieces)) if index else 0)

    def load(self, transaction: str, topics: Sequence[str], index: Any, data: Any, *, times: bool = False) -> int:
        """``stage`` for messages that are a range already: its index (docs/formats.md) and its bytes; returns how many.
        A topic's number is its index in ``topics``. The broker assigns new positions and ordinals, and new times unless
        ``times`` is set.
        """
        count = memoryview(index).nbytes // ENTRY.size
        head = encode_head(count, topics, times=times)
        length = len(head) + memoryview(index).nbytes + memoryview(data).nbytes
        self._send(f"LOAD {transaction} {length}\n".encode() + head, index, data)
        answer = self._answer()
        if answer != f"STAGED {count}":
            raise ProtocolError(f"unexpected answer of the broker to LOAD of {count} messages: {answer[:100]!r}")
        return count

    def commit(self, transaction: str, parts: Iterable[str] = ()) -> tuple[int, int, bool]:
        """Publish what was staged under the id, or under the parts, once per id; (first, last, whether before)."""
        answer = self._ask(" ".join(["COMMIT", transaction, *parts]))
        verb, span, *again = [*answer.split(), "", ""][:3]
        first, _, last = span.partition("-")
        if verb != "COMMITTED":
            raise ProtocolError(f"unexpected answer of the broker to COMMIT: {answer[:100]!r}")
        return _number(first), _number(last), again != [""]

    def abort(self, transaction: str) -> None:
        """Forget what was staged."""
        self._ask(f"ABORT {transaction}")

    # --- lines

    def _ask(self, line: str) -> str:
        self._send(line.encode() + b"\n")
        return self._answer()

    def _send(self, *pieces: Any) -> None:
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except OSError as error:
            raise ClosedError(f"the connection to the broker is lost: {error}") from None

    def _answer(self) -> str:
        line = self._file.readline(MAX_LINE_BYTES)
        if line == b"\n":  # the line end after data
            line = self._file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ClosedError("the broker closed the connection")
        text = line.decode(errors="replace").rstrip("\n")
        if text.startswith("ERR "):
            code, _, reason = text[4:].partition(" ")
            raise RefusedError(f"the broker refused: {reason} ({code})")
        return text

    def _read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        if len(data) != count:
            raise ClosedError("the broker closed the connection")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise ProtocolError(f"the broker answered {text[:40]!r}, which is no number")
    return int(text)
