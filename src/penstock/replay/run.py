"""One replay: the clock, the seed, the inputs in order, the end."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.clock import VirtualClock, using
from penstock.replay.script import Input
from penstock.replay.target import Target, Told

__all__ = ["Report", "replay"]


@dataclass(frozen=True, slots=True)
class Report:
    """How much went in and how long that took by the recording and by the machine."""

    inputs: int
    recorded_s: float
    seconds: float


def replay(
    target: Target,
    inputs: Iterable[Input],
    times_ns: tuple[int, int],
    *,
    on_published: Told = lambda *_: None,
    on_left: Told = lambda *_: None,
    seed: int = 0,
    paced: bool = False,
    enough: Callable[[], bool] = lambda: False,
    on_end: Callable[[], object] | None = lambda: None,
) -> Report:
    """Put ``inputs`` into a new run of ``target``, from the first to the last of ``times_ns``.

    ``paced``: as slowly as it was recorded, else as fast as it goes; the output is the same. ``enough`` is asked after
    each input and ends it early. ``on_end`` is called before the modules are stopped; None: they are not.
    """
    began, count, first_ns = time.monotonic(), 0, times_ns[0]
    with using(VirtualClock(first_ns)) as clock, target.at_home(), _seeded(seed):
        actor = target.actor(clock, on_published, on_left)
        try:
            actor.start()
            for one in inputs:
                if paced:
                    time.sleep(max(0.0, began + (one.message.timestamp_ns - first_ns) / 1e9 - time.monotonic()))
                count += 1
                actor.put(one.source, one.message)
                if enough():
                    break
            else:
                actor.advance(times_ns[1])
                if on_end is not None:
                    on_end()
                    actor.stop()
        finally:
            actor.close()
        return Report(count, (clock.time_ns() - first_ns) / 1e9, time.monotonic() - began)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, ``random`` gives the numbers of this seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
