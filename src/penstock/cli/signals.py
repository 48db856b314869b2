"""The signals that end a command. Light: it is loaded before everything else, so that none of them meets an import."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # importing typing for this would be most of the work
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Handler = Callable[[int, FrameType | None], Any]

__all__ = ["ENDING", "end_at_once", "handle"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP end the process at once, until a command begins: nothing is open yet.

    An exception could be lost instead: Python prints and drops what is raised in a finaliser or a callback, and imports
    run many of these.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    handle(end, end)


def handle(interrupted: Handler, terminated: Handler) -> None:
    """Let one function answer Ctrl-C, another SIGTERM and SIGHUP."""
    for number in ENDING:
        # a shell's job in the background ignores Ctrl-C, and nohup's command SIGHUP
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupted if number == signal.SIGINT else terminated)
