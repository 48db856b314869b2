"""One writer a journal: a POSIX record lock on its ``lock`` file, which dies with the process and names its pid.

POSIX locks are not inherited by a forked child, but vanish when any descriptor of the file is closed, so a process
opens the file once: a second writer in the same process is refused here, before the file is touched. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from penstock.errors import RefusedError
from penstock.journal.guard import Guard
from penstock.journal.layout import LOCK_NAME

_FLOCK = struct.Struct("hhxxxxqqixxxx")  # struct flock of 64-bit Linux
_MAKING_S = 10.0  # making a journal takes milliseconds; who holds the lock longer is not making one
#: (device, inode) of directories that this process writes: its pid, and whether it only makes the journal
_held: dict[tuple[int, int], tuple[int, bool]] = {}
_guard = Guard()


def _after_fork() -> None:
    """The child holds no record lock of its parent's."""
    _guard.renew()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


class WriterLock:
    """Held from construction to ``release``.

    A reader that finds no journal makes one and holds the lock for that moment (``making``, told by a longer range);
    a writer that comes meanwhile waits for it, and is refused only where another writer holds the lock.
    """

    def __init__(self, directory: Path, making: bool = False) -> None:
        deadline = time.monotonic() + _MAKING_S
        status = directory.stat()
        self._key = (status.st_dev, status.st_ino)
        while not self._take(directory, making, final=time.monotonic() >= deadline):
            time.sleep(0.005)

    def _take(self, directory: Path, making: bool, final: bool) -> bool:
        """True when taken; False when somebody is just making the journal; ``RefusedError`` when it has a writer."""
        with _guard:
            held = _held.get(self._key)
            if held is not None and held[0] == os.getpid():
                if held[1] and not final:
                    return False
                raise RefusedError(f"journal {directory} is being written by this process (pid {os.getpid()})")
            self._file = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 2 if making else 1)
            except OSError:
                pid, length = _holder(self._file)
                os.close(self._file)
                if not final and (pid == 0 or length == 2):
                    return False
                raise RefusedError(
                    f"journal {directory} is being written by process {pid or 'that has just ended'}; "
                    "open it with mode='read'"
                ) from None
            _held[self._key] = (os.getpid(), making)
            return True

    def release(self) -> None:
        """Let another writer in. Twice does nothing."""
        with _guard:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                _held.pop(self._key, None)


def _holder(file: int) -> tuple[int, int]:
    """Pid of the lock's holder (0: it has just gone) and the length of what it holds."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fields = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return (0, 0) if fields[0] == fcntl.F_UNLCK else (fields[4], fields[3])


def writer_pid(directory: Path) -> int | None:
    """The pid of the process that writes the journal, or None."""
    with _guard:
        status = directory.stat()
        if _held.get((status.st_dev, status.st_ino), (0, False))[0] == os.getpid():
            return os.getpid()
        try:
            file = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            return int(_FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))[4]) or None
        finally:
            os.close(file)
