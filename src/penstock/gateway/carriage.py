"""Carriage: how a gateway's messages travel over channels that know nothing of gateways.

If a channel's publisher carries properties, they are sent as such. Otherwise the byte form of the message is sent,
which includes its properties; a message without properties is sent as its bare content. A received payload counts as
byte form only if it follows all of its rules (magic, exact sizes); everything else is content.

A message in another process is framed: its source's number (u64, big-endian) precedes the byte form, and is
stripped before ``receive``. A frame that is larger than a slot of the channel goes in pieces, one after the other, so
that a large message costs its size and the channel never grows::

    FF FF FF FF FF FF FF FF | size of the whole frame u64, big-endian | the next bytes of the frame

A message that is not to be handled after a moment is preceded by that moment, in nanoseconds since 1970::

    FE FE FE FE FE FE FE FE | u64, big-endian
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock._core import Message
from penstock._core.gateway import GatewayMessage
from penstock.carry import time_of
from penstock.channel import Publisher
from penstock.errors import ProtocolError

MAGIC = b"\xa1\x60"
PIECE = b"\xff" * 8  # in place of the source's number, which never has this value
PIECE_HEAD_SIZE = 16
EXPIRES = b"\xfe" * 8  # in that place too
OUTPUT = "penstock-output"  # the property by which a process names the output that a message goes to
OUTPUT_BYTES = OUTPUT.encode() + b"\0"
FRAME_HEAD_SIZE = 8 + 14  # a frame without properties and content
MAX_FRAME_BYTES = 1 << 31


def send(publisher: Publisher, messages: Sequence[GatewayMessage], bare: bool = False) -> None:
    """Publish each of them in order."""
    if publisher.carries_properties_of_many:
        publisher.forward(list(messages))  # with their times
    elif publisher.carries_properties:
        publish: Any = publisher.publish
        for message in messages:
            publish(message, properties=dict(message.properties), timestamp_ns=message.timestamp_ns)
    elif bare:
        publisher.publish_many(messages)
    else:
        publisher.publish_many([message.to_bytes() if message.encoded_properties else message for message in messages])


def arrived(message: Message) -> GatewayMessage:
    """A message of any channel as a gateway message, with its properties. The bytes are copied, so that a module that
    keeps the message does not hold a slot of the channel."""
    content, properties = memoryview(message), message.properties
    given = time_of(message)
    if content[:2] == MAGIC:
        try:
            decoded = GatewayMessage.from_bytes(content)
            if given is None:
                return decoded
            content, properties = decoded.content, decoded.properties  # the byte form has no time
        except ProtocolError:
            pass  # content that happens to begin like the byte form
    if given is None:
        return GatewayMessage(content, properties)
    return GatewayMessage(content, properties, timestamp_ns=given)


def framed(
    messages: Sequence[GatewayMessage], slot_bytes: int, expiries: Sequence[int | None] | None = None
) -> list[Any]:
    """The frames of ``messages``, in pieces where they do not fit a slot; ``expiries`` says until when each may be
    handled."""
    frames, largest = GatewayMessage.to_frames(messages)
    if largest <= slot_bytes and expiries is None:
        return frames
    found: list[Any] = []
    for frame, expires_ns in zip(frames, expiries or [None] * len(frames), strict=True):
        if expires_ns is not None:
            found.append(EXPIRES + max(0, expires_ns).to_bytes(8, "big"))
        found += _pieces(frame, slot_bytes)
    return found


def _pieces(frame: bytes, slot_bytes: int) -> list[bytes]:
    if len(frame) <= slot_bytes:
        return [frame]
    head, room = PIECE + len(frame).to_bytes(8, "big"), slot_bytes - PIECE_HEAD_SIZE
    return [head + frame[at : at + room] for at in range(0, len(frame), room)]


class Unframer:
    """Decodes frames and pieces of frames into messages; one thread."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes_left = 0
        self._next_expiry: int | None = None
        #: Until when messages of the last read may be handled, by their ids as objects.
        self.expiries: dict[int, int] = {}

    def messages(self, batch: Sequence[Any], on_error: Callable[[ProtocolError], object]) -> list[GatewayMessage]:
        """The messages in what one read returned; ``on_error`` is called for each item that is neither a frame nor a
        piece."""
        found, whole = GatewayMessage.from_frames(batch)
        if self.expiries:
            self.expiries = {}
        # The fast path: only complete frames, and nothing pending from the last read.
        if whole and not self._parts and self._next_expiry is None:
            return found
        messages = []
        for one in found:
            message: GatewayMessage | None
            if isinstance(one, GatewayMessage):
                self._parts, self._bytes_left = [], 0
                message = one
            else:
                head = bytes(memoryview(one)[: PIECE_HEAD_SIZE + 1])
                if head[:8] == EXPIRES and len(head) == PIECE_HEAD_SIZE:
                    self._next_expiry = int.from_bytes(head[8:], "big")
                    continue
                try:
                    message = self.message(one)
                except ProtocolError as error:
                    on_error(error)
                    continue
            if message is not None:
                messages.append(message)
                if self._next_expiry is not None:
                    self.expiries[id(message)], self._next_expiry = self._next_expiry, None
        return messages

    def message(self, data: Any) -> GatewayMessage | None:
        """The message of a frame, or of the pieces that this one completes; None: more pieces are to come.
        ``ProtocolError`` where it is neither."""
        if bytes(memoryview(data)[:8]) != PIECE:
            self._parts, self._bytes_left = [], 0
            return GatewayMessage.from_frame(data)
        piece = bytes(memoryview(data))
        size = int.from_bytes(piece[8:PIECE_HEAD_SIZE], "big")
        left, parts = (self._bytes_left, self._parts) if self._parts else (size, [])
        self._parts, self._bytes_left = [], 0
        content = piece[PIECE_HEAD_SIZE:]
        if size > MAX_FRAME_BYTES or not 0 < len(content) <= left:
            raise ProtocolError(
                f"invalid piece of a frame: {len(content)} bytes, where {left} of {size} are missing and a frame has "
                f"at most {MAX_FRAME_BYTES}"
            )
        parts.append(content)
        if len(content) == left:
            return GatewayMessage.from_frame(b"".join(parts))
        self._parts, self._bytes_left = parts, left - len(content)
        return None
