"""The clock that programs ask: the machine's, or a virtual one that a test or a replay moves.

``time``, ``time_ns`` and ``monotonic`` stand for those of the module ``time``, ``call_later`` for a timer. They ask the
clock in use, which is the machine's unless ``using(VirtualClock(...))`` is around. Objects that live long (a bus's
delayed message, a gateway's module) take ``current()`` when they are created and keep it.

``SystemClock`` fires from a thread of its own, which is started when first needed. ``VirtualClock`` stands still until
``advance`` is called, so that tests need not sleep; what it calls runs in the thread that moves it. Its ``thread``
runs beside the others only in appearance: one of them at a time, each until it waits for an ``event``, so that the
same input gives the same order. One that does not wait for ``MAX_TURN_S`` of the machine's time is given up. Clocks may
be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import math
import os
import threading
import time as machine
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.errors import InvalidArgument, RefusedError, StateError

__all__ = [
    "Clock",
    "SystemClock",
    "Timer",
    "VirtualClock",
    "call_later",
    "current",
    "monotonic",
    "note_failure",
    "refuse_if_replayed",
    "refuse_if_virtual",
    "sleep",
    "system_clock",
    "time",
    "time_ns",
    "using",
]

logger = logging.getLogger("penstock.bus")
TELL_TURN_S = 3.0  # real seconds: a thread of a virtual clock that runs longer without waiting is reported
MAX_TURN_S = 30.0  # real seconds after which it is given up
MAX_NS = 2**63  # since 1970, in the year 2262: more does not fit into a message (nor less than -MAX_NS, in 1677)
MAX_FAILURES = 1000  # that a virtual clock remembers


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


class Event(Protocol):
    """The part of ``threading.Event`` that both clocks give."""

    def set(self) -> None:
        """From now on nobody waits."""

    def is_set(self) -> bool:
        """Whether it was set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or so many seconds of this clock; gives ``is_set()``."""


class Thread(Protocol):
    """The part of ``threading.Thread`` that both clocks give."""

    def start(self) -> None:
        """Begin."""

    def join(self) -> None:
        """Wait for its end."""


class Clock(Protocol):
    """What delayed messages and modules need of a clock."""

    def now(self) -> float:
        """Seconds from some beginning; it never goes back."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""

    def call_at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` at ``when`` or later, in a thread of the clock's choice."""

    def event(self) -> Event:
        """What a thread of this clock waits for."""

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """A daemon thread, not started."""


class _Heap:
    # A finaliser or signal handler may schedule a call while its own thread is inside of this class. Hence the
    # reentrant lock, and the list is a valid heap of all timers at every moment.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def call_at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` at ``when`` or later."""
        if math.isnan(when):  # the heap would lose its order
            raise InvalidArgument("a timer is due at a number of seconds, not at nan")
        if not callable(function):
            raise TypeError(f"a timer calls a function, not {type(function).__name__}")
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
    """A clock that a test or a replay moves. It begins at ``start_ns`` (since 1970; negative: before it)."""

    def __init__(self, start_ns: int = 0) -> None:
        super().__init__()
        if not isinstance(start_ns, int) or not -MAX_NS <= start_ns < MAX_NS:
            raise InvalidArgument(f"start_ns is a whole number of nanoseconds since 1970, of 64 bits, not {start_ns!r}")
        self._now = 0.0
        self._start_ns = start_ns
        self._time_ns = start_ns
        self.turn: int | None = None  #: identifier of the thread of this clock that runs now; None: none does
        self.replayed = False  #: only the replay that owns it may move it
        #: Where a replay is, for the text of a refusal; empty: not known.
        self.where: Callable[[], str] = str
        #: Called before each timer; it raises to end a replay.
        self.check: Callable[[], object] = lambda: None
        #: The first thing that was refused because this clock was in use, whoever caught that.
        self.refused: RefusedError | None = None
        #: Failures while this clock was in use that no caller got: (where, the error), the first ``MAX_FAILURES``.
        self.failures: list[tuple[str, BaseException]] = []
        self._fired: Callable[[], object] | None = None  # the function of the last timer

    def now(self) -> float:
        """Seconds advanced so far."""
        return self._now

    def time_ns(self) -> int:
        """``start_ns`` and what it was advanced by."""
        return self._time_ns

    def __repr__(self) -> str:
        return f"<VirtualClock at {self.time_ns()} ns>"

    def advance(self, seconds: float) -> int:
        """Advance the time and fire, in this thread and in order, what becomes due; returns how many fired."""
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise InvalidArgument(f"a clock goes forward, by a finite number of seconds: seconds={seconds!r}")
        if self.replayed:
            raise StateError("a replay moves this clock")
        fired = 0
        target = self._now + seconds
        if self._start_ns + target * 1e9 >= MAX_NS:  # as floats: too great a number is infinite
            raise InvalidArgument(f"seconds={seconds!r} is too far: a clock goes up to 2^63 nanoseconds since 1970")
        while self.fire_next(target):
            fired += 1
        # A timer may have advanced the clock further.
        self._set(max(self._now, target), max(self._time_ns, self._start_ns + round(target * 1e9)))
        return fired

    def fire_next(self, until: float) -> bool:
        """Go forward to the next timer that is due by ``until`` and fire it; False: there is none."""
        self.check()
        timer, _ = self._take_due(until + 1e-12)  # 0.1 + 0.2 is due at 0.3
        if timer is None:
            return False
        now = max(self._now, timer.when)
        self._set(now, max(self._time_ns, self._start_ns + round(now * 1e9)))
        self._fired = timer.function
        timer.function()
        return True

    def place(self) -> str:
        """Where a replay is, and the function of the last timer, for the text of an error."""
        function: object = self._fired
        while isinstance(function, functools.partial):
            function = function.func
        code = getattr(function, "__code__", None)
        timer = f"the last timer: {code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code else ""
        return "; ".join(filter(None, (self.where(), timer)))

    def seconds_at(self, time_ns: int) -> float:
        """What ``now()`` gives at a moment since 1970."""
        return (time_ns - self._start_ns) / 1e9

    def set_time_ns(self, time_ns: int) -> None:
        """Go forward to a moment since 1970, exactly; its timers were fired before. An earlier one changes nothing."""
        if time_ns > self._time_ns:
            self._set(max(self._now, self.seconds_at(time_ns)), time_ns)

    def _set(self, now: float, time_ns: int) -> None:
        self._now, self._time_ns = now, time_ns
        if self is _current:
            _stamp_with(self)

    def event(self) -> Event:
        """An event that threads of this clock wait for."""
        return _VirtualEvent(self)

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """A thread that runs only when this clock lets it."""
        return _VirtualThread(self, target, name)


class GivenUpError(StateError):
    """A thread of a virtual clock kept its turn too long."""


class _GivenUp(BaseException):
    """Ends a thread that was given up when it waits at last."""


class _Body(threading.Thread):
    """The machine's thread of a ``_VirtualThread``."""


