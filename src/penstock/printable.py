"""Makes foreign text safe to print: a name, a payload or a peer's message must not control the terminal.

Any thread; no I/O.
"""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["command", "printable"]


def printable(text: str, keep: str = "\t\n") -> str:
    """``text`` with every non-printable character escaped (``\\x1b``), except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def command(*words: str | Path) -> str:
    """A command of Penstock for people to paste into a shell, whatever characters its words have."""
    return shlex.join(["penstock", *map(str, words)])
