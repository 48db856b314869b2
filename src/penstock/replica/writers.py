"""Writers: which writers of the stream have run on this directory, one line each in a file there. A stream that has
lost its last blocks does not say who wrote them. A directory may restore blocks only if, as far as this file tells, no
broker of another directory has written since.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from penstock.errors import PenstockError
from penstock.journal.disk import Disk, read_all

FILE_NAME = "writers"
MOST = 16  # how many are kept
LED, BEGUN = "led", "begun"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Writers:
    """The list, read from the file when this is created."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._kept: list[tuple[int, int, str]] = []
        try:
            lines = [line.split() for line in read_all(self._path).decode().splitlines()]
            for epoch, writer, state in (line for line in lines if len(line) == 3):  # a torn one has fewer words
                self._add((int(epoch), int(writer, 16), state))
        except (FileNotFoundError, PenstockError, ValueError):
            self._kept = []

    def _add(self, newest: tuple[int, int, str]) -> None:
        others = [kept for kept in self._kept if kept[1] != newest[1]]
        self._kept = [*others[1 - MOST :], newest]

    @property
    def epoch(self) -> int:
        """The highest epoch in which a broker on this directory led."""
        return max((epoch for epoch, _, state in self._kept if state == LED), default=0)

    def were_last(self, epoch: int, writer: int) -> bool:
        """Whether no other broker has led since one on this directory did, given the last epoch and writer of the
        stream.
        """
        return self.epoch > epoch or any(writer == known for _, known, _ in self._kept)

    def begin(self, epoch: int) -> int:
        """Create the number of a new writer, stored before it appends anything."""
        writer = secrets.randbits(64)
        self._write((epoch, writer, BEGUN))
        return writer

    def note_led(self) -> None:
        """Note that the newest writer has appended its epoch block."""
        epoch, writer, _ = self._kept[-1]
        self._write((epoch, writer, LED))

    def _write(self, newest: tuple[int, int, str]) -> None:
        self._add(newest)
        try:
            Disk().write_file(self._path, "".join(map(_line, self._kept)).encode())
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._append(newest, error)

    def _append(self, newest: tuple[int, int, str], full: OSError) -> None:
        """On a full disk: add a line to the file, whose last block may have room. Of a writer the last line counts."""
        disk = Disk()
        disk.remove(self._path.with_name(FILE_NAME + ".new"))
        try:
            file = disk.open(self._path)
        except FileNotFoundError:
            raise full from None
        try:
            end = os.fstat(file).st_size
            disk.write(file, f"\n{_line(newest)}".encode(), 0, end)
            disk.sync(file)
        except BaseException:
            os.ftruncate(file, end)
            raise
        finally:
            disk.close(file)


def _line(kept: tuple[int, int, str]) -> str:
    epoch, writer, state = kept
    return f"{epoch} {writer:016x} {state}\n"
