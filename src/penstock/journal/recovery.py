"""Opening a journal for writing: create it if it does not exist, find its durable end, cut off a torn tail, and report.

Rules:

- A directory with entries but no marker, or of another version, is refused untouched.
- A directory that is a copy of a stream (``replica`` is in it) is written from that stream alone: what others would add
  there is not on the stream.
- Only the last segment is read. Intact batches past the frontier are written again and synced before they are served:
  after a failed sync, pages can be read correctly although they are not on disk.
- A file that others may have mapped is never truncated: after a torn tail or damage a new segment is begun.
- Positions are never used twice: the next one is at least the frontier.
- Broken bytes past the frontier are a torn tail. Broken bytes before it are damage: it is reported, or opening is
  refused and nothing changed, so that the next attempt finds the same.

Called by one thread, under the writer's lock.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument, RefusedError
from penstock.journal import layout
from penstock.journal.disk import Disk, read_all, read_part
from penstock.journal.lock import WriterLock
from penstock.printable import command


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged place; the positions ``first`` to ``last`` are lost with it (last < first: none)."""

    path: str
    offset: int
    bytes: int
    first: int
    last: int
    text: str

    @property
    def place(self) -> str:
        """File and offset."""
        return f"{self.path}:{self.offset}"

    def __str__(self) -> str:
        lost = f", positions {self.first} to {self.last}" if self.last >= self.first else ""
        return f"{self.place}: {self.bytes} bytes: {self.text}{lost}"


@dataclass(slots=True)
class Recovery:
    """What opening found: the tail that was cut off and the damage, if any."""

    created: bool = False
    torn_bytes: int = 0
    torn_place: str = ""
    rewritten_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """Where a writer continues."""

    uuid: uuid.UUID
    report: Recovery
    next_position: int = 1
    first: int = 1
    generation: int = 0
    topics: list[tuple[int, bytes, int, int, int]] = field(default_factory=list)
    states: list[tuple[int, int, bytes]] = field(default_factory=list)
    resume: LastSegment | None = None  # None: begin a new segment
    after_loss: bool = False


@dataclass(slots=True)
class LastSegment:
    """The active segment, if it can be appended to."""

    header: layout.SegmentHeader
    end: int
    file_bytes: int
    entries: int
    block_crc: int
    states: int


def prepare(directory: Path, disk: Disk, identity: uuid.UUID | None = None) -> tuple[uuid.UUID, WriterLock, bool]:
    """Take the lock and return the journal's identity; create the directory if it is missing or empty.

    ``identity``: what a new one gets; a random one by default.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_place(directory)
    if not disk.for_copies:
        _refuse_copy(directory)
    marker = directory / layout.MARKER_NAME
    lock = WriterLock(directory)
    try:
        created = not marker.exists()
        if created:
            disk.write_file(marker, layout.encode_marker(identity or uuid.uuid4()))
            disk.sync_directory(directory)
            disk.sync_directory(directory.parent)
        return layout.decode_marker(read_all(marker), str(marker)), lock, created
    except BaseException:
        lock.release()
        raise


def check_place(directory: Path) -> None:
    """Refuse a directory that is somebody else's, or neither a journal nor empty; nothing in it is changed."""
    check_owner(directory)
    marker = directory / layout.MARKER_NAME
    if not marker.exists():
        ours = (layout.LOCK_NAME, layout.READERS_NAME)
        foreign = [name for name in os.listdir(directory) if name not in ours and not name.endswith(".new")]
        if foreign and not marker.exists():  # otherwise another process has just created it
            raise InvalidArgument(
                f"{directory} is not a journal (it has {foreign[0]!r} but no {layout.MARKER_NAME}): left as it is"
            )
    else:
        layout.decode_marker(read_all(marker), str(marker))


def _refuse_copy(directory: Path) -> None:
    mark = directory / layout.REPLICA_NAME
    if mark.exists():
        raise RefusedError(
            f"{directory} is a copy of a replicated broker's log: write through that broker "
            f"({command('broker', directory, '--store')} ADDRESS), or remove {mark} to make it a journal of its own"
        )


def read_frontier(directory: Path, identity: uuid.UUID) -> layout.Frontier | None:
    """The frontier's words; None where the file is missing or damaged."""
    path = directory / layout.FRONTIER_NAME
    for _ in range(100):  # a writer may be changing both copies at the moment they are read
        try:
            words = layout.decode_frontier(read_part(path, 0, layout.FRONTIER_BYTES), identity)
        except (FileNotFoundError, CorruptionError):
            return None
        if words is not None:
            return words
    return None


