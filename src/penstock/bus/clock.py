"""Clocks that delayed messages run on.

``SystemClock`` fires from a thread of its own, which is started when first needed; ``VirtualClock`` stands still until
``advance`` is called, so that tests need not sleep. Both may be called from any thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from penstock.errors import InvalidArgument

logger = logging.getLogger("penstock.bus")


class Timer:
    """One scheduled call."""

    __slots__ = ("_clock", "_done", "function", "when")

    def __init__(self, clock: _Heap, when: float, function: Callable[[], object]) -> None:
        self._clock = clock
        self._done = False
        self.when = when
        self.function = function

    def cancel(self) -> bool:
        """Keep it from firing; False if it has fired or was cancelled before."""
        return self._clock._cancel(self)


class Clock(Protocol):
    """What a delayed message needs of a clock."""

    def now(self) -> float:
        """Seconds from some beginning."""

    def call_at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` at ``when`` or later, in a thread of the clock's choice."""


class _Heap:
    # A finaliser or signal handler may schedule a call while its own thread is inside of this class. Hence the
    # reentrant lock, and the list is a valid heap of all timers at every moment.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def call_at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` at ``when`` or later."""
        timer = Timer(self, when, function)
        entry = (when, next(self._numbers), timer)
        with self._lock:
            heapq.heappush(self._timers, entry)
            first = self._timers[0][2] is timer
        if first:
            self._sooner()
        return timer

    def _sooner(self) -> None:
        """Called when the next timer is earlier than the one that the thread waits for."""

    def _cancel(self, timer: Timer) -> bool:
        with self._lock:
            if timer._done:
                return False
            timer._done = True
            dead = sum(entry[2]._done for entry in self._timers) if len(self._timers) > 64 else 0
            if dead * 2 > len(self._timers):  # otherwise cancelled timers would pile up
                before, self._timers = self._timers, []
                for entry in before:
                    if not entry[2]._done:
                        heapq.heappush(self._timers, entry)
            return True

    def _take_due(self, now: float) -> tuple[Timer | None, float | None]:
        """The next timer that is due, or when the next one will be."""
        with self._lock:
            while self._timers:
                when, _, timer = self._timers[0]
                if not timer._done and when > now:
                    return None, when
                heapq.heappop(self._timers)
                if not timer._done:
                    timer._done = True
                    return timer, None
            return None, None


class VirtualClock(_Heap):
    """A clock that a test drives."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def now(self) -> float:
        """Seconds advanced so far."""
        return self._now

    def advance(self, seconds: float) -> int:
        """Advance the time and fire, in this thread and in order, what becomes due; returns how many fired."""
        if not seconds >= 0:
            raise InvalidArgument(f"a clock goes forward: seconds={seconds!r}")
        target = self._now + seconds
        fired = 0
        while True:
            timer, _ = self._take_due(target + 1e-12)  # 0.1 + 0.2 is due at 0.3
            if timer is None:
                break
            self._now = max(self._now, timer.when)
            timer.function()
            fired += 1
        self._now = target
        return fired


class SystemClock(_Heap):
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread = None
        self._timers = []  # after a fork they belong to the parent

    def _sooner(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="penstock-bus-clock", daemon=True)
                thread.start()
                self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            timer, when = self._take_due(time.monotonic())
            if timer is not None:
                try:
                    timer.function()
                except BaseException:  # SystemExit too: one function must not stop the clock for all others
                    logger.exception("a function that the clock of a bus called raised")
            else:
                self._wake.wait(None if when is None else max(0.0, when - time.monotonic()))


_system: SystemClock | None = None
_system_lock = threading.Lock()


def system_clock() -> SystemClock:
    """The one system clock, made on first use."""
    global _system  # noqa: PLW0603
    with _system_lock:
        if _system is None:
            _system = SystemClock()
        return _system
