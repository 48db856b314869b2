"""The NATS client protocol without I/O: bytes in, events out, and the bytes of what a client sends.

Everything a server can make grow has a bound: a line (``MAX_LINE``) and a message (``MAX_MESSAGE``). What breaks the
protocol is a ``ProtocolError``; after it the parser is not used any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError

MAX_LINE = 1 << 20  # INFO of a large cluster is one line
MAX_MESSAGE = 128 << 20
END = b"\r\n"
_VERSION = b"NATS/1.0"


@dataclass(frozen=True, slots=True)
class Info:
    """The server's description of itself; sent again when the cluster changes."""

    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a subscription. ``status``: a code that the server sent instead of data, 0 for none."""

    subject: str
    subscription: str
    data: bytes
    headers: dict[str, str]
    status: int = 0
    description: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """To be answered with ``PONG``."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to ``PING``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``-ERR``: the server's error text. It closes the connection after most errors."""

    text: str


Event = Info | Message | Ping | Pong | Failure
PING, PONG = b"PING\r\n", b"PONG\r\n"


class Parser:
    """Parses bytes (``feed``) into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: tuple[str, str, int, int] | None = None  # subject, subscription, bytes of headers, all bytes

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that these bytes complete."""
        self._buffer += data
        at = 0
        try:
            while True:
                if self._waiting is not None:
                    size = self._waiting[3]
                    if len(self._buffer) - at < size + len(END):
                        return
                    body = bytes(self._buffer[at : at + size])
                    if self._buffer[at + size : at + size + len(END)] != END:
                        raise ProtocolError("invalid data from the NATS server: a message has not the announced length")
                    at += size + len(END)
                    subject, subscription, head, _ = self._waiting
                    self._waiting = None
                    yield _message(subject, subscription, body[:head], body[head:])
                    continue
                # The search is bounded: a server that sends no line end must not make it slower and slower.
                end = self._buffer.find(END, at, at + MAX_LINE)
                if end < 0:
                    if len(self._buffer) - at >= MAX_LINE:
                        raise ProtocolError(f"invalid data from the NATS server: a line of more than {MAX_LINE} bytes")
                    return
                line = bytes(self._buffer[at:end])
                at = end + len(END)
                event = self._line(line)
                if event is not None:
                    yield event
        finally:
            del self._buffer[:at]

    def _line(self, line: bytes) -> Event | None:
        verb, _, rest = line.partition(b" ")
        match verb.upper():
            case b"MSG" | b"HMSG":
                self._waiting = _announced(verb.upper() == b"HMSG", rest)
                return None
            case b"PING":
                return Ping()
            case b"PONG":
                return Pong()
            case b"+OK":
                return None
            case b"-ERR":
                return Failure(_text(rest).strip().strip("'"))
            case b"INFO":
                return Info(fields_of(rest, "INFO"))
        raise ProtocolError(f"invalid data from the NATS server: {line[:40]!r}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def fields_of(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object of the server."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProtocolError(f"the server's {what} is no JSON object")
    return found


def _announced(headers: bool, rest: bytes) -> tuple[str, str, int, int]:
    words = _text(rest).split()
    sizes = 2 if headers else 1
    if len(words) not in (2 + sizes, 3 + sizes) or not all(
        word.isascii() and word.isdigit() for word in words[-sizes:]
    ):
        raise ProtocolError(f"invalid data from the NATS server: it announced a message as {rest[:80]!r}")
    if any(len(word) > 12 for word in words[-sizes:]):
        raise ProtocolError("invalid data from the NATS server: the announced message is too long")
    whole = int(words[-1])
    head = int(words[-2]) if headers else 0
    if head > whole or whole > MAX_MESSAGE:
        raise ProtocolError(f"invalid data from the NATS server: a message of {whole} bytes with headers of {head}")
    return words[0], words[1], head, whole


def _message(subject: str, subscription: str, head: bytes, data: bytes) -> Message:
    if not head:
        return Message(subject, subscription, data, {})
    if not head.startswith(_VERSION):
        raise ProtocolError("the headers of a NATS message do not begin with their version")
    first, *lines = _text(head[len(_VERSION) :]).split("\r\n")
    status, _, description = first.strip().partition(" ")
    headers = {}
    for line in lines:
        name, mark, value = line.partition(":")
        if mark:
            headers[name.strip()] = value.strip()
    number = int(status) if status.isascii() and status.isdigit() and len(status) <= 4 else 0
    return Message(subject, subscription, data, headers, number, description.strip())


def connect(fields: Mapping[str, Any]) -> bytes:
    """``CONNECT``."""
    return b"CONNECT " + json.dumps(dict(fields)).encode() + END


def subscribe(subject: str, subscription: str) -> bytes:
    """``SUB``."""
    return f"SUB {subject} {subscription}\r\n".encode()


def publish(subject: str, reply: str, data: bytes, headers: Mapping[str, str] | None = None) -> list[bytes]:
    """``PUB`` or ``HPUB``, in pieces, so that large data is not copied."""
    if not headers:
        return [f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, END]
    head = b"".join([_VERSION, END, *(f"{name}: {value}\r\n".encode() for name, value in headers.items()), END])
    return [f"HPUB {subject} {reply} {len(head)} {len(head) + len(data)}\r\n".encode() + head, data, END]
