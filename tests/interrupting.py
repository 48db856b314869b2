"""Calls that an exception of a signal's function, such as KeyboardInterrupt, breaks off at every point of the library's
Python code where Python runs such functions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import penstock

LIBRARY = str(Path(penstock.__file__).parent)
# Python runs the functions of signals after these instructions, and nowhere else; a call of a Python function is
# followed by the RESUME of that function instead.
POINTS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}


class Interrupted(BaseException):
    """What the signal's function raises."""


class At:
    """Raises Interrupted at the point of that number, if there are as many."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_back is not None:
            self.before[frame.f_back] = ""
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        return self.look

    def look(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self.before.get(frame) in POINTS:
                self.left -= 1
                if self.left < 0:
                    self.before[frame] = ""
                    raise Interrupted
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self.look


def each_point(call: Callable[[int], object]) -> Iterator[bool]:
    """Calls it again and again, interrupted one point later each time, until it is not; gives whether it was."""
    number = 0
    while True:
        before = sys.gettrace()
        try:
            sys.settrace(At(number))
            try:
                call(number)
            finally:
                sys.settrace(before)
        except Interrupted:
            yield True
        else:
            yield False
            return
        number += 1
