"""Executor: the threads that publishers and subscribers share for what is done once a connection.

Job: accepting, connecting, handshakes, timers, reconnects, and calling a subscriber's function. What is done once a
message is native: a publisher sends in its caller's thread, a reader reads in its own.

Rules:

- One epoll instance, at most ``threads`` threads, started when there is work and none is free. A descriptor is watched
  one-shot: its callback runs in one thread at a time, and rearms it by ``watch``.
- Callbacks must not wait for long: those of users may, and then take one of the threads.
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

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HANG_UP = select.EPOLLRDHUP


class Timer:
    """One call to come; ``cancel`` calls it off."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


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
        self._numbers = itertools.count()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._listening: dict[int, float] = {}  # by thread: when it looks at the timers again
        self._closed = False
        self._pid = os.getpid()
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # closed at exit
        _executors.add(self)

    # -- what others ask for

    def watch(self, descriptor: int, events: int, callback: Callback) -> None:
        """Call ``callback`` once when ``descriptor`` has one of ``events``; call again to go on watching."""
        with self._lock:
            self.check_open()
            self._callbacks[descriptor] = callback
            try:
                self._epoll.modify(descriptor, events | select.EPOLLONESHOT)
            except FileNotFoundError:
                self._epoll.register(descriptor, events | select.EPOLLONESHOT)
            self._need_worker()

    def unwatch(self, descriptor: int) -> None:
        """Forget ``descriptor``; call it before closing that. Its callback may be running."""
        with self._lock:
            if self._callbacks.pop(descriptor, None) is not None and not self._closed:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(descriptor)

    def call_soon(self, callback: Callback) -> None:
        """Call ``callback`` in one of the threads."""
        with self._lock:
            self.check_open()
            self._soon.append(callback)
            self._need_worker()
            self._wake()

    def call_later(self, delay: float, callback: Callback) -> Timer:
        """Call ``callback`` in one of the threads, ``delay`` seconds from now."""
        timer = Timer(time.monotonic() + delay, callback)
        entry = (timer.due, next(self._numbers), timer)
        with self._lock:
            self.check_open()
            heapq.heappush(self._timers, entry)
            self._need_worker()
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
            if worker is not threading.current_thread():
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
        """``ClosedError`` where it can do nothing any more."""
        if self._closed or self.forked:
            raise ClosedError("this executor is closed (or was made before a fork); use another one")

    def _need_worker(self) -> None:
        """One thread more, where all are busy. The lock is held."""
        if self._idle or len(self._workers) >= self.threads:
            return
        worker = threading.Thread(target=self._run, name="penstock-tcp-worker", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # no more threads: those there are do it, later
            if not self._workers:
                raise
            return
        self._workers.append(worker)
        self._idle += 1

    def _wake(self) -> None:
        """Let a thread that listens look again. The lock is held, so that the descriptor is not another's by now."""
        with contextlib.suppress(OSError):  # full: awake already
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._closed:
            callback = self._next()
            if callback is not None:
                self._call(callback)

    def _call(self, callback: Callback) -> None:
        with self._lock:
            self._idle -= 1
            if self._soon or self._timers or self._callbacks:
                self._need_worker()  # somebody stays to listen while this one works
            if self._idle and (self._soon or self._first_due() < min(self._listening.values(), default=0.0)):
                self._wake()  # who listens does not know of it: this one read what was to wake the other
        try:
            callback()
        except BaseException:  # an exit too: the thread is not its own
            logger.exception("a callback in the executor failed")
        with self._lock:
            self._idle += 1

    def _first_due(self) -> float:
        """When the next timer is due. The lock is held."""
        return self._timers[0][0] if self._timers else math.inf

    def _next(self) -> Callback | None:
        """The next thing to do, or None after a wait."""
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
            self._listening[threading.get_ident()] = self._first_due()
        try:
            events = self._epoll.poll(timeout, 1)
        finally:
            with self._lock:
                del self._listening[threading.get_ident()]
        for descriptor, _ in events:
            if descriptor == self._wake_read:
                if self._closed:
                    return None
                with contextlib.suppress(OSError):
                    os.read(self._wake_read, 4096)
                continue
            with self._lock:
                return self._callbacks.get(descriptor)
        return None


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


class _Default:
    """The process's own executor; a forked child gets another one."""

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


_default = _Default()


def default_executor() -> Executor:
    """The process's own, made when first asked for."""
    return _default.get()


def _close_all() -> None:
    """At exit: publishers flush for a moment, then the threads end while the interpreter still stands."""
    for executor in list(_executors):
        if executor.forked:
            continue
        for handle in list(executor.handles):
            handle.end_at_exit()
        executor.close()


atexit.register(_close_all)
