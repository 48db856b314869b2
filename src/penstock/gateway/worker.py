"""A worker: one module's queue on the bus, the thread that empties it, and what happens when the module fails.

Rules

- ``receive`` is serial and in publish order: the thread alone calls it, under ``turn``, which whoever replaces the
  module takes too.
- The quit signal is the closing of the queue itself: no message can imitate it, and it is the worker's own.
- No lock but ``turn`` is held while a module runs, and nobody waits for ``turn`` without a time-out.

``waiting``, ``idle`` and ``info`` may be read by any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock._core import Counters
from penstock._core.gateway import GatewayMessage, Port
from penstock.address import without_secrets
from penstock.bus import QueueSubscriber
from penstock.errors import ClosedError
from penstock.gateway.filters import Predicate

BATCH = 256
log = logging.getLogger("penstock.gateway")

#: Told of a failure: (worker, what failed, the error). Gives the module to go on with, or None to keep this one.
OnFailure = Callable[["Worker", str, BaseException], Any]


class Worker:
    """One module at work."""

    def __init__(self, module: Any, name: str, port: Port, queue: QueueSubscriber, on_failure: OnFailure) -> None:
        name = without_secrets(name)  # of an endpoint it is an address
        self.name = name
        self.port = port
        self.queue = queue
        self.counters = Counters("gateway", "module", name)
        self.sinks: dict[Worker, Predicate | None] = {}
        self.turn = threading.RLock()
        self.failed = 0
        self.handled = 0
        self.lost = 0  # in the hand of a process that died
        self.busy_since: float | None = None
        self.stuck = False
        self.removing = False
        self.ended = False
        self.after: Callable[[], None] | None = None  # what the thread does last, for a module that removes itself
        self._on_failure = on_failure
        self._seen, self._seen_s = 0, 0.0  # how far it had come when somebody last looked
        self.adopt(module)
        self.thread = threading.Thread(target=self._run, name=f"module {name}", daemon=True)

    def adopt(self, module: Any) -> None:
        """Hand everything from now on to ``module``."""
        self.module = module
        self._receive: Callable[[GatewayMessage], Any] = module.receive
        self._receive_many: Callable[[Sequence[GatewayMessage]], Any] | None = getattr(module, "receive_many", None)

    def start(self) -> None:
        """Begin to empty the queue."""
        self.thread.start()

    @property
    def waiting(self) -> int:
        """Messages that wait, the batch in hand included."""
        handled = self.handled  # first: what is handled after it is still counted as taken
        # One look at the native counts: a batch leaves the queue and is taken in the same moment.
        _, taken, _, queued, _ = self.queue._counts()
        return queued + taken - handled

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being handled."""
        return self.waiting == 0 and self.busy_since is None

    @property
    def mine(self) -> bool:
        """Whether the caller is this worker's thread: then it cannot wait for itself."""
        return threading.current_thread() is self.thread

    def seconds_in_receive(self, now_s: float) -> float:
        """How long the message in hand has been in hand, as far as those who looked can tell."""
        since = self.busy_since
        if since is None:
            return 0.0
        if self._seen != self.handled:
            self._seen, self._seen_s = self.handled, now_s
        return now_s - max(since, self._seen_s)

    def close(self, timeout: float | None) -> bool:
        """Quit: what is still queued is dropped and counted. Whether the thread has ended in time."""
        self.queue.close()
        if self.mine or not self.thread.is_alive():
            return True
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def _run(self) -> None:
        self.port.worker = threading.get_ident()
        try:
            while not (self.removing and self.after and self.queue.queued == 0):
                self._handle(self.queue.read_many(BATCH, None))  # not kept here: a waiting worker holds no message
        except ClosedError:
            pass  # the quit signal
        except Exception as error:
            self.counters.add("errors")
            self.counters.state("its queue failed")
            self._on_failure(self, "queue", error)
        finally:
            self.ended = True
            if self.after is not None:
                self.after()

    def _handle(self, batch: Sequence[Any]) -> None:
        """Each message to the module; a failure costs that message alone."""
        with self.turn:
            self._serve(batch)

    def _serve(self, batch: Sequence[GatewayMessage]) -> None:
        self.busy_since = time.monotonic()
        if self._receive_many is not None:
            self._attempt(self._receive_many, batch)
            self.handled += len(batch)
        else:
            for message in batch:
                try:
                    self._receive(message)
                except BaseException as error:
                    self._fail("receive", error)
                self.handled += 1
        self.busy_since = None
        self.counters.set("matched", self.handled)
        self.counters.set("delivered", self.handled - self.lost)
        self.counters.set("depth", self.queue.queued)

    def _attempt(self, function: Callable[[Any], Any], argument: Any) -> None:
        try:
            function(argument)
        except BaseException as error:
            self._fail("receive", error)

    def _fail(self, step: str, error: BaseException) -> None:
        self.failed += 1
        self.counters.add("errors")
        if isinstance(error, ClosedError) and self.queue.closed:
            return  # it was told to quit in the midst of a publish
        try:
            module = self._on_failure(self, step, error)
        except Exception:
            log.exception("module %r: what was to be done about its failure failed too", self.name)
            module = None
        if module is not None:
            self.adopt(module)
        self.busy_since = time.monotonic()
