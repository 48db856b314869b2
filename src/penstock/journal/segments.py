"""The active segment's files. A segment starts with a snapshot, under a temporary name, and is sealed after the next
one has started.

Used by the writing journal only, by the thread that holds the writer's lead.
"""

from __future__ import annotations

import errno
import secrets
import time
import uuid
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock._core import journal as native
from penstock.journal import layout, recovery
from penstock.journal.disk import Disk

State = tuple[int, int, bytes]  # kind, flags, data


class ActiveSegment:
    """Three open files that the native writer writes to."""

    def __init__(self, directory: Path, header: layout.SegmentHeader, disk: Disk) -> None:
        self.directory = directory
        self.header = header
        self.disk = disk
        self.files: list[int] = []

    @property
    def name(self) -> tuple[int, int]:
        """(first position, revision)."""
        return self.header.first, self.header.revision

    def path(self, suffix: str = "log") -> Path:
        """The path of one of its files."""
        return self.directory / layout.segment_name(*self.name, suffix)

    def close(self) -> None:
        """Close the descriptors; mappings stay."""
        while self.files:
            self.disk.close(self.files.pop())


def resume(
    directory: Path, last: recovery.LastSegment, writer: native.Writer, next_position: int, disk: Disk
) -> ActiveSegment:
    """Continue where the last process stopped."""
    segment = ActiveSegment(directory, last.header, disk)
    try:
        for suffix in ("log", "index", "sums"):
            segment.files.append(disk.open(segment.path(suffix)))
    except BaseException:
        segment.close()
        raise
    log, index, sums = segment.files
    writer.replace_segment(
        log, index, sums, last.header.nonce, last.header.first, last.end, last.file_bytes,
        last.entries, last.block_crc, next_position, last.states,
    )  # fmt: skip
    return segment


def begin(
    directory: Path,
    identity: uuid.UUID,
    writer: native.Writer,
    first: int,
    states: Iterable[State],
    disk: Disk,
    *,
    flags: int = 0,
    next_position: int = 0,
    revision: int = 0,
) -> ActiveSegment:
    """Start a new segment with a snapshot of all topics and states; on disk under its name when this returns.

    If it fails before the rename, the writer returns to the old segment. After the rename nobody knows which of the two
    would be the last one after a power cut, so neither may take another message: the writer fails.
    """
    nonce = secrets.randbits(64) | 1
    header = layout.SegmentHeader(identity, nonce, first, time.time_ns(), revision, flags)
    segment = ActiveSegment(directory, header, disk)
    temporary = segment.path().with_suffix(".log.new")
    head = header.encode()
    records = [
        layout.encode_record(layout.KIND_TOPIC, number, name, flags=topic_flags, ordinal=ordinal, stored_ns=stored_ns)
        for number, name, topic_flags, ordinal, stored_ns in writer.topics()
    ]
    records += [layout.encode_record(layout.KIND_STATE, kind, data, flags=marks) for kind, marks, data in states]
    replaced = False
    try:
        for path in (temporary, segment.path("index"), segment.path("sums")):
            segment.files.append(disk.create(path))
        disk.write(segment.files[0], head, 0, 0)
        log, index, sums = segment.files
        writer.replace_segment(log, index, sums, nonce, first, len(head), len(head), 0, zlib.crc32(head), next_position)
        replaced = True
        flag = layout.BATCH_SNAPSHOT | (layout.BATCH_TOPICS if writer.topics() else 0)
        writer.commit_records(b"".join(records), len(records), flag)
        disk.remove(segment.path("topics"))  # left by a segment that started here and was ended without a message
        disk.rename(temporary, segment.path())
        disk.sync_directory(directory)
    except BaseException as error:
        if replaced and not temporary.exists():  # it was renamed, or that is not known
            writer.fail(getattr(error, "errno", None) or errno.EIO)
            segment.close()
            raise
        if replaced:
            writer.restore_segment()
        segment.close()
        for path in (temporary, segment.path("index"), segment.path("sums")):
            with suppress(OSError):
                disk.remove(path)
        raise
    return segment
