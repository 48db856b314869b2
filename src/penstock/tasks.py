"""Waiting inside an event loop: for a descriptor, or for a call that may block. asyncio (uvloop too) and trio.

Any loop may use it; a ``Worker`` belongs to one handle.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ClosedError

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

Result = TypeVar("Result")
_Queue = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


def _running_trio() -> Any:
    """The module, where its loop runs this thread; penstock never imports it by itself."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait in the running event loop until ``descriptor`` is readable; False when the time is over.

    One task at a time may wait for one descriptor: a handle has one reader.
    """
    import asyncio  # here, so that importing penstock stays light

    if (trio := _running_trio()) is not None:
        with trio.move_on_after(float("inf") if timeout is None else timeout) as scope:
            await trio.lowlevel.wait_readable(descriptor)
        return not scope.cancelled_caught
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(descriptor, _settle, future)
    timer = None if timeout is None else loop.call_later(timeout, _settle, future, False)
    try:
        return await future
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def _settle(future: asyncio.Future[bool], value: bool = True) -> None:
    if not future.done():
        future.set_result(value)


class Worker:
    """One thread that runs calls one after the other, in the order in which they were given.

    The thread is a daemon: a call that waits for ever does not keep the program from ending. It ends with ``stop``, or
    when nobody holds the worker any more.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Queue = queue.SimpleQueue()
        self._jobs: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call is under way or waits."""
        return bool(self._jobs)

    async def run(self, function: Callable[[], Result]) -> Result:
        """What ``function()`` gives. Cancelled before it began, it is not called; afterwards it goes on by itself."""
        import asyncio
        from concurrent.futures import Future

        job: Future[Result] = Future()
        with self._lock:
            if self._stopped:
                raise ClosedError("this handle was closed")
            self._jobs.add(job)
            self._calls.put((job, function))
        job.add_done_callback(self._jobs.discard)
        if (trio := _running_trio()) is None:
            return await asyncio.wrap_future(job)
        try:
            found: Result = await trio.to_thread.run_sync(job.result, abandon_on_cancel=True)
        except trio.Cancelled:
            job.cancel()
            raise
        return found

    def stop(self) -> None:
        """No more calls; those given before still run."""
        with self._lock:
            self._stopped = True
            self._calls.put(None)

    def __del__(self) -> None:
        self._calls.put(None)


def _work(calls: _Queue) -> None:
    while (entry := calls.get()) is not None:
        job, function = entry
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(function())
            except BaseException as error:  # an exit too: it belongs to whoever awaits it
                job.set_exception(error)
        del entry, job, function  # before the next one is waited for: they may hold a handle
