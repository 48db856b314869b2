"""FileTail: each line that is added to a file, as ``tail -F`` shows them.
args: ``file`` (required), ``from_start`` (false), ``poll_s`` (0.2), ``max_line_bytes`` (65536: a longer line comes in
pieces). Properties: ``file``, ``line`` (number since the module began). A file that is not there yet is waited for;
one that was replaced or cut short is read anew from its beginning.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from penstock.gateway.module import Source, options


class FileTail(Source):
    """Lines out of a file."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, file="", from_start=False, poll_s=0.2, max_line_bytes=65536)
        if not given["file"]:
            raise ValueError("file is missing")
        return given

    def run(self) -> None:
        """Read whole lines; wait where there is none; look whether the file is still the same."""
        path, number = self.configuration["file"], 0
        file, rest, skip = self._open(), b"", not self.configuration["from_start"]
        if file is not None and skip:
            file.seek(0, os.SEEK_END)
        while not self.stopping.is_set():
            piece = b"" if file is None else file.readline(self.configuration["max_line_bytes"] - len(rest))
            rest += piece
            if rest.endswith(b"\n") or len(rest) >= self.configuration["max_line_bytes"]:
                number += 1
                self.publish(rest.rstrip(b"\r\n"), {"file": path, "line": str(number)})
                rest = b""
            elif not piece:
                if self._replaced(file):
                    file, rest = self._open(file), b""
                self.stopping.wait(self.configuration["poll_s"])
        if file is not None:
            file.close()

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
