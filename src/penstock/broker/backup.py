"""Backup: copies a broker's directory while the broker runs, and restores it. Any process may do so; it only reads the
source.

A copy holds what was durable when it began: the frontier is read first, then the segments, which never change below the
frontier; what lies beyond is cut off when the copy is opened. Segments that are full are copied once; a later backup to
the same target copies those that are new, and the last one. Queues, positions, producers and transactions are records
in these segments, so they are in the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.errors import InvalidArgument, RefusedError, StateError
from penstock.journal import layout
from penstock.journal.disk import Disk
from penstock.journal.lock import WriterLock

ATTEMPTS = 20  # attempts: retention may remove segments while they are copied
PART = ".part"
# holds the identity of the broker whose first copy was begun here, so that an interrupted copy can be continued
UNFINISHED = "unfinished-backup"


@dataclass(frozen=True, slots=True)
class Copied:
    """What a backup did."""

    segments: int
    copied_files: int
    copied_bytes: int
    removed_files: int  # segments removed, because the broker has freed them since the last backup


def backup(directory: str | Path, target: str | Path) -> Copied:
    """Bring ``target`` up to what is durable in ``directory`` now."""
    source, place = Path(directory), Path(target)
    marker = source / layout.MARKER_NAME
    if not marker.is_file():
        raise InvalidArgument(f"{source} is not a broker's directory (no {layout.MARKER_NAME} in it)")
    identity = layout.decode_marker(marker.read_bytes(), str(marker))
    _check_apart(source, place)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = place / layout.MARKER_NAME
    if there.is_file():
        if layout.decode_marker(there.read_bytes(), str(there)) != identity:
            raise InvalidArgument(f"{place} holds a backup of another broker")
    elif not _is_free(place, identity):
        raise InvalidArgument(f"{place} is neither empty nor a backup")
    try:
        lock = WriterLock(place)  # no writer can open it while it is copied to
    except RefusedError:
        raise RefusedError(f"{place} is in use: a broker that runs on it would lose what it stores") from None
    try:
        if not there.is_file():
            _write(place / UNFINISHED, str(identity).encode())
        for _ in range(ATTEMPTS):
            try:
                return _copy(source, place)
            except FileNotFoundError:
                continue
    finally:
        lock.release()
    raise StateError(f"the segments of {source} are deleted faster than they can be copied; keep more (--keep)")


def _check_apart(source: Path, place: Path) -> None:
    """Refuse if both are the same directory, or one is inside the other, also through links."""
    one, other = source.resolve(), place.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise InvalidArgument(f"{place} and {source} are the same directory, or one lies in the other")


def restore(target: str | Path, directory: str | Path) -> Copied:
    """Restore a backup into a new or empty directory, on which a broker can then be started."""
    place = Path(directory)
    if place.exists() and any(place.iterdir()) and not _has_begun(place):
        raise InvalidArgument(f"{place} is not empty; a backup is restored into a directory of its own")
    return backup(target, place)


def _is_free(place: Path, identity: object) -> bool:
    """Whether the directory holds nothing but, at most, a first copy of this broker that was interrupted."""
    if (place / UNFINISHED).is_file():
        return (place / UNFINISHED).read_bytes() == str(identity).encode()
    return all(found.name in (layout.LOCK_NAME, UNFINISHED + PART) for found in place.iterdir())


def _has_begun(place: Path) -> bool:
    """Whether a first copy to this directory was begun and not finished."""
    if (place / layout.MARKER_NAME).exists():
        return False
    names = {found.name for found in place.iterdir()}
    return UNFINISHED in names or names <= {layout.LOCK_NAME, UNFINISHED + PART}


def _copy(source: Path, place: Path) -> Copied:
    frontier = (source / layout.FRONTIER_NAME).read_bytes()  # first: the segments copied after it hold at least this
    segments = layout.latest_segments(os.listdir(source))
    stems = {layout.segment_name(*segment).partition(".")[0] for segment in segments}
    last = layout.segment_name(*segments[-1]).partition(".")[0] if segments else ""
    names = sorted(name for name in os.listdir(source) if name.partition(".")[0] in stems)
    copied = size = 0
    for name in names:
        if name.startswith(last) or not _same(source / name, place / name):
            size += _copy_file(source / name, place / name)
            copied += 1
    _write(place / layout.FRONTIER_NAME, frontier)
    _write(place / layout.MARKER_NAME, (source / layout.MARKER_NAME).read_bytes())
    (place / UNFINISHED).unlink(missing_ok=True)
    stale = [name for name in os.listdir(place) if _is_segment(name) and name.partition(".")[0] not in stems]
    for name in stale:
        (place / name).unlink()
    Disk().sync_directory(place)
    return Copied(len(segments), copied, size, len(stale))


def _is_segment(name: str) -> bool:
    return layout.parse_segment_name(name.partition(".")[0] + ".log") is not None


def _same(source: Path, copy: Path) -> bool:
    """Whether a file of a full segment was copied before: such a file never changes."""
    try:
        one, other = source.stat(), copy.stat()
    except FileNotFoundError:
        return False
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _copy_file(source: Path, copy: Path) -> int:
    with source.open("rb") as reader, _replacing(copy) as writer:
        before = os.fstat(reader.fileno())
        shutil.copyfileobj(reader, writer, 1 << 20)
        size = writer.tell()
        writer.flush()
        os.utime(writer.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
    return size


def _write(path: Path, data: bytes) -> None:
    with _replacing(path) as writer:
        writer.write(data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` once it is completely on disk; an error names ``path``."""
    part = path.with_name(path.name + PART)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as writer:
            yield writer
            writer.flush()
            os.fsync(writer.fileno())
        part.replace(path)
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from None
