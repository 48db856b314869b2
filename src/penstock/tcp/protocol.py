"""The protocol, version 0, without I/O: bytes in, events out.

Job: the handshake before the data. A subscriber asks, a publisher answers; after that the native core scans frames.

Rules:

- Feed a ``Negotiation`` at most the bytes it ``needs``; it gives events, and puts bytes to send into ``outgoing``. It
  never asks for more than the frame it is reading, so it cannot swallow the data that follows.
- A header of 12 bytes (see ``docs/formats.md``): size, type, reserved, size of the data. Header bytes beyond what is
  known are skipped, fields left out read as 0, frames of unknown types are skipped, reserved bits are ignored.
- Our own peers identify themselves in the data of the handshake, after the version: ``MAGIC`` and a list of tagged
  fields (unknown ones are skipped). All other peers get plain version 0. Every header of a handshake has 12 bytes.
- A token is never sent: both sides prove that they know it by an HMAC over two nonces, compared in constant time.
- No state is shared: one negotiation belongs to one connection, and one thread at a time serves it.
"""

from __future__ import annotations

import enum
import hmac
import os
import struct
from dataclasses import dataclass

from penstock.address import NO_BROKER
from penstock.errors import ProtocolError, RefusedError
from penstock.printable import printable

VERSION = 0
HEADER = struct.Struct("<HBBQ")
MAGIC = b"PNSK"
FIELD = struct.Struct("<HH")  # tag and size of the value that follows
MAX_HANDSHAKE_DATA = 1024
MAX_SCHEMA_BYTES = 40_960
MAX_ANSWER_DATA = MAX_HANDSHAKE_DATA + MAX_SCHEMA_BYTES
NO_NONCE = bytes(16)
PUBLISHES = "messages are published at this port, nobody answers calls there; read it with penstock.subscriber"
NO_PAST_HERE = "this publisher keeps nothing on disk; open it with durable=, or the subscriber without start="
DAMAGED = "what this publisher keeps on disk is damaged there"
BROKER_BEGINS = b"HELLO "  # what a client of a broker says first
ANSWERS = "calls are answered at this port, nobody publishes there; ask it with penstock.client"
PROOF_SIZE = 32
# NEXT_ORDINAL is the first field of an extended answer, at a fixed offset: the native core fills it in at the moment of
# joining, and in the field after it how many messages of the history come first.
NEXT_ORDINAL_OFFSET = HEADER.size + 1 + len(MAGIC) + FIELD.size


class FrameType(enum.IntEnum):
    """The types of version 0, and those our own peers use before the data begins."""

    PAYLOAD = 0
    HANDSHAKE = 1
    PROOF = 2
    REFUSED = 3


class Tag(enum.IntEnum):
    """The fields of a handshake between our own peers. New tags may be added; a number is never reused."""

    NEXT_ORDINAL = 1
    NONCE = 2
    IDENTITY = 3
    CLOCK_NS = 4
    WANTS_TOKEN = 5
    PROOF = 6
    CALLS = 7
    SCHEMA = 8
    PAST = 9
    NO_PAST = 10
    START = 11
    LAST = 12
    FRONTIER = 13


SIZES = {Tag.NEXT_ORDINAL: 8, Tag.NONCE: 16, Tag.IDENTITY: 16, Tag.CLOCK_NS: 8, Tag.PROOF: PROOF_SIZE, Tag.CALLS: 0,
         Tag.PAST: 8, Tag.NO_PAST: 0, Tag.LAST: 24, Tag.FRONTIER: 8}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages of the history a subscriber asks for."""

    past: bool = True  # those that the publisher keeps for subscribers that join
    start: str = ""  # a position in what it keeps on disk, as ``start=`` names it; empty: none of that
    last: tuple[bytes, int] = (NO_NONCE, 0)  # the publisher's identity and the last ordinal received from it


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of a handshake; data follows."""

    version: int
    extended: bool
    peer_identity: bytes = NO_NONCE
    next_ordinal: int = 0
    peer_clock_ns: int = 0
    schema: str = ""
    past: int = 0  # so many first messages are history; an earlier connection may have delivered them
    frontier: int = 0  # with ``start``: the messages before this ordinal were on disk; 0: it was not told
    wanted: Wanted = Wanted()


