"""Blocks: what one commit appends to the stream. The only place that knows their bytes; no I/O.

    0  magic "PBLK"        4  version      6  flags
    8  UUID of the journal (16)
   24  epoch: counts the openings of the stream for writing
   32  writer: a random number, one for each opening
   40  first: the position of the block's first message      48  next: the position after its last one
   56  segment: the first position of the segment            64  revision of the segment     68  zero
   72  offset: where the data belongs in the segment's log
   80  link: the stream sequence of the block that begins the segment; in a block that begins one, that of the
       block that began the segment before; 0: there is none
   88  bytes of data       92  CRC32C of everything before and of the data
   96  data

A commit that is larger than the stream takes in one message is a chain: all of its blocks but the last have ``MORE``.
A chain without its last block is void, as a torn tail is in a file. An ``EPOCH`` block has no data: whoever opens the
stream for writing appends one, so that an earlier writer cannot append any more.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from penstock._core.journal import crc32c
from penstock.errors import CorruptionError, InvalidArgument

MAGIC: Final = b"PBLK"
VERSION: Final = 1
BEGIN: Final = 1
MORE: Final = 2
EPOCH: Final = 4
HEAD: Final = struct.Struct("<4sHH16sQQQQQIIQQII")
_SUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Block:
    """One block. ``begins`` and ``more`` are its flags; an epoch block has neither."""

    uuid: UUID
    epoch: int
    writer: int
    first: int
    next: int
    segment: int
    revision: int
    offset: int
    link: int
    flags: int = 0
    data: bytes = b""

    @property
    def begins(self) -> bool:
        """Whether it is the first block of a segment."""
        return bool(self.flags & BEGIN)

    @property
    def more(self) -> bool:
        """Whether the commit goes on in the next block."""
        return bool(self.flags & MORE)

    @property
    def is_epoch(self) -> bool:
        """Whether it says only that somebody has opened the stream."""
        return bool(self.flags & EPOCH)

    def begin_sequence(self, sequence: int) -> int:
        """The sequence at which its segment begins, given its own sequence; 0: it belongs to none."""
        return sequence if self.begins else self.link

    def part(self, at: int, size: int, begun: int) -> Block:
        """The block of a chain that has ``size`` bytes of the data from ``at`` on; ``begun``: the sequence of the first
        block of that chain.
        """
        end = at + size
        flags = self.flags | (MORE if end < len(self.data) else 0)
        if at == 0:
            return replace(self, flags=flags, data=self.data[:end])
        link = begun if self.begins else self.link
        return replace(self, offset=self.offset + at, link=link, flags=flags & ~BEGIN, data=self.data[at:end])

    def encode(self) -> bytes:
        """Its bytes."""
        head = HEAD.pack(
            MAGIC, VERSION, self.flags, self.uuid.bytes, self.epoch, self.writer, self.first, self.next,
            self.segment, self.revision, 0, self.offset, self.link, len(self.data), 0,
        )[:-4]  # fmt: skip
        return b"".join((head, _SUM.pack(crc32c(self.data, crc32c(head))), self.data))


@functools.lru_cache(maxsize=4)  # all blocks of a stream have the same
def _uuid(data: bytes) -> UUID:
    return UUID(bytes=data)


def decode(data: bytes, place: str) -> Block:
    """The inverse of ``encode``; CorruptionError names ``place``."""
    if len(data) < HEAD.size or data[:4] != MAGIC:
        raise CorruptionError(f"{place} is no block of a journal", place)
    _, version, flags, uuid, epoch, writer, first, following, segment, revision, _, offset, link, size, checksum = (
        HEAD.unpack_from(data)
    )
    if version != VERSION:
        raise InvalidArgument(f"{place} is a block of version {version}; this Penstock reads version {VERSION}")
    body = data[HEAD.size :]
    if size != len(body) or crc32c(body, crc32c(data[: HEAD.size - 4])) != checksum:
        raise CorruptionError(f"{place} is damaged: its checksum is wrong (positions from {first} on)", place)
    return Block(_uuid(uuid), epoch, writer, first, following, segment, revision, offset, link, flags, body)
