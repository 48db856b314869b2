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
    """The trio module if its loop runs in this thread, else None; never imports trio itself."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait in the running event loop until ``descriptor`` is readable; False after ``timeout`` seconds.

    One task at a time may wait for one descriptor: a handle has one reader.
    """
    import asyncio  # here, so that importing penstock stays light

    if (trio := _running_trio()) is not None:
        with trio.move_on_after(float("inf") if timeout is None else timeout) as scope:
            await trio.lowlevel.wait_readable(descriptor)
        return not scope.cancelled_caught
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(descriptor, _set_if_pending, future)
    timer = None if timeout is None else loop.call_later(timeout, _set_if_pending, future, False)
    try:
        return await future
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def _set_if_pending(future: asyncio.Future[bool], value: bool = True) -> None:
    if not future.done():  # both the descriptor and the timer may fire in one turn of the loop
        future.set_result(value)


class _Call:
    """A queued call. The first to claim it decides its fate: the worker runs it, or the timer expires it."""

    __slots__ = ("_claimed", "function", "job")

    def __init__(self, job: Future[Any], function: Callable[[], Any]) -> None:
        self.job = job
        self.function = function
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        return self._claimed.acquire(blocking=False)

    def expire(self) -> None:
        """Fail the call with ``TimeoutError`` unless it has begun; one that has begun has a time-out of its own."""
        if self.claim() and not self.job.done():
            self.job.set_exception(TimeoutError("earlier calls of this handle have not ended yet"))


class Worker:
    """One thread that runs calls one after the other, in the order in which they were submitted.

    The thread is a daemon, so that a call that never returns does not keep the program alive. It ends after ``stop``,
    or when the worker is garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Queue = queue.SimpleQueue()
        self._jobs: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call is running or queued."""
        return bool(self._jobs)

    async def run(self, function: Callable[[], Result], timeout: float | None = None) -> Result:
        """Return ``function()``. If this is cancelled before the call began, it is not made; a begun call runs on.

        ``TimeoutError`` if the call has not begun within ``timeout`` seconds; then it is not made.
        """
        import asyncio
        from concurrent.futures import Future

        job: Future[Result] = Future()
        with self._lock:  # shared with `stop`: a call queued after the end mark would never run
            if self._stopped:
                raise ClosedError("this handle was closed")
            self._jobs.add(job)
            self._calls.put(call := _Call(job, function))
        job.add_done_callback(self._jobs.discard)
        if (trio := _running_trio()) is None:
            timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, call.expire)
            try:
                return await asyncio.wrap_future(job)
            except TimeoutError:
                # asyncio raises a new TimeoutError, without the attributes of the call's own (how many were published)
                raise (job.done() and not job.cancelled() and job.exception()) or TimeoutError from None
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
        """Accept no more calls; queued ones still run."""
        with self._lock:
            self._stopped = True
            self._calls.put(None)

    def __del__(self) -> None:
        self._calls.put(None)


def _run_calls(calls: _Queue) -> None:
    while (entry := calls.get()) is not None:
        if entry.claim() and entry.job.set_running_or_notify_cancel():
            try:
                entry.job.set_result(entry.function())
            except BaseException as error:  # SystemExit too: it belongs to the task that awaits the call
                entry.job.set_exception(error)
        del entry  # before waiting for the next one: the call may keep a handle alive
