"""The byte layout of a journal: file names, headers, records (docs/formats.md, "Journal"). No I/O, no numpy, no native
code.

``native/journal/format.hpp`` has the same layout; a test compares the two. Any thread may call this.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from penstock.errors import CorruptionError, InvalidArgument
from penstock.printable import command

MARKER_NAME: Final = "penstock-journal"
MARKER_BYTES: Final = 64
VERSION: Final = 2
LOCK_NAME: Final = "lock"
READERS_NAME: Final = "readers"
FRONTIER_NAME: Final = "frontier"
CHANNEL_NAME: Final = "channel"
REPLICA_NAME: Final = "replica"  # only in a directory that is a copy of a stream
FRONTIER_BYTES: Final = 4096
SEGMENT_HEADER_BYTES: Final = 4096
BLOCK_BYTES: Final = 65536
SEAL_OFFSET: Final = 512
SEAL_BYTES: Final = 64
BATCH: Final = struct.Struct("<4sIQQIIQqQII")
RECORD: Final = struct.Struct("<IIBBHHHIIIIQqq")
FRONTIER_HEAD: Final = struct.Struct("<8sII16s")
FRONTIER_COPY: Final = struct.Struct("<QQQQQQII")
FRONTIER_COPIES: Final = (64, 128)
SEGMENT: Final = struct.Struct("<8sII16sQQqII")
SEAL: Final = struct.Struct("<QQQqqqqII")
INDEX_ENTRY: Final = struct.Struct("<QQqqQIIIIII")
TOPIC_SUMMARY: Final = struct.Struct("<IIQQQQQqqqq")
BATCH_MAGIC: Final = b"PBAT"
SEGMENT_MAGIC: Final = b"PENSTKSG"
FRONTIER_MAGIC: Final = b"PENSTKFR"
INDEX_ENTRY_BYTES: Final = INDEX_ENTRY.size
TIME_NOW: Final = -(2**63)  # no time was given: the time of storing is used

KIND_MESSAGE: Final = 1
KIND_STATE: Final = 2
KIND_TOPIC: Final = 3
FLAG_INTERNAL: Final = 1
FLAG_COMPACTED_TOPIC: Final = 2
BATCH_SNAPSHOT: Final = 1
BATCH_TOPICS: Final = 2
BATCH_OPEN: Final = 4
SEGMENT_COMPACTED: Final = 1
SEGMENT_REPAIRED: Final = 2
SEGMENT_AFTER_LOSS: Final = 4

MAX_POSITION: Final = 1 << 62
_SEGMENT_NAME = re.compile(r"^(\d{20})-(\d{4})\.log$")


def _castagnoli() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
        table.append(crc)
    return tuple(table)


_TABLE = _castagnoli()


def crc32c(data: bytes, value: int = 0) -> int:
    """CRC32C byte by byte: for headers, in readers without native code."""
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def padded(count: int) -> int:
    """``count`` up to a multiple of 8."""
    return (count + 7) & ~7


def encode_marker(uuid: UUID) -> bytes:
    """The 64 bytes that make a directory a journal."""
    return f"penstock-journal {VERSION}\n{uuid}\n".encode().ljust(MARKER_BYTES - 1) + b"\n"


def decode_marker(data: bytes, place: str) -> UUID:
    """The UUID; refuses other versions by number."""
    try:
        name, uuid = data.decode("ascii").split("\n")[:2]
        word, version = name.split(" ")
        if word != "penstock-journal":
            raise ValueError(name)
        if int(version) != VERSION:
            raise InvalidArgument(
                f"{place} is a journal of version {int(version)}; {_other_version(int(version), place)}"
            )
        return UUID(uuid)
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise CorruptionError(f"{place} is not a journal's format marker", place) from None


def _other_version(version: int, place: str) -> str:
    if version < VERSION:
        return f"convert it once: {command('journal', 'upgrade', place.removesuffix('/' + MARKER_NAME))}"
    return f"this Penstock reads version {VERSION}"


MAX_REVISION = 9999  # four digits of its name


def segment_name(first: int, revision: int, suffix: str = "log") -> str:
    """The file name of one part of a segment."""
    return f"{first:020d}-{revision:04d}.{suffix}"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """(first position, revision) of a ``.log``'s name; None for any other name."""
    match = _SEGMENT_NAME.match(name)
    return (int(match[1]), int(match[2])) if match and int(match[1]) < MAX_POSITION else None


