"""The files that take the place of one that is read line by line, as log rotation does, in their order. They are kept
open, since the next rotation may rename or delete them. One thread.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import BinaryIO

MAX_LATER = 100  # files that are kept open while lines of an older one wait
log = logging.getLogger("penstock.gateway")


class LaterFiles:
    """What took the place of the file that is being read, each open at its beginning."""

    def __init__(self, path: str, module: str) -> None:
        """``module`` is named in log entries."""
        self._path = path
        self._module = module
        self._files: deque[BinaryIO] = deque()
        self._size = 0  # of the newest one, as last seen
        self._is_full = False
        self.is_cut = False  #: the file that is being read was truncated: what it has now is a later file

    def __len__(self) -> int:
        return len(self._files)

    def open(self) -> BinaryIO | None:
        """The file that has the name now; None if none has it."""
        try:
            return open(self._path, "rb")
        except FileNotFoundError:
            return None

    def take(self) -> BinaryIO:
        """The oldest of them, which is read from now on."""
        self.is_cut = False
        return self._files.popleft()

    def look(self, reading: BinaryIO | None) -> None:
        """Notice that the file was replaced or truncated. Call it often, also while nothing can be read: that may
        happen again before the lines of ``reading`` were handled.
        """
        newest = self._files[-1] if self._files else reading
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return
        same = newest is not None and there.st_ino == os.fstat(newest.fileno()).st_ino
        read = reading.tell() if newest is reading and reading is not None else 0
        before, self._size = self._size, there.st_size
        if same and there.st_size >= max(before, read):
            return
        if same and newest is not reading:
            log.error("module %r: the file was cut short before its lines could be read", self._module)
            return
        if len(self._files) >= MAX_LATER:
            if not self._is_full:
                log.error("module %r: the file was replaced %d times while its lines waited: files are left out",
                          self._module, MAX_LATER)  # fmt: skip
            self._is_full = True
            return
        opened = self.open()
        if opened is not None:
            self._files.append(opened)
            self._is_full = False
            self.is_cut = self.is_cut or same

    def close(self) -> None:
        """Close them."""
        while self._files:
            self._files.popleft().close()
