"""Warnings about a replay that makes no progress, and about threads of modules. One thread runs all modules, so a
module that waits for ever or loops endlessly would stop the replay silently.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import penstock
from penstock.clock import VirtualClock

__all__ = ["quiet_refusals", "watched"]

TELL_AFTER_S = 10.0  # as a live gateway does by itself (``stuck_after_s``)
LOOKS = 10  # checks in that time
OURS = (str(Path(penstock.__file__).parent), sysconfig.get_path("stdlib"))
log = logging.getLogger("penstock.replay")


@contextlib.contextmanager
def watched(progress: Callable[[], object], turn: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Inside, report once where this thread is if ``progress`` has not changed for ``TELL_AFTER_S``; or where the
    thread of a source is that it waits for, whose identifier ``turn`` gives.
    """
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        seen, looks = progress(), 0
        while not ended.wait(TELL_AFTER_S / LOOKS):
            before, seen = seen, progress()
            looks = looks + 1 if seen == before else 0
            if looks == LOOKS:
                log.warning("recorded time has not gone on for %g s: %s", TELL_AFTER_S, _place(turn() or thread))

    watcher = threading.Thread(target=watch, name="replay watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _place(thread: int) -> str:
    """The innermost line that is neither in Penstock nor in Python's own library."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return _line(frame or innermost)


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "its thread has ended"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}, has not come back or comes again"


@contextlib.contextmanager
def quiet_refusals(clock: VirtualClock) -> Iterator[None]:
    """Inside, a thread of a module that ends because of a refusal prints no traceback: the replay itself ends with that
    error.
    """
    before = threading.excepthook

    def print_others(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is None or ended.exc_value is not clock.refused:
            before(ended)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = before