@dataclass(frozen=True, slots=True)
class Extension:
    """The fields that our own peers add to a handshake."""

    wants_token: bool = False
    nonce: bytes = NO_NONCE
    identity: bytes = NO_NONCE
    next_ordinal: int = 0
    clock_ns: int = 0
    proof: bytes = b""
    calls: bool = False  # the connection carries requests and answers, not messages
    schema: str = ""
    past: int = 0
    frontier: int = 0
    wanted: Wanted = Wanted()

    def encode(self) -> bytes:
        """The fields as bytes; the next ordinal comes first (``NEXT_ORDINAL_OFFSET``)."""
        fields = [
            (Tag.NEXT_ORDINAL, struct.pack("<Q", self.next_ordinal)),
            (Tag.PAST, struct.pack("<Q", self.past)),
            (Tag.NONCE, self.nonce),
            (Tag.IDENTITY, self.identity),
            (Tag.CLOCK_NS, struct.pack("<q", self.clock_ns)),
        ]
        if self.wants_token:
            fields.append((Tag.WANTS_TOKEN, b""))
        if self.proof:
            fields.append((Tag.PROOF, self.proof))
        if self.calls:
            fields.append((Tag.CALLS, b""))
        if self.schema:
            fields.append((Tag.SCHEMA, self.schema.encode()))
        if self.frontier:
            fields.append((Tag.FRONTIER, struct.pack("<Q", self.frontier)))
        if not self.wanted.past:
            fields.append((Tag.NO_PAST, b""))
        if self.wanted.start:
            fields.append((Tag.START, self.wanted.start.encode()))
        if self.wanted.last[1]:
            fields.append((Tag.LAST, self.wanted.last[0] + struct.pack("<Q", self.wanted.last[1])))
        return MAGIC + b"".join(FIELD.pack(tag, len(value)) + value for tag, value in fields)

    @classmethod
    def decode(cls, data: bytes) -> Extension | None:
        """The fields out of the bytes after the version; None if the peer is not one of ours."""
        if not data.startswith(MAGIC):
            return None
        fields: dict[int, bytes] = {}
        at = len(MAGIC)
        while at < len(data):
            if len(data) - at < FIELD.size:
                raise ProtocolError("the last field of the handshake is cut off")
            tag, size = FIELD.unpack_from(data, at)
            at += FIELD.size
            value = data[at : at + size]
            at += size
            if len(value) != size or SIZES.get(tag, size) != size:
                raise ProtocolError(f"field {tag} of the handshake has {len(value)} bytes")
            fields.setdefault(tag, value)
        last_field = fields.get(Tag.LAST, bytes(24))
        last = (last_field[:16], int.from_bytes(last_field[16:], "little"))
        return cls(
            Tag.WANTS_TOKEN in fields,
            fields.get(Tag.NONCE, NO_NONCE),
            fields.get(Tag.IDENTITY, NO_NONCE),
            int.from_bytes(fields.get(Tag.NEXT_ORDINAL, b""), "little"),
            int.from_bytes(fields.get(Tag.CLOCK_NS, b""), "little", signed=True),
            fields.get(Tag.PROOF, b""),
            Tag.CALLS in fields,
            fields.get(Tag.SCHEMA, b"").decode("utf-8", "replace"),
            int.from_bytes(fields.get(Tag.PAST, b""), "little"),
            int.from_bytes(fields.get(Tag.FRONTIER, b""), "little"),
            Wanted(Tag.NO_PAST not in fields, fields.get(Tag.START, b"").decode("utf-8", "replace"), last),
        )


def handshake(version: int = VERSION, extension: Extension | None = None) -> bytes:
    """A handshake frame; 13 bytes without the extension."""
    return frame(FrameType.HANDSHAKE, bytes([version]) + (b"" if extension is None else extension.encode()))


def frame(kind: FrameType, data: bytes) -> bytes:
    """A plain frame."""
    return HEADER.pack(HEADER.size, kind, 0, len(data)) + data


def prove(token: bytes, side: bytes, request_nonce: bytes, answer_nonce: bytes) -> bytes:
    """The HMAC over both nonces that only a holder of the token can compute; ``side`` prevents reflecting it."""
    return hmac.digest(token, b"penstock tcp " + side + request_nonce + answer_nonce, "sha256")


@dataclass(frozen=True, slots=True)
class Frame:
    """One complete frame of a negotiation."""

    kind: int
    header: bytes
    data: bytes

    @property
    def version(self) -> int:
        return self.data[0] if self.data else 0  # a peer may leave it out, which means 0

    def extension(self) -> Extension | None:
        """The fields of a peer of ours; None for other peers."""
        return Extension.decode(self.data[1:])


