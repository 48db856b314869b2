"""Interrupts (Ctrl-C, SIGTERM, SIGHUP) that a module catches, by a bare ``except:`` for example, end a replay too."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from penstock.gateway.stage import FAILURES

__all__ = ["remembered"]

Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def remembered() -> Iterator[Callable[[], None]]:
    """Inside, what the handlers of these signals raise is remembered. Gives a function that raises it again, if there
    was any; the end of the block does so too. Python calls handlers in the main thread: in another this does nothing.
    """
    came: list[BaseException] = []

    def check() -> None:
        if came:
            raise came[0]

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    handlers: list[tuple[signal.Signals, Handler, Handler]] = []  # the signal, its handler before and inside
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        if callable(before):
            handlers.append((number, before, _remembering(before, came)))
    try:
        for number, _, inside in handlers:
            signal.signal(number, inside)
        try:
            yield check
        except FAILURES:  # it may have come of the interrupt
            check()
            raise
        check()
    finally:
        for number, before, inside in handlers:
            if signal.getsignal(number) is inside:  # a module may have set one of its own
                signal.signal(number, before)


def _remembering(handler: Handler, came: list[BaseException]) -> Handler:
    def remembering(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            came.append(error)
            raise

    return remembering
