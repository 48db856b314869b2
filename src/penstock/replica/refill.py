"""Refill: makes a journal's directory what the stream says. The stream is the truth, the directory a copy.

- Segments that are there in full stay; the last one is always compared with the stream, block by block.
- What the stream does not have was never confirmed: it is wiped, never truncated, because readers may have it mapped.
- Nothing here is synced. So after a restart of the machine (another boot id) every segment is checked in full.
- Where the directory knows more as durable than the stream has, the stream has lost something: that is refused.

Under the writer's lock of the directory; one thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.journal import layout, recovery
from penstock.journal.disk import Disk, open_regular, read_all, read_part
from penstock.journal.rewrite import remove_segment
from penstock.replica.history import History, Segment

log = logging.getLogger("penstock.replica")
PIECE_BYTES = 1 << 20
BOOT_NAME = "replica"  # in the directory: the boot id under which it was last written


@dataclass
class Refilled:
    """The directory, and where a writer goes on in it."""

    uuid: UUID
    begins: dict[tuple[int, int], int] = field(default_factory=dict)  # of each segment, its first block
    segment: tuple[int, int] = (0, 0)
    end: int = 0  # of the last segment's log
    next: int = 1
    copied: list[str] = field(default_factory=list)  # the logs that were written


class UnsyncedDisk(Disk):
    """A disk on which nothing is waited for: what is lost with it is on the stream."""

    native = False

    def sync(self, file: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


def refill(directory: Path, history: History, *, check: bool = False) -> Refilled:
    """Make the directory a copy of the stream, as far as ``history`` goes. ``check``: every segment, in full."""
    disk = UnsyncedDisk()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = history.last.uuid if history.last is not None else None
    uuid, lock, _ = recovery.prepare(directory, disk, wanted)
    try:
        if wanted is not None and uuid != wanted:
            raise InvalidArgument(f"{directory} is of journal {uuid}, {history.blocks.name} of {wanted}: not touched")
        result = Refilled(uuid)
        local = layout.latest_segments(os.listdir(directory))
        if not history.segments:
            if local:
                text = f"{directory} has messages and {history.blocks.name} has none: --seed copies them there"
                raise InvalidArgument(text)
            return result
        if any(segment.head.uuid != uuid for segment in history.segments):
            raise CorruptionError(f"{history.blocks.name} has blocks of more than one journal", history.blocks.name)
        _copy(directory, history, disk, result, check or not same_boot(directory))
        _forget_others(directory, result, disk)
        disk.write_file(directory / BOOT_NAME, _boot_id())
        return result
    finally:
        lock.release()


def _copy(directory: Path, history: History, disk: Disk, result: Refilled, check: bool) -> None:
    """The last segment is fetched first: it tells whether the stream has everything that the directory has."""
    *older, last = history.segments
    result.begins = {segment.name: segment.begin for segment in history.segments}
    result.segment = last.name
    fetched = _fetch(directory, history, last, disk, result)
    frontier = _frontier(directory, history, fetched, result)
    for segment in older:
        if not _is_whole(directory, segment, check, disk):
            _install(_fetch(directory, history, segment, disk), directory, segment, disk, result)
    _install(fetched, directory, last, disk, result)
    if frontier is not None:
        _write_frontier(directory, result.uuid, frontier)


def mend(directory: Path, history: History, names: set[tuple[int, int]]) -> list[str]:
    """Check these segments, which are not the last one, and fetch again what is damaged; the names of those logs."""
    disk, result = UnsyncedDisk(), Refilled(history.segments[-1].head.uuid)
    for segment in history.segments[:-1]:
        if segment.name in names and not _is_whole(directory, segment, True, disk):
            _install(_fetch(directory, history, segment, disk), directory, segment, disk, result)
    return result.copied


def _is_whole(directory: Path, segment: Segment, check: bool, disk: Disk) -> bool:
    """Whether a segment that is not the last one is there in full. It was sealed only after the next had begun."""
    path = directory / layout.segment_name(*segment.name)
    try:
        data = read_all(path) if check else read_part(path, 0, layout.SEGMENT_HEADER_BYTES)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    except (FileNotFoundError, PenstockError):
        return False
    if header.seal is None or data[: layout.SEAL_OFFSET] != segment.head.data[: layout.SEAL_OFFSET]:
        return False
    if not check:
        return True
    scan = native.scan(data, header.nonce, header.first, header.seal.next, header.seal.next, header.gaps)
    if scan["damage"] or scan["end"] != header.seal.end or scan["next_position"] != header.seal.next:
        return False
    recovery.seal_segment(directory, segment.name, header, data, scan, header.seal.next, disk)  # its caches too
    return True


def _fetch(directory: Path, history: History, segment: Segment, disk: Disk, result: Refilled | None = None) -> Path:
    """A segment's log as the stream has it, under a temporary name."""
    path = (directory / layout.segment_name(*segment.name)).with_suffix(".log.new")
    file = disk.create(path)
    try:
        for block in history.commits(segment):
            disk.write(file, block.data, 0, block.offset)
            if result is not None:
                result.end, result.next = block.offset + len(block.data), block.next
    finally:
        disk.close(file)
    return path


