"""One replay: the clock, the seed, the inputs in order, the end."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.clock import VirtualClock, is_virtual, using
from penstock.gateway.stage import Failure
from penstock.replay.interrupts import remembered
from penstock.replay.outside import controlled
from penstock.replay.place import kept
from penstock.replay.script import Input
from penstock.replay.target import Target, Told
from penstock.replay.watchdog import watched

__all__ = ["Report", "replay", "seeded"]


@dataclass(frozen=True, slots=True)
class Report:
    """How many inputs there were, how long they took in recorded and in real time, what failed, how many messages (by
    module) were not handled at the end, and notes on anything unusual.
    """

    inputs: int
    recorded_s: float
    seconds: float
    failures: tuple[Failure, ...] = ()
    waiting: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether there was no unhandled failure."""
        return all(failure.handled for failure in self.failures)


def replay(
    target: Target,
    inputs: Iterable[Input],
    times_ns: tuple[int, int],
    *,
    on_published: Told = lambda *_: None,
    on_left: Told = lambda *_: None,
    seed: int = 0,
    paced: bool = False,
    on_input: Callable[[], object] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
    on_end: Callable[[], object] | None = lambda: None,
) -> Report:
    """Feed ``inputs`` to a new run of ``target``, from the first to the last of ``times_ns``. ``paced``: at the
    recorded speed, otherwise as fast as possible; the output is the same. ``on_input`` is called before each input,
    after what is due before it. ``enough`` is called before and after each input, and can end the replay early.
    ``on_end`` is called before the modules are stopped; None: they are not stopped. ``RefusedError`` if something was
    used that is not reproducible, even if a module caught that error; an interrupt ends it in the same way.
    """
    began, count, first_ns, process = time.monotonic(), 0, times_ns[0], os.getpid()
    handled: Input | None = None
    place = kept()
    waiting: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    with (
        remembered() as check_interrupts,
        using(VirtualClock(first_ns)) as clock,
        watched(lambda: (count, clock.time_ns()), lambda: clock.turn),
        controlled(target.used) as outside,
        target.at_home(),
        seeded(seed),
    ):
        # From here on only the replay may move the clock: a module that tries gets a RefusedError.
        clock.replayed = True

        def check() -> None:
            _check_process(process)
            check_interrupts()

        clock.check = check
        actor = target.actor(clock, on_published, on_left)
        clock.where = lambda: _where(actor.running, count, handled)
        try:
            actor.start()
            _check(clock)
            for one in inputs:
                if paced:
                    time.sleep(max(0.0, began + (one.message.timestamp_ns - first_ns) / 1e9 - time.monotonic()))
                actor.advance(one.message.timestamp_ns)
                _check(clock)
                if enough():
                    break
                count += 1
                on_input()
                handled = one
                if place is not None:
                    place.set(_where("", count, one))
                actor.put(one.source, one.message, one.ordinal, one.schema)
                handled = None
                _check(clock)
                if enough():
                    break
            else:
                # No input ended it early: let timers run up to the last recorded moment.
                actor.advance(times_ns[1])
                if on_end is not None:
                    on_end()
                    actor.stop()
                    _check(clock)
                    waiting, notes = actor.waiting, tuple(actor.notes)
        except KeyboardInterrupt as end:  # a module may raise it too: without a word nobody would look there
            end.add_note(f"interrupted, by Ctrl-C or by a KeyboardInterrupt of a module ({clock.where()})")
            raise
        finally:
            _check_process(process)
            actor.close()
        _check(clock)
        seconds = time.monotonic() - began
        notes = (*notes, *outside.notes)
        return Report(count, (clock.time_ns() - first_ns) / 1e9, seconds, tuple(actor.failures), waiting, notes)


def _where(running: str, count: int, handled: Input | None) -> str:
    """The module that runs, and the input that it handles: ``handled``, or what comes after ``count`` of them."""
    if is_virtual(thread := threading.current_thread()):  # a source's, which is named after it
        running = thread.name
    module = f"{running}, " if running else ""
    if handled is None:
        return f"{module}after input {count}" if count else f"{module}before the first input"
    return f"{module}at input {count}: topic {handled.message.channel}, ordinal {handled.ordinal}"


def _check(clock: VirtualClock) -> None:
    clock.check()
    if clock.refused is not None:
        raise clock.refused


def _check_process(replaying: int) -> None:
    """End a process that a module has forked when it leaves the module: it must not go on with the replay."""
    if os.getpid() != replaying:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1 if sys.exc_info()[1] is not None else 0)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, ``random`` is seeded with this seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
