"""FileTail: each line that is added to a file, as ``tail -F`` shows them.

args: ``file`` (required), ``from_start`` (false), ``poll_s`` (0.2), ``max_line_bytes`` (65536: a longer line comes in
pieces), ``place`` (null; a file that keeps how far all lines were handled: then links deliver at least once, and the
next run goes on there). Properties: ``file``, ``line`` (number since the module began). A file that is not there yet is
waited for; one that was replaced or cut short is read anew from its beginning.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import Any, BinaryIO

from penstock.gateway.durable import Place
from penstock.gateway.module import Outlet, Source, options

LINES = 256  # so many are marked together


class FileTail(Source):
    """Lines out of a file."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, file="", from_start=False, poll_s=0.2, max_line_bytes=65536, place=None)
        if not given["file"]:
            raise ValueError("file is missing")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Find the place."""
        super().create(broker, configuration)
        self._cut = threading.Event()
        self.durable = bool(configuration["place"])
        self._place = Place(configuration["place"], functools.partial(self.broker.mark, self)) if self.durable else None

    def run(self) -> None:
        """Read whole lines; wait where there is none; look whether the file is still the same."""
        path, number, marked = self.configuration["file"], 0, 0
        file, rest = self._open(), b""
        self._seek(file)
        while not self.stopping.is_set():
            piece = b"" if file is None else file.readline(self.configuration["max_line_bytes"] - len(rest))
            rest += piece
            if rest.endswith(b"\n") or len(rest) >= self.configuration["max_line_bytes"]:
                number += 1
                self.publish(rest.rstrip(b"\r\n"), {"file": path, "line": str(number)})
                rest = b""
            if number - marked >= LINES or (number > marked and not piece):
                marked = number
                self._reached(file, rest)
            if not piece:
                if self._replaced(file):
                    file, rest = self._open(file), b""
                self._settle()
                self.stopping.wait(self.configuration["poll_s"])
        if number > marked:
            self._reached(file, rest)
        while self._place is not None and self._place.in_flight and not self._cut.wait(0.002):
            self._settle()
        if file is not None:
            file.close()

    def kill(self) -> None:
        """Wait no longer for lines to be handled: they come again."""
        self._cut.set()

    def _seek(self, file: BinaryIO | None) -> None:
        """To the place where the last run left off; else to the end, or to the beginning where that is asked for."""
        if file is None:
            return
        saved = self._place.read() if self._place is not None else None
        there = os.fstat(file.fileno())
        with contextlib.suppress(ValueError):
            inode, offset = map(int, (saved or "").split())
            if inode == there.st_ino and offset <= there.st_size:
                file.seek(offset)
                return
        if not self.configuration["from_start"] and saved is None:
            file.seek(0, os.SEEK_END)

    def _reached(self, file: BinaryIO | None, rest: bytes) -> None:
        if self._place is not None and file is not None:
            self._place.reached(f"{os.fstat(file.fileno()).st_ino} {file.tell() - len(rest)}")
            self._settle()

    def _settle(self) -> None:
        if self._place is not None:
            self._place.settle()

    def _open(self, old: BinaryIO | None = None) -> BinaryIO | None:
        if old is not None:
            old.close()
        try:
            return open(self.configuration["file"], "rb")
        except FileNotFoundError:
            return None

    def _replaced(self, file: BinaryIO | None) -> bool:
        try:
            there = os.stat(self.configuration["file"])
        except FileNotFoundError:
            return False
        return file is None or there.st_ino != os.fstat(file.fileno()).st_ino or there.st_size < file.tell()
