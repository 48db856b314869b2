"""A worker: one module's queue, and the one thread that makes every call to the module after ``create``.

Rules

- Calls come in this order and never overlap: ``start``, ``receive`` for each message in publish order, ``stop``,
  ``destroy``. It holds by construction, because one thread makes them: others post orders, which the thread carries out
  between two messages.
- Nothing is received before ``start`` has returned or after ``stop`` was called.
- A caller waits for an order as long as it likes. A worker whose module does not return is abandoned: it makes no
  further call, its thread is left alone, and the message being handled counts as lost.
- ``async def`` steps run in an event loop of the worker's own, which also runs while it waits for messages.

``waiting``, ``idle``, ``handled`` and ``life`` may be read by any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import heapq
import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock._core import Counters
from penstock._core.gateway import GatewayMessage, Port
from penstock.bus import QueueSubscriber
from penstock.errors import ClosedError
from penstock.gateway.bounds import Bound
from penstock.gateway.errors import reason_of
from penstock.gateway.filters import Predicate
from penstock.gateway.links import DEFAULT, Delivery, LinkOptions
from penstock.gateway.losses import note_loss, number_aside
from penstock.tasks import readable
from penstock.throttle import Throttle

BATCH = 256
MAX_ASIDE = 1024
ERROR = "error"  # the output for messages at which a module fails for good
DROPPED = "dropped"  # the output for messages that a module drops, which count as filtered by it
log = logging.getLogger("penstock.gateway")

#: Called on the worker's thread after a failure: (worker, step, error). It may replace the module (``adopt``).
OnFailure = Callable[["Worker", str, BaseException], object]


class Life(enum.StrEnum):
    """The states of a module's life cycle."""

    MADE = "made"  # nothing is received yet
    RUNNING = "running"
    FAILED = "failed"  # it cannot receive: its messages are dropped and counted
    QUIET = "quiet"  # stopped, or its queue was closed: nothing is received any more
    ENDED = "ended"
    ABANDONED = "abandoned"  # it did not return from a call


class Deadline:
    """A common deadline for several waits; ``seconds`` None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        for_ever = seconds is None or seconds >= threading.TIMEOUT_MAX
        self._end = None if for_ever else time.monotonic() + max(0.0, seconds or 0.0)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, 0 after it; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def until(self, seconds: float | None) -> Deadline:
        """The earlier one of this and ``seconds`` from now."""
        left_s = self.left_s
        return self if seconds is None or (left_s is not None and left_s <= seconds) else Deadline(seconds)

    def part(self, share: float) -> Deadline:
        """An earlier deadline: after ``share`` of the time that is left."""
        left_s = self.left_s
        return Deadline(None if left_s is None else left_s * share)

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() >= self._end


class Order:
    """A call for a worker's thread to make; ``error`` is what it raised. ``in_backoff``: run it also while the thread
    waits before a restart.
    """

    def __init__(self, function: Callable[[], object], in_backoff: bool = False) -> None:
        self.function = function
        self.in_backoff = in_backoff
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

    @property
    def done(self) -> bool:
        """Whether it was carried out."""
        return self._done.is_set()

    def wait(self, deadline: Deadline) -> bool:
        """Whether it was carried out before the deadline."""
        return self._done.wait(deadline.left_s)


class _Abandoned(Exception):
    """Raised on a worker's thread that returns from a call after it was abandoned."""


class Output:
    """One source of links: a module's default output, or one of its named outputs."""

    def __init__(self, worker: Worker, name: str, port: Port) -> None:
        self.worker = worker
        self.name = name
        self.port = port
        self.sinks: dict[Worker, Joint] = {}
        self.parted = 0  # the loss number of the last removal of one of its sinks

    @property
    def passes_on(self) -> bool:
        """Whether everything it published was published while its module was handling a message, as far as can be
        known. A dead letter is published before its message counts as handled.
        """
        worker, module = self.worker, self.worker.module
        if self is worker.outputs.get(ERROR):
            return self.port.published == worker.dead_letters  # none by the module itself
        seen = worker._loop is None and not hasattr(module, "unhandled")  # neither tasks nor a process of its own
        return seen and not getattr(module, "gathers", False) and self.port.outside == 0


@dataclass(slots=True, eq=False)
class Joint:
    """A link in use: its filter, its options and its bound."""

    accepts: Predicate | None
    options: LinkOptions
    bound: Bound | None = None

    @classmethod
    def of(cls, accepts: Predicate | None, options: LinkOptions) -> Joint:
        """Create one, with a bound if the options ask for it."""
        return cls(accepts, options, Bound(options) if options.bounded else None)

    @property
    def predicate(self) -> Predicate | None:
        """The predicate that the port calls before a message is queued."""
        if self.bound is None:
            return self.accepts
        return self.bound.admit if self.accepts is None else self.bound.behind(self.accepts)