class FrameReader:
    """Puts one frame together from exactly the bytes it asks for."""

    def __init__(self, max_data: int = MAX_HANDSHAKE_DATA) -> None:
        self._max_data = max_data
        self._buffer = bytearray()
        self._size = 2  # bytes the buffer must reach next: the header's size, the header, then the frame

    @property
    def needs(self) -> int:
        """How many bytes to feed at most."""
        return self._size - len(self._buffer)

    def begins_with(self, words: bytes) -> bool:
        """Whether what has come of a frame begins so."""
        return self._buffer.startswith(words)

    def feed(self, data: bytes) -> Frame | None:
        """A frame, once it is complete. ``ProtocolError`` says what is wrong with it."""
        if len(data) > self.needs:
            raise ValueError(f"feed at most the {self.needs} bytes that are needed, not {len(data)}")
        self._buffer += data
        while not self.needs:
            header_size = int.from_bytes(self._buffer[:2], "little")
            if header_size < 2:
                raise ProtocolError(f"header_size {header_size} cannot be: a header holds at least its own size")
            if len(self._buffer) < header_size:
                self._size = header_size
                continue
            header = bytes(self._buffer[:header_size])
            _, kind, _, data_size = HEADER.unpack(header[: HEADER.size].ljust(HEADER.size, b"\0"))
            if data_size > self._max_data:
                raise ProtocolError(f"{data_size} bytes announced where a handshake has at most {self._max_data}")
            if len(self._buffer) < header_size + data_size:
                self._size = header_size + data_size
                continue
            complete = Frame(kind, header, bytes(self._buffer[header_size:]))
            self._buffer.clear()
            self._size = 2
            return complete
        return None


class Negotiation:
    """Common to both sides: takes frames, produces bytes to send, and ends in an agreement or an error."""

    def __init__(
        self,
        token: bytes | None,
        identity: bytes = NO_NONCE,
        calls: bool = False,
        max_data: int = MAX_HANDSHAKE_DATA,
    ) -> None:
        self._reader = FrameReader(max_data)
        self._token = token
        self._calls = calls
        self._asking_role, self._answering_role = ("client", "server") if calls else ("subscriber", "publisher")
        self._identity = identity
        self._nonce = os.urandom(16)
        self._frames = 0
        self.outgoing = bytearray()

    @property
    def needs(self) -> int:
        """How many bytes to feed at most."""
        return self._reader.needs

    def feed(self, data: bytes) -> Agreed | None:
        """The agreement, once it is reached. ``ProtocolError`` or ``RefusedError`` if it cannot be reached."""
        received = self._reader.feed(data)
        if received is None:
            return None
        self._frames += 1
        if self._frames > 16:  # frames of unknown types are skipped; a peer could send them for ever
            raise ProtocolError("16 frames and no handshake")
        return self._handle(received)

    def _handle(self, received: Frame) -> Agreed | None:
        raise NotImplementedError


class Request(Negotiation):
    """The subscriber's side. ``outgoing`` holds the request from the start."""

    def __init__(
        self,
        token: bytes | None = None,
        *,
        extended: bool = True,
        identity: bytes = NO_NONCE,
        clock_ns: int = 0,
        calls: bool = False,
        wanted: Wanted = Wanted(),  # noqa: B008 - a value that nobody can change
    ) -> None:
        super().__init__(token, identity, calls, MAX_ANSWER_DATA)
        if token is not None and not extended:
            raise ValueError("a token needs the extended handshake")
        ours = Extension(token is not None, self._nonce, identity, 0, clock_ns, calls=calls, wanted=wanted)
        self.outgoing += handshake(VERSION, ours if extended else None)

    def _handle(self, received: Frame) -> Agreed | None:
        if received.kind == FrameType.REFUSED:
            reason = printable(received.data[:200].decode("utf-8", "replace"), keep="")
            raise RefusedError(f"the {self._answering_role} refused: {reason}")
        if received.kind == FrameType.PROOF:
            self._answer_challenge(received.data)
            return None
        if received.kind == FrameType.PAYLOAD:
            raise ProtocolError("data came before the handshake was answered")
        if received.kind != FrameType.HANDSHAKE:
            return None
        return self._agree(received)

    def _answer_challenge(self, challenge: bytes) -> None:
        """Prove the token to the publisher; the challenge is its nonce."""
        if self._token is None:
            raise RefusedError(f"the {self._answering_role} asks for a token; open the {self._asking_role} with token=")
        if len(challenge) != len(NO_NONCE):
            raise ProtocolError(f"a challenge of {len(challenge)} bytes is not one of {len(NO_NONCE)}")
        self._challenge = challenge
        self.outgoing += frame(FrameType.PROOF, prove(self._token, b"subscriber", self._nonce, challenge))

    def _agree(self, received: Frame) -> Agreed:
        if received.version > VERSION:
            raise ProtocolError(
                f"the {self._answering_role} offers version {received.version} where {VERSION} was asked for"
            )
        extension = received.extension()
        if self._calls and (extension is None or not extension.calls):
            raise RefusedError(PUBLISHES)
        if self._token is not None:
            self._check_publisher(b"" if extension is None else extension.proof)
        if extension is None:
            return Agreed(received.version, False)
        facts = (extension.identity, extension.next_ordinal, extension.clock_ns, extension.schema, extension.past)
        return Agreed(received.version, True, *facts, extension.frontier)

    def _check_publisher(self, proof: bytes) -> None:
        challenge = getattr(self, "_challenge", NO_NONCE)  # unset where the publisher never challenged: refused below
        assert self._token is not None
        right = prove(self._token, b"publisher", self._nonce, challenge)
        if not hmac.compare_digest(right, proof) or challenge == NO_NONCE:
            raise RefusedError(f"the {self._answering_role} did not prove that it knows the token")


