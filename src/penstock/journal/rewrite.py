"""Rewriting a segment as its next revision: what compaction and repair share.

The caches of the new revision are written first and its ``.log`` renamed into place last, so that a crash leaves either
revision whole. The old files are removed afterwards; readers keep those that they have mapped. Called under the
writer's lock.
"""

from __future__ import annotations

import secrets
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock._core import journal as native
from penstock.journal import layout
from penstock.journal.disk import Disk
from penstock.journal.recovery import times_of

SUFFIXES = ("log", "index", "sums", "topics")


@dataclass(frozen=True, slots=True)
class Source:
    """A segment as it was read: its bytes and the result of scanning them."""

    header: layout.SegmentHeader
    revision: int
    data: bytes
    scan: dict[str, Any]
    following: int


def rewrite(directory: Path, source: Source, kept: bytes, flags: int, disk: Disk) -> None:
    """Write the next revision with the index entries ``kept`` and remove the old one; on disk when this returns."""
    old = source.header
    header = layout.SegmentHeader(
        old.uuid, secrets.randbits(64) | 1, old.first, time.time_ns(), source.revision + 1, old.flags | flags
    )
    head = encode_head(source.scan)
    body, index = native.compose(
        source.data, kept, header.nonce, header.first, b"".join(head), len(head), layout.BATCH_TOPICS
    )
    end = layout.SEGMENT_HEADER_BYTES + len(body)
    count = len(index) // layout.INDEX_ENTRY_BYTES
    summary = native.summarise(index, header.nonce)
    seal = layout.Seal(end, source.following, count, *times_of(summary))
    # Block sums are computed before the seal is put in, as the writer does: it counts as zeros in them.
    whole = bytearray(header.encode() + body)
    sums = [zlib.crc32(whole[at : at + layout.BLOCK_BYTES]) for at in range(0, end, layout.BLOCK_BYTES)]
    whole[layout.SEAL_OFFSET : layout.SEAL_OFFSET + layout.SEAL_BYTES] = header.encode_seal(seal)
    contents = {
        "index": index,
        "sums": struct.pack(f"<{len(sums)}I", *sums),
        "topics": summary,
        "log": bytes(whole),
    }
    for suffix, content in contents.items():
        disk.write_file(directory / layout.segment_name(header.first, header.revision, suffix), content)
    # The new revision must be on disk before the old one is removed.
    disk.sync_directory(directory)
    remove_segment(directory, header.first, source.revision, disk)


def encode_head(scan: dict[str, Any]) -> list[bytes]:
    """Topics and states as of the segment's end, for the snapshot in its head."""
    records = [
        layout.encode_record(layout.KIND_TOPIC, number, name, flags=flags, ordinal=ordinal, stored_ns=stored_ns)
        for number, name, flags, ordinal, stored_ns in scan["topics"]
        if name
    ]
    states = scan["states"]
    return records + [layout.encode_record(layout.KIND_STATE, kind, data, flags=flags) for kind, flags, data in states]


def remove_segment(directory: Path, first: int, revision: int, disk: Disk) -> None:
    """Remove a segment's files, the ``.log`` first: without it the others are ignored."""
    for suffix in SUFFIXES:
        disk.remove(directory / layout.segment_name(first, revision, suffix))
