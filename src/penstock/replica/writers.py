"""Writers: which writers of the stream have run on this directory, one line each in a file there. A stream that has
lost its last blocks does not say who wrote them. A directory may restore blocks only if nobody has written to the
stream after its own broker, as far as that can be known.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from penstock.errors import PenstockError
from penstock.journal.disk import Disk, read_all

FILE_NAME = "writers"
MOST = 16  # how many are kept
LED, BEGUN = "led", "begun"


class Writers:
    """The list, read from the file when this is created."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        try:
            lines = [line.split() for line in read_all(self._path).decode().splitlines()]
            self._kept = [(int(epoch), int(writer, 16), state) for epoch, writer, state in lines]
        except (FileNotFoundError, PenstockError, ValueError):
            self._kept = []

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
        epoch, writer, _ = self._kept.pop()
        self._write((epoch, writer, LED))

    def _write(self, newest: tuple[int, int, str]) -> None:
        self._kept = [*self._kept[1 - MOST :], newest]
        lines = (f"{epoch} {writer:016x} {state}\n" for epoch, writer, state in self._kept)
        Disk().write_file(self._path, "".join(lines).encode())
