"""Warnings about a replay that makes no progress. One thread runs all modules, so a
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

__all__ = ["innermost", "watched"]

TELL_AFTER_S = 10.0  # as a live gateway does by itself (``stuck_after_s``)
LOOKS = 10  # checks in that time
OURS = (str(Path(penstock.__file__).parent), sysconfig.get_path("stdlib"), "<frozen ")
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
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended"
    return f"{innermost(frame)}, has not come back or comes again"


def innermost(frame: FrameType | None) -> str:
    """The innermost line that is neither in Penstock nor in Python's own library; if there is none, the frame's own."""
    found = frame
    while found is not None and found.f_code.co_filename.startswith(OURS):
        found = found.f_back
    found = found or frame
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}, in {found.f_code.co_name}"
