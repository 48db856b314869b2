"""The protocol, version 0, without I/O: bytes in, events out.

Job: what stands before the data. A subscriber asks, a publisher answers; after that the native core scans frames.

Rules:

- Feed a ``Negotiation`` exactly the bytes it ``needs``; it gives events, and bytes to be sent in ``outgoing``. It never
  asks for more than the frame it is reading, so nothing of the data that follows is swallowed.
- A header of 12 bytes (see ``docs/formats.md``): size, type, reserved, size of the data. Header bytes beyond what is
  known are skipped, fields left out read as 0, unknown types are skipped whole, reserved bits are ignored.
- Our own peers say so in the data of the handshake, behind the version: ``MAGIC`` and a list of tagged fields, of which
  unknown ones are skipped; everybody else gets plain version 0. Every header of a handshake has 12 bytes.
- A token never travels: both sides prove it by an HMAC over two nonces, compared in constant time.
- No state is shared: one negotiation belongs to one connection and to whichever thread serves it.
"""

from __future__ import annotations

import enum
import hmac
import os
import struct
from dataclasses import dataclass

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
ANSWERS = "calls are answered at this port, nobody publishes there; ask it with penstock.client"
PROOF_SIZE = 32
# In an extended answer, whose first field it is: the native core writes it at the very moment of joining, and in the
# field behind it how many messages of the past come first.
NEXT_ORDINAL_OFFSET = HEADER.size + 1 + len(MAGIC) + FIELD.size


class FrameType(enum.IntEnum):
    """The types of version 0, and those our own peers use before the data begins."""

    PAYLOAD = 0
    HANDSHAKE = 1
    PROOF = 2
    REFUSED = 3


class Tag(enum.IntEnum):
    """The fields of a handshake between our own peers. New ones are added; a number is never used again."""

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


SIZES = {Tag.NEXT_ORDINAL: 8, Tag.NONCE: 16, Tag.IDENTITY: 16, Tag.CLOCK_NS: 8, Tag.PROOF: PROOF_SIZE, Tag.CALLS: 0,
         Tag.PAST: 8, Tag.NO_PAST: 0, Tag.LAST: 24}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a subscriber asks for of the past."""

    past: bool = True  # what the publisher keeps for who joins
    start: str = ""  # a place in what it keeps on disk, as ``start=`` names it; empty: nothing of that
    last: tuple[bytes, int] = (NO_NONCE, 0)  # the publisher's identity and the last ordinal that came from it


@dataclass(frozen=True, slots=True)
class Agreed:
    """Both sides are agreed; data follows."""

    version: int
    extended: bool
    peer_identity: bytes = NO_NONCE
    next_ordinal: int = 0
    peer_clock_ns: int = 0
    schema: str = ""
    past: int = 0  # so many messages at the beginning may have come over a connection before
    wanted: Wanted = Wanted()


@dataclass(frozen=True, slots=True)
class Extension:
    """What our own peers say of themselves in a handshake."""

    wants_token: bool = False
    nonce: bytes = NO_NONCE
    identity: bytes = NO_NONCE
    next_ordinal: int = 0
    clock_ns: int = 0
    proof: bytes = b""
    calls: bool = False  # requests and answers follow, not messages
    schema: str = ""
    past: int = 0
    wanted: Wanted = Wanted()

    def encode(self) -> bytes:
        """The list of fields, the next ordinal first."""
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
        if not self.wanted.past:
            fields.append((Tag.NO_PAST, b""))
        if self.wanted.start:
            fields.append((Tag.START, self.wanted.start.encode()))
        if self.wanted.last[1]:
            fields.append((Tag.LAST, self.wanted.last[0] + struct.pack("<Q", self.wanted.last[1])))
        return MAGIC + b"".join(FIELD.pack(tag, len(value)) + value for tag, value in fields)

    @classmethod
    def decode(cls, data: bytes) -> Extension | None:
        """From what follows the version; None where a peer is not one of ours."""
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
        told = fields.get(Tag.LAST, bytes(24))
        last = (told[:16], int.from_bytes(told[16:], "little"))
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
            Wanted(Tag.NO_PAST not in fields, fields.get(Tag.START, b"").decode("utf-8", "replace"), last),
        )


def handshake(version: int = VERSION, extension: Extension | None = None) -> bytes:
    """A handshake frame; 13 bytes without the extension."""
    return frame(FrameType.HANDSHAKE, bytes([version]) + (b"" if extension is None else extension.encode()))


def frame(kind: FrameType, data: bytes) -> bytes:
    """A plain frame."""
    return HEADER.pack(HEADER.size, kind, 0, len(data)) + data


def prove(token: bytes, side: bytes, request_nonce: bytes, answer_nonce: bytes) -> bytes:
    """What only a holder of the token can say about these two nonces."""
    return hmac.digest(token, b"penstock tcp " + side + request_nonce + answer_nonce, "sha256")


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame of a negotiation."""

    kind: int
    header: bytes
    data: bytes

    @property
    def version(self) -> int:
        return self.data[0] if self.data else 0  # left out: 0

    def extension(self) -> Extension | None:
        """What a peer of ours says of itself, or None."""
        return Extension.decode(self.data[1:])


class FrameReader:
    """Puts one frame together from exactly the bytes it asks for."""

    def __init__(self, max_data: int = MAX_HANDSHAKE_DATA) -> None:
        self._max_data = max_data
        self._buffer = bytearray()
        self._size = 2  # of what is being waited for

    @property
    def needs(self) -> int:
        """How many bytes to feed at most."""
        return self._size - len(self._buffer)

    def feed(self, data: bytes) -> Frame | None:
        """A frame, once it is whole. ``ProtocolError`` says what is wrong with it."""
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
            whole = Frame(kind, header, bytes(self._buffer[header_size:]))
            self._buffer.clear()
            self._size = 2
            return whole
        return None


