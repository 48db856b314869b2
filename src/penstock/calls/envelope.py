"""The envelope: the 40 bytes in front of every request and answer, the same at every reach.

::

    0   1   version (1)
    1   1   kind (``Kind``)
    2   6   zero
    8   8   number of the call, chosen by the client, unique among its calls
    16  8   time left for the call in nanoseconds when it was sent; 0: no limit
    24  16  identity of the client
    40      payload: of a request or an answer; of a failure its text

Pure functions over bytes; any thread.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from penstock.errors import ProtocolError

VERSION = 1
HEADER = struct.Struct("<BB6xQQ16s")
MAX_TEXT_BYTES = 2000  #: longest text of a failure


class Kind(enum.IntEnum):
    """What an envelope means."""

    REQUEST = 1
    CANCEL = 2  #: the client no longer waits for this call
    ANSWER = 3
    FAILURE = 4  #: the function raised; the payload is the text
    REFUSAL = 5  #: the server did not begin; the payload is the reason
    GOODBYE = 6  #: the server closes: calls without an answer get none


_KINDS = {kind.value: kind for kind in Kind}


class Envelope(NamedTuple):
    """One envelope, parsed."""

    kind: Kind
    number: int
    left_ns: int
    origin: bytes
    payload: bytes


def pack(kind: Kind, number: int, left_ns: int, origin: bytes, payload: bytes = b"") -> bytes:
    """The envelope as bytes."""
    return HEADER.pack(VERSION, kind, number, left_ns, origin) + payload


def unpack(data: bytes) -> Envelope:
    """The parts of ``data``; ``ProtocolError`` where it is no envelope."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"{len(data)} bytes are too few for a call: its header has {HEADER.size}")
    version, kind, number, left_ns, origin = HEADER.unpack_from(data)
    if version != VERSION or kind not in _KINDS:
        raise ProtocolError(f"a call of version {version} and kind {kind} is not known; this is version {VERSION}")
    return Envelope(_KINDS[kind], number, left_ns, origin, data[HEADER.size :])


def aged(envelope: Envelope, waited_ns: int) -> Envelope:
    """The envelope with its time limit reduced by the time it has waited. A limit that has passed becomes 1 ns, because
    0 means no limit."""
    kind, number, left_ns, origin, payload = envelope
    return Envelope(kind, number, max(1, left_ns - waited_ns), origin, payload) if left_ns else envelope


def payload_of(data: object, takes: str) -> bytes:
    """What a user gives as a request or an answer, as bytes."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        raise TypeError(f"{takes} bytes, not str; encode it: text.encode()")
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{takes} bytes (or what has a buffer), not {type(data).__name__}") from None


def text_of(error: BaseException) -> bytes:
    """The text of an exception for the client: its class and message, cut to a bound."""
    try:
        text = str(error)
    except Exception:  # an exception whose text raises
        text = "(no text)"
    return f"{type(error).__name__}{': ' if text else ''}{text}".encode("utf-8", "replace")[:MAX_TEXT_BYTES]