def check_owner(directory: Path) -> None:
    """Refuse to write into a directory of another user, or through another user's link. Those of root are trusted."""
    trusted = (os.geteuid(), 0)
    for status, what in ((directory.lstat(), "link"), (directory.stat(), "directory")):
        if status.st_uid not in trusted:
            raise RefusedError(
                f"{directory} is the {what} of another user (uid {status.st_uid}, this process has {trusted[0]}): "
                "its owner may write the journal, others may read it"
            )


def recover(directory: Path, identity: uuid.UUID, disk: Disk, *, refuse_damage: bool = False) -> Recovered:
    """Everything that a writer needs to continue; the surviving tail is on disk."""
    result = Recovered(identity, Recovery())
    frontier = read_frontier(directory, identity)
    segments = tidy(directory, identity, disk, frontier.frontier if frontier else 0)
    if frontier is None and segments and (directory / layout.FRONTIER_NAME).exists():
        place = str(directory / layout.FRONTIER_NAME)
        text = "the frontier was damaged: made anew"
        result.report.damage.append(Damage(place, 0, layout.FRONTIER_BYTES, 1, 0, text))
    if frontier is not None:
        result.next_position, result.generation = max(1, frontier.frontier), frontier.generation
    if not segments:
        result.first = result.next_position
        result.after_loss = result.next_position > 1
        if result.after_loss:
            last = result.next_position - 1
            result.report.damage.append(Damage(str(directory), 0, 0, 1, last, "segments are missing"))
            if refuse_damage:
                raise _refusal(directory, result.report.damage)
        return result
    result.first = segments[0][0]
    _seal_older(directory, segments, disk)  # first, because only the last segments may be unsealed
    _read_last(directory, segments[-1], frontier, disk, result, refuse_damage)
    return result


def mended_by(directory: Path | str) -> str:
    """What to do about damage, for error texts."""
    if (Path(directory) / layout.REPLICA_NAME).exists():
        return f"{command('replica', directory, '--store')} ADDRESS fetches what is damaged"
    return f"{command('journal', 'repair', directory)} keeps all that is whole"


def _refusal(directory: Path, damage: list[Damage]) -> CorruptionError:
    text = "; ".join(map(str, damage[:3])) + (f"; {len(damage) - 3} more" if len(damage) > 3 else "")
    return CorruptionError(f"{text}; {mended_by(directory)}", damage[0].place)


def _seal_older(directory: Path, segments: list[tuple[int, int]], disk: Disk) -> None:
    """Seal older segments: a crash may have come after the next one began and before the seal, or may have torn the
    seal."""
    unsealed = []
    for segment, following in zip(segments[-2::-1], segments[:0:-1], strict=True):
        path = directory / layout.segment_name(*segment)
        try:
            header = layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path))
        except CorruptionError:
            continue  # reported when it is read or verified
        if header.seal is not None:
            continue
        unsealed.append((segment, header, following[0]))
    for segment, header, first in reversed(unsealed):
        seal_from_log(directory, segment, header, first, disk)


def tidy(directory: Path, identity: uuid.UUID, disk: Disk, durable: int) -> list[tuple[int, int]]:
    """Remove what a crash left behind: unfinished files, replaced revisions, groups without an end."""
    names = os.listdir(directory)
    segments = layout.latest_segments(names)
    latest = dict(segments)
    logs = filter(None, map(layout.parse_segment_name, names))
    older = {first for first, revision in logs if revision < latest[first]}
    kept = {first for first in older if not _replaces(directory, identity, (first, latest[first]))}
    for name in names:
        stem, _, suffix = name.partition(".")
        parsed = layout.parse_segment_name(stem + ".log")
        replaced = parsed is not None and parsed[1] < latest.get(parsed[0], -1) and parsed[0] not in kept
        orphan = parsed is not None and suffix != "log" and parsed[1] > latest.get(parsed[0], -1)
        if name.endswith(".new") or replaced or orphan:
            disk.remove(directory / name)
    return _drop_open_group(directory, segments, durable, disk) if segments else []


def _replaces(directory: Path, identity: uuid.UUID, segment: tuple[int, int]) -> bool:
    """Whether this revision may replace older ones: its header is right. Refuses one of another journal."""
    path = directory / layout.segment_name(*segment)
    try:
        header = layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path))
    except CorruptionError:
        return False
    if header.uuid != identity:
        raise CorruptionError(
            f"{path} is a segment of journal {header.uuid}, and this is {identity}: "
            f"penstock journal repair {directory} sets it aside"
        )
    return True


