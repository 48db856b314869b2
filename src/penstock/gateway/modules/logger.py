"""Logger: writes each message as a line of JSON (time, source, properties, bytes, content) to a file or to the log.

args: ``file`` (null: logging, which ``penstock run`` sends to standard error), ``level`` ("INFO"), ``max_bytes`` (200:
how much of the content is shown). A new file is readable by its owner only; lines are appended and written at once.

Example: {"name": "log", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Logger"}, "args": {"file":
"messages.log"}}
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class Logger(Module):
    """Logs each message."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, file=None, level="INFO", max_bytes=200)
        if not isinstance(logging.getLevelName(given["level"]), int):
            raise ValueError(f"level {given['level']!r} is not one of DEBUG, INFO, WARNING, ERROR")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the file."""
        super().create(broker, configuration)
        self._log = logging.getLogger(f"penstock.gateway.{self.name or 'logger'}")
        # whoever adds a Logger wants its lines, even if the root logger shows only warnings
        if self._log.level == logging.NOTSET:
            self._log.setLevel(configuration["level"])
        self._file = None
        if configuration["file"]:
            number = os.open(configuration["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(number, "w", buffering=1)

    def receive(self, message: GatewayMessage) -> None:
        """One line."""
        shown = bytes(message.content[: self.configuration["max_bytes"]]).decode(errors="backslashreplace")
        when = datetime.fromtimestamp(message.timestamp_ns / 1e9, UTC).isoformat(timespec="microseconds")
        line = json.dumps(
            {
                "time": when,
                "source": message.channel,
                "properties": dict(message.properties),
                "bytes": message.size,
                "content": shown,
            }
        )
        if self._file is not None:
            self._file.write(line + "\n")
        else:
            self._log.log(logging.getLevelName(self.configuration["level"]), "%s", line)

    def destroy(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