class Answer(Negotiation):
    """The publisher's side."""

    def __init__(
        self, token: bytes | None = None, *, identity: bytes = NO_NONCE, calls: bool = False, schema: str = "",
        durable: bool = False,
    ) -> None:
        super().__init__(token, identity, calls)
        self._schema = schema
        self._durable = durable
        self._request_frame: Frame | None = None
        self._proof = b""

    def feed(self, data: bytes) -> Agreed | None:
        """As of every negotiation; a client of a broker is told in its own words where it is."""
        agreed = super().feed(data)
        if self._frames == 0 and self._reader.begins_with(BROKER_BEGINS):
            said = "calls are answered" if self._calls else "messages are published"
            reason = f"{said} at this port, {NO_BROKER}; its address begins with tcp://"
            self.outgoing += f"ERR closing {reason}\n".encode()
            raise RefusedError(f"a client of a broker has come: {reason}")
        return agreed

    def _handle(self, received: Frame) -> Agreed | None:
        if received.kind == FrameType.HANDSHAKE and self._request_frame is None:
            return self._handle_request(received)
        if received.kind == FrameType.PROOF and self._request_frame is not None:
            return self._check_subscriber(received.data)
        if received.kind == FrameType.PAYLOAD:
            raise ProtocolError("data came before the handshake")
        return None

    def _handle_request(self, received: Frame) -> Agreed | None:
        self._request_frame = received
        extension = received.extension()
        wants_token = extension is not None and extension.wants_token
        if self._calls != (extension is not None and extension.calls):
            self._refuse(ANSWERS if self._calls else PUBLISHES)
        if extension is not None and extension.wanted.start and not self._durable:
            self._refuse(NO_PAST_HERE)
        if self._token is None:
            if wants_token:
                self._refuse(f"this {self._answering_role} has no token; open the {self._asking_role} without token=")
            return self._agree(b"")
        if not wants_token:
            self._refuse(f"this {self._answering_role} asks for a token; open the {self._asking_role} with token=")
        self.outgoing += frame(FrameType.PROOF, self._nonce)
        return None

    def _check_subscriber(self, proof: bytes) -> Agreed:
        assert self._request_frame is not None
        extension = self._request_frame.extension()
        if self._token is None or extension is None:
            raise ProtocolError("a proof that nobody asked for")
        right = prove(self._token, b"subscriber", extension.nonce, self._nonce)
        if not hmac.compare_digest(right, proof):
            self._refuse("wrong token")
        return self._agree(prove(self._token, b"publisher", extension.nonce, self._nonce))

    def _refuse(self, reason: str) -> None:
        self.outgoing += frame(FrameType.REFUSED, reason.encode())
        raise RefusedError(reason)

    def _agree(self, proof: bytes) -> Agreed:
        """The agreement. ``answer`` makes the bytes to send later, when the next ordinal is known."""
        assert self._request_frame is not None
        extension = self._request_frame.extension()
        self._proof = proof
        version = min(self._request_frame.version, VERSION)
        if extension is None:
            return Agreed(version, False)
        return Agreed(version, True, extension.identity, 0, extension.clock_ns, wanted=extension.wanted)

    def answer(
        self, agreed: Agreed, clock_ns: int, next_ordinal: int = 0, past: int = 0, frontier: int = 0
    ) -> bytes:
        """The publisher's handshake: the last bytes before data."""
        if not agreed.extended:
            return handshake(agreed.version)
        facts = (next_ordinal, clock_ns, self._proof, self._calls, self._schema, past, frontier)
        ours = Extension(False, self._nonce, self._identity, *facts)
        return handshake(agreed.version, ours)
