"""Text from elsewhere, made fit to print: a name, a body or a peer's words must not steer the terminal they appear on.

Any thread; no I/O.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, keep: str = "\t\n") -> str:
    """``text`` with every character that is not for printing escaped (``\\x1b``), except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
