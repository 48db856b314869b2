"""Converting a journal of version 1 into one of this version, in place, segment by segment.

Each segment gets a next revision in the new format, synced before the old one is removed; the marker, which holds the
version, is replaced last. So an interrupted run can be repeated and continues. A damaged journal is refused before
anything is written: the release that wrote it repairs it. Version 1 had one time per message, which becomes both times.
Takes the writer's lock; one thread.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import layout, recovery
from penstock.journal.disk import Disk, read_all
from penstock.journal.lock import WriterLock
from penstock.journal.rewrite import remove_segment

OLD_RECORD: Final = struct.Struct("<IIBBHHHIIIIQq")
OLD_FRONTIER: Final = struct.Struct("<8sII16sQQQQQQ")
OLD_SEAL: Final = struct.Struct("<QQQqqII")


def upgrade(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> int:
    """Convert the journal; returns how many segments were converted, 0 if it already has this version."""
    path, disk = Path(directory), disk or Disk()
    recovery.check_owner(path)
    marker = path / layout.MARKER_NAME
    version, identity = _marker(path)
    if version == layout.VERSION:
        return 0
    lock = WriterLock(path)
    try:
        segments = layout.latest_segments(os.listdir(path))
        frontier = _frontier(path, identity)
        sources = [name for name in segments if _version(path, name) == 1]
        for name in sources:  # check all of them before the first is written
            _convert(path, name, _limit(segments, name, frontier), -(2**63))
        stored_ns = -(2**63)
        for name in sources:
            body, stored_ns = _convert(path, name, _limit(segments, name, frontier), stored_ns)
            _replace(path, identity, name, body, _limit(segments, name, frontier), disk)
        disk.remove(path / layout.FRONTIER_NAME)  # opening rebuilds it; all records have been checked
        disk.write_file(marker, layout.encode_marker(identity))
        disk.sync_directory(path)
    finally:
        lock.release()
    from penstock.journal.journal import Journal

    Journal(path, disk=disk).close()
    return len(sources)


def _marker(path: Path) -> tuple[int, UUID]:
    place = path / layout.MARKER_NAME
    try:
        first, uuid = read_all(place).decode("ascii").split("\n")[:2]
        version = int(first.removeprefix("penstock-journal "))
        identity = UUID(uuid)
    except FileNotFoundError:
        raise InvalidArgument(f"{path} is not a journal (no {layout.MARKER_NAME} in it)") from None
    except ValueError:
        raise CorruptionError(f"{place} is not a journal's format marker", str(place)) from None
    if version not in (1, layout.VERSION):
        raise InvalidArgument(f"{path} is a journal of version {version}; this Penstock converts version 1")
    return version, identity


def _frontier(path: Path, identity: UUID) -> int:
    """All positions below it must exist. 0: not known (the file was lost, or an earlier run has removed it)."""
    try:
        words = OLD_FRONTIER.unpack_from(read_all(path / layout.FRONTIER_NAME))
    except (FileNotFoundError, struct.error):
        return 0
    return int(words[5]) if words[0] == layout.FRONTIER_MAGIC and words[3] == identity.bytes else 0


def _version(path: Path, name: tuple[int, int]) -> int:
    place = path / layout.segment_name(*name)
    data = read_all(place)[: layout.SEGMENT.size]
    if len(data) < layout.SEGMENT.size or data[:8] != layout.SEGMENT_MAGIC:
        raise CorruptionError(f"{place}: the segment's header is damaged", str(place))
    return int(layout.SEGMENT.unpack(data)[1])


def _limit(segments: list[tuple[int, int]], name: tuple[int, int], frontier: int) -> tuple[int, bool, int]:
    """(where the segment ends, whether it is the last, what must be there)."""
    later = [first for first, _ in segments if first > name[0]]
    return (later[0], False, later[0]) if later else (2**63, True, frontier)


class _Body:
    """A segment in the new form, without its caches."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.batches: list[tuple[int, int, list[bytes]]] = []  # first position, flags, records
        self.next = 0


def _convert(path: Path, name: tuple[int, int], limit: tuple[int, bool, int], stored_ns: int) -> tuple[_Body, int]:
    place = path / layout.segment_name(*name)
    data = read_all(place)
    fields = layout.SEGMENT.unpack_from(data)
    if fields[8] != native.crc32c(data[:60]):
        raise CorruptionError(f"{place}: the segment's header is damaged", str(place))
    body, nonce = _Body(fields[2]), fields[4]
    body.next = fields[5]
    end = _old_end(data, nonce)
    for offset, header, content in _old_batches(data, nonce, end):
        first, messages = header[3], header[4]
        # Batches past the beginning of the next segment were void in version 1 too.
        if first + (1 if messages else 0) > limit[0]:
            break
        records, position, words = [], first, b""
        for record, raw in _old_records(content):
            if native.crc32c(raw[4:], native.crc32c(struct.pack("<QQ", nonce, position))) != record[0]:
                raise _damaged(place, offset)
            words += raw[:4]
            # Version 1 had one time per message; times of storing must never go back.
            stored_ns = max(stored_ns, record[12])
            records.append(_new_record(record, raw, stored_ns))
            position += record[2] == layout.KIND_MESSAGE
        if len(records) != header[5] or native.crc32c(words, native.crc32c(header[-1])) != header[1]:
            raise _damaged(place, offset)
        body.batches.append((first, header[9], records))
        body.next = position
    must = limit[2]
    if body.next < must and not body.flags & (layout.SEGMENT_COMPACTED | layout.SEGMENT_REPAIRED):
        raise CorruptionError(
            f"{place} ends at position {body.next}, its journal says {must}; repair it with the release that wrote it",
            str(place),
        )
    return body, stored_ns


