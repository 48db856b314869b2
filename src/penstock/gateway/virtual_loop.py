"""An asyncio loop that runs on a virtual clock: ``asyncio.sleep`` and time-outs take recorded time, not real time.

Rules

- The thread that moves the clock calls ``run_until_idle``, which runs what is ready and returns when the loop must run
  next.
- ``SourceLoop`` is for a thread of the clock, which gives its turn back while the loop waits.
- Executors and sockets are refused: their order of events is not reproducible.
- ``hurry`` lets time pass for the loop only, at the end, when nothing moves the clock any more.

A loop belongs to one thread.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import Any

from penstock.clock import VirtualClock
from penstock.errors import StateError

__all__ = ["SourceLoop", "StageLoop"]

LEAST_S = 1e-9
MAX_HURRIES = 100_000  # most waits that are skipped for one step at the end
NEVER = "it waits for what nobody brings at the end"


class _VirtualLoop(asyncio.SelectorEventLoop):
    """What both loops share: their clock."""

    replayed = True  #: others go on while a task of it waits

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual = clock
        self._ahead_s = 0.0  # seconds that the loop is ahead of the clock
        self._clock_resolution: float
        super().__init__(_Selector(self))

    def time(self) -> float:
        """The time of the clock in seconds."""
        return self._virtual.now() + self._ahead_s

    def wait(self, timeout: float | None) -> None:
        """Called when everything in the loop waits; ``timeout`` None: for no timer."""
        raise NotImplementedError


class _Selector(selectors.DefaultSelector):
    """The selector in which an event loop waits."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._waiting_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._waiting_loop
        if timeout is None or timeout > 0:
            loop.wait(timeout)
        # asyncio takes a timer for due if its time is less than this away. Far from the clock's beginning the next
        # number is further away, and asyncio would never take it.
        loop._clock_resolution = max(LEAST_S, 2 * math.ulp(loop.time()))
        return super().select(0)


class StageLoop(_VirtualLoop):
    """The loop of all modules on a stage."""

    def __init__(self, clock: VirtualClock) -> None:
        self.woken = False  # something is ready to run
        self._due_s: float | None = None
        self._hurries = 0  # waits that may still be skipped
        super().__init__(clock)

    def call_soon(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """Note that something is ready to run."""
        self.woken = True
        return super().call_soon(*arguments, **options)

    def run_until_idle(self) -> float | None:
        """Run until everything waits; returns the clock's time at which the first timer is due, None if there is
        none.
        """
        self._due_s = None
        self.run_forever()
        self.woken = False
        return self._due_s

    def wait(self, timeout: float | None) -> None:
        if self._hurries and timeout is not None:
            self._ahead_s += timeout
            self._hurries -= 1
            return
        self._due_s = None if timeout is None else self._virtual.now() + timeout
        self.stop()

    def hurry(self, coroutine: Any) -> None:
        """Run a coroutine to its end at once; ``StateError`` if it waits for something that never happens."""
        task = self.create_task(coroutine)
        task.add_done_callback(lambda _: self.stop())
        self._hurries = MAX_HURRIES
        try:
            self.run_until_idle()
        finally:
            self._hurries = 0
        if not task.done():
            task.cancel()
            raise StateError(NEVER)
        task.result()

    def end(self) -> None:
        """Cancel the tasks that still wait, and close."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_until_idle()
        self.close()


class SourceLoop(_VirtualLoop):
    """The loop of a source's thread."""

    def __init__(self, clock: VirtualClock) -> None:
        self._never = clock.event()
        super().__init__(clock)

    def wait(self, timeout: float | None) -> None:
        until_s = self._virtual.now() + (timeout or 0.0)
        self._never.wait(timeout)
        if timeout is None:  # the thread is being joined, and what it waits for will not happen
            raise StateError(NEVER)
        # the thread is being joined: nothing moves the clock any more
        self._ahead_s += max(0.0, until_s - self._virtual.now())
