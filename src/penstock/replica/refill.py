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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.journal import layout, recovery
from penstock.journal.disk import Disk, open_regular, read_all, read_part
from penstock.journal.rewrite import remove_segment
from penstock.replica.block import Block
from penstock.replica.history import History, Segment

log = logging.getLogger("penstock.replica")
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


def refill(directory: Path, history: History) -> Refilled:
    """Make the directory a copy of the stream, as far as ``history`` goes."""
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
                text = f"{directory} has messages and {history.blocks.name} has none: begin with an empty directory"
                raise InvalidArgument(text)
            return result
        _copy(directory, history, disk, result)
        _forget_others(directory, result, disk)
        _set_frontier(directory, history, result)
        disk.write_file(directory / BOOT_NAME, _boot_id())
        return result
    finally:
        lock.release()


def _copy(directory: Path, history: History, disk: Disk, result: Refilled) -> None:
    rebooted = _noted_boot(directory) != _boot_id()
    for segment in history.segments:
        if segment.head.uuid != result.uuid:
            raise CorruptionError(f"block {segment.begin} of {history.blocks.name} is of journal {segment.head.uuid}")
        result.begins[segment.name] = segment.begin
        last = segment is history.segments[-1]
        if last or not _is_whole(directory, segment, rebooted, disk):
            result.end = _write(directory, segment, history.commits(segment), disk, result)
    result.segment = history.segments[-1].name


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


def _write(directory: Path, segment: Segment, commits: Iterable[Block], disk: Disk, result: Refilled) -> int:
    """Write a segment's log as the stream has it; where it ends."""
    path = directory / layout.segment_name(*segment.name)
    temporary = path.with_suffix(".log.new")
    try:
        same = read_part(path, 0, layout.SEAL_OFFSET) == segment.head.data[: layout.SEAL_OFFSET]
    except (FileNotFoundError, CorruptionError):
        same = False
    file = disk.open(path) if same else disk.create(temporary)
    end = 0
    changed = not same
    try:
        for block in commits:
            there = os.pread(file, len(block.data), block.offset) if same else b""
            if there != block.data:
                disk.write(file, block.data, 0, block.offset)
                changed = True
            end = block.offset + len(block.data)
            result.next = block.next
        changed = _wipe(file, end) or changed
    finally:
        disk.close(file)
    if not same:
        disk.rename(temporary, path)
    if changed:
        result.copied.append(path.name)
    return end


def _wipe(file: int, end: int) -> bool:
    """Zero whatever follows the end; whether there was something."""
    found = False
    while data := os.pread(file, 1 << 20, end):
        if data.count(0) != len(data):
            os.pwrite(file, bytes(len(data)), end)
            found = True
        end += len(data)
    return found


def _forget_others(directory: Path, result: Refilled, disk: Disk) -> None:
    """Remove segments that the stream has no more (retention), or never had."""
    for name in os.listdir(directory):
        segment = layout.parse_segment_name(name)
        if segment is not None and segment not in result.begins:
            remove_segment(directory, *segment, disk)


def _set_frontier(directory: Path, history: History, result: Refilled) -> None:
    """The frontier of a directory that was used before: what the stream has is durable, and only that."""
    words = recovery.read_frontier(directory, result.uuid)
    path = directory / layout.FRONTIER_NAME
    if words is None:
        with contextlib.suppress(FileNotFoundError):  # damaged: made anew when the journal is opened
            path.unlink()
        return
    log_path = directory / layout.segment_name(*result.segment)
    data = read_all(log_path)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(log_path))
    scan = native.scan(data, header.nonce, header.first, 2**63, 0, header.gaps)
    if words.frontier > scan["next_position"]:
        raise CorruptionError(
            f"{history.blocks.name} ends at position {scan['next_position'] - 1}, and {directory} has confirmed messages "
            f"up to {words.frontier - 1}: the cluster has lost some; they are still in that directory",
            history.blocks.name,
        )
    first = min(first for first, _ in result.begins)
    new = layout.Frontier(
        words.pid, words.sequence + 1, scan["next_position"], header.first, scan["end"], words.generation + 1, first
    )
    encoded = layout.encode_frontier(result.uuid, new)
    file = open_regular(path, os.O_RDWR)
    try:
        for place in layout.FRONTIER_COPIES:  # one after the other: a reader finds one that is whole
            os.pwrite(file, encoded[place : place + layout.FRONTIER_COPY.size], place)
    finally:
        os.close(file)


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
