"""The keeper: looks after a gateway's modules. Failures are counted and told; the restart policy is carried out; a
module that stays too long in ``receive`` is told of.

A failure inside ``receive`` is handled on the module's own worker, which has nothing better to do meanwhile; one that
is noticed elsewhere (its process died while it was idle) on the keeper's thread. That thread begins with the first
module and looks four times a second for modules that are stuck.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.broker import ModuleBroker
from penstock.gateway.configuration import ModuleEntry
from penstock.gateway.errors import BrokerError
from penstock.gateway.events import Event
from penstock.gateway.loaders import Recipe
from penstock.gateway.supervision import Restart, Supervisor
from penstock.gateway.worker import Worker

LOOK_S = 0.25
log = logging.getLogger("penstock.gateway")


@dataclass
class Kept:
    """A module under care."""

    recipe: Recipe
    restart: Restart
    stuck_after_s: float | None
    entry: ModuleEntry | None = None
    module: Any = None
    started: bool = False
    removing: bool = False
    supervisor: Supervisor = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.restart)

    @property
    def name(self) -> str:
        """The module's name."""
        return self.recipe.name


class Keeper:
    """Carries out what the policies say."""

    def __init__(self, broker: ModuleBroker, tell: Callable[[Event, Any], None]) -> None:
        self._broker = broker
        self._tell = tell
        self._kept: dict[str, Kept] = {}
        self._reports: queue.SimpleQueue[tuple[Kept, Any, BaseException] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, kept: Kept) -> None:
        """Look after ``kept`` from now on; its module is attached."""
        self._kept[kept.name] = kept
        self._watch_process(kept)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gateway keeper", daemon=True)
            self._thread.start()

    def forget(self, kept: Kept) -> None:
        """It goes on by itself."""
        self._kept.pop(kept.name, None)

    def close(self) -> None:
        """No more restarts; waits that are under way end now."""
        self._closing.set()
        self._reports.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- failures

    def failed(self, worker: Worker, step: str, error: BaseException) -> Any:
        """A module failed on its worker's thread; gives the one to go on with, or None to keep it."""
        kept = self._kept.get(worker.name)
        if kept is None:
            return None
        return self._restart(kept, worker, step, error)

    def _watch_process(self, kept: Kept) -> None:
        module = kept.module
        if hasattr(module, "on_failure"):
            module.on_failure = lambda error: self._reports.put((kept, module, error))

    def _restart(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> Any:
        """Tell, wait, make anew; as often as the policy says."""
        old = kept.module
        while True:
            self._told(kept, step, error)
            delay_s = kept.supervisor.failed(time.monotonic())
            if delay_s is None or kept.removing or self._closing.wait(delay_s):
                self._left(kept, worker)
                return None
            try:
                new = self._anew(kept, old)
            except Exception as failure:
                step, error = "restart", failure
                continue
            if new is None:
                return None
            kept.supervisor.restarted()
            self._resend(kept, worker, old, new)
            self._tell(Event.MODULE_RESTARTED, kept.name)
            return new

    def _anew(self, kept: Kept, old: Any) -> Any:
        """A new module in the place of ``old``: same name, id, queue, links."""
        finish(old, "destroy")
        new = kept.recipe.make(self._broker)
        try:
            self._broker.replace_module(kept.module, new)
        except BrokerError:  # it was removed meanwhile
            finish(new, "destroy")
            return None
        kept.module = new
        self._watch_process(kept)
        if kept.started and hasattr(new, "start"):
            new.start()
        return new

    def _resend(self, kept: Kept, worker: Worker, old: Any, new: Any) -> None:
        """What a process had not handled goes to the next one; the message in hand is lost, and counted."""
        if not hasattr(old, "unhandled"):
            return
        left = old.unhandled()
        lost = old.sent - old.handled - len(left)
        if lost:
            worker.lost += lost
            worker.counters.drop("error", lost)
            log.error("module %r: %d message was in hand when its process ended; it is lost", kept.name, lost)
        if left:
            worker.counters.add("redelivered", len(left))
            new.receive_many(left)

    def _left(self, kept: Kept, worker: Worker) -> None:
        if kept.supervisor.gave_up:
            worker.counters.state("given up")
            log.error("module %r failed %d times; it is not started again", kept.name, kept.supervisor.failures)

    def _told(self, kept: Kept, step: str, error: BaseException) -> None:
        first = kept.supervisor.failures == 0
        log.error("module %r failed in %s: %s", kept.name, step, error, exc_info=error if first else None)
        self._tell(Event.MODULE_FAILED, (kept.name, step, error))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                report = self._reports.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if report is not None:
                self._handle(*report)

    def _handle(self, kept: Kept, module: Any, error: BaseException) -> None:
        if kept.module is not module or kept.removing:
            return  # replaced or leaving already
        try:
            worker = self._broker.worker_of(module)
        except BrokerError:
            return
        worker.failed += 1
        worker.counters.add("errors")
        if not getattr(module, "dead", None):
            self._told(kept, "process", error)
            kept.supervisor.failures += 1
            return
        with worker.turn:
            if kept.module is module:
                self._restart(kept, worker, "process", error)

    def _look(self) -> None:
        now = time.monotonic()
        for kept in list(self._kept.values()):
            try:
                worker = self._broker.worker_of(kept.module)
            except BrokerError:
                continue
            seconds = worker.seconds_in_receive(now)
            is_stuck = kept.stuck_after_s is not None and seconds > kept.stuck_after_s
            if is_stuck and not worker.stuck:
                worker.counters.state("stuck in receive")
                log.warning("module %r has been in receive for %.1f s", kept.name, seconds)
                self._tell(Event.MODULE_STUCK, (kept.name, seconds))
            elif worker.stuck and not is_stuck:
                worker.counters.state("")
            worker.stuck = is_stuck


def finish(module: Any, step: str) -> None:
    """Call an optional last step of a module; a failure is logged and goes no further."""
    try:
        getattr(module, step, lambda: None)()
    except Exception:
        log.exception("module %r: %s raised", getattr(module, "name", module), step)
