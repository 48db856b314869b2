"""What modules and programs use that a replay does not control: threads of their own are refused when they are started,
calls that would end the process or interrupt it later when they are made; processes, sockets, name look-ups, the
machine's clock and random numbers that are not of the seed are noted.

A thread counts as started by a module if the thread of the replay, or one of the virtual clock's, starts it, in
whichever library. (Python 3.11 has no audit event for that, so ``Thread.start`` is replaced meanwhile.)
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from penstock import clock as clocks
from penstock.replay.uses import is_of_library, noted_calls, replace, user_of
from penstock.replay.watchdog import innermost

__all__ = ["Used", "controlled"]

#: Python's audit events for access to the outside of the process.
OUTSIDE = frozenset({
    "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn",
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
})  # fmt: skip
#: Those for look-ups of names.
LOOK_UPS = frozenset(f"socket.{name}" for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo"))
WHY = "a replay cannot control its result"
MAX_PLACES = 5  # lines that a note names
# a process started by this causes no event, but the import of this module does
SPAWNED = "multiprocessing.popen_spawn_posix"
#: Functions that end the process, or may; those of ``os.exec...`` all call one of two.
ENDS = (
    *((os, name) for name in ("_exit", "abort", "kill", "killpg", "execv", "execve")),
    *((signal, name) for name in ("raise_signal", "pthread_kill", "pidfd_send_signal")),
)
#: Functions that interrupt the process after some time of the machine's; the place of that time in their arguments.
INTERRUPTS = {"alarm": 0, "setitimer": 1}


class Used:
    """What was used that a replay does not control, and where."""

    def __init__(self, before: Used | None = None) -> None:
        """``before`` is what was used when the modules were imported."""
        found = {} if before is None else before._places
        self._places: dict[tuple[str, str], list[str]] = {use: [*places] for use, places in found.items()}

    def add(self, name: str, why: str, frame: FrameType | None) -> None:
        """Remember a use by this line; None: it is not known."""
        places = self._places.setdefault((name, why), [])
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            if place not in places:
                places.append(place)

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that was used."""
        return [
            f"{name} was used{_at(places)}: {why}; the output may differ the next time"
            for (name, why), places in self._places.items()
        ]


def _at(places: list[str]) -> str:
    more = len(places) - MAX_PLACES
    return f" ({'; '.join(places[:MAX_PLACES])}{f'; and in {more} more lines' if more > 0 else ''})" if places else ""


class _Controlled:
    """The replay that runs: its process and thread, and what was used."""

    def __init__(self, used: Used) -> None:
        self._process, self._thread = os.getpid(), threading.get_ident()
        self.used = used
        self._known: set[tuple[str, CodeType, int]] = set()  # callers that need not be looked at again

    def note(self, name: str, why: str, caller: FrameType) -> None:
        """Note a call that a module makes, itself or through a library."""
        key = name, caller.f_code, caller.f_lineno
        if key in self._known or not self.calls():
            return
        if not is_of_library(caller):  # one line of the library may serve many modules
            self._known.add(key)
        if (frame := user_of(caller)) is not None:
            self.used.add(name, why, frame)

    def calls(self) -> bool:
        """Whether the caller is under control; a process that a module has forked is not."""
        return self.is_here() and clocks.in_order(self._thread)

    def is_here(self) -> bool:
        """Whether this is its process, not one that a module has forked."""
        return os.getpid() == self._process


_now: _Controlled | None = None
_hooked: list[bool] = []


@contextlib.contextmanager
def controlled(before: Used | None = None) -> Iterator[Used]:
    """Inside, threads that this thread (or one of the virtual clock's) starts are refused, and calls that would end the
    process or interrupt it later. Gives what else is used that is not controlled, beside what was used ``before``.
    """
    global _now  # noqa: PLW0603
    if not _hooked:  # an audit hook cannot be removed
        _hooked.append(True)
        sys.addaudithook(_audit)
    with contextlib.ExitStack() as stack:
        replace(stack, threading.Thread, "start", _started_or_refused(threading.Thread.start))
        for name in ("start_new_thread", "start_new"):  # what threading itself calls has other names there
            replace(stack, _thread, name, _begun_or_refused(getattr(_thread, name)))
        handed = asyncio.BaseEventLoop.run_in_executor
        replace(stack, asyncio.BaseEventLoop, "run_in_executor", _handed_or_refused(handed))
        for owner, name in ENDS:
            if hasattr(owner, name):
                replace(stack, owner, name, _ended_or_refused(getattr(owner, name), f"{owner.__name__}.{name}"))
        for name, place in INTERRUPTS.items():
            replace(stack, signal, name, _set_or_refused(getattr(signal, name), name, place))
        stack.enter_context(noted_calls(_note))
        _now = begun = _Controlled(Used(before))
        processes = _processes()
        try:
            yield begun.used
        except BaseException:
            # At the end of the command Python would wait for them, and they for the thread that was refused.
            for process in _processes() - processes if begun.is_here() else ():
                process.kill()
            raise
        finally:
            _now = None


