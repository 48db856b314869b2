"""The disk as the journal uses it: the one seam through which files are made, written, synced, renamed and removed.

``Disk`` is the real one. Tests put a simulated one in its place, which loses, reorders and tears what was not synced.
Any thread; errors are ``OSError``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Disk:
    """The system's files. Subclasses see every change, the writer's commits included (``native`` is False then)."""

    native = True  # the writer makes its system calls itself

    def create(self, path: Path, mode: int = 0o600) -> int:
        """A new file for reading and writing; an old one of that name is emptied (only ``*.new`` and caches are)."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)

    def open(self, path: Path) -> int:
        """An existing file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, file: int) -> None:
        """Give the descriptor back."""
        os.close(file)

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        """``data`` and then ``zeros`` zero bytes, all of it."""
        view = memoryview(data + bytes(zeros) if zeros else data)
        while view:
            written = os.pwrite(file, view, offset)
            view = view[written:]
            offset += written

    def sync(self, file: int) -> None:
        """What was written to the file is on disk when this returns."""
        os.fdatasync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Atomically; durable after ``sync_directory``."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Gone, or was not there."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Names made, renamed and removed in it are on disk when this returns."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def write_file(self, path: Path, data: bytes) -> None:
        """A whole file under its final name or not at all, synced (the name by ``sync_directory``)."""
        temporary = path.with_name(path.name + ".new")
        file = self.create(temporary)
        try:
            self.write(file, data, 0, 0)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, path)


def read_all(path: Path) -> bytes:
    """The whole file, by read and not by mapping, so that one truncated meanwhile is short and no fault."""
    return path.read_bytes()