class Negotiation:
    """What both sides share: frames come in, bytes go out, in the end there is an agreement."""

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
        self._asking, self._answering = ("client", "server") if calls else ("subscriber", "publisher")
        self._identity = identity
        self._nonce = os.urandom(16)
        self._frames = 0
        self.outgoing = bytearray()

    @property
    def needs(self) -> int:
        """How many bytes to feed at most."""
        return self._reader.needs

    def feed(self, data: bytes) -> Agreed | None:
        """The agreement, once it is reached. ``ProtocolError``, ``RefusedError``: it cannot be."""
        whole = self._reader.feed(data)
        if whole is None:
            return None
        self._frames += 1
        if self._frames > 16:
            raise ProtocolError("16 frames and no handshake")
        return self._handle(whole)

    def _handle(self, whole: Frame) -> Agreed | None:
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

    def _handle(self, whole: Frame) -> Agreed | None:
        if whole.kind == FrameType.REFUSED:
            reason = printable(whole.data[:200].decode("utf-8", "replace"), keep="")
            raise RefusedError(f"the {self._answering} refused: {reason}")
        if whole.kind == FrameType.PROOF:
            self._answer(whole.data)
            return None
        if whole.kind == FrameType.PAYLOAD:
            raise ProtocolError("data came before the handshake was answered")
        if whole.kind != FrameType.HANDSHAKE:
            return None
        return self._agree(whole)

    def _answer(self, challenge: bytes) -> None:
        """The publisher wants proof; the challenge is its nonce."""
        if self._token is None:
            raise RefusedError(f"the {self._answering} asks for a token; open the {self._asking} with token=")
        if len(challenge) != len(NO_NONCE):
            raise ProtocolError(f"a challenge of {len(challenge)} bytes is not one of {len(NO_NONCE)}")
        self._challenge = challenge
        self.outgoing += frame(FrameType.PROOF, prove(self._token, b"subscriber", self._nonce, challenge))

    def _agree(self, whole: Frame) -> Agreed:
        if whole.version > VERSION:
            raise ProtocolError(f"the {self._answering} offers version {whole.version} where {VERSION} was asked for")
        extension = whole.extension()
        if self._calls and (extension is None or not extension.calls):
            raise RefusedError(PUBLISHES)
        if self._token is not None:
            self._check_publisher(b"" if extension is None else extension.proof)
        if extension is None:
            return Agreed(whole.version, False)
        told = (extension.identity, extension.next_ordinal, extension.clock_ns, extension.schema, extension.past)
        return Agreed(whole.version, True, *told)

    def _check_publisher(self, proof: bytes) -> None:
        challenge = getattr(self, "_challenge", NO_NONCE)
        assert self._token is not None
        right = prove(self._token, b"publisher", self._nonce, challenge)
        if not hmac.compare_digest(right, proof) or challenge == NO_NONCE:
            raise RefusedError(f"the {self._answering} did not prove that it knows the token")


class Answer(Negotiation):
    """The publisher's side."""

    def __init__(
        self, token: bytes | None = None, *, identity: bytes = NO_NONCE, calls: bool = False, schema: str = "",
        durable: bool = False,
    ) -> None:
        super().__init__(token, identity, calls)
        self._schema = schema
        self._durable = durable
        self._asked: Frame | None = None
        self._proof = b""

    def _handle(self, whole: Frame) -> Agreed | None:
        if whole.kind == FrameType.HANDSHAKE and self._asked is None:
            return self._ask(whole)
        if whole.kind == FrameType.PROOF and self._asked is not None:
            return self._check_subscriber(whole.data)
        if whole.kind == FrameType.PAYLOAD:
            raise ProtocolError("data came before the handshake")
        return None

    def _ask(self, whole: Frame) -> Agreed | None:
        self._asked = whole
        extension = whole.extension()
        wants_token = extension is not None and extension.wants_token
        if self._calls != (extension is not None and extension.calls):
            self._refuse(ANSWERS if self._calls else PUBLISHES)
        if extension is not None and extension.wanted.start and not self._durable:
            self._refuse(NO_PAST_HERE)
        if self._token is None:
            if wants_token:
                self._refuse(f"this {self._answering} has no token; open the {self._asking} without token=")
            return self._agree(b"")
        if not wants_token:
            self._refuse(f"this {self._answering} asks for a token; open the {self._asking} with token=")
        self.outgoing += frame(FrameType.PROOF, self._nonce)
        return None

    def _check_subscriber(self, proof: bytes) -> Agreed:
        assert self._asked is not None
        extension = self._asked.extension()
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
        """What is agreed. The answer itself is made by ``answer``, when its numbers are known."""
        assert self._asked is not None
        extension = self._asked.extension()
        self._proof = proof
        version = min(self._asked.version, VERSION)
        if extension is None:
            return Agreed(version, False)
        return Agreed(version, True, extension.identity, 0, extension.clock_ns, wanted=extension.wanted)

    def answer(self, agreed: Agreed, clock_ns: int, next_ordinal: int = 0, past: int = 0) -> bytes:
        """The publisher's handshake: the last bytes before data."""
        if not agreed.extended:
            return handshake(agreed.version)
        told = (next_ordinal, clock_ns, self._proof, self._calls, self._schema, past)
        ours = Extension(False, self._nonce, self._identity, *told)
        return handshake(agreed.version, ours)