def _damaged(place: Path, offset: int) -> CorruptionError:
    text = f"{place}:{offset} is damaged; repair the journal with the release that wrote it"
    return CorruptionError(text, f"{place}:{offset}")


def _old_end(data: bytes, nonce: int) -> int:
    end, *_, checksum = OLD_SEAL.unpack_from(data, layout.SEAL_OFFSET)
    sealed = data[layout.SEAL_OFFSET : layout.SEAL_OFFSET + OLD_SEAL.size - 4]
    good = end and native.crc32c(sealed, native.crc32c(struct.pack("<Q", nonce))) == checksum
    return min(int(end), len(data)) if good else len(data)


def _old_batches(data: bytes, nonce: int, end: int) -> Iterator[tuple[int, tuple[Any, ...], bytes]]:
    at = layout.SEGMENT_HEADER_BYTES
    while at + layout.BATCH.size <= end:
        header = layout.BATCH.unpack_from(data, at)
        size = header[6]
        if header[0] != layout.BATCH_MAGIC or header[2] != nonce or not layout.BATCH.size <= size <= end - at:
            return  # the torn tail; the caller checks that every confirmed position exists
        yield at, (*header, data[at + 8 : at + layout.BATCH.size]), data[at + layout.BATCH.size : at + size]
        at += size


def _old_records(content: bytes) -> Iterator[tuple[tuple[int, ...], bytes]]:
    at = 0
    while at + OLD_RECORD.size <= len(content):
        record = OLD_RECORD.unpack_from(content, at)
        if not OLD_RECORD.size <= record[1] <= len(content) - at:
            return
        yield record, content[at : at + record[1]]
        at += record[1]


def _new_record(record: tuple[int, ...], raw: bytes, stored_ns: int) -> bytes:
    _, _, kind, flags, identity, key, _, topic, properties, length, _, ordinal, time_ns = record
    used = length + properties + identity + key
    size = layout.padded(layout.RECORD.size + used)
    times = (time_ns, stored_ns) if kind == layout.KIND_MESSAGE else (stored_ns, stored_ns)
    head = layout.RECORD.pack(0, size, kind, flags, identity, key, 0, topic, properties, length, 0, ordinal, *times)
    return (head + raw[OLD_RECORD.size : OLD_RECORD.size + used]).ljust(size, b"\0")


def _replace(
    path: Path, identity: UUID, name: tuple[int, int], body: _Body, limit: tuple[int, bool, int], disk: Disk
) -> None:
    """The segment as its next revision, with its caches, sealed unless it is the last."""
    nonce = int.from_bytes(os.urandom(8), "little") | 1
    header = layout.SegmentHeader(identity, nonce, name[0], time.time_ns(), name[1] + 1, body.flags)
    whole = bytearray(header.encode())
    for first, flags, records in body.batches:
        whole += _batch(nonce, first, flags, records)
    data = bytes(whole)
    target = path / layout.segment_name(header.first, header.revision)
    disk.write_file(target, data)
    if not limit[1]:
        scan = native.scan(data, nonce, header.first, limit[0], limit[0], header.gaps)
        recovery.seal_segment(path, (header.first, header.revision), header, data, scan, limit[0], disk)
    disk.sync_directory(path)
    remove_segment(path, *name, disk)


def _batch(nonce: int, first: int, flags: int, records: list[bytes]) -> bytes:
    content, words, position, messages = bytearray(), b"", first, 0
    for raw in records:
        record = bytearray(raw)
        struct.pack_into("<I", record, 28, position & 0xFFFF_FFFF)
        seed = native.crc32c(struct.pack("<QQ", nonce, position))
        struct.pack_into("<I", record, 0, native.crc32c(bytes(record[4:]), seed))
        words += record[:4]
        message = record[8] == layout.KIND_MESSAGE
        position, messages = position + message, messages + message
        content += record
    fields = nonce, first, messages, len(records), layout.BATCH.size + len(content), time.time_ns(), first, flags
    head = bytearray(layout.BATCH.pack(layout.BATCH_MAGIC, 0, *fields, 0))
    struct.pack_into("<I", head, 60, native.crc32c(bytes(head[8:60])))
    struct.pack_into("<I", head, 4, native.crc32c(words, native.crc32c(bytes(head[8:]))))
    return bytes(head + content)
