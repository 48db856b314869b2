"""One writer per journal: a POSIX record lock on its ``lock`` file, which the kernel releases when the process ends and
which names its pid.

POSIX locks are not inherited by a forked child, but vanish when any descriptor of the file is closed, so a process
opens the file once: a second writer in the same process is refused here, before the file is touched. Any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from penstock.errors import RefusedError
from penstock.journal.disk import open_regular
from penstock.journal.guard import Guard
from penstock.journal.layout import LOCK_NAME

_FLOCK = struct.Struct("hhxxxxqqixxxx")  # struct flock of 64-bit Linux
_held: dict[tuple[int, int], int] = {}  # (device, inode) of directories that this process writes: its pid
_guard = Guard()


def _after_fork() -> None:
    """Forget them in a forked child, which does not inherit record locks."""
    _guard.renew()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


class WriterLock:
    """Held from construction to ``release``; ``RefusedError`` if the journal has another writer."""

    def __init__(self, directory: Path) -> None:
        status = directory.stat()
        self._key = (status.st_dev, status.st_ino)
        with _guard:
            if _held.get(self._key) == os.getpid():
                raise RefusedError(f"journal {directory} is being written by this process (pid {os.getpid()})")
            self._file = open_regular(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                pid = _holder(self._file)
                os.close(self._file)
                raise RefusedError(
                    f"journal {directory} is being written by process {pid or 'that has just ended'}; "
                    "others may only read it"
                ) from None
            _held[self._key] = os.getpid()

    def check(self, directory: Path) -> None:
        """Refuse another directory in the place of the one that is locked: its files are those of another journal."""
        status = directory.stat()
        if (status.st_dev, status.st_ino) != self._key:
            text = "the journal's directory was moved away, and another one is in its place"
            raise FileNotFoundError(errno.ENOENT, text, str(directory))

    def release(self) -> None:
        """Release the lock. Releasing twice does nothing."""
        with _guard:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                _held.pop(self._key, None)


def _holder(file: int) -> int:
    """Pid of the lock's holder; 0: it has just ended."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fields = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return 0 if fields[0] == fcntl.F_UNLCK else int(fields[4])


def writer_pid(directory: Path) -> int | None:
    """The pid of the process that writes the journal, or None."""
    with _guard:
        status = directory.stat()
        if _held.get((status.st_dev, status.st_ino)) == os.getpid():
            return os.getpid()
        try:
            file = open_regular(directory / LOCK_NAME)
        except FileNotFoundError:
            return None
        try:
            return _holder(file) or None
        finally:
            os.close(file)
