"""Keys as they are pressed, without Enter: for commands that redraw a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["pressed"]

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)

_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\x7f": "backspace", "\x08": "backspace", "\r": "enter", "\n": "enter", "\x1b": "escape",
}  # fmt: skip


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """A function that waits up to the given seconds for a key and returns its name, '' if none came.

    Where standard input is no terminal there are no keys, and the function waits.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: select.select([], [], [], max(0.0, seconds)) and ""
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    waiting: deque[str] = deque()  # keys that were pressed faster than they were read

    def wait(seconds: float) -> str:
        if not waiting and select.select([descriptor], [], [], max(0.0, seconds))[0]:
            text = os.read(descriptor, 256).decode("utf-8", "replace")
            waiting.extend(_NAMES.get(key, key) for key in _KEY.findall(text))
        return waiting.popleft() if waiting else ""

    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # Ctrl-C still interrupts; what was typed before counts
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
