"""Executor: the threads that publishers and subscribers share for work that is done once per connection.

Job: accepting, connecting, handshakes, timers, reconnects, and calling a subscriber's function. Work that is done once
per message is native: a publisher sends in its caller's thread, a reader receives in its own.

Rules:

- One epoll instance and at most ``threads`` threads. A thread is started when there is work and all others are busy.
  Descriptors are watched one-shot: a callback runs in one thread at a time and calls ``watch`` to go on.
- Callbacks must not block for long. A user's callback may; it then occupies one of the threads.
- Every method may be called by any thread. In a forked child the executor is dead; a new default one is made.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock._core import tcp as native
from penstock.errors import ClosedError, InvalidArgument
from penstock.tcp.log import logger

Callback = Callable[[], Any]


class CollectedError(ClosedError):
    """The handle that a callback is for was forgotten and collected: there is nothing to do."""

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HANG_UP = select.EPOLLRDHUP


class Timer:
    """A callback that is due later; ``cancel`` prevents it."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None  # the entry stays in the heap and is skipped when it comes to the top


def weakly(method: Callable[[], Any]) -> Callback:
    """The method as a callback that does not hold its object: a handle that is forgotten must be collected."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


class Executor:
    """Threads shared by publishers and subscribers (``executor=``); without one a default is shared per process."""

    def __init__(self, threads: int = 6) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
            raise InvalidArgument(f"threads={threads!r} must be a number from 1 to 1024")
        self.threads = threads
        self.loop = native.Loop()
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_read, READ)
        self._lock = threading.RLock()  # a finaliser may close a handle inside a call of its own thread
        self._callbacks: dict[int, Callback] = {}
        self._soon: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_numbers = itertools.count()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._polling_until: dict[int, float] = {}  # by thread: when its wait in epoll ends for the next timer
        self._closed = False
        self._pid = os.getpid()
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # closed at exit
        _executors.add(self)

    # -- scheduling work

    def watch(self, descriptor: int, events: int, callback: Callback) -> None:
        """Call ``callback`` once, when ``descriptor`` has one of ``events``. Call ``watch`` again to go on."""
        with self._lock:
            self.check_open()
            self._callbacks[descriptor] = callback
            try:
                self._epoll.modify(descriptor, events | select.EPOLLONESHOT)
            except FileNotFoundError:
                self._epoll.register(descriptor, events | select.EPOLLONESHOT)
            self._start_worker_if_all_busy()

    def unwatch(self, descriptor: int) -> None:
        """Stop watching ``descriptor``. Call this before you close it; its callback may still be running."""
        with self._lock:
            if self._callbacks.pop(descriptor, None) is not None and not self._closed:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(descriptor)

    def call_soon(self, callback: Callback) -> None:
        """Call ``callback`` in one of the threads."""
        with self._lock:
            self.check_open()
            self._soon.append(callback)
            self._start_worker_if_all_busy()
            self._wake()

    def call_later(self, delay: float, callback: Callback) -> Timer:
        """Call ``callback`` in one of the threads, ``delay`` seconds from now."""
        timer = Timer(time.monotonic() + delay, callback)
        entry = (timer.due, next(self._timer_numbers), timer)
        with self._lock:
            self.check_open()
            heapq.heappush(self._timers, entry)
            self._start_worker_if_all_busy()
            self._wake()
        return timer

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process whose threads these were."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """End the threads. Handles that still use it stop working; close them first."""
        if self.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers)
            self._wake()
        for worker in workers:
            if worker is not threading.current_thread():  # a callback may close the executor that runs it
                worker.join()
        self.loop.stop()
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the threads

    def check_open(self) -> None:
        """Raise ``ClosedError`` if this executor is closed or belongs to the parent process."""
        if self._closed or self.forked:
            raise ClosedError("this executor is closed (or was made before a fork); use another one")

    def _start_worker_if_all_busy(self) -> None:
        """Start one more thread if all are busy and ``threads`` allows it. The caller holds the lock."""
        if self._idle or len(self._workers) >= self.threads:
            return
        worker = threading.Thread(target=self._run, name="penstock-tcp-worker", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # the system allows no more threads: those that exist do the work later
            if not self._workers:
                raise
            return
        self._workers.append(worker)
        self._idle += 1

    def _wake(self) -> None:
        """Wake one thread out of epoll. The caller holds the lock: otherwise ``close`` could reuse the descriptor."""
        with contextlib.suppress(OSError):  # the pipe is full: a wake-up is pending anyway
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._closed:
            callback = self._next_callback()
            if callback is not None:
                self._run_callback(callback)
                del callback  # while this thread waits, it holds nobody's handle

    def _run_callback(self, callback: Callback) -> None:
        with self._lock:
            self._idle -= 1
            if self._soon or self._timers or self._callbacks:
                self._start_worker_if_all_busy()  # one thread keeps polling while this one works
            if self._idle and (self._soon or self._first_due() < min(self._polling_until.values(), default=0.0)):
                # This thread consumed the wake-up byte that was meant for the new work; pass it on.
                self._wake()
        try:
            callback()
        except CollectedError:
            pass
        except BaseException:  # SystemExit too: a user's function must not end a shared thread
            logger.exception("a callback in the executor failed")
        with self._lock:
            self._idle += 1

    def _first_due(self) -> float:
        """When the next timer is due. The caller holds the lock."""
        return self._timers[0][0] if self._timers else math.inf

    def _next_callback(self) -> Callback | None:
        """Wait for the next callback; None when there is none yet and the caller should ask again."""
        with self._lock:
            if self._soon:
                return self._soon.popleft()
            timeout = -1.0
            while self._timers:
                timer = self._timers[0][2]
                if timer.callback is None:
                    heapq.heappop(self._timers)
                    continue
                timeout = max(0.0, timer.due - time.monotonic())
                if timeout == 0.0:
                    heapq.heappop(self._timers)
                    return timer.callback
                break
            self._polling_until[threading.get_ident()] = self._first_due()
        try:
            events = self._epoll.poll(timeout, 1)  # one event a thread, so that the others can take the rest
        finally:
            with self._lock:
                del self._polling_until[threading.get_ident()]
        for descriptor, _ in events:
            if descriptor == self._wake_read:
                with self._lock, contextlib.suppress(OSError):  # `close` writes its byte with this lock held
                    if self._closed:
                        return None  # leave the byte in the pipe: the other threads must wake too
                    os.read(self._wake_read, 4096)
                continue
            with self._lock:
                return self._callbacks.get(descriptor)
        return None


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


class _DefaultExecutor:
    """Holds the executor that the whole process shares; a forked child gets another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        os.register_at_fork(after_in_child=self._forked)

    def get(self) -> Executor:
        with self._lock:
            if self._executor is None or self._executor.closed:
                self._executor = Executor()
            return self._executor

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self._executor = None


_default = _DefaultExecutor()


def default_executor() -> Executor:
    """The executor that the whole process shares, made at the first call."""
    return _default.get()


def _close_all() -> None:
    """At exit: let publishers flush for a moment, then end the threads before the interpreter is torn down."""
    for executor in list(_executors):
        if executor.forked:
            continue
        for handle in list(executor.handles):
            handle.end_at_exit()
        executor.close()


atexit.register(_close_all)