def _drop_open_group(
    directory: Path, segments: list[tuple[int, int]], durable: int, disk: Disk
) -> list[tuple[int, int]]:
    """Remove the segments of a group whose last batch is missing: no reader has seen them. The last one goes first.

    What the group has in the segment in which it began is a torn tail there.
    """
    first, revision = segments[-1]
    path = directory / layout.segment_name(first, revision)
    data = read_part(path, 0, layout.SEGMENT_HEADER_BYTES + layout.BATCH.size)
    if len(data) < layout.SEGMENT_HEADER_BYTES + layout.BATCH.size:
        return segments
    group, flags = layout.BATCH.unpack(data[layout.SEGMENT_HEADER_BYTES :])[8:10]
    if not flags & layout.BATCH_OPEN or not durable <= group < first:
        return segments
    try:
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    except CorruptionError:
        return segments  # reported when it is read
    if native.scan(read_all(path), header.nonce, first, 2**63, durable, header.gaps)["open_group"] != group:
        return segments
    from penstock.journal.rewrite import remove_segment

    for segment in reversed(segments):
        if segment[0] > group:
            remove_segment(directory, *segment, disk)
            disk.sync_directory(directory)
    return [segment for segment in segments if segment[0] <= group]


def _read_last(
    directory: Path,
    last: tuple[int, int],
    frontier: layout.Frontier | None,
    disk: Disk,
    result: Recovered,
    refuse_damage: bool,
) -> None:
    path = directory / layout.segment_name(*last)
    data = read_all(path)
    try:
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    except CorruptionError as error:
        raise CorruptionError(f"{error}; {mended_by(directory)}", error.place) from None
    if header.uuid != result.uuid or header.first != last[0]:
        foreign = f"{path} is a segment of journal {header.uuid} from position {header.first}"
        raise CorruptionError(f"{foreign}, not of this one ({result.uuid}): put its own file back", str(path))
    durable = frontier.frontier if frontier else 0
    scan = native.scan(data, header.nonce, header.first, 2**63, durable, header.gaps)
    found = [Damage(str(path), at, size, first, after - 1, text) for at, size, first, after, text in scan["damage"]]
    # If the segment was rewritten since, it ends elsewhere.
    ours = frontier is not None and frontier.segment == header.first and not (header.gaps or header.revision)
    known = frontier.end if frontier and ours else layout.SEGMENT_HEADER_BYTES
    if scan["end"] < known and not found:
        text = "the segment ends before its durable end"
        found.append(Damage(str(path), scan["end"], known - scan["end"], 1, 0, text))
    if found and refuse_damage:
        raise _refusal(directory, found)
    result.report.damage += found
    if scan["tail_bytes"] and scan["end"] >= known:  # before the durable end it is damage
        result.report.torn_bytes = scan["tail_bytes"]
        result.report.torn_place = f"{path}:{scan['end']}"
    result.topics = [(number, name or b"unknown#%d" % number, *rest) for number, name, *rest in scan["topics"]]
    result.states = scan["states"]
    result.next_position = max(scan["next_position"], durable, 1)
    result.after_loss = result.next_position > scan["next_position"] or bool(result.report.damage)
    _write_again(path, data, min(known, scan["end"]), scan["end"], disk, result.report)
    clean = not (scan["tail_bytes"] or result.report.damage or header.seal or header.flags & 3)
    if clean and result.next_position == scan["next_position"]:
        result.resume = LastSegment(
            header, scan["end"], len(data), len(scan["index"]) // layout.INDEX_ENTRY_BYTES,
            0, scan["state_records"],
        )  # fmt: skip
        result.resume.block_crc = write_caches(directory, last, header, data, scan, disk, sealed=False)
    else:
        seal_segment(directory, last, header, data, scan, result.next_position, disk)


def _write_again(path: Path, data: bytes, start: int, end: int, disk: Disk, report: Recovery) -> None:
    """Write what is past the frontier again and sync it, because it may be in the page cache only."""
    file = disk.open(path)
    try:
        if start < end:
            disk.write(file, data[start:end], 0, start)
            report.rewritten_bytes = end - start
        disk.sync(file)
    finally:
        disk.close(file)


