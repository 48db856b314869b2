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

from penstock._core.gateway import GatewayMessage
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
        """The module's name; of an endpoint, its whole address."""
        return self.recipe.name

    @property
    def shown(self) -> str:
        """The name as it may be told."""
        return self.recipe.shown


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
        kept = next((one for one in list(self._kept.values()) if one.module is worker.module), None)
        if kept is None:
            return None
        if step == "queue":  # the worker has ended: nothing can be handed to another module
            self._told(kept, step, error)
            return None
        return self._restart(kept, worker, step, error)

    def _watch_process(self, kept: Kept) -> None:
        module = kept.module
        if hasattr(module, "on_failure"):
            module.on_failure = lambda error: self._reports.put((kept, module, error))

    def _restart(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> Any:
        """Tell, wait, make anew; as often as the policy says. The worker's turn is held all the while."""
        ended: Any = None  # the last one that was destroyed
        left: list[GatewayMessage] = []  # what a process has not handled, for the next one
        with worker.turn:
            worker.busy_since = None  # waiting for a restart is not being stuck in receive
            while True:
                self._told(kept, step, error)
                delay_s = kept.supervisor.failed(time.monotonic())
                if delay_s is None or kept.removing or self._closing.wait(delay_s):
                    self._left(kept, worker, left)
                    return None
                if ended is not kept.module:
                    ended = kept.module
                    finish(ended, "destroy")
                    left = self._unhandled(kept, worker)
                try:
                    new = self._anew(kept)
                    if new is not None:
                        self._begin(kept, worker, left)
                except Exception as failure:
                    step, error = "restart", failure
                    continue
                return new

    def _anew(self, kept: Kept) -> Any:
        """A new module in the place of the old one: same name, id, queue, links. None when it was removed meanwhile."""
        new = kept.recipe.make(self._broker)
        try:
            self._broker.replace_module(kept.module, new)
        except BrokerError:
            finish(new, "destroy")
            return None
        kept.module = new
        self._watch_process(kept)
        return new

    def _begin(self, kept: Kept, worker: Worker, left: list[GatewayMessage]) -> None:
        """Start the new module and give it what the last one had not handled."""
        kept.supervisor.restarted()
        if kept.started and hasattr(kept.module, "start"):
            kept.module.start()
        if left:
            worker.counters.add("redelivered", len(left))
            kept.module.receive_many(left)
        self._tell(Event.MODULE_RESTARTED, kept.shown)

    def _unhandled(self, kept: Kept, worker: Worker) -> list[GatewayMessage]:
        """What a process that ended leaves; the message in its hand is lost, and counted."""
        module = kept.module
        if not hasattr(module, "unhandled"):
            return []
        left: list[GatewayMessage] = module.unhandled()
        lost = module.sent - module.handled - len(left)
        if lost:
            worker.lost += lost
            worker.counters.drop("error", lost)
            log.error("module %r: %d message was in hand when its process ended; it is lost", kept.shown, lost)
        return left

    def _left(self, kept: Kept, worker: Worker, left: list[GatewayMessage]) -> None:
        """It is not made anew; what was left for the next one is lost."""
        if left:
            worker.lost += len(left)
            worker.counters.drop("error", len(left))
            log.error("module %r: %d messages that its process had not handled are lost", kept.shown, len(left))
        if kept.supervisor.gave_up:
            worker.counters.state("given up")
            log.error("module %r failed %d times; it is not started again", kept.shown, kept.supervisor.failures)

    def _told(self, kept: Kept, step: str, error: BaseException) -> None:
        first = kept.supervisor.failures == 0
        log.error("module %r failed in %s: %s", kept.shown, step, error, exc_info=error if first else None)
        self._tell(Event.MODULE_FAILED, (kept.shown, step, error))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._once()
            except Exception:  # a module that went in the midst of it: the others are still looked after
                log.exception("looking after the modules failed; it goes on")

    def _once(self) -> None:
        try:
            report = self._reports.get(timeout=LOOK_S)
        except queue.Empty:
            self._look()
            return
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
            if kept.module is module:  # its own worker may have been first
                self._restart(kept, worker, "process", error)

    def _look(self) -> None:
        now = time.monotonic()
        self._broker.count_links()
        for kept in list(self._kept.values()):
            try:
                worker = self._broker.worker_of(kept.module)
            except BrokerError:
                continue
            seconds = worker.seconds_in_receive(now)
            is_stuck = kept.stuck_after_s is not None and seconds > kept.stuck_after_s
            if is_stuck and not worker.stuck:
                worker.counters.state("stuck in receive")
                log.warning("module %r has been in receive for %.1f s", kept.shown, seconds)
                self._tell(Event.MODULE_STUCK, (kept.shown, seconds))
            elif worker.stuck and not is_stuck:
                worker.counters.state("")
            worker.stuck = is_stuck


def finish(module: Any, step: str) -> None:
    """Call an optional last step of a module; a failure is logged and goes no further."""
    try:
        getattr(module, step, lambda: None)()
    except Exception:
        log.exception("module %r: %s raised", getattr(module, "name", module), step)
