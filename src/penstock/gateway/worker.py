"""A worker: one module's queue, and the one thread that makes every call to the module after ``create``.

Rules

- Calls come in this order and never overlap: ``start``, ``receive`` for each message in publish order, ``stop``,
  ``destroy``. It holds by construction, because one thread makes them: others post orders, which the thread carries out
  between two messages.
- Nothing is received before ``start`` has returned or after ``stop`` was called.
- A caller waits for an order as long as it likes. A worker that does not come back is abandoned: it gets no further
  call, its thread is left to itself, and what it had in hand is counted as lost.
- ``async def`` steps run in an event loop of the worker's own, which also runs while it waits for messages.

``waiting``, ``idle``, ``handled`` and ``life`` may be read by any thread.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock._core import Counters
from penstock._core.gateway import GatewayMessage, Port
from penstock.bus import QueueSubscriber
from penstock.errors import ClosedError
from penstock.gateway.filters import Predicate
from penstock.gateway.throttle import Throttle
from penstock.tasks import readable

BATCH = 256
log = logging.getLogger("penstock.gateway")

#: Told of a failure on the worker's thread: (worker, step, error). It may put another module in place (``adopt``).
OnFailure = Callable[["Worker", str, BaseException], object]


class Life(enum.StrEnum):
    """Where a module is in its life."""

    MADE = "made"  # nothing is received yet
    RUNNING = "running"
    FAILED = "failed"  # it cannot receive: what comes is dropped and counted
    QUIET = "quiet"  # stopped, or its queue was closed: nothing is received any more
    ENDED = "ended"
    ABANDONED = "abandoned"  # it did not come back from a call


class Deadline:
    """A moment until which several waits may last together; ``seconds`` None: for ever."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + max(0.0, seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds until it, 0 after it; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Deadline:
        """An earlier one: when ``share`` of the time that is left has gone."""
        left_s = self.left_s
        return Deadline(None if left_s is None else left_s * share)

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() >= self._end


class Order:
    """Something for a worker's thread to do; ``error`` is what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Carry it out, on the worker's thread."""
        try:
            self.function()
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    def wait(self, deadline: Deadline) -> bool:
        """Whether it was carried out before the deadline."""
        return self._done.wait(deadline.left_s)


class _Abandoned(Exception):
    """The thread has come back from a call and finds that it was given up."""


