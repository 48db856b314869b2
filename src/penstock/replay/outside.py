"""What modules and programs use that a replay does not control: threads of their own are refused when they are started,
processes and sockets are noted.

A thread counts as started by a module if the thread of the replay, or one of the virtual clock's, starts it, in
whichever library. (Python 3.11 has no audit event for that, so ``Thread.start`` is replaced meanwhile.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from penstock import clock as clocks
from penstock.replay.watchdog import innermost

__all__ = ["controlled"]

#: Python's audit events for access to the outside of the process.
OUTSIDE = frozenset({
    "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn",
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
})  # fmt: skip
# a process started by this causes no event, but the import of this module does
SPAWNED = "multiprocessing.popen_spawn_posix"


_notes: list[str] | None = None  # of the replay that runs
_hooked: list[bool] = []


@contextlib.contextmanager
def controlled() -> Iterator[list[str]]:
    """Inside, a thread that this thread (or one of the virtual clock's) starts is refused. Gives the notes about
    processes that are started and sockets that are used.
    """
    global _notes  # noqa: PLW0603
    if not _hooked:  # an audit hook cannot be removed
        _hooked.append(True)
        sys.addaudithook(_audit)
    found: list[str] = []
    thread, start = threading.get_ident(), threading.Thread.start

    def start_or_refuse(started: threading.Thread) -> None:
        if clocks.in_order(thread):
            _refuse(started, sys._getframe(1))
        start(started)

    _notes = found
    threading.Thread.start = start_or_refuse  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        _notes = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import" and _notes is not None and arguments[0] == SPAWNED:
        event = "os.posix_spawn"
    if _notes is not None and event in OUTSIDE:
        told = f"{event} was used: a replay does not control what comes of that; the output may differ the next time"
        if told not in _notes:
            _notes.append(told)


def _refuse(thread: threading.Thread, caller: FrameType) -> None:
    """Refuse a thread, unless it is one of Penstock's: the clock's own, or one that completes a journal's file."""
    starter = caller.f_globals.get("__name__", "")
    # The clock calls functions of modules, and one of these may be the start of a thread.
    ours = starter.startswith("penstock.") and starter != clocks.__name__
    if not ours and not clocks.is_virtual(thread):
        place = f"{thread.name!r}, started at {innermost(caller)}"
        clocks.refuse_if_virtual(f"a thread of one's own ({place}; clock.call_later takes recorded time)")