# All of these ask for the replay that runs when they are called: a module that is imported while they stand for a
# function of the library may keep them (``from os import _exit``), also for replays in other processes.


def _started_or_refused(start: Callable[..., None]) -> Callable[..., None]:
    def started(thread: threading.Thread) -> None:
        if _now is not None and _now.calls():
            _refuse_thread(thread, sys._getframe(1))
        start(thread)

    return started


def _begun_or_refused(begin: Callable[..., int]) -> Callable[..., int]:
    def begun(*arguments: Any, **options: Any) -> int:
        if _now is not None and _now.calls():
            place = f"started at {innermost(sys._getframe(1))}"
            clocks.refuse_if_virtual(f"a thread of one's own ({place}; clock.call_later takes recorded time)")
        return begin(*arguments, **options)

    return begun


def _handed_or_refused(hand: Callable[..., Any]) -> Callable[..., Any]:
    """Work for threads of an event loop: they may run already, and then none is started."""

    def handed(*arguments: Any, **options: Any) -> Any:
        if _now is not None and _now.calls():
            place = f"asyncio.to_thread or run_in_executor, called at {innermost(sys._getframe(1))}"
            clocks.refuse_if_virtual(f"a thread of the event loop's ({place}; clock.call_later takes recorded time)")
        return hand(*arguments, **options)

    return handed


def _processes() -> set[multiprocessing.process.BaseProcess]:
    """Those of the library that are there; a module may have started one."""
    return set(multiprocessing.active_children())


def _ended_or_refused(end: Callable[..., Any], name: str) -> Callable[..., Any]:
    def ended(*arguments: Any, **options: Any) -> Any:
        if _now is not None and _now.calls() and _ends_this(name, arguments):
            place = innermost(sys._getframe(1))
            clocks.refuse_if_virtual(f"{name}, called at {place}, which ends the process,")
        return end(*arguments, **options)

    return ended


def _ends_this(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether such a call is meant for this process. Any signal but 0 counts, since the command handles those that end
    it: a module that sends one would end the replay without a word.
    """
    if name in ("os.kill", "os.killpg"):
        mine = (os.getpid(), 0, -1, -os.getpgrp()) if name == "os.kill" else (os.getpgrp(), 0)
        return arguments[:1] != () and arguments[0] in mine and arguments[1:] != (0,)
    if name in ("signal.pthread_kill", "signal.pidfd_send_signal"):
        return len(arguments) > 1 and arguments[1] != 0 and (name == "signal.pthread_kill" or _is_of_this(arguments[0]))
    return True


def _is_of_this(descriptor: object) -> bool:
    """Whether a descriptor of a process is of this one."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:  # there is none: the call itself says so
        return False
    return f"Pid:\t{os.getpid()}" in lines


def _set_or_refused(interrupt: Callable[..., Any], name: str, place: int) -> Callable[..., Any]:
    def was_set(*arguments: Any) -> Any:
        if _now is not None and _now.calls() and arguments[place : place + 1] != (0,):  # 0 only takes it back
            where = innermost(sys._getframe(1))
            clocks.refuse_if_virtual(
                f"signal.{name}, called at {where}, which interrupts in the machine's time (clock.call_later takes "
                "recorded time),"
            )
        return interrupt(*arguments)

    return was_set


def _note(name: str, why: str, caller: FrameType) -> None:
    if _now is not None:
        _now.note(name, why, caller)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _now is None:
        return
    if event == "import" and arguments[0] == SPAWNED:
        event = "os.posix_spawn"
    if event in OUTSIDE:
        _now.used.add(event, WHY, user_of(sys._getframe(1)))
    elif event in LOOK_UPS:
        _note(event, WHY, sys._getframe(1))


def _refuse_thread(thread: threading.Thread, caller: FrameType) -> None:
    """Refuse a thread, unless it is one of Penstock's: the clock's own, or one that completes a journal's file."""
    starter = caller.f_globals.get("__name__", "")
    # The clock calls functions of modules, and one of these may be the start of a thread.
    ours = starter.startswith("penstock.") and starter != clocks.__name__
    if not ours and not clocks.is_virtual(thread):
        place = f"{thread.name!r}, started at {innermost(caller)}"
        clocks.refuse_if_virtual(f"a thread of one's own ({place}; clock.call_later takes recorded time)")
