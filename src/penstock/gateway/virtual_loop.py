"""An asyncio loop in the time of a virtual clock: ``asyncio.sleep`` and time-outs take recorded time and no real one.

Rules

- ``run_until_idle`` is for who moves the clock: it runs what is ready and says when the loop is to run next.
- ``SourceLoop`` is for a thread of the clock's, which gives its turn back while the loop waits.
- Threads and sockets of the loop are refused: nobody could say in which order they do what.
- ``hurry`` lets time pass for the loop alone, at the end, when nobody moves the clock any more.

A loop belongs to one thread.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from penstock.clock import VirtualClock, refuse_if_virtual
from penstock.errors import StateError

__all__ = ["SourceLoop", "StageLoop"]

MAX_HURRIES = 100_000  # waits that are passed over for one step of the end
NEVER = "it waits for what nobody brings at the end"


class _VirtualLoop(asyncio.SelectorEventLoop):
    """What both loops share: whose time it is, and what is refused."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual = clock
        self._ahead_s = 0.0  # of the clock
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Seconds, as the clock has them."""
        return self._virtual.now() + self._ahead_s

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]
        """Refused."""
        refuse_if_virtual("run_in_executor and asyncio.to_thread (in threads of their own)")

    def wait(self, timeout: float | None) -> None:
        """Everything in the loop waits; None: for nothing that time brings."""
        raise NotImplementedError


class _Selector(selectors.DefaultSelector):
    """Where an event loop waits."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._waiting_loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._waiting_loop.wait(timeout)
        return super().select(0)


class StageLoop(_VirtualLoop):
    """The loop of all modules on a stage."""

    def __init__(self, clock: VirtualClock) -> None:
        self.woken = False  # something is ready to run
        self._due_s: float | None = None
        self._hurries = 0  # waits that are passed over yet
        super().__init__(clock)

    def call_soon(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """Note that there is something to do."""
        self.woken = True
        return super().call_soon(*arguments, **options)

    def run_until_idle(self) -> float | None:
        """Run until everything waits; gives when the first of that is due, by the clock. None: nothing is."""
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
        """Run a coroutine to its end, at once; ``StateError`` where it waits for what never comes."""
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
        """Cancel what still waits, and close."""
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
        if timeout is None:  # it is joined, and what it waits for does not come
            raise StateError(NEVER)
        self._ahead_s += max(0.0, until_s - self._virtual.now())  # it is joined: nobody moves the clock any more
