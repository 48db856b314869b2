"""One replay: the clock, the seed, the inputs in order, the end."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock import clock as clocks
from penstock.clock import VirtualClock, using
from penstock.gateway.stage import Failure
from penstock.replay.script import Input
from penstock.replay.target import Target, Told
from penstock.replay.watchdog import quiet_refusals, watched

__all__ = ["Report", "replay", "seeded"]

#: Python's audit events for access to the outside of the process.
OUTSIDE = frozenset({
    "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn",
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
})  # fmt: skip
# a process started by this causes no event, but the import of this module does
SPAWNED = "multiprocessing.popen_spawn_posix"


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
    used that is not reproducible, even if a module caught that error.
    """
    began, count, first_ns = time.monotonic(), 0, times_ns[0]
    waiting: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    with (
        using(VirtualClock(first_ns)) as clock,
        watched(lambda: (count, clock.time_ns()), lambda: clock.turn),
        quiet_refusals(clock),
        _outside_notes() as outside,
        target.at_home(),
        seeded(seed),
    ):
        # From here on only the replay may move the clock: a module that tries gets a RefusedError.
        clock.replayed = True
        threads = set(threading.enumerate())
        actor = target.actor(clock, on_published, on_left)
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
                actor.put(one.source, one.message, one.ordinal, one.schema)
                _check(clock)
                if enough():
                    break
            else:
                # No input ended it early: let timers run up to the last recorded moment.
                actor.advance(times_ns[1])
                if on_end is not None:
                    on_end()
                    actor.stop()
                    waiting, notes = actor.waiting, tuple(actor.notes)
        finally:
            actor.close()
        _check(clock)
        seconds = time.monotonic() - began
        notes = (*notes, *_threads_note(threads), *outside)
        return Report(count, (clock.time_ns() - first_ns) / 1e9, seconds, tuple(actor.failures), waiting, notes)


def _threads_note(before: set[threading.Thread]) -> list[str]:
    """A note about threads that were started meanwhile and still run: their order is not under control."""
    names = sorted(one.name for one in set(threading.enumerate()) - before if not clocks.is_virtual(one))
    told = f"threads of one's own still run: {', '.join(names[:5])}; the output may differ the next time"
    return [told] if names else []


_outside_now: list[str] | None = None  # the notes of the replay that runs
_hooked: list[bool] = []


def _note_audit_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import" and _outside_now is not None and arguments[0] == SPAWNED:
        event = "os.posix_spawn"
    if _outside_now is not None and event in OUTSIDE:
        told = f"{event} was used: a replay does not control what comes of that; the output may differ the next time"
        if told not in _outside_now:
            _outside_now.append(told)


@contextlib.contextmanager
def _outside_notes() -> Iterator[list[str]]:
    """Collect notes about processes that are started and sockets that are used inside."""
    global _outside_now  # noqa: PLW0603
    if not _hooked:  # an audit hook cannot be removed
        _hooked.append(True)
        sys.addaudithook(_note_audit_event)
    found: list[str] = []
    _outside_now = found
    try:
        yield found
    finally:
        _outside_now = None


def _check(clock: VirtualClock) -> None:
    if clock.refused is not None:
        raise clock.refused


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, ``random`` is seeded with this seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
