"""Control messages between a gateway and a module in another process. Bytes in, events out, no I/O.

::

    +----+----+---------+------+------------+------+
    | A1 | 6C | version | type | total size | body |     total size: u32, big-endian, the head's 8 bytes included
    +----+----+---------+------+------------+------+

    create   message version u8 | uri type u8 | uri size u32 | uri NUL | args size u32 | args NUL
    reply    status u8, and but for a bare answer to create: first u64 | count u32 | step u8 | reason, UTF-8
    start, destroy   nothing

Sizes of the two texts count their NUL; a text of size 0 has none. Any thread may call these functions; a ``Decoder``
belongs to one.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from penstock.errors import InvalidArgument, ProtocolError

MAGIC = b"\xa1\x6c"
VERSION = 1
MESSAGE_VERSION = 1
HEAD_SIZE = 8
MAX_CONTROL_BYTES = 1 << 20
_HEAD = struct.Struct(">2sBBI")
_SIZE = struct.Struct(">I")
_TOLD = struct.Struct(">QIB")
MAX_REASON_BYTES = 1024


class Type(enum.IntEnum):
    """The fourth byte."""

    CREATE = 1
    REPLY = 2
    START = 3
    DESTROY = 4


class Status(enum.IntEnum):
    """What a reply says."""

    OK = 0
    ERROR = 1
    MISSING = 2  # an error, because a package is not installed
    DETACH = 0xFF


class Step(enum.IntEnum):
    """What a reply is about."""

    RECEIVE = 0
    START = 1
    STOP = 2
    DESTROY = 3
    CREATE = 4
    LOAD = 5  # the class, before create
    PARSE = 6  # its args, before create


@dataclass(frozen=True, slots=True)
class Create:
    """Make the module: messages travel at ``uri``; ``args`` is its configuration as JSON."""

    uri: str = ""
    args: str = ""
    uri_type: int = 0
    message_version: int = MESSAGE_VERSION


@dataclass(frozen=True, slots=True)
class Reply:
    """The module's answer; DETACH when the module leaves on its own. An ERROR says in which step and why; in receive,
    at which messages: ``count`` from ``first`` on, as the process counts what it has got. A bare reply answers create.
    """

    status: Status
    first: int = 0
    count: int = 0
    reason: str = ""
    step: Step = Step.CREATE


@dataclass(frozen=True, slots=True)
class Start:
    """Call the module's start."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Call the module's destroy, then end."""


Control = Create | Reply | Start | Destroy


def encode(message: Control) -> bytes:
    """The bytes of one control message."""
    match message:
        case Create(uri, args, uri_type, message_version):
            body = bytes((message_version, uri_type)) + _text(uri, "uri") + _text(args, "args")
            return _framed(Type.CREATE, body)
        case Reply(status, first, count, reason, step):
            told = b""
            if reason or step is not Step.CREATE:
                told = _TOLD.pack(first, count, step) + reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
            return _framed(Type.REPLY, bytes((status,)) + told)
        case Start():
            return _framed(Type.START, b"")
        case Destroy():
            return _framed(Type.DESTROY, b"")


def decode(data: bytes) -> Control:
    """The control message in ``data``, which must contain exactly one; ``ProtocolError`` says what is wrong."""
    kind, total = _head(data)
    if total != len(data):
        raise ProtocolError(f"a control message of {len(data)} bytes says it has {total}")
    body = data[HEAD_SIZE:]
    if kind is Type.CREATE:
        return _create(body)
    if kind is Type.REPLY:
        return _reply(body)
    if body:
        raise ProtocolError(f"a {kind.name.lower()} message has no body, this one has {len(body)} bytes")
    return Start() if kind is Type.START else Destroy()


class Decoder:
    """Splits a stream into control messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Control]:
        """The messages completed by ``data``."""
        self._buffer += data
        found: list[Control] = []
        while len(self._buffer) >= HEAD_SIZE:
            _, total = _head(self._buffer)
            if len(self._buffer) < total:
                break
            found.append(decode(bytes(self._buffer[:total])))
            del self._buffer[:total]
        return found


def _head(data: bytes | bytearray) -> tuple[Type, int]:
    if len(data) < HEAD_SIZE:
        raise ProtocolError(f"a control message has at least {HEAD_SIZE} bytes, this one has {len(data)}")
    magic, version, number, total = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"a control message begins with A1 6C, this one with {magic.hex(' ').upper()}")
    if version != VERSION:
        raise ProtocolError(f"control version {version} is not known here; this gateway speaks {VERSION}")
    if number not in set(Type):
        raise ProtocolError(f"control type {number} is not known; they are 1 create, 2 reply, 3 start, 4 destroy")
    if not HEAD_SIZE <= total <= MAX_CONTROL_BYTES:
        raise ProtocolError(f"a control message of {total} bytes; {HEAD_SIZE} to {MAX_CONTROL_BYTES} are allowed")
    return Type(number), total


def _create(body: bytes) -> Create:
    if len(body) < 2:
        raise ProtocolError("a create message ends before its versions")
    version, uri_type = body[0], body[1]
    if version != MESSAGE_VERSION:
        raise ProtocolError(f"message version {version} is not known here; this gateway speaks {MESSAGE_VERSION}")
    uri, at = _take(body, 2, "uri")
    args, at = _take(body, at, "args")
    if at != len(body):
        raise ProtocolError(f"{len(body) - at} bytes follow a create message's args")
    return Create(uri, args, uri_type, version)


def _reply(body: bytes) -> Reply:
    if not body or 1 < len(body) < 1 + _TOLD.size or body[0] not in set(Status):
        raise ProtocolError(f"a reply's body is one byte 00, 01 or FF, not {body[:8].hex(' ').upper() or 'nothing'}")
    if len(body) == 1:
        return Reply(Status(body[0]))
    first, count, step = _TOLD.unpack_from(body, 1)
    if step not in set(Step):
        raise ProtocolError(f"a reply tells of step {step}; 0 to {max(Step)} are known")
    return Reply(Status(body[0]), first, count, body[1 + _TOLD.size :].decode("utf-8", "replace"), Step(step))


def _framed(kind: Type, body: bytes) -> bytes:
    total = HEAD_SIZE + len(body)
    if total > MAX_CONTROL_BYTES:
        raise InvalidArgument(f"a control message of {total} bytes; at most {MAX_CONTROL_BYTES} are allowed")
    return _HEAD.pack(MAGIC, VERSION, kind, total) + body


def _text(text: str, what: str) -> bytes:
    if "\0" in text:
        raise InvalidArgument(f"a create message's {what} cannot hold a NUL")
    data = text.encode() + b"\0" if text else b""
    return _SIZE.pack(len(data)) + data


def _take(body: bytes, at: int, what: str) -> tuple[str, int]:
    """The text at ``at`` and where the next one begins."""
    if len(body) - at < _SIZE.size:
        raise ProtocolError(f"a create message ends before the size of its {what}")
    (size,) = _SIZE.unpack_from(body, at)
    start, end = at + _SIZE.size, at + _SIZE.size + size
    if end > len(body):
        raise ProtocolError(f"a create message's {what} of {size} bytes runs over its end")
    if size == 0:
        return "", end
    data = body[start:end]
    if data.index(0) != size - 1 if 0 in data else True:
        raise ProtocolError(f"a create message's {what} must end with its only NUL")
    try:
        return data[:-1].decode(), end
    except UnicodeDecodeError:
        raise ProtocolError(f"a create message's {what} is not UTF-8") from None
