"""Compaction by key: of topics that are configured for it, sealed segments keep only the last message of each key.

Messages without a key stay. Positions and ordinals do not change; removed messages leave holes with the reason
``compaction``. Memory grows with the number of different keys, not with the messages. Called by the writer, one at a
time; readers continue with the files that they have mapped.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from penstock._core import journal as native
from penstock.journal import layout
from penstock.journal.disk import Disk, read_all
from penstock.journal.rewrite import Source, rewrite

ENTRY = struct.Struct(f"{layout.INDEX_ENTRY_BYTES}s")
POSITION, TOPIC = 0, 6  # offsets of an index entry's fields


def compact(directory: Path, topics: set[int], active: int, frontier: int, disk: Disk) -> int:
    """Rewrite every sealed segment that has something to remove; returns how many messages were removed."""
    if not topics:
        return 0
    segments = layout.latest_segments(os.listdir(directory))
    following = [first for first, _ in segments[1:]] + [frontier]
    latest: dict[tuple[int, bytes], int] = {}
    for segment, after in zip(segments, following, strict=True):
        for position, topic, key in _keyed(_read(directory, segment, after), topics):
            latest[topic, key] = position
    removed = 0
    for segment, after in zip(segments, following, strict=True):
        if segment[0] < active:
            removed += _compact_segment(directory, _read(directory, segment, after), topics, latest, disk)
    return removed


def _read(directory: Path, segment: tuple[int, int], following: int) -> Source:
    path = directory / layout.segment_name(*segment)
    data = read_all(path)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
    return Source(header, segment[1], data, scan, following)


def _keyed(source: Source, topics: set[int]) -> list[tuple[int, int, bytes]]:
    index = source.scan["index"]
    wanted = [entry for (entry,) in ENTRY.iter_unpack(index) if _field(entry, TOPIC) in topics]
    keys = native.record_keys(source.data, b"".join(wanted))
    pairs = zip(wanted, keys, strict=True)
    return [(_field(entry, POSITION), _field(entry, TOPIC), key) for entry, key in pairs if key]


def _field(entry: bytes, number: int) -> int:
    return int(layout.INDEX_ENTRY.unpack(entry)[number])


def _compact_segment(
    directory: Path, source: Source, topics: set[int], latest: dict[tuple[int, bytes], int], disk: Disk
) -> int:
    """Skips a damaged segment: it must be repaired first."""
    gone = {position for position, topic, key in _keyed(source, topics) if latest[topic, key] != position}
    if not gone or source.scan["damage"]:
        return 0
    kept = [entry for (entry,) in ENTRY.iter_unpack(source.scan["index"]) if _field(entry, POSITION) not in gone]
    rewrite(directory, source, b"".join(kept), layout.SEGMENT_COMPACTED, disk)
    return len(gone)
