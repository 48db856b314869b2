"""The disk as the journal uses it: every file is created, written, synced, renamed and removed through this class.

``Disk`` is the real one. Tests replace it by a simulated one, which loses, reorders and tears what was not synced.
Any thread; errors are ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from penstock.errors import CorruptionError, StateError
from penstock.journal.layout import parse_segment_name


class Disk:
    """The system's files. Subclasses see every change, the writer's commits included (``native`` is False then)."""

    native = True  # the writer makes its system calls itself
    for_copies = False  # whether it may write into a directory that is a copy of a stream

    def create(self, path: Path, mode: int = 0o600) -> int:
        """A new file for reading and writing; an old one of that name is emptied (only ``*.new`` and caches are)."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):  # never write through a link or FIFO that somebody put here
                path.unlink()
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)

    def open(self, path: Path) -> int:
        """An existing file for reading and writing."""
        return open_regular(path, os.O_RDWR)

    def close(self, file: int) -> None:
        """Close the descriptor."""
        os.close(file)

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        """``data`` and then ``zeros`` zero bytes, all of it."""
        view = memoryview(data + bytes(zeros) if zeros else data)
        with named(file):
            while view:
                written = os.pwrite(file, view, offset)
                view = view[written:]
                offset += written

    def sync(self, file: int) -> None:
        """Return when everything written to the file is on disk."""
        with named(file):
            os.fdatasync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Atomically; durable after ``sync_directory``."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Return when all created, renamed and removed names in it are on disk."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a file atomically and sync it: it appears complete or not at all (its name is durable after
        ``sync_directory``)."""
        temporary = path.with_name(path.name + ".new")
        file = self.create(temporary)
        try:
            self.write(file, data, 0, 0)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, path)


Found = TypeVar("Found")
LISTINGS = 100
LONGEST_HOLE = 1 << 30  # longer than any batch: in a log, nothing valid can follow such a hole


@contextlib.contextmanager
def named(file: int) -> Iterator[None]:
    """Name the file in the errors of calls that know its descriptor alone."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):  # no /proc
            error.filename = error.filename or os.readlink(f"/proc/self/fd/{file}")
        raise


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. Refuses links, which may lead anywhere, FIFOs, which would block, and devices."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise CorruptionError(f"{path} is not a regular file, as every file of a journal is", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptionError(f"{path} is not a regular file, as every file of a journal is", str(path))
    return file


def while_files_go(directory: Path, look: Callable[[], Found]) -> Found:
    """Call ``look()``, and again if retention or compaction has removed a file meanwhile; it lists the files itself."""
    for _ in range(LISTINGS):
        try:
            return look()
        except FileNotFoundError as error:
            if not directory.is_dir() or error.filename is None or not _of_segment(error.filename):
                raise
    raise StateError(f"the segments of {directory} are deleted faster than they can be listed; keep more")


def _of_segment(filename: str) -> bool:
    return parse_segment_name(os.path.basename(os.fsdecode(filename)).partition(".")[0] + ".log") is not None


def read_all(path: Path) -> bytes:
    """The whole file, read instead of mapped: a file that is truncated meanwhile then gives fewer bytes, not a SIGBUS.

    A sparse file is read up to the first hole that is longer than any batch.
    """
    return read_part(path, 0, None)


def read_part(path: Path, offset: int, size: int | None) -> bytes:
    """Up to ``size`` bytes from ``offset`` on."""
    file = open_regular(path)
    try:
        left = max(0, _data_end(file) - offset)
        left = left if size is None else min(size, left)
        data = bytearray()
        while left > len(data):
            piece = os.pread(file, min(left - len(data), 1 << 30), offset + len(data))
            if not piece:
                break
            data += piece
        return bytes(data)
    finally:
        os.close(file)


def _data_end(file: int) -> int:
    size, hole = os.fstat(file).st_size, 0
    if size <= LONGEST_HOLE or not hasattr(os, "SEEK_DATA"):
        return size
    while hole < size:
        try:
            data = os.lseek(file, hole, os.SEEK_DATA)
        except OSError:  # only a hole from here on
            return hole
        if data - hole > LONGEST_HOLE:
            return hole
        hole = os.lseek(file, data, os.SEEK_HOLE)
    return size
