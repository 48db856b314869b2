"""Printer: prints each message as a line on standard output.

args: ``format`` ("{content}"; also {properties}, {size}, {time}, {source} and {NAME} of any property), ``max_bytes``
(200).
A missing property is shown as "-", a control character as its escape (``\\n``, ``\\x1b``). The format is filled in by
name only: no attributes, no indexes.

Example: {"name": "show", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Printer"}, "args":
{"format": "{source} {deviceId}: {content}"}}
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, options
from penstock.printable import printable

_NAME = re.compile(r"\{([^{}]*)\}")


class Printer(Module):
    """Prints lines at the terminal."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        return options(args, format="{content}", max_bytes=200)

    def receive(self, message: GatewayMessage) -> None:
        """Print one line."""

        def value(match: re.Match[str]) -> str:
            return printable(text_of(match[1]), keep="\t")

        def text_of(name: str) -> str:
            if name == "content":
                return bytes(message.content[: self.configuration["max_bytes"]]).decode(errors="backslashreplace")
            if name == "properties":
                return " ".join(f"{key}={text}" for key, text in message.properties.items())
            if name == "size":
                return str(message.size)
            if name == "source":
                return str(message.channel)
            if name == "time":
                return time.strftime("%H:%M:%S", time.localtime(message.timestamp_ns / 1e9))
            return message.properties.get(name, "-")

        # One write per line, so that the lines of several printers do not mix.
        sys.stdout.write(_NAME.sub(value, self.configuration["format"]) + "\n")
        sys.stdout.flush()