def write_caches(
    directory: Path,
    segment: tuple[int, int],
    header: layout.SegmentHeader,
    data: bytes,
    scan: dict[str, Any],
    disk: Disk,
    *,
    sealed: bool,
    damaged: list[str] | None = None,
) -> int:
    """Rebuild the index and the block sums from the log; returns the running sum of the last, unfinished block.

    Written in place: a reader that has them mapped sees the same bytes or the correct ones. The names of those that
    were missing or wrong are added to ``damaged``; one that is only short is neither.
    """
    end = scan["end"]
    sums = native.block_sums(data, end)
    unfinished = 0
    if end % layout.BLOCK_BYTES and not sealed:
        sums, unfinished = sums[:-4], int.from_bytes(sums[-4:], "little")
    contents = {"index": scan["index"], "sums": sums}
    if sealed:
        contents["topics"] = native.summarise(scan["index"], header.nonce)
    for suffix, content in contents.items():
        path = directory / layout.segment_name(*segment, suffix)
        old = _old_cache(path)
        if damaged is not None and (old is None or not content.startswith(old[: len(content)].rstrip(b"\0"))):
            damaged.append(path.name)
        if old is not None and not sealed and old[: len(content)] == content and not any(old[len(content) :]):
            continue
        # the file's size says how many entries it has: the segment was sealed inside of a group
        if suffix == "topics" and len(old or b"") > len(content):
            disk.remove(path)
            disk.sync_directory(directory)
            old = None
        file = disk.open(path) if old is not None else disk.create(path)
        try:
            disk.write(file, content, max(0, len(old or b"") - len(content)), 0)
            if sealed:
                disk.sync(file)
        finally:
            disk.close(file)
    return unfinished


def _old_cache(path: Path) -> bytes | None:
    """The content of a cache; None if it must be rebuilt. Anything but a regular file is replaced."""
    try:
        return read_all(path)
    except (FileNotFoundError, CorruptionError):
        return None


def seal_from_log(
    directory: Path, segment: tuple[int, int], header: layout.SegmentHeader, following: int, disk: Disk
) -> None:
    """Seal a segment whose successor begins at ``following``."""
    data = read_all(directory / layout.segment_name(*segment))
    scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
    seal_segment(directory, segment, header, data, scan, following, disk)


def times_of(summary: bytes) -> tuple[int, int, int, int]:
    """Least and greatest time, least and greatest time of storing, over all topics; zeros where there is no message."""
    rows = list(layout.TOPIC_SUMMARY.iter_unpack(summary))
    if not rows:
        return 0, 0, 0, 0
    columns = list(zip(*rows, strict=True))
    return min(columns[7]), max(columns[8]), min(columns[9]), max(columns[10])


def seal_written(
    directory: Path, header: layout.SegmentHeader, end: int, following: int, tail: int, disk: Disk
) -> None:
    """Seal a segment whose caches this process has written completely: they are synced, not rebuilt.

    ``tail`` is the sum of the last, unfinished block.
    """
    segment = header.first, header.revision
    index = read_all(directory / layout.segment_name(*segment, "index"))
    index = index[: (following - header.first) * layout.INDEX_ENTRY_BYTES]
    if native.believed(index, header.nonce) != following - header.first:
        return seal_from_log(directory, segment, header, following, disk)
    summary = native.summarise(index, header.nonce)
    seal = layout.Seal(end, following, following - header.first, *times_of(summary))
    last = [(tail.to_bytes(4, "little"), end // layout.BLOCK_BYTES * 4)] if end % layout.BLOCK_BYTES else []
    sealed = [(header.encode_seal(seal), layout.SEAL_OFFSET)]
    parts: dict[str, list[tuple[bytes, int]]] = {"topics": [(summary, 0)], "index": [], "sums": last, "log": sealed}
    for suffix, writes in parts.items():
        path = directory / layout.segment_name(*segment, suffix)
        file = disk.open(path) if path.exists() else disk.create(path)
        try:
            for content, offset in writes:
                disk.write(file, content, 0, offset)
            disk.sync(file)
        finally:
            disk.close(file)


def seal_segment(
    directory: Path,
    segment: tuple[int, int],
    header: layout.SegmentHeader,
    data: bytes,
    scan: dict[str, Any],
    following: int,
    disk: Disk,
    damaged: list[str] | None = None,
) -> None:
    """Sync the caches, then write the seal. All of it can be rebuilt from the log."""
    write_caches(directory, segment, header, data, scan, disk, sealed=True, damaged=damaged)
    count = len(scan["index"]) // layout.INDEX_ENTRY_BYTES
    times = (scan[name] for name in ("least_time_ns", "greatest_time_ns", "least_stored_ns", "greatest_stored_ns"))
    seal = layout.Seal(scan["end"], following, count, *(times if count else (0, 0, 0, 0)))
    file = disk.open(directory / layout.segment_name(*segment))
    try:
        disk.write(file, header.encode_seal(seal), 0, layout.SEAL_OFFSET)
        disk.sync(file)
    finally:
        disk.close(file)
