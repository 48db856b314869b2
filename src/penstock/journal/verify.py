"""Verify: checks every byte of a journal against its checksums, and its caches against the log. Only reads, with
``pread``.

Any thread; a journal that is being written is verified up to its durable frontier.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import PenstockError
from penstock.journal import foreign, layout
from penstock.journal.disk import read_all, read_part, while_files_go
from penstock.journal.recovery import Damage, read_frontier


def verify(directory: str | os.PathLike[str]) -> list[Damage]:
    """All damage, in order of position; empty if the journal is intact.

    Starts again if retention or compaction removes segments meanwhile.
    """
    path = Path(directory)
    return while_files_go(path, lambda: _verify(path))


def _verify(path: Path) -> list[Damage]:
    marker = path / layout.MARKER_NAME
    identity = layout.decode_marker(read_all(marker), str(marker))
    place = path / layout.FRONTIER_NAME
    words = read_frontier(path, identity)
    damage = [] if words else [Damage(str(place), 0, 0, 1, 0, "the frontier file is missing or damaged")]
    damage += _verify_frontier(place, identity) if words else []
    durable = words.frontier if words else 0
    others = foreign.find(path, identity)
    names = [name for name in os.listdir(path) if name not in {other.path.name for other in others}]
    own = layout.latest_segments(names)
    damage += [other.damage(identity, own, words) for other in others]
    segments = [item for item in own if not durable or item[0] <= durable]
    if not segments and durable > 1 and not others:
        damage.append(Damage(str(path), 0, 0, 1, durable - 1, "segments are missing"))
    for number, segment in enumerate(segments):
        last = number == len(segments) - 1
        following = 2**63 if last else segments[number + 1][0]
        # a writer may be at work past the frontier: what is there is not confirmed, and is no damage
        limit = min(following, durable) if durable else following
        end = words.end if words and words.segment == segment[0] else 0
        damage += _verify_segment(path, segment, limit, last, end)
    return damage


def _verify_frontier(place: Path, identity: UUID) -> list[Damage]:
    """Find a damaged copy. One that a writer was just changing is intact at the next read."""
    for _ in range(100):
        data = read_part(place, 0, layout.FRONTIER_BYTES)
        broken = [at for at in layout.FRONTIER_COPIES if layout.decode_copy(data, at, identity) is None]
        if not broken:
            return []
    text = "one of the two copies of the frontier is damaged; the next commit makes it anew"
    return [Damage(str(place), broken[0], layout.FRONTIER_COPY.size, 1, 0, text)]


def _verify_segment(directory: Path, segment: tuple[int, int], limit: int, active: bool, end: int) -> list[Damage]:
    path = directory / layout.segment_name(*segment)
    data = read_all(path)
    try:
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    except PenstockError as error:
        return [Damage(str(path), 0, layout.SEGMENT_HEADER_BYTES, segment[0], limit - 1, str(error))]
    durable = limit if limit < 2**63 else 0
    scan = native.scan(data, header.nonce, header.first, limit, durable, header.gaps)
    damage = [
        Damage(str(path), offset, size, first, following - 1, text)
        for offset, size, first, following, text in scan["damage"]
    ]
    if header.seal and header.seal.next < limit < 2**63:
        damage.append(Damage(str(directory), 0, 0, header.seal.next, limit - 1, "a segment is missing"))
    # a compacted segment has gaps, so its positions do not say whether something is missing
    if not damage and durable and scan["next_position"] < durable and not header.gaps:
        lost = scan["next_position"], durable - 1
        damage.append(Damage(str(path), scan["end"], 0, *lost, "the segment ends too early"))
    if not damage and scan["end"] < end and not header.gaps:
        text = "the segment ends before its durable end"
        damage.append(Damage(str(path), scan["end"], end - scan["end"], 1, 0, text))
    return damage + _verify_caches(directory, segment, header, data, scan, active)


def _verify_caches(
    directory: Path,
    segment: tuple[int, int],
    header: layout.SegmentHeader,
    data: bytes,
    scan: dict[str, Any],
    active: bool,
) -> list[Damage]:
    """Check the caches, if the log is intact: with a damaged log they prove nothing. A missing cache is no damage."""
    if scan["damage"]:
        return []
    found = []
    if header.seal is None and any(data[layout.SEAL_OFFSET : layout.SEAL_OFFSET + layout.SEAL_BYTES]) and not active:
        place = directory / layout.segment_name(*segment)
        text = "the segment's seal is damaged; repair makes it again"
        found.append(Damage(str(place), layout.SEAL_OFFSET, layout.SEAL_BYTES, 1, 0, text))
    topics = directory / layout.segment_name(*segment, "topics")
    if header.seal and topics.exists() and layout.decode_summary(read_all(topics), header) is None:
        text = "the topic summary is damaged; repair makes it again"
        found.append(Damage(str(topics), 0, topics.stat().st_size, 1, 0, text))
    index = directory / layout.segment_name(*segment, "index")
    if index.exists() and read_all(index)[: len(scan["index"])] != scan["index"]:
        text = "the index does not agree with the log; it can be made again"
        found.append(Damage(str(index), 0, index.stat().st_size, 1, 0, text))
    sums = directory / layout.segment_name(*segment, "sums")
    if sums.exists():
        stored = read_all(sums)
        for block in _wrong_sums(data[: scan["end"]], stored, active or not header.seal):
            text = f"the sum of block {block} does not agree; it can be made again"
            found.append(Damage(str(sums), block * 4, 4, 1, 0, text))
    return found


def _wrong_sums(data: bytes, stored: bytes, active: bool) -> Iterator[int]:
    size = layout.BLOCK_BYTES
    blank = bytearray(data)
    blank[layout.SEAL_OFFSET : layout.SEAL_OFFSET + layout.SEAL_BYTES] = bytes(layout.SEAL_BYTES)
    whole = len(data) // size if active else -(-len(data) // size)
    for block in range(min(whole, len(stored) // 4)):
        told = int.from_bytes(stored[block * 4 : block * 4 + 4], "little")
        if zlib.crc32(blank[block * size : (block + 1) * size]) != told:
            yield block