def _install(fetched: Path, directory: Path, segment: Segment, disk: Disk, result: Refilled) -> None:
    """Give a log its name. Where the segment is there already, its bytes are changed in place: it may be mapped."""
    path = directory / layout.segment_name(*segment.name)
    try:
        same = read_part(path, 0, layout.SEAL_OFFSET) == segment.head.data[: layout.SEAL_OFFSET]
    except (FileNotFoundError, CorruptionError):
        same = False
    if not same:
        disk.rename(fetched, path)
        result.copied.append(path.name)
        return
    source, target = disk.open(fetched), disk.open(path)
    try:
        at, changed = 0, False
        while data := os.pread(source, PIECE_BYTES, at):
            if os.pread(target, len(data), at) != data:
                disk.write(target, data, 0, at)
                changed = True
            at += len(data)
        if _wipe(target, at) or changed:
            result.copied.append(path.name)
    finally:
        disk.close(source)
        disk.close(target)
    disk.remove(fetched)


def _wipe(file: int, end: int) -> bool:
    """Zero whatever follows the end; whether there was something."""
    found = False
    while data := os.pread(file, PIECE_BYTES, end):
        if data.count(0) != len(data):
            os.pwrite(file, bytes(len(data)), end)  # not truncated: it may be mapped
            found = True
        end += len(data)
    return found


def _forget_others(directory: Path, result: Refilled, disk: Disk) -> None:
    """Remove segments that the stream has no more (retention), or never had."""
    for name in os.listdir(directory):
        segment = layout.parse_segment_name(name)
        if segment is not None and segment not in result.begins:
            remove_segment(directory, *segment, disk)


def _frontier(directory: Path, history: History, log: Path, result: Refilled) -> layout.Frontier | None:
    """The frontier of a directory that was used before: what the stream has is durable, and only that.

    ``log`` is the last segment's. Nothing of the directory has been changed yet.
    """
    words = recovery.read_frontier(directory, result.uuid)
    if words is None:
        with contextlib.suppress(FileNotFoundError):  # damaged: made anew when the journal is opened
            (directory / layout.FRONTIER_NAME).unlink()
        return None
    data = read_all(log)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(log))
    scan = native.scan(data, header.nonce, header.first, 2**63, 0, header.gaps)
    following = scan["next_position"]
    if words.frontier > following:
        log.unlink()
        raise CorruptionError(
            f"{history.blocks.name} ends at position {following - 1}, and {directory} has confirmed messages up to "
            f"{words.frontier - 1}: the cluster has lost some; they are still in that directory",
            history.blocks.name,
        )
    first = min(first for first, _ in result.begins)
    return layout.Frontier(
        words.pid, words.sequence + 1, following, header.first, scan["end"], words.generation + 1, first
    )


def _write_frontier(directory: Path, uuid: UUID, words: layout.Frontier) -> None:
    encoded = layout.encode_frontier(uuid, words)
    file = open_regular(directory / layout.FRONTIER_NAME, os.O_RDWR)
    try:
        for place in layout.FRONTIER_COPIES:  # one after the other: a reader finds one that is whole
            os.pwrite(file, encoded[place : place + layout.FRONTIER_COPY.size], place)
    finally:
        os.close(file)


def same_boot(directory: Path) -> bool:
    """Whether the machine runs on since the directory was written: then its files are as they were written."""
    return _noted_boot(directory) == _boot_id()


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.urandom(16)  # never the same: everything is checked


def _noted_boot(directory: Path) -> bytes:
    try:
        return read_all(directory / BOOT_NAME)
    except (FileNotFoundError, CorruptionError):
        return b""
