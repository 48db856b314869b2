"""The numbered, checksummed message that workers exchange, and the logs they keep.

Message: ``u32 producer | u32 crc32 of what follows | u64 sequence | padding`` (little-endian); the padding's length and
bytes are computed from producer and sequence, so that a wrong byte anywhere is detected.
Log: fixed-width entries appended with one write each, so that a kill leaves whole entries (a torn last one is ignored).
Tally: counts instead of entries, for runs too long to keep each message.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEAD = struct.Struct("<IIQ")
ENTRY = struct.Struct("<IQQ")  # producer, sequence, ordinal (0 where there is none)
COUNTS = struct.Struct("<QQQQ")  # as Counts


def make(producer: int, sequence: int, most: int = 512) -> bytes:
    """The message of this producer and sequence."""
    size = zlib.crc32(b"%d %d" % (producer, sequence)) % (most + 1)
    body = struct.pack("<Q", sequence) + bytes([sequence % 251]) * size
    return struct.pack("<II", producer, zlib.crc32(body)) + body


def look(data: bytes) -> tuple[int, int] | None:
    """Producer and sequence, or None where a byte is wrong."""
    if len(data) < HEAD.size:
        return None
    producer, checksum, sequence = HEAD.unpack_from(data)
    return (producer, sequence) if zlib.crc32(data[8:]) == checksum else None


class Log:
    """Appends entries to a file."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, producer: int, sequence: int, ordinal: int = 0) -> None:
        """One entry, in one write."""
        os.write(self.descriptor, ENTRY.pack(producer, sequence, ordinal))

    def close(self) -> None:
        os.close(self.descriptor)


class Tally:
    """Counts one producer's sequence numbers, which should ascend by one. Its file is always up to date."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._count = self._missing = self._disordered = self._last = 0

    def add(self, producer: int, sequence: int, ordinal: int = 0) -> None:
        """One message."""
        self._count += 1
        if sequence > self._last:
            self._missing += sequence - self._last - 1
        else:
            self._disordered += 1
        self._last = sequence
        os.pwrite(self.descriptor, COUNTS.pack(self._count, self._missing, self._disordered, self._last), 0)

    def close(self) -> None:
        os.close(self.descriptor)


class Counts(NamedTuple):
    """What a ``Tally`` has counted."""

    total: int
    missing: int
    disordered: int
    last: int


def counts(path: Path) -> Counts:
    """The counts of the tally at ``path``; zeros if nothing was counted yet."""
    data = path.read_bytes() if path.exists() else b""
    return Counts(*COUNTS.unpack(data)) if len(data) == COUNTS.size else Counts(0, 0, 0, 0)


def entries(path: Path) -> Iterator[tuple[int, int, int]]:
    """The complete entries of a log; none if the file does not exist."""
    data = path.read_bytes() if path.exists() else b""
    yield from ENTRY.iter_unpack(data[: len(data) - len(data) % ENTRY.size])


def runs(path: Path) -> Iterator[list[int]]:
    """The log's sequence numbers, one list for each producer, in the order of arrival."""
    found: dict[int, list[int]] = {}
    for producer, sequence, _ in entries(path):
        found.setdefault(producer, []).append(sequence)
    yield from found.values()
