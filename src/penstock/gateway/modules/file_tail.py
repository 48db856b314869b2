"""FileTail: publishes each line that is added to a file, as ``tail -F`` does.

args: ``file`` (required), ``from_start`` (false), ``poll_s`` (0.2), ``max_line_bytes`` (65536: a longer line comes in
pieces), ``place`` (null; or a file that records how far lines were handled: then links deliver at least once, lines
that were lost on their way are read again, and the next run continues there). Properties: ``file``, ``line`` (counted
since the module started; with a ``place``, since that file was created). If the file does not exist, the module waits
for it. A file that was replaced or truncated is read from its beginning, with a ``place`` after the old lines were
handled. Files that take its place while old lines wait are kept open, up to 100, and read in their order.

Example: {"name": "lines", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:FileTail"}, "args":
{"file": "/var/log/plc.log", "place": "plc.place"}}
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any

from penstock.gateway.durable import UNLINKED_S, Place
from penstock.gateway.later_files import LaterFiles
from penstock.gateway.module import Outlet, Source, options

LINES = 256  # how many lines are marked together
RETRY_S = 1.0  # pause between a loss and reading again
log = logging.getLogger("penstock.gateway")


class FileTail(Source):
    """Publishes the lines of a file."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, file="", from_start=False, poll_s=0.2, max_line_bytes=65536, place=None)
        if not given["file"]:
            raise ValueError("file is missing")
        if not given["poll_s"] > 0 or given["max_line_bytes"] < 1:
            raise ValueError("poll_s must be above 0 and max_line_bytes 1 or more")
        if not isinstance(given["place"], str | None):
            raise ValueError(f"place must be the path of a file or null, not {given['place']!r}")
        return given

    @classmethod
    def durable_with(cls, configuration: Any) -> bool:
        """As its args say."""
        return bool(configuration["place"])

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Load the place that was reached."""
        super().create(broker, configuration)
        self._cut = threading.Event()
        self.durable = self.durable_with(configuration)
        self._place = Place(configuration["place"], functools.partial(self.broker.mark, self)) if self.durable else None

    def run(self) -> None:
        """Publish complete lines; wait if there is none; check whether the file was replaced."""
        self._number = self._marked = 0
        self._rest = b""
        self._later = LaterFiles(self.configuration["file"], self.name)
        self._file = self._later.open()
        self._seek()
        while not self.stopping.is_set():
            self._await_link()
            more = self._read()
            if self._number - self._marked >= LINES or (self._number > self._marked and not more):
                self._reached()
            if not more:
                self._later.look(self._file)
            if not more and self._settle():
                # Lost lines can be read again only from the file that they came from.
                if self._later and not self._in_flight():
                    self._begin_anew()
                else:
                    self.stopping.wait(self.configuration["poll_s"])
        if self._number > self._marked:
            self._reached()
        while self._in_flight() and not self._cut.wait(0.002) and self._settle() and not self._is_stalled():
            pass  # lines that were lost, or are being tried again, are read again in the next run
        self._later.close()
        if self._file is not None:
            self._file.close()

    def _await_link(self) -> None:
        """With a place, wait until something is linked: before that nobody could handle the lines."""
        while self._place is not None and not self.broker.linked(self) and not self.stopping.wait(UNLINKED_S):
            pass

    def kill(self) -> None:
        """Stop waiting for lines to be handled: they are read again in the next run."""
        self._cut.set()

    def _read(self) -> bool:
        """Publish a line if a complete one is there; returns whether something was read."""
        most = self.configuration["max_line_bytes"]
        piece = b"" if self._file is None or self._later.is_cut else self._file.readline(most - len(self._rest))
        self._rest += piece
        if self._rest.endswith(b"\n") or len(self._rest) >= most:
            self._number += 1
            line = {"file": self.configuration["file"], "line": str(self._number)}
            self.publish(self._rest.rstrip(b"\r\n"), line)
            self._rest = b""
        return bool(piece)

    def _seek(self) -> None:
        """Go to the place where the last run stopped; otherwise to the end, or with ``from_start`` to the beginning."""
        saved = self._place.read() if self._place is not None else None
        if not self._go_to(saved) and saved is None and self._file is not None and not self.configuration["from_start"]:
            self._file.seek(0, os.SEEK_END)
        if self._file is not None or saved is None:
            self._begin()

    def _go_to(self, place: str | None) -> bool:
        """Go to a place that ``_current_place`` wrote; False if it is not in this file."""
        there = os.fstat(self._file.fileno()) if self._file is not None else None
        if place is None:
            return False
        try:
            inode, offset, number = map(int, place.split())
        except ValueError:
            log.error("module %r: its place %s is damaged (%r): the file is read from its beginning", self.name,
                      self.configuration["place"], place[:100])  # fmt: skip
        else:
            self._number = self._marked = number
            same = there is not None and inode == there.st_ino and offset <= there.st_size
            if self._file is not None and same and not self._later.is_cut:
                self._file.seek(offset)
                return True
        return False

    def _current_place(self) -> str:
        if self._file is None:
            return f"0 0 {self._number}"
        return f"{os.fstat(self._file.fileno()).st_ino} {self._file.tell() - len(self._rest)} {self._number}"

    def _begin(self) -> None:
        """Start here: nothing before this place will be read again."""
        if self._place is not None:
            self._place.begin(self._current_place())

    def _begin_anew(self) -> None:
        """Start with a file that was replaced or truncated, or that has just appeared."""
        first = self._file is None
        if self._file is not None:
            self._file.close()
        self._file, self._rest = self._later.take(), b""
        if first and self._place is not None:
            self._go_to(self._place.read())
        self._begin()

    def _reached(self) -> None:
        self._marked = self._number
        self._later.look(self._file)
        if self._place is not None:
            self._place.reached(self._current_place())
            self._settle()

    def _in_flight(self) -> bool:
        return self._place is not None and self._place.in_flight > 0

    def _is_stalled(self) -> bool:
        return self._place is not None and self._place.stalled

    def _settle(self) -> bool:
        """Store how far all was handled. If something was lost, go back to that place and return False."""
        if self._place is None or self._place.settle():
            return True
        log.warning("module %r: lines were lost on their way; they are read once more", self.name)
        self._rest = b""
        if not self._go_to(self._place.handled):
            log.error("module %r: the file was cut short before lines that were lost could be read again", self.name)
        self._begin()
        self.stopping.wait(RETRY_S)
        return False