@dataclass(order=True, slots=True)
class Aside:
    """A message that failed and is tried again later."""

    due_s: float
    number: int  # its loss number: smaller means put aside earlier (``losses.py``)
    tries: int
    message: GatewayMessage = field(compare=False)


class Worker:
    """One module, its queue and its thread."""

    def __init__(self, module: Any, name: str, port: Port, queue: QueueSubscriber, on_failure: OnFailure) -> None:
        self.name = name
        self.output = Output(self, name, port)
        self.outputs: dict[str, Output] = {}  # the named ones
        self.queue = queue
        self.timeout_s = math.inf  # how long its queue lets a publisher wait
        self.counters = Counters("gateway", "module", name)
        # the thread counts after each batch, and other threads may count during a batch
        self._counting = threading.Lock()
        self.sources: dict[Output, Joint] = {}
        self.joints: dict[int | None, Joint] = {}  # the links that lead here, by the id of their messages
        self.special = False  # whether one of them has a bound or a TTL
        self.aside: list[Aside] = []
        self.retrying = False  # it waits before it tries a message again, with others behind that one
        # ids of durable sources whose failed messages are left to them instead of being tried again
        self.lets_go: frozenset[int] = frozenset()
        self.given_back: deque[tuple[GatewayMessage, int, BaseException]] = deque()  # failed in the module's process
        self.resent = 0  # messages that were sent to the module's process again
        # the number of its last loss: messages taken from their source before that may not count as handled
        self.last_loss = 0
        self.life = Life.MADE
        self.failed = 0
        self.taken = 0  # messages that left the queue and are finished, handled or lost
        self.lost = 0  # of those: never handled
        self.backed = False  # set at the gateway's end: durable sources keep everything it gets until it was handled
        self.stored = 0  # of those taken: not handled at the end, but kept by their source
        self.filtered = 0  # of those taken: dropped by the module itself
        self.dead_letters = 0  # sent to the output ``error``, or just being sent
        # stored by a buffer, which counts as handled, and removed by its bounds before they were forwarded
        self.gone = 0
        self.doing = ""  # the step that the module is in
        self.busy_since: float | None = None
        self._expired = 0  # of those taken: had waited longer than their TTL
        self.overflowed_before = 0  # refused by the bounds of links that were removed
        self.stuck = False
        self.run_failed = False  # a source's `run` has failed for good: it publishes nothing any more
        self.removing = False
        self.paused = False
        self.between = False  # the module is being replaced; everything waits until the new one is started
        self._holding = False
        self.destroyed = False  # the module was destroyed, and a new one will replace it
        self.owed = 0  # unhandled messages of a process that died, until the next one has got them
        self.ending = threading.Event()  # set to end the waits of the module's supervision
        self.after: Callable[[], object] | None = None  # what the thread does last, for a module that removes itself
        self._on_failure = on_failure
        self._last: Callable[[], object] | None = None
        self._orders: deque[Order] = deque()
        self._woken = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ident = 0  # of its thread
        self._counted = self._counted_handled = 0  # messages taken and handled when it was last counted
        # while a batch is on its way to the module's process: how many had been sent there before
        self._sent_before: int | None = None
        self._seen, self._seen_s = 0, 0.0  # the count at the last check of progress, and when that was
        self._backlog_told = 0
        self._throttle = Throttle(log)
        self._receive_again: Callable[[GatewayMessage, int], Any] | None = None
        self.module: Any = module
        self.adopt(module)
        self.thread = threading.Thread(target=self._run, name=f"module {name}", daemon=True)

    def adopt(self, module: Any) -> None:
        """Pass messages to ``module`` from now on."""
        if self._receive_again is not None:
            self._expired += self.module.expired
        self.module = module
        self.destroyed = self._stopped = False
        self._receive: Callable[[GatewayMessage], Any] = self._awaited(module.receive)
        many = getattr(module, "receive_many", None)
        self._receive_many: Callable[[Sequence[GatewayMessage]], Any] | None = many and self._awaited(many)
        if (together := self._receive_many) is not None:
            self._receive = lambda message: together([message])  # one that is tried again by itself
        # Only modules in their own process have it: they report failures later, and keep what they were sent until
        # then.
        self._receive_again = getattr(module, "receive_again", None)
        if self._receive_again is not None:
            module.expiries = self._expiries

    def _awaited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.iscoroutinefunction(function):
            return function
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return functools.partial(self.call, function)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step of the module; if it returns an awaitable, await it in the worker's event loop."""
        result = function(*arguments)
        if inspect.isawaitable(result):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            result = self._loop.run_until_complete(_outcome(result))
        return result

    @property
    def port(self) -> Port:
        """The port of its default output."""
        return self.output.port

    @property
    def sinks(self) -> dict[Worker, Joint]:
        """The sinks of its default output."""
        return self.output.sinks

    @property
    def own_outputs(self) -> list[Output]:
        """The outputs that the module itself publishes to; the worker publishes dead letters."""
        named = list(self.outputs.items())  # a copy: another thread may add one meanwhile
        return [self.output, *(output for name, output in named if name != ERROR)]

    # ---- figures, for any thread

    @property
    def handled(self) -> int:
        """Messages for which ``receive`` has returned, or that went to the error link; without those that the module
        dropped.
        """
        # Other threads change these meanwhile. Read in this order, a message that moves from one to the next is left
        # out for a moment and never counts too early.
        taken, sent_before = self.taken, self._sent_before
        handed_over = 0 if sent_before is None else max(0, self.module.sent - sent_before)
        again_before = len(self.given_back) + len(self.aside)
        at_process = self.at_process
        tried_again = max(again_before, len(self.given_back) + len(self.aside))
        done = taken + handed_over - at_process - tried_again
        return max(0, done - self.lost - self.stored - self.expired - self.filtered)

    @property
    def expired(self) -> int:
        """Messages that had waited longer than their TTL, also in the module's process."""
        return self._expired + (self.module.expired if self._receive_again is not None else 0)

    @property
    def at_process(self) -> int:
        """Messages that the module's process has received and not handled, or that a dead process has left."""
        module = self.module
        known = module.sent - module.settled if self._receive_again is not None and not module.accounted else 0
        return max(known, self.owed)

    @property
    def waiting(self) -> int:
        """Messages that wait, including the current batch."""
        taken = self.taken  # read first: a message that is finished later is still counted as waiting
        # One call for all native counts, because a batch leaves the queue and is delivered in the same step.
        _, delivered, _, queued, _ = self.queue._counts()
        return max(0, queued + delivered - taken) + len(self.given_back) + len(self.aside)

    @property
    def overflowed(self) -> int:
        """Messages that the bounds of its links refused."""
        return self.overflowed_before + sum(j.bound.dropped for j in list(self.sources.values()) if j.bound is not None)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, no publisher waits for room in its queue, and no call is running."""
        taken = self.taken
        matched, _, dropped, _, _ = self.queue._counts()
        coming = matched - sum(dropped.values()) - taken
        return not (coming > 0 or self.given_back or self.aside or self.busy_since is not None or self.owed)

    @property
    def over(self) -> bool:
        """Whether no message will be handled any more."""
        return self.life in (Life.QUIET, Life.ENDED, Life.ABANDONED)

    @property
    def mine(self) -> bool:
        """Whether the caller runs on this worker's thread, which cannot wait for itself."""
        return threading.current_thread() is self.thread

    def seconds_in_step(self, now_s: float) -> float:
        """How long the current call has lasted, as far as callers of this have observed."""
        since = self.busy_since
        if since is None:
            return 0.0
        if self._seen != self.taken:
            self._seen, self._seen_s = self.taken, now_s
        return now_s - max(since, self._seen_s)

    # ---- orders, by any thread

    def start(self) -> None:
        """Start the thread, which then waits for orders."""
        self.thread.start()

    def post(self, function: Callable[[], object], *, in_backoff: bool = False) -> Order:
        """Order ``function`` to be called on the thread, between two messages."""
        order = Order(function, in_backoff)
        self._orders.append(order)
        self._woken.set()
        self.queue.interrupt()
        return order

    def pause(self) -> None:
        """Receive nothing after the current message, until ``resume``; messages wait in the queue."""
        if not self.paused:
            self.paused = True
            self.post(self._hold)

    def resume(self) -> None:
        """Undo ``pause``."""
        self.paused = False
        self.post(lambda: None)

    def begin(self) -> Order:
        """Call ``start``, then receive; ``error`` of the order is what ``start`` raised."""
        return self.post(self._begin)

    def run_step(self, step: str) -> Order:
        """Call an optional step of the module; a failure is reported and counted, not raised."""
        return self.post(lambda: self._step(step))

    def cut(self) -> Order:
        """Receive nothing more: what is queued, and the rest of the current batch, is dropped and counted."""
        self.ending.set()
        # close first: a message that arrives between a check and the closing would be lost uncounted
        self.queue.close()
        if self.waiting or self.queue.ledger.dropped.get("closed"):
            note_loss(self)
        return self.post(self._be_quiet)

    def stop(self) -> Order:
        """Call ``stop``; nothing is received after it."""
        self.ending.set()
        return self.post(self._stop)

    def end(self, *steps: str, last: Callable[[], object] | None = None) -> Order:
        """Call ``steps``, then end the thread, which calls ``last`` as its final act."""
        self._last = last
        self.cut()
        return self.post(lambda: self._end(steps))

    def abandon(self) -> bool:
        """Abandon it; returns whether there was anything to abandon. The message being handled counts as lost."""
        if self.life in (Life.ENDED, Life.ABANDONED) or not self.thread.is_alive():
            return False
        self.life = Life.ABANDONED
        self.ending.set()
        self.queue.close()
        _, delivered, _, _, _ = self.queue._counts()  # what is queued, or just being queued, is dropped with the queue
        self.lose(delivered - self.taken, "closed")
        tried_again, self.aside = len(self.given_back) + len(self.aside), []
        self.given_back.clear()
        if tried_again:
            self.lose_taken(tried_again, "closed")
        self.post(lambda: None)  # an empty order, so that the thread notices between two messages
        return True

    def give_back(self, messages: Sequence[tuple[GatewayMessage, int]], error: BaseException) -> None:
        """Take back messages at which the module's process failed, each with its number of tries."""
        if messages:
            self.given_back.extend((message, tries, error) for message, tries in messages)
            self.post(self._take_back)

    def fail_in_hand(self, messages: Sequence[tuple[GatewayMessage, int]], error: BaseException) -> None:
        """Take back, on the worker's thread, what the module's process had in hand when it ended."""
        self.given_back.extend((message, tries, error) for message, tries in messages)
        self._take_back()

    def let_go(self, kept: bool = True) -> None:
        """From now on leave failed messages to their durable source instead of trying them again; with ``kept`` False
        try them again, as before.
        """
        keepers = [output for output, joint in list(self.sources.items()) if _keeps(output, joint)] if kept else []
        self.lets_go = frozenset(output.port.id for output in keepers)
        if keepers:
            self.post(self._leave_aside)

    @property
    def has_keepers(self) -> bool:
        """Whether durable sources keep everything it gets, as far as its incoming links show."""
        return bool(self.sources) and all(
            joint.options.delivery is Delivery.AT_LEAST_ONCE and (output.worker.is_durable or output.passes_on)
            for output, joint in list(self.sources.items())
        )

    @property
    def has_durable_sources(self) -> bool:
        """Whether each of its sources keeps its messages until they were handled."""
        return self.has_keepers and all(output.worker.is_durable for output in list(self.sources))

    @property
    def is_durable(self) -> bool:
        """Whether its module is a durable source: its input keeps messages until they were handled."""
        return bool(getattr(self.module, "durable", False))

    def _receiving(self, thread: int) -> None:
        """Note which thread is in ``receive``; 0: none."""
        for output in (self.output, *self.outputs.values()):
            output.port.receiving = thread

    @property
    def backlog(self) -> int:
        """Messages that the module keeps on disk and that were not handled yet."""
        known = getattr(self.module, "backlog", 0)
        return known if isinstance(known, int) else 0  # a user's class may use this name for something else

    def count_backlog(self) -> None:
        """Update the backlog that the monitor shows."""
        backlog, before = self.backlog, self._backlog_told
        self.counters.set("lag", backlog)
        # otherwise its state already shows something else
        if backlog != before and not self.stuck and self.life is Life.RUNNING:
            self.counters.state(f"{backlog} stored on disk" if backlog else "")
            self._backlog_told = backlog

    @property
    def lost_at_end(self) -> int:
        """Messages that were never handled and that nobody keeps, including those dropped with its queue."""
        return self.lost + (0 if self.backed else self.queue.ledger.dropped.get("closed", 0))

    def count_failure(self) -> None:
        """Count one failure. Any thread, also after the worker was abandoned."""
        self.failed += 1
        with contextlib.suppress(ValueError):  # the counters were closed
            self.counters.add("errors")

    def count_filtered(self) -> None:
        """Count a received message that the module drops."""
        self.filtered += 1
        with contextlib.suppress(ValueError):  # the counters were closed
            self.counters.drop("filtered")

    def lose(self, count: int, reason: str = "error") -> None:
        """Count messages that left the queue and will not be handled."""
        if count > 0:
            self.lose_taken(count, reason)  # first this: a mark that sees them as taken must also see them as lost
            self.taken += count

    def lose_stored(self, count: int) -> None:
        """Count messages that a buffer had stored and that its bounds have removed. For their link they were handled,
        so their source must not send them again (no loss is noted).
        """
        self.gone += count
        self.counters.drop("overflow", count)

    def lose_taken(self, count: int, reason: str = "error") -> None:
        """Count messages as lost that were counted as taken before."""
        note_loss(self)
        if self.backed and reason == "closed":
            self.stored += count
            return
        self.lost += count
        self.counters.drop(reason, count)

    def leave(self, count: int) -> None:
        """Count messages, taken before, at which the module failed and that their durable source keeps."""
        if count:
            note_loss(self)
            self.stored += count

    # ---- the thread

    def _run(self) -> None:
        self._ident = threading.get_ident()
        for output in (self.output, *self.outputs.values()):
            output.port.worker = self._ident
        try:
            while self.life is not Life.ENDED:
                self._turn()
        except _Abandoned:
            log.warning("abandoned module %r has returned from its call; it will not be called again", self.name)
        except Exception:
            if self.life is not Life.ABANDONED:  # the counters of an abandoned worker are closed
                raise
        finally:
            if self._loop is not None:
                self._loop.close()
            if self._last is not None:
                self._last()

    def _turn(self) -> None:
        if self._orders:
            self._run_orders()
        elif self.after is not None and (self.queue.closed or self.queue.queued == 0):
            self.after()
            self.life = Life.ENDED
        elif self.life in (Life.RUNNING, Life.FAILED):
            try:
                self._handle(self._read())  # no local name: a waiting worker must not keep messages alive
            except ClosedError:
                self.life = Life.QUIET
            except _Abandoned:
                raise
            except Exception as error:
                self._on_failure(self, "queue", error)
                self.counters.state("its queue failed")
                self.life = Life.QUIET
        else:
            self._woken.wait()
            self._woken.clear()

    def _hold(self) -> None:
        """While it is paused, or its module is being replaced, only carry out orders."""
        held, self.busy_since = self.busy_since is not None, None
        self._holding = True
        while (self.paused or self.between) and not self.over:
            if self._orders:
                self._run_orders()
            else:
                self._woken.wait()
                self._woken.clear()
        self._holding = False
        if held:
            self.busy_since = time.monotonic()

    def _run_orders(self) -> None:
        while self._orders:
            if self.life is Life.ABANDONED:
                raise _Abandoned
            self._orders.popleft().run()
        if self.between and not self._holding:
            self._hold()

    def wait_to_restart(self, seconds: float) -> bool:
        """Wait before a restart, on the worker's thread; returns whether the worker has to end instead. A replacement
        by the user ends the wait.
        """
        deadline = Deadline(seconds)
        while not deadline.passed and not self.ending.is_set():
            order = next((order for order in list(self._orders) if order.in_backoff), None)
            if order is not None:
                self._orders.remove(order)
                order.run()
                if self.between:
                    self._hold()
                break
            self._woken.wait(deadline.left_s)
            self._woken.clear()
        return self.ending.is_set()

    def take_over(self, left: Sequence[tuple[GatewayMessage, int]]) -> None:
        """Pass the unhandled messages of the previous process to this module, before any other message."""
        waiting = sorted(one for one in self.aside if not one.tries)  # left by an even earlier process
        first = [*left, *((one.message, 1) for one in waiting)]
        self.aside = [one for one in self.aside if one.tries]
        self.aside += [Aside(0.0, number_aside(), tries - 1, message) for message, tries in first]
        heapq.heapify(self.aside)

    def _read(self) -> Sequence[Any]:
        wait_s = None
        if self.aside and self.life is Life.FAILED:
            self._lose_aside("error")
        if self.aside:
            self._retry_due()
            if self._orders:
                return ()  # the next messages may have to wait for those put aside
            wait_s = max(0.0, self.aside[0].due_s - time.monotonic()) if self.aside else 0.0
            if self._receive_again is not None and len(self.aside) >= MAX_ASIDE:
                self._pause(wait_s)
                return ()
        if self._loop is None:
            return self.queue.read_many(BATCH, wait_s)
        batch = self.queue.read_many(BATCH, 0)
        if not batch and not self._orders:  # let the module's own tasks run meanwhile
            self._loop.run_until_complete(readable(self.queue.fileno(), wait_s))
        return batch

    def _handle(self, batch: Sequence[GatewayMessage]) -> None:
        """Pass each message to the module; a failure costs only that message."""
        if not batch:
            return
        if self.special:
            batch = self._still_wanted(batch)
        if not batch:
            pass
        elif self.life is Life.FAILED:
            self._make_room(batch)
            self.lose(len(batch))
            self._throttle.error("module %r cannot receive; %d messages were dropped and counted", self.name, self.lost)
        else:
            self._serve(batch)
        self.count()

    def count(self) -> None:
        """Update the counters. Any thread may do so, so that the count of a slow module moves during a batch too. A
        module without input counts what it publishes.
        """
        with self._counting:
            handled, taken = self.handled, self.taken  # read in this order, so that never more are handled than taken
            # the figure may be off while messages are being passed to the process
            self._counted_handled = max(self._counted_handled, handled)
            delivered, size = self._counted_handled, self.queue.delivered_bytes
            if not taken and not self.queue.ledger.matched:
                ports = [output.port for output in self.own_outputs]
                taken = delivered = sum(port.published for port in ports)
                size = sum(port.bytes for port in ports)
            if taken != self._counted:
                self._counted = taken
                self.counters.set("last_ns", time.time_ns())
            self.counters.set("matched", taken)
            self.counters.set("expired", self.expired)
            self.counters.set("delivered", delivered)
            self.counters.set("bytes", size)
            self.counters.set("depth", self.queue.queued)

    def _serve(self, batch: Sequence[GatewayMessage]) -> None:
        self.doing, self.busy_since = "receive", time.monotonic()
        self._receiving(self._ident)
        end = self.taken + len(batch)
        if self._receive_many is not None:
            self._make_room(batch)
            keeps = self._receive_again is not None
            self._sent_before = self.module.sent if keeps else None
            try:
                self._receive_many(batch)
            except BaseException as error:
                if keeps:
                    # the next process gets them, or they are counted as lost when there is none
                    self._fail("receive", error)
                else:
                    self._batch_failed(batch, error)
            self._sent_before = None
            self.taken += len(batch)
            if self._receive_again is not None:
                self.module.note_sent(self.taken)
        else:
            orders, receive, special = self._orders, self._receive, self.special
            for message in batch:
                if orders:
                    self._run_orders()
                    self._catch_up()
                    receive = self._receive
                    if self.life is not Life.RUNNING:
                        break
                if special:
                    self._make_room((message,))
                    if self._has_expired(message):
                        self.taken += 1
                        continue
                try:
                    receive(message)
                except BaseException as error:
                    self._message_failed(message, error)
                    receive = self._receive
                self.taken += 1
        if self.life is Life.ABANDONED:
            raise _Abandoned
        self._receiving(0)
        if end > self.taken:
            self._make_room(batch[self.taken - end :])
        self.lose(end - self.taken, "closed" if self.life is not Life.FAILED else "error")
        self.busy_since = None

    def _catch_up(self) -> None:
        """During a batch, if the module was replaced: first pass on the unhandled messages of its old process."""
        if not self.aside or self.aside[0].tries:
            return
        while self.aside and not self.aside[0].tries and self.life is Life.RUNNING:
            self._retry_due()
            self._run_orders()
        self.doing, self.busy_since = "receive", time.monotonic()
        self._receiving(self._ident)

    # ---- messages that fail

    def _still_wanted(self, batch: Sequence[GatewayMessage]) -> Sequence[GatewayMessage]:
        """Leave out messages that have expired."""
        kept = []
        for message in batch:
            if self._has_expired(message):
                self._make_room((message,))
                self.taken += 1
            else:
                kept.append(message)
        return kept

    def _make_room(self, messages: Sequence[GatewayMessage]) -> None:
        """Give back the room that these had on their links: they no longer wait."""
        if not self.special:
            return
        for message in messages:
            joint = self.joints.get(message.id)
            if joint is not None and joint.bound is not None:
                joint.bound.release(message)

    def _has_expired(self, message: GatewayMessage) -> bool:
        """Whether it has waited longer than its link allows. If so, it is counted here and must not be handled."""
        joint = self.joints.get(message.id)
        ttl_s = joint.options.ttl_s if joint is not None else None
        if ttl_s is None or time.time_ns() - message.timestamp_ns <= ttl_s * 1e9:
            return False
        self._expired += 1
        return True

    def _expiries(self, messages: Sequence[GatewayMessage]) -> list[int | None] | None:
        """Until when each of them may be handled, for the module's process; None: no limit for any."""
        if not self.special:
            return None
        ttls = [self._options_of(message).ttl_s for message in messages]
        if not any(ttls):
            return None
        return [
            None if ttl_s is None else message.timestamp_ns + int(ttl_s * 1e9)
            for message, ttl_s in zip(messages, ttls, strict=True)
        ]

    def _is_tried_again(self, message: GatewayMessage, error: BaseException, tries: int) -> bool:
        """Decide about a message that failed for the ``tries``-th time, for any loader: True if it will be tried again.
        False if it is given up (to the error link, or lost), left to its source, or cannot be tried; then it is counted
        here.
        """
        options = self._options_of(message)
        most = options.max_tries
        if options.delivery is not Delivery.AT_LEAST_ONCE or (most is not None and tries >= most):
            self._give_up(message, error, tries)
        elif message.id in self.lets_go:
            self.leave(1)
        elif self.over or self.ending.is_set() or self.life is Life.FAILED:
            self.lose_taken(1, "error" if self.life is Life.FAILED else "closed")
        else:
            return True
        return False

    def _options_of(self, message: GatewayMessage) -> LinkOptions:
        joint = self.joints.get(message.id)
        return joint.options if joint is not None else DEFAULT

    def _message_failed(self, message: GatewayMessage, error: BaseException) -> None:
        self._fail("receive", error)
        if not self._is_tried_again(message, error, 1):
            return
        options = self._options_of(message)
        if options.ordered or len(self.aside) >= MAX_ASIDE:
            self._retry_here(message, error, options)
        else:
            self._put_aside(message, 1, number_aside())

    def _put_aside(self, message: GatewayMessage, tries: int, number: int) -> None:
        due_s = time.monotonic() + backoff_s(self._options_of(message), tries)
        heapq.heappush(self.aside, Aside(due_s, number, tries, message))

    def _take_back(self) -> None:
        while self.given_back:
            # stays here until it is put aside: marks that wait for it look here
            message, tries, error = self.given_back[0]
            if self._is_tried_again(message, error, tries):
                self._put_aside(message, tries, number_aside())
            self.given_back.popleft()

    def _retry_due(self) -> None:
        while self.aside and self.aside[0].due_s <= time.monotonic() and self.life is Life.RUNNING and not self._orders:
            one = self.aside[0]  # stays here until it is handled: marks that wait for it look here
            if self._has_expired(one.message):
                heapq.heappop(self.aside)
                continue
            self.doing, self.busy_since = "receive", time.monotonic()
            failed: BaseException | None = None
            keeps = self._receive_again is not None
            self._receiving(self._ident)
            try:
                if self._receive_again is not None:
                    self._receive_again(one.message, one.tries + 1)
                else:
                    self.call(self._receive, one.message)
            except BaseException as error:
                failed = None if keeps else error
                self._fail("receive", error)
            self._receiving(0)
            self.resent += 1
            self.counters.add("redelivered")
            # otherwise it was left to its source or lost meanwhile, and counted
            if self.aside and self.aside[0] is one:
                if failed is not None and self._is_tried_again(one.message, failed, one.tries + 1):
                    self._put_aside(one.message, one.tries + 1, one.number)
                # removed last, so that a mark always finds the message here or its dead letter in a queue
                heapq.heappop(self.aside)
            self.busy_since = None

    def _retry_here(self, message: GatewayMessage, error: BaseException, options: LinkOptions) -> None:
        """Try it again until it is handled or given up; later messages wait."""
        tries = 1
        while True:
            self.busy_since = None
            self._wait_for_try(backoff_s(options, tries), [message])
            if not self._is_tried_again(message, error, tries) or self._has_expired(message):
                return
            # there is room to put it aside again, so that later messages need not wait
            if not options.ordered and len(self.aside) < MAX_ASIDE:
                heapq.heappush(self.aside, Aside(time.monotonic(), number_aside(), tries, message))
                return
            tries += 1
            self.doing, self.busy_since = "receive", time.monotonic()
            self.counters.add("redelivered")
            try:
                self.call(self._receive, message)
                return
            except BaseException as again:
                error = again
                self._fail("receive", again)
            if not self._is_tried_again(message, error, tries):
                return

    def _batch_failed(self, batch: Sequence[GatewayMessage], error: BaseException) -> None:
        """A batch failed: messages of at_least_once links are tried again together, until they are handled or for
        ``max_tries``.
        """
        self._fail("receive", error)
        left, tries = list(batch), 1
        while left := [message for message in left if self._is_tried_again(message, error, tries)]:
            self.busy_since = None
            self._wait_for_try(backoff_s(self._options_of(left[0]), tries), left)
            left = [message for message in left if self._is_tried_again(message, error, tries)]
            left = [message for message in left if not self._has_expired(message)]
            if self._receive_many is None:  # it was replaced by a module without ``receive_many``
                for message in left:
                    self._put_aside(message, tries, number_aside())
                return
            if not left:
                return
            tries += 1
            self.doing, self.busy_since = "receive", time.monotonic()
            self.counters.add("redelivered", len(left))
            try:
                self._receive_many(left)
                return
            except BaseException as again:
                error = again
                self._fail("receive", again)

    def _wait_for_try(self, seconds: float, messages: Sequence[GatewayMessage]) -> None:
        """Wait before the next try of ``messages``, or until one of them will not be tried again. Meanwhile orders are
        carried out and messages put aside are tried.
        """
        ids = {message.id for message in messages}
        deadline = Deadline(seconds)
        self.retrying = True
        while (
            not deadline.passed
            and not self.ending.is_set()
            and self.life is Life.RUNNING
            and ids.isdisjoint(self.lets_go)
        ):
            if not self._orders:
                self._retry_due()  # messages put aside do not wait for this one
            if self._orders:
                self._run_orders()
            else:
                wait_s = deadline.left_s or 0.0
                if self.aside:
                    wait_s = min(wait_s, max(0.0, self.aside[0].due_s - time.monotonic()))
                self._woken.wait(wait_s)
                self._woken.clear()
        self._receiving(self._ident)
        self.retrying = False

    def _pause(self, seconds: float) -> None:
        """Wait before the next try; meanwhile orders are carried out."""
        deadline = Deadline(seconds)
        while not deadline.passed and not self.ending.is_set():
            if self._orders:
                self._run_orders()
            else:
                self._woken.wait(deadline.left_s)
                self._woken.clear()

    def _give_up(self, message: GatewayMessage, error: BaseException, tries: int) -> None:
        """Send a dead letter to the output ``error``; if nothing is linked to it, the message is lost."""
        output = self.outputs.get(ERROR)
        if output is None or all(sink.queue.closed for sink in list(output.sinks)):
            self._count_given_up()
            return
        told = {
            "error": reason_of(error),
            "error-module": self.name,
            "error-source": str(message.channel),
            "error-tries": str(tries),
        }
        self.dead_letters += 1
        try:
            output.port.publish(message.with_properties({**message.properties, **told}))
        except Exception:
            self.dead_letters -= 1
            log.exception("module %r: a dead letter was refused", self.name)
            self._count_given_up()

    def _count_given_up(self) -> None:
        """Count it as lost. Its link allows that, so its source must not send it again (no loss is noted)."""
        self.lost += 1
        self.counters.drop("error")

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
        self.between = False

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
        if self.life in (Life.RUNNING, Life.QUIET, Life.FAILED) and not self._stopped:
            self._stopped = True
            self._step("stop")
        self._be_quiet()

    def _be_quiet(self) -> None:
        if self.life is not Life.ABANDONED:
            self.life = Life.QUIET
        self._lose_aside("closed")

    def _lose_aside(self, reason: str) -> None:
        if self.aside:
            self.lose_taken(len(self.aside), reason)
            self.aside = []

    def _leave_aside(self) -> None:
        kept = [one for one in self.aside if one.message.id not in self.lets_go]
        self.leave(len(self.aside) - len(kept))
        heapq.heapify(kept)
        self.aside = kept

    def _end(self, steps: Sequence[str]) -> None:
        for step in steps:
            self._step(step)
        self._take_back()
        if self.life is not Life.ABANDONED:
            self.life = Life.ENDED

    def _fail(self, step: str, error: BaseException) -> None:
        if self.life is Life.ABANDONED:
            raise _Abandoned from error
        if isinstance(error, ClosedError) and self.queue.closed:
            self.count_failure()
            return  # it was ordered to end while it was publishing
        try:
            self._on_failure(self, step, error)
        except Exception:
            log.exception("module %r: handling its failure failed", self.name)
        self.doing, self.busy_since = step, time.monotonic()


def _keeps(output: Output, joint: Joint) -> bool:
    """Whether the source of a link keeps its messages until they were handled."""
    return joint.options.delivery is Delivery.AT_LEAST_ONCE and output.worker.is_durable


def backoff_s(options: LinkOptions, tries: int) -> float:
    return min(options.backoff_s * 2.0 ** min(tries - 1, 64), options.max_backoff_s)


async def _outcome(awaitable: Any) -> Any:
    return await awaitable