class _VirtualThread:
    """Runs when the clock calls ``resume``, which returns when it waits again or has ended: never beside its caller.
    One that keeps its turn too long is given up: it is never resumed again."""

    _local = threading.local()

    def __init__(self, clock: VirtualClock, target: Callable[[], object], name: str) -> None:
        self._clock = clock
        self._target = target
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = _Body(target=self._run, name=name, daemon=True)
        self._ended = False
        self._given_up = False

    @classmethod
    def mine(cls) -> _VirtualThread | None:
        """The one that the caller runs in."""
        return getattr(cls._local, "thread", None)

    def start(self) -> None:
        self._thread.start()
        self._clock.call_at(self._clock.now(), self.resume)

    def resume(self) -> None:
        if self._ended or self._given_up:
            return
        before, self._clock.turn = self._clock.turn, self._thread.ident
        self._go.release()
        try:
            if self._back.acquire(timeout=TELL_TURN_S):
                return
            logging.getLogger("penstock.clock").warning(
                "%r has not waited for %g s; under a virtual clock a source waits with self.stopping.wait(seconds)",
                self._thread.name,
                TELL_TURN_S,
            )
            if self._back.acquire(timeout=max(0.0, MAX_TURN_S - TELL_TURN_S)):
                return
        except BaseException:  # Ctrl-C: whoever closes must not wait for it again
            self._give_up()
            raise
        finally:
            self._clock.turn = before
        self._give_up()
        raise GivenUpError(
            f"{self._thread.name!r} was given up: it has not waited for {MAX_TURN_S:g} s. Under a virtual clock a "
            "source waits with self.stopping.wait(seconds); time.sleep and waits of one's own stop all others"
        )

    def _give_up(self) -> None:
        self._given_up = True
        self._go.release()  # should it wait some day, it ends

    def pause(self) -> None:
        """In the thread itself: let the others go on until ``resume``."""
        self._back.release()
        self._go.acquire()
        if self._given_up:
            raise _GivenUp

    def join(self) -> None:
        """Its events are set: it runs to its end in the caller's time."""
        while not self._ended and not self._given_up and self._local_is_other():
            self.resume()

    def _local_is_other(self) -> bool:
        return _VirtualThread.mine() is not self and self._thread.ident is not None

    def _run(self) -> None:
        self._local.thread = self
        self._go.acquire()
        try:
            self._target()
        except _GivenUp:
            pass
        except BaseException as error:
            logger.exception("a thread of a virtual clock ended by an error")
            note_failure(self._thread.name, error)
        finally:
            self._ended = True
            self._back.release()