class Worker:
    """One module at work."""

    def __init__(self, module: Any, name: str, port: Port, queue: QueueSubscriber, on_failure: OnFailure) -> None:
        self.name = name
        self.port = port
        self.queue = queue
        self.counters = Counters("gateway", "module", name)
        self.sinks: dict[Worker, Predicate | None] = {}
        self.sources: dict[Worker, None] = {}
        self.life = Life.MADE
        self.failed = 0
        self.taken = 0  # messages that left the queue and are done with, handled or lost
        self.lost = 0  # of those: never handled
        self.doing = ""  # the step that the module is in
        self.busy_since: float | None = None
        self.stuck = False
        self.removing = False
        self.destroyed = False  # the module was destroyed, and another one is to come
        self.ending = threading.Event()  # waits of the module's supervision end when it is set
        self.after: Callable[[], object] | None = None  # what the thread does last, for a module that removes itself
        self._on_failure = on_failure
        self._orders: deque[Order] = deque()
        self._woken = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen, self._seen_s = 0, 0.0  # how far it had come when somebody last looked
        self._throttle = Throttle(log)
        self.adopt(module)
        self.thread = threading.Thread(target=self._run, name=f"module {name}", daemon=True)

    def adopt(self, module: Any) -> None:
        """Hand everything from now on to ``module``."""
        self.module = module
        self.destroyed = False
        self._receive: Callable[[GatewayMessage], Any] = self._awaited(module.receive)
        many = getattr(module, "receive_many", None)
        self._receive_many: Callable[[Sequence[GatewayMessage]], Any] | None = many and self._awaited(many)

    def _awaited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.iscoroutinefunction(function):
            return function
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return functools.partial(self.call, function)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step of the module; what it gives to await is awaited in the worker's event loop."""
        result = function(*arguments)
        if inspect.isawaitable(result):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            result = self._loop.run_until_complete(_outcome(result))
        return result

    # ---- what others see

    @property
    def handled(self) -> int:
        """Messages that the module has handled (or failed at)."""
        return self.taken - self.lost

    @property
    def waiting(self) -> int:
        """Messages that wait, the batch in hand included."""
        taken = self.taken  # first: what is done after it is still counted as waiting
        # One look at the native counts: a batch leaves the queue and is delivered in the same moment.
        _, delivered, _, queued, _ = self.queue._counts()
        return max(0, queued + delivered - taken)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being done."""
        return self.waiting == 0 and self.busy_since is None

    @property
    def over(self) -> bool:
        """Whether no message will be handled any more."""
        return self.life in (Life.QUIET, Life.ENDED, Life.ABANDONED)

    @property
    def mine(self) -> bool:
        """Whether the caller is this worker's thread: then it cannot wait for itself."""
        return threading.current_thread() is self.thread

    def seconds_in_step(self, now_s: float) -> float:
        """How long the call under way has lasted, as far as those who looked can tell."""
        since = self.busy_since
        if since is None:
            return 0.0
        if self._seen != self.taken:
            self._seen, self._seen_s = self.taken, now_s
        return now_s - max(since, self._seen_s)

    # ---- orders, by any thread

    def start(self) -> None:
        """Begin the thread; it waits for orders."""
        self.thread.start()

    def post(self, function: Callable[[], object]) -> Order:
        """Have the thread carry out ``function`` between two messages."""
        order = Order(function)
        self._orders.append(order)
        self._woken.set()
        self.queue.interrupt()
        return order

    def begin(self) -> Order:
        """Call ``start``, then receive; ``error`` of the order is what ``start`` raised."""
        return self.post(self._begin)

    def run_step(self, step: str) -> Order:
        """Call an optional step of the module; a failure is told, counted and goes no further."""
        return self.post(lambda: self._step(step))

    def cut(self) -> Order:
        """Receive nothing more: what is queued, and what is left of the batch in hand, is dropped and counted."""
        self.ending.set()
        self.queue.close()
        return self.post(self._be_quiet)

    def stop(self) -> Order:
        """Call ``stop``; nothing is received after it."""
        self.ending.set()
        return self.post(self._stop)

    def end(self, *steps: str) -> Order:
        """Call ``steps``, then end the thread."""
        self.cut()
        return self.post(lambda: self._end(steps))

    def abandon(self) -> bool:
        """Give it up; whether there was something to give up. What it has in hand is counted as lost."""
        if self.life in (Life.ENDED, Life.ABANDONED) or not self.thread.is_alive():
            return False
        self.life = Life.ABANDONED
        self.ending.set()
        self.queue.close()
        self.lose(self.waiting, "closed")
        self.post(lambda: None)  # between two messages, it finds out
        return True

    def lose(self, count: int, reason: str = "error") -> None:
        """Count messages that left the queue and will not be handled."""
        if count > 0:
            self.taken += count
            self.lost += count
            self.counters.drop(reason, count)

    # ---- the thread

    def _run(self) -> None:
        self.port.worker = threading.get_ident()
        try:
            while self.life is not Life.ENDED:
                self._turn()
        except _Abandoned:
            log.warning("module %r, which had been given up, came back; it gets no further call", self.name)
        finally:
            if self._loop is not None:
                self._loop.close()

    def _turn(self) -> None:
        if self._orders:
            self._obey()
        elif self.after is not None and (self.queue.closed or self.queue.queued == 0):
            self.after()
            self.life = Life.ENDED
        elif self.life in (Life.RUNNING, Life.FAILED):
            try:
                self._handle(self._read())  # not kept here: a waiting worker holds no message
            except ClosedError:
                self.life = Life.QUIET
            except _Abandoned:
                raise
            except Exception as error:
                self.counters.add("errors")
                self.counters.state("its queue failed")
                self.life = Life.QUIET
                self._on_failure(self, "queue", error)
        else:
            self._woken.wait()
            self._woken.clear()

    def _obey(self) -> None:
        while self._orders:
            if self.life is Life.ABANDONED:
                raise _Abandoned
            self._orders.popleft().run()

    def _read(self) -> Sequence[Any]:
        if self._loop is None:
            return self.queue.read_many(BATCH, None)
        batch = self.queue.read_many(BATCH, 0)
        if not batch and not self._orders:  # the module's own tasks go on meanwhile
            self._loop.run_until_complete(readable(self.queue.fileno(), None))
        return batch

    def _handle(self, batch: Sequence[GatewayMessage]) -> None:
        """Each message to the module; a failure costs that message alone."""
        if not batch:
            return
        if self.life is Life.FAILED:
            self.lose(len(batch))
            self._throttle.error("module %r cannot receive; %d messages were dropped and counted", self.name, self.lost)
        else:
            self._serve(batch)
        self.counters.set("matched", self.taken)
        self.counters.set("delivered", self.taken - self.lost)
        self.counters.set("depth", self.queue.queued)

    def _serve(self, batch: Sequence[GatewayMessage]) -> None:
        self.doing, self.busy_since = "receive", time.monotonic()
        end = self.taken + len(batch)
        if self._receive_many is not None:
            try:
                self._receive_many(batch)
            except BaseException as error:
                self._fail("receive", error)
            self.taken += len(batch)
        else:
            orders, receive = self._orders, self._receive
            for message in batch:
                if orders:
                    self._obey()
                    receive = self._receive
                    if self.life is not Life.RUNNING:
                        break
                try:
                    receive(message)
                except BaseException as error:
                    self._fail("receive", error)
                    receive = self._receive
                self.taken += 1
        if self.life is Life.ABANDONED:
            raise _Abandoned
        self.lose(end - self.taken, "closed" if self.life is not Life.FAILED else "error")
        self.busy_since = None

    def _begin(self) -> None:
        if self.life is not Life.MADE:
            return
        self.doing, self.busy_since = "start", time.monotonic()
        try:
            if hasattr(self.module, "start"):
                self.call(self.module.start)
        except BaseException:
            self.life = Life.FAILED
            raise
        finally:
            self.busy_since = None
        if self.life is Life.MADE:
            self.life = Life.RUNNING

    def _step(self, step: str) -> None:
        function = getattr(self.module, step, None)
        if function is None or self.destroyed:
            return
        self.doing, self.busy_since = step, time.monotonic()
        try:
            self.call(function)
        except BaseException as error:
            self._fail(step, error)
        finally:
            self.busy_since = None

    def _stop(self) -> None:
        if self.life in (Life.RUNNING, Life.QUIET, Life.FAILED):
            self._step("stop")
        self._be_quiet()
        self.queue.close()

    def _be_quiet(self) -> None:
        if self.life is not Life.ABANDONED:
            self.life = Life.QUIET

    def _end(self, steps: Sequence[str]) -> None:
        for step in steps:
            self._step(step)
        if self.life is not Life.ABANDONED:
            self.life = Life.ENDED

    def _fail(self, step: str, error: BaseException) -> None:
        if self.life is Life.ABANDONED:
            raise _Abandoned from error
        self.failed += 1
        self.counters.add("errors")
        if isinstance(error, ClosedError) and self.queue.closed:
            return  # it was told to quit in the midst of a publish
        try:
            self._on_failure(self, step, error)
        except Exception:
            log.exception("module %r: what was to be done about its failure failed too", self.name)
        self.doing, self.busy_since = step, time.monotonic()


async def _outcome(awaitable: Any) -> Any:
    return await awaitable