def latest_segments(names: Iterable[str]) -> list[tuple[int, int]]:
    """(first position, revision) of every segment among file names, in order, the greatest revision of each."""
    latest: dict[int, int] = {}
    for name in names:
        parsed = parse_segment_name(name)
        if parsed:
            latest[parsed[0]] = max(parsed[1], latest.get(parsed[0], 0))
    return sorted(latest.items())


@dataclass(frozen=True, slots=True)
class Seal:
    """The summary in a segment's header once nothing more is added to the segment."""

    end: int
    next: int
    messages: int
    least_time_ns: int
    greatest_time_ns: int
    least_stored_ns: int
    greatest_stored_ns: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 4096 bytes of a ``.log``."""

    uuid: UUID
    nonce: int
    first: int
    created_ns: int
    revision: int = 0
    flags: int = 0
    seal: Seal | None = None

    @property
    def gaps(self) -> bool:
        """Whether positions may be missing."""
        return bool(self.flags & (SEGMENT_COMPACTED | SEGMENT_REPAIRED))

    def encode(self) -> bytes:
        """The header, without a seal."""
        words = SEGMENT_MAGIC, VERSION, self.flags, self.uuid.bytes, self.nonce, self.first, self.created_ns
        head = SEGMENT.pack(*words, self.revision, 0)[:-4]
        return (head + struct.pack("<I", crc32c(head))).ljust(SEGMENT_HEADER_BYTES, b"\0")

    @property
    def seed(self) -> int:
        """The seed of the checksums of its seal, its index entries and its topic summary."""
        return crc32c(struct.pack("<Q", self.nonce))

    def encode_seal(self, seal: Seal) -> bytes:
        """The bytes at ``SEAL_OFFSET``."""
        times = seal.least_time_ns, seal.greatest_time_ns, seal.least_stored_ns, seal.greatest_stored_ns
        body = SEAL.pack(seal.end, seal.next, seal.messages, *times, 0, 0)[:-4]
        return body + struct.pack("<I", crc32c(body, self.seed))


def decode_segment_header(data: bytes, place: str) -> SegmentHeader:
    """The header; a damaged seal counts as none."""
    if len(data) < SEGMENT_HEADER_BYTES:
        raise CorruptionError(f"{place} is shorter than a segment's header", place)
    magic, version, flags, uuid, nonce, first, created, revision, checksum = SEGMENT.unpack_from(data)
    if magic != SEGMENT_MAGIC or checksum != crc32c(data[: SEGMENT.size - 4]):
        raise CorruptionError(f"{place}: the segment's header is damaged", place)
    if version != VERSION:
        raise InvalidArgument(f"{place} is of version {version}; this Penstock reads version {VERSION}")
    header = SegmentHeader(UUID(bytes=uuid), nonce, first, created, revision, flags)
    end, following, messages, *times, _, _ = SEAL.unpack_from(data, SEAL_OFFSET)
    seal = Seal(end, following, messages, *times)
    if end and header.encode_seal(seal) == data[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES]:
        header = replace(header, seal=seal)
    return header


def decode_summary(
    data: bytes, header: SegmentHeader, crc32c: Callable[[bytes, int], int] = crc32c
) -> list[tuple[int, ...]] | None:
    """The rows of a ``.topics`` file; None if a checksum is wrong or a row is missing.

    ``crc32c``: a faster implementation, if the caller has one.
    """
    if len(data) % TOPIC_SUMMARY.size or header.seal is None:
        return None
    rows = list(TOPIC_SUMMARY.iter_unpack(data))
    for at, row in enumerate(rows):
        begin = at * TOPIC_SUMMARY.size
        body = data[begin : begin + 4], data[begin + 8 : begin + TOPIC_SUMMARY.size]
        if row[1] != crc32c(body[1], crc32c(body[0], header.seed)):
            return None
    return rows if sum(row[2] for row in rows) == header.seal.messages else None


def encode_record(
    kind: int, number: int, data: bytes, *, flags: int = 0, ordinal: int = 0, stored_ns: int = 0
) -> bytes:
    """A state or topic record; its checksum and position are put in when it is written."""
    size = padded(RECORD.size + len(data))
    head = RECORD.pack(0, size, kind, flags, 0, 0, 0, number, 0, len(data), 0, ordinal, stored_ns, stored_ns)
    return (head + data).ljust(size, b"\0")


@dataclass(frozen=True, slots=True)
class Frontier:
    """The words of the frontier file."""

    pid: int
    sequence: int
    frontier: int
    segment: int
    end: int
    generation: int
    first: int

    @property
    def plausible(self) -> bool:
        """Whether the words are consistent: that many messages fit into that many bytes."""
        if not 1 <= self.frontier < MAX_POSITION or max(self.segment, self.first) > self.frontier:
            return False
        if self.end >= 1 << 56:
            return False
        if not self.segment or not self.end:  # new, not moved yet
            return self.segment == self.end == 0
        return 0 <= self.frontier - self.segment <= (self.end - SEGMENT_HEADER_BYTES) // RECORD.size


def encode_frontier(uuid: UUID, words: Frontier) -> bytes:
    """The whole frontier file."""
    body = words.sequence, words.frontier, words.segment, words.end, words.generation, words.first, words.pid
    copy = FRONTIER_COPY.pack(*body, 0)[:-4]
    copy += struct.pack("<I", crc32c(copy, crc32c(uuid.bytes)))
    file = bytearray(FRONTIER_BYTES)
    FRONTIER_HEAD.pack_into(file, 0, FRONTIER_MAGIC, VERSION, 0, uuid.bytes)
    for place in FRONTIER_COPIES:
        file[place : place + len(copy)] = copy
    return bytes(file)


def decode_frontier(data: bytes, uuid: UUID) -> Frontier | None:
    """The newest copy that is intact and plausible; None if there is none, or if the file belongs to another
    journal."""
    if len(data) < FRONTIER_BYTES:
        return None
    magic, version, _, owner = FRONTIER_HEAD.unpack_from(data)
    if magic != FRONTIER_MAGIC or version != VERSION or owner != uuid.bytes:
        return None
    found = [copy for place in FRONTIER_COPIES if (copy := decode_copy(data, place, uuid))]
    return max(found, key=lambda words: words.sequence, default=None)


def decode_copy(data: bytes, place: int, uuid: UUID) -> Frontier | None:
    """One copy of the words; None if it is damaged or not plausible."""
    sequence, frontier, segment, end, generation, first, pid, checksum = FRONTIER_COPY.unpack_from(data, place)
    body = data[place : place + FRONTIER_COPY.size - 4]
    words = Frontier(pid, sequence, frontier, segment, end, generation, first)
    return words if checksum == crc32c(body, crc32c(uuid.bytes)) and words.plausible else None


def encode_text(name: str, text: str | None) -> bytes:
    """A message id or key; ``TypeError`` says which of them is no text."""
    if text is None:
        return b""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, not {type(text).__name__}")
    return text.encode()


def encode_properties(properties: Mapping[str, str] | None) -> bytes:
    """``key NUL value NUL ...``."""
    if not properties:
        return b""
    parts = []
    for key, value in properties.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError("properties must be a dict of str to str")
        if "\0" in key or "\0" in value:
            raise InvalidArgument(f"property {key!r} has a NUL in it")
        parts += [key, value]
    return "\0".join([*parts, ""]).encode("utf-8", "surrogateescape")


def decode_properties(data: bytes) -> dict[str, str]:
    """The inverse of ``encode_properties``."""
    texts = data.decode("utf-8", "surrogateescape").split("\0")
    return dict(zip(texts[0:-1:2], texts[1:-1:2], strict=False))
