"""Delays at places where a scheduler may put them: what fails by them is a race, on a slow machine or by bad luck.

Threads other than the main one pause before lines of the package and of the tests; the seed chooses one line of
``SHARE``, so each line is among the chosen ones of some seed. So a thread that announces something before it is there
is caught between the two. They pause too at their start and before they end, before a record is logged, a file is
removed or renamed, an event set and a condition notified, and after they are woken by a socket. Each place pauses
``TIMES`` times a test. The threads take turns more often, and programs start late.

Only the standard library is imported, and nothing is delayed that the main thread does: it is the one that looks.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

VARIABLE = "PENSTOCK_JITTER"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = (f"{ROOT}/src/penstock/", f"{ROOT}/tests/")
SHARE = 32
TIMES = 2
PAUSE_S = (0.01, 0.03)  # longer than a look of the tests' `until` takes
START_S = (0.0, 0.1)  # of a program

_pauses = random.Random()
_passed: Counter[tuple[str, int]] = Counter()
_chosen: dict[CodeType, frozenset[int]] = {}
_sleep = time.sleep  # tests put other clocks in its place


def disturb_tests() -> None:
    """In the process of the tests, and by its environment in those that they start."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    _disturb()


def disturb_program() -> None:
    """In a program that a test starts."""
    _disturb()
    _sleep(random.Random(f"{os.environ.get(VARIABLE)} {os.getpid()}").uniform(*START_S))


def begin_test(name: str) -> None:
    """Each place may pause again; how long, the seed and the test's name tell."""
    _passed.clear()
    _pauses.seed(f"{os.environ[VARIABLE]} {name}")


def _disturb() -> None:
    sys.setswitchinterval(1e-5)
    threading.settrace(_enter)
    for place, names in {
        threading.Event: ["set"],
        threading.Condition: ["notify"],
        logging.Logger: ["handle"],
        os: ["remove", "rename", "replace", "rmdir", "unlink"],
    }.items():
        for name in names:
            setattr(place, name, _late(getattr(place, name), before=True))
    for place, names in {
        socket.socket: ["accept", "recv", "recv_into"],
        selectors.DefaultSelector: ["select"],
    }.items():
        for name in names:
            setattr(place, name, _late(getattr(place, name), before=False))
    run = threading.Thread.run

    def run_late(self: threading.Thread) -> None:
        _pause("start", 0)
        run(self)
        _pause("end", 0)

    threading.Thread.run = run_late  # type: ignore[method-assign]


def _late(function: Callable[..., Any], before: bool) -> Callable[..., Any]:
    name = getattr(function, "__qualname__", str(function))

    def late(*arguments: Any, **options: Any) -> Any:
        if before:
            _pause(name, 0)
        result = function(*arguments, **options)
        if not before:
            _pause(name, 0)
        return result

    return late


def _pause(place: str, line: int) -> None:
    if threading.get_ident() == threading.main_thread().ident:
        return
    _passed[place, line] += 1
    if _passed[place, line] <= TIMES:
        _sleep(_pauses.uniform(*PAUSE_S))


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    """The trace function of threads: goes into functions that have chosen lines, and into no others."""
    return _step if _lines(frame.f_code) else None


def _step(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line" and frame.f_lineno in _lines(frame.f_code):
        _pause(frame.f_code.co_filename, frame.f_lineno)
    return _step


def _lines(code: CodeType) -> frozenset[int]:
    found = _chosen.get(code)
    if found is None:
        name = code.co_filename
        lines = {line for *_, line in code.co_lines() if line} if name.startswith(FOLDERS) else set()
        start = f"{os.environ.get(VARIABLE)} {name.removeprefix(str(ROOT))}"
        found = frozenset(line for line in lines if zlib.crc32(f"{start} {line}".encode()) % SHARE == 0)
        _chosen[code] = found
    return found
