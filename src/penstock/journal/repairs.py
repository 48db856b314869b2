"""Repair: keep everything that is intact and report what is lost. A damaged segment gets a new revision without the
damage. A segment of another journal is set aside.

Takes the writer's lock, so no writer may be running; readers may. One thread.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import foreign, layout, recovery
from penstock.journal.disk import Disk, read_all
from penstock.journal.recovery import Damage
from penstock.journal.rewrite import Source, rewrite

Range = tuple[int, int]


@dataclass(slots=True)
class RepairReport:
    """What repair found and did. ``lost`` are ranges of positions, both ends included."""

    segments: int = 0
    rewritten: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    lost: list[Range] = field(default_factory=list)
    kept_messages: int = 0
    aside: list[str] = field(default_factory=list)  # where segments of other journals are now

    @property
    def whole(self) -> bool:
        """Whether there was nothing to do."""
        return not self.rewritten and not self.caches and not self.damage


def repair(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> RepairReport:
    """Repair the journal: remove what is damaged."""
    path, disk, report = Path(directory), disk or Disk(), RepairReport()
    if not (path / layout.MARKER_NAME).exists():
        raise InvalidArgument(f"{path} is not a journal (no {layout.MARKER_NAME} in it)")
    identity, lock, _ = recovery.prepare(path, disk)
    try:
        if (named := identity) != (identity := foreign.owner(path, identity)):
            text = f"the marker names journal {named}, and all other files are of {identity}: made anew"
            report.damage.append(Damage(str(path / layout.MARKER_NAME), 0, layout.MARKER_BYTES, 1, 0, text))
            disk.write_file(path / layout.MARKER_NAME, layout.encode_marker(identity))
            disk.sync_directory(path)
        words = recovery.read_frontier(path, identity)
        frontier = path / layout.FRONTIER_NAME
        if not frontier.exists():  # a damaged one is reported by opening the journal below
            text = "the frontier file was missing: made anew"
            report.damage.append(Damage(str(frontier), 0, 0, 1, 0, text))
        others = foreign.find(path, identity)
        names = [name for name in os.listdir(path) if name not in {other.path.name for other in others}]
        for other in others:
            report.damage.append(other.damage(identity, layout.latest_segments(names), words))
            report.aside.append(str(foreign.set_aside(path, other, disk)))
        report.lost += [(item.first, item.last) for item in report.damage if item.last >= item.first]
        segments = recovery.tidy(path, identity, disk, words.frontier if words else 0)
        report.segments = len(segments)
        for number, segment in enumerate(segments):
            following = segments[number + 1][0] if number + 1 < len(segments) else None
            _repair_segment(path, identity, segment, following, words.frontier if words else 0, disk, report)
    finally:
        lock.release()
    from penstock.journal.journal import Journal

    with Journal(path, disk=disk) as journal:  # cuts off a torn tail, rebuilds frontier and caches
        found = [item for item in journal.recovery.damage if item not in report.damage]
        report.damage += found
        report.lost += [(item.first, item.last) for item in found if item.last >= item.first]
    report.lost = merge(report.lost)
    return report


def _repair_segment(
    path: Path,
    identity: UUID,
    segment: tuple[int, int],
    following: int | None,
    durable: int,
    disk: Disk,
    report: RepairReport,
) -> None:
    place = path / layout.segment_name(*segment)
    data = read_all(place)
    header, header_damage = _header(data, str(place), identity, segment)
    limit = 2**63 if following is None else following
    # positions below `must` were confirmed: if the scan ends before, they are lost and reported
    must = max(durable if following is None else following, segment[0])
    scan = native.scan(data, header.nonce, header.first, limit, must, header.gaps)
    found = [Damage(str(place), at, size, first, end - 1, text) for at, size, first, end, text in scan["damage"]]
    if header_damage:
        found.insert(0, header_damage)
    if header.seal and following is not None and header.seal.next < following:
        found.append(Damage(str(path), 0, 0, header.seal.next, following - 1, "a segment is missing"))
    ends_early = scan["next_position"] < must and not header.gaps
    if ends_early and not any(item.last >= item.first for item in found):
        found.append(Damage(str(place), scan["end"], 0, scan["next_position"], must - 1, "the segment ends too early"))
    report.kept_messages += len(scan["index"]) // layout.INDEX_ENTRY_BYTES
    if not found:  # the log is intact: at most its caches are rebuilt
        if following is not None:
            _repair_caches(path, segment, header, data, scan, following, disk, report)
        return
    report.damage += found
    report.lost += [(item.first, item.last) for item in found if item.last >= item.first]
    report.rewritten.append(str(place))
    after = limit if following is not None else max(scan["next_position"], must)
    source = Source(header, segment[1], data, scan, after)
    rewrite(path, source, scan["index"], layout.SEGMENT_REPAIRED, disk)


def _header(
    data: bytes, place: str, identity: UUID, segment: tuple[int, int]
) -> tuple[layout.SegmentHeader, Damage | None]:
    """The header; if it is damaged, one made from the file's name and the nonce in its batches."""
    try:
        return layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], place), None
    except CorruptionError:
        damage = Damage(place, 0, layout.SEGMENT_HEADER_BYTES, 1, 0, "the segment's header is damaged")
    at = data.find(layout.BATCH_MAGIC, layout.SEGMENT_HEADER_BYTES)
    nonce = struct.unpack_from("<Q", data, at + 8)[0] if 0 <= at <= len(data) - layout.BATCH.size else 0
    return layout.SegmentHeader(identity, nonce, segment[0], 0, segment[1], layout.SEGMENT_REPAIRED), damage


def _repair_caches(
    path: Path,
    segment: tuple[int, int],
    header: layout.SegmentHeader,
    data: bytes,
    scan: dict[str, object],
    following: int,
    disk: Disk,
    report: RepairReport,
) -> None:
    before = _caches(path, segment)
    recovery.seal_segment(path, segment, header, data, scan, following, disk)
    after = _caches(path, segment)
    report.caches += [name for name, content in after.items() if before.get(name) != content]


def _caches(path: Path, segment: tuple[int, int]) -> dict[str, bytes]:
    places = [path / layout.segment_name(*segment, suffix) for suffix in ("index", "sums", "topics")]
    return {str(place): read_all(place).rstrip(b"\0") for place in places if place.exists()}


def merge(ranges: list[Range]) -> list[Range]:
    """Ranges sorted, neighbours joined."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
