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
_Queue = queue.SimpleQueue["_Call | None"]


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


class _Call:
    """A call that waits for its turn. Whoever claims it first decides: the worker begins it, or its time is over."""

    __slots__ = ("_claimed", "function", "job")

    def __init__(self, job: Future[Any], function: Callable[[], Any]) -> None:
        self.job = job
        self.function = function
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        return self._claimed.acquire(blocking=False)

    def expire(self) -> None:
        """The time is over: an error where the call has not begun. One that has begun knows its time itself."""
        if self.claim() and not self.job.done():
            self.job.set_exception(TimeoutError("the calls before it still wait"))


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

    async def run(self, function: Callable[[], Result], timeout: float | None = None) -> Result:
        """What ``function()`` gives. Cancelled before it began, it is not called; afterwards it goes on by itself.

        ``TimeoutError`` when its turn has not come in so many seconds: it is not called then.
        """
        import asyncio
        from concurrent.futures import Future

        job: Future[Result] = Future()
        with self._lock:
            if self._stopped:
                raise ClosedError("this handle was closed")
            self._jobs.add(job)
            self._calls.put(call := _Call(job, function))
        job.add_done_callback(self._jobs.discard)
        if (trio := _running_trio()) is None:
            timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, call.expire)
            try:
                return await asyncio.wrap_future(job)
            finally:
                if timer is not None:
                    timer.cancel()
        try:
            if timeout is not None:
                with trio.move_on_after(timeout):
                    await trio.to_thread.run_sync(job.exception, abandon_on_cancel=True)
                call.expire()
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
        if entry.claim() and entry.job.set_running_or_notify_cancel():
            try:
                entry.job.set_result(entry.function())
            except BaseException as error:  # an exit too: it belongs to whoever awaits it
                entry.job.set_exception(error)
        del entry  # before the next one is waited for: it may hold a handle
