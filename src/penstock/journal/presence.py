"""Presence: counts the followers of a journal over all processes; a crash leaves nothing behind.

Each follower holds a shared open-file-description lock on a random byte of the ``readers`` file; to count, the kernel
is asked for one lock after the other. Used for ``wait_ready`` only. Any thread may call this.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path

from penstock.errors import CorruptionError
from penstock.journal.disk import open_regular
from penstock.journal.layout import READERS_NAME

_FLOCK = struct.Struct("hhxxxxqqixxxx")
_OFD_GETLK, _OFD_SETLK = 36, 37
_LIMIT = 1 << 40


class Presence:
    """One follower, from construction to ``leave``; not counted where the directory cannot be written."""

    def __init__(self, directory: Path) -> None:
        self._file = -1
        with suppress(OSError, CorruptionError):
            self._file = open_regular(directory / READERS_NAME, os.O_RDONLY | os.O_CREAT)
            place = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, secrets.randbelow(_LIMIT), 1, 0)
            fcntl.fcntl(self._file, _OFD_SETLK, place)

    def leave(self) -> None:
        """Release the lock. Leaving twice does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.leave()


def count(directory: Path) -> int:
    """The number of followers now."""
    try:
        file = open_regular(directory / READERS_NAME, os.O_RDWR)
    except (OSError, CorruptionError):
        return 0
    try:
        found, start = 0, 0
        while start < _LIMIT:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0)
            kind, _, at, length, _ = _FLOCK.unpack(fcntl.fcntl(file, _OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                break
            # The kernel reports any lock in the range, not the first: count those before it, then continue after it.
            found += 1 + _between(file, start, at)
            start = at + max(1, length)
        return found
    finally:
        os.close(file)


def _between(file: int, start: int, end: int) -> int:
    found = 0
    while start < end:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, at, length, _ = _FLOCK.unpack(fcntl.fcntl(file, _OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            break
        found += 1 + _between(file, start, at)
        start = at + max(1, length)
    return found
