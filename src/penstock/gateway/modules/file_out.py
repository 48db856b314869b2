"""FileOut: writes each message to a file, as one line.

args: ``file`` (required), ``format`` ("lines": the content, in which a line break is written as ``\\n``; or "json": an
object with ``time``, ``source``, ``properties`` and ``content``), ``max_bytes`` (null: no limit; else a full file is
renamed to ``FILE.1`` and a new one begun), ``keep`` (5: how many old files to keep), ``sync`` (false; true: on disk
before a message counts as handled). A new file has mode 0600. If writing fails (a full disk), no part of the batch
stays in the file.

Example: {"name": "archive", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:FileOut"}, "args":
{"file": "readings.jsonl", "format": "json", "max_bytes": 10000000}}
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


def as_json(message: GatewayMessage) -> dict[str, Any]:
    """A message as plain data; content that is no UTF-8 stands under ``base64``."""
    found = {
        "time": message.timestamp_ns / 1e9,
        "source": str(message.channel),
        "properties": dict(message.properties),
    }
    content = bytes(message)
    try:
        return {**found, "content": content.decode()}
    except UnicodeDecodeError:
        return {**found, "base64": base64.b64encode(content).decode()}


class FileOut(Module):
    """Appends lines to a file."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, file="", format="lines", max_bytes=None, keep=5, sync=False)
        if not given["file"]:
            raise ValueError("file is missing")
        if given["format"] not in ("lines", "json"):
            raise ValueError(f'format must be "lines" or "json", not {given["format"]!r}')
        if (given["max_bytes"] is not None and not given["max_bytes"] > 0) or given["keep"] < 0:
            raise ValueError("max_bytes must be above 0, or null, and keep 0 or more")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the file now, so that an error is noticed at once."""
        super().create(broker, configuration)
        self._path = Path(configuration["file"])
        self._number = self._open()

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Write them together."""
        bound: int | None = self.configuration["max_bytes"]
        part: list[bytes] = []
        size = os.fstat(self._number).st_size
        for line in map(self._line, messages):
            if bound is not None and size and size + len(line) > bound:
                self._write(part)
                self._rotate()
                size, part = 0, []
            part.append(line)
            size += len(line)
        self._write(part)

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        size = os.fstat(self._number).st_size
        try:
            left = memoryview(b"".join(lines))
            while left:
                left = left[os.write(self._number, left) :]
            if self.configuration["sync"]:
                os.fsync(self._number)
        except OSError:
            os.ftruncate(self._number, size)  # remove what was written: the messages may be tried again
            raise

    def receive(self, message: GatewayMessage) -> None:
        """Write one."""
        self.receive_many([message])

    def destroy(self) -> None:
        """Close the file."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1

    def _line(self, message: GatewayMessage) -> bytes:
        if self.configuration["format"] == "json":
            return json.dumps(as_json(message)).encode() + b"\n"
        return bytes(message).replace(b"\n", b"\\n") + b"\n"

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        keep = self.configuration["keep"]
        for number in range(keep, 0, -1):
            older = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            if older.exists():
                older.replace(self._path.with_name(f"{self._path.name}.{number}"))
        if not keep:
            self._path.unlink(missing_ok=True)
        new = self._open()
        os.close(self._number)
        self._number = new