class _VirtualEvent:
    """A waiting thread gives its turn back; it gets it again when the event is set or its time-out has passed."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._is_set = False
        self._waiting: list[tuple[_VirtualThread, Timer | None]] = []

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread, timer in waiting:
            if timer is None or timer.cancel():
                self._clock.call_at(self._clock.now(), thread.resume)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        thread = _VirtualThread.mine()
        if self._is_set:
            return True
        if thread is None:
            raise StateError("under a virtual clock only its own threads wait; use a timer (call_later)")
        timer = None if timeout is None else self._clock.call_at(self._clock.now() + max(0.0, timeout), thread.resume)
        entry = thread, timer
        self._waiting.append(entry)
        thread.pause()
        if entry in self._waiting:
            self._waiting.remove(entry)
        return self._is_set


class SystemClock(_Heap):
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)

    def __repr__(self) -> str:
        return "<SystemClock>"

    now = staticmethod(machine.monotonic)
    time_ns = staticmethod(machine.time_ns)
    event = staticmethod(threading.Event)

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """A daemon thread, not started."""
        return threading.Thread(target=target, name=name, daemon=True)

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
            timer, when = self._take_due(machine.monotonic())
            if timer is not None:
                try:
                    timer.function()
                except BaseException:  # SystemExit too: one function must not stop the clock for all others
                    logger.exception("a function that the clock of a bus called raised")
            else:
                # A timer may be due later than a thread can wait, even never (inf): it is looked at again in between.
                self._wake.wait(
                    None if when is None else min(max(0.0, when - machine.monotonic()), threading.TIMEOUT_MAX)
                )


_system: SystemClock | None = None
_system_lock = threading.Lock()


def system_clock() -> SystemClock:
    """The one system clock, made on first use."""
    global _system  # noqa: PLW0603
    with _system_lock:
        if _system is None:
            _system = SystemClock()
        return _system


# ---- the clock in use

_current: Clock | None = None  # None: the machine's


def current() -> Clock:
    """The clock in use, for objects that keep it."""
    return _current or _system or system_clock()


@contextlib.contextmanager
def using(clock: VirtualClock) -> Iterator[VirtualClock]:
    """Inside, the whole process asks ``clock``, and what its buses and gateways publish has the clock's time."""
    from penstock import _core

    global _current  # noqa: PLW0603
    if not isinstance(clock, VirtualClock):
        raise InvalidArgument(f"using() takes a VirtualClock(), not {clock!r}")
    if _current is not None:
        raise StateError("a virtual clock is in use already")
    _stamp_with(clock)
    _current = clock
    try:
        yield clock
    finally:
        _current = None
        _core.run_wall_clock()


def _stamp_with(clock: VirtualClock) -> None:
    from penstock import _core

    _core.stop_wall_clock(clock.time_ns())


def is_virtual(thread: threading.Thread) -> bool:
    """Whether a virtual clock lets this thread run, or has given it up."""
    return isinstance(thread, _Body)


def in_order(ident: int) -> bool:
    """Whether the caller runs in this thread, or in one of a virtual clock's."""
    return threading.get_ident() == ident or isinstance(threading.current_thread(), _Body)


def refuse_if_virtual(what: str) -> None:
    """Raise ``RefusedError`` where a virtual clock is in use: its order could not be the same the next time."""
    if isinstance(_current, VirtualClock):
        where = _current.where()
        refused = RefusedError(f"{what} cannot be replayed the same way twice{f' ({where})' if where else ''}")
        # kept, so that the replay ends even if the program catches the error
        _current.refused = _current.refused or refused
        raise refused


def refuse_if_replayed(what: str) -> None:
    """The same, but only in a replay: a program may do this with a virtual clock of its own."""
    if isinstance(_current, VirtualClock) and _current.replayed:
        refuse_if_virtual(what)


def in_use() -> bool:
    """Whether a virtual clock is in use."""
    return isinstance(_current, VirtualClock)


def pass_time(timeout: float | None, what: str) -> None:
    """Under a virtual clock, replaces a wait for other threads: a thread of the clock lets them run for ``timeout``
    seconds; any other thread does not wait, because nothing can happen meanwhile. A wait without an end is refused.
    """
    if timeout is None:
        refuse_if_virtual(f"{what} without a time-out (nothing happens while it waits; timeout=0 takes what is there)")
    elif timeout > 0 and _VirtualThread.mine() is not None:
        sleep(timeout)


def note_failure(where: str, error: BaseException) -> None:
    """Let the virtual clock in use, if there is one, remember what failed, so that the replay can report it."""
    if isinstance(_current, VirtualClock) and len(_current.failures) < MAX_FAILURES:
        _current.failures.append((where, error))


def monotonic() -> float:
    """Seconds from some beginning; it never goes back."""
    return current().now()


def time_ns() -> int:
    """Nanoseconds since 1970."""
    return current().time_ns()


def time() -> float:
    """Seconds since 1970."""
    return current().time_ns() / 1e9


def sleep(seconds: float) -> None:
    """Wait, as ``time.sleep`` does; under a virtual clock only its own threads (``Source.run``) may call it."""
    if _current is None:
        machine.sleep(seconds)
    else:
        _current.event().wait(seconds)


def call_later(delay: float, function: Callable[[], object]) -> Timer:
    """Call ``function`` after ``delay`` seconds, in a thread of the clock's choice: it must not wait."""
    if not isinstance(delay, int | float) or math.isnan(delay):
        raise InvalidArgument(f"delay is a number of seconds, not {delay!r}")
    clock = current()
    return clock.call_at(clock.now() + delay, function)
