"""One writer per journal: a POSIX record lock on its ``lock`` file, which the kernel releases when the process ends and
which names its pid.

POSIX locks are not inherited by a forked child, but vanish when any descriptor of the file is closed, so a process
opens the file once: a second writer in the same process is refused here, before the file is touched. Any thread.

The lock holds the directory itself, not its path: what is written through ``place`` goes there, wherever the directory
is moved meanwhile and whatever takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import CorruptionError, RefusedError
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
        self._directory = directory
        self._path = directory.absolute()  # the working directory may be changed
        self._file = -1
        self._held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(self._held)
            self._key = (status.st_dev, status.st_ino)
            place = Path(f"/proc/self/fd/{self._held}")
            #: A path to the directory that no move changes; its own where there is no /proc.
            self.place = place if os.path.isdir(place) else directory
            with _guard:
                self._take(directory)
        except BaseException:
            os.close(self._held)
            raise

    def _take(self, directory: Path) -> None:
        if _held.get(self._key) == os.getpid():
            raise RefusedError(f"journal {directory} is being written by this process (pid {os.getpid()})")
        try:
            self._file = open_regular(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except CorruptionError:
            path = directory / LOCK_NAME
            raise RefusedError(f"{path} is not a regular file: remove it; nothing of the journal is in it") from None
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

    def check(self) -> None:
        """Refuse another directory in the place of the one that is locked: its files are those of another journal."""
        status = self._path.stat()
        if (status.st_dev, status.st_ino) != self._key:
            text = "the journal's directory was moved away, and another one is in its place"
            raise FileNotFoundError(errno.ENOENT, text, str(self._directory))

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """A context whose errors name the directory by its own path instead of ``place``."""
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, str | os.PathLike):
                error.filename = self._own(os.fspath(error.filename))
            raise
        except CorruptionError as error:
            raise CorruptionError(self._own(str(error)), error.place and self._own(error.place)) from None

    def _own(self, text: str) -> str:
        return text.replace(str(self.place), str(self._directory))

    def release(self) -> None:
        """Release the lock. Releasing twice does nothing."""
        with _guard:
            if self._file >= 0:
                os.close(self._file)
                os.close(self._held)
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
