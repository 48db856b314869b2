"""The keeper: looks after a gateway's modules. Failures are counted and told; the restart policy is carried out; a
module that stays too long in a call is told of, and killed and started again where it has a process of its own.

A failure is handled on the module's own worker, which makes every call to the module, so that a restart overlaps none.
A failure that is noticed elsewhere (a source's thread ended, a process died) is an order for that worker. The keeper's
thread begins with the first module and looks four times a second for modules that are stuck.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.broker import ModuleBroker
from penstock.gateway.configuration import ModuleEntry
from penstock.gateway.errors import BrokerError, EndedByFailure, MessageFailed, StepFailed, reason_of
from penstock.gateway.events import Event
from penstock.gateway.loaders import Recipe
from penstock.gateway.supervision import Policy, Restart, Supervisor
from penstock.gateway.worker import Life, Worker
from penstock.throttle import Throttle

LOOK_S = 0.25
#: For modules with a thread or process of their own, where nobody chose: what died is made anew, for ever.
UNLESS_CHOSEN = Restart(Policy.ON_FAILURE, limit=None)
log = logging.getLogger("penstock.gateway")
Left = tuple[GatewayMessage, int]  # with the times it was tried


@dataclass
class Kept:
    """A module under care."""

    recipe: Recipe
    restart: Restart | None  # None: what is usual for its kind
    stuck_after_s: float | None
    entry: ModuleEntry | None = None
    module: Any = None
    started: bool = False
    removing: bool = False
    left: list[Left] | None = None  # what a process has not handled, for the next one
    supervisor: Supervisor = field(init=False)
    throttle: Throttle = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.restart or Restart())
        self.throttle = Throttle(log)

    def take(self, module: Any) -> None:
        """It was made; where nobody chose a policy, a module with a thread or a process of its own gets one."""
        self.module = module
        if self.restart is None and getattr(module, "restarts", False):
            self.supervisor.restart = UNLESS_CHOSEN

    @property
    def keeps_state(self) -> bool:
        """Whether a failure in ``receive`` costs the message alone and no restart: nobody chose one."""
        return self.restart is None

    @property
    def name(self) -> str:
        """The module's name; of an endpoint, its whole address."""
        return self.recipe.name

    @property
    def shown(self) -> str:
        """The name as it may be told."""
        return self.recipe.shown

    @property
    def where(self) -> tuple[str, str | None]:
        """Its path and its file, where it comes from one."""
        return self.entry.where if self.entry is not None else ("", None)


class Keeper:
    """Carries out what the policies say."""

    def __init__(self, broker: ModuleBroker, tell: Callable[[Event, Any], None]) -> None:
        self._broker = broker
        self._tell = tell
        self._kept: dict[int, Kept] = {}  # by the module's id
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, kept: Kept) -> None:
        """Look after ``kept`` from now on; its module is attached."""
        self._watch(kept)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gateway keeper", daemon=True)
            self._thread.start()

    def forget(self, kept: Kept) -> None:
        """It goes on by itself."""
        self._kept.pop(id(kept.module), None)

    def close(self) -> None:
        """No more looks."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(LOOK_S)

    # ---- failures, on the worker's thread

    def failed(self, worker: Worker, step: str, error: BaseException) -> None:
        """A step of a module failed: tell it, and make the module anew where its policy says so."""
        kept = self._kept.get(id(worker.module))
        if kept is None:
            return
        if step == "receive" and getattr(worker.module, "dead", None) is not None:
            step = "process"  # that is why it could not be handed on
        if step in ("receive", "start", "run", "process") and not (step == "receive" and kept.keeps_state):
            self._restart(kept, worker, step, error)
        else:
            self._told(kept, step, error)
            kept.supervisor.failures += 1

    def start(self, worker: Worker) -> None:
        """Start a module, on its worker; raises what ``start`` raises, and sees to it afterwards."""
        try:
            worker._begin()
        except BaseException as error:
            self._start_failed(worker, error)
            raise

    def start_again(self, worker: Worker) -> None:
        """Make a module anew whose start failed, and start it; raises what it raises, and sees to it afterwards."""
        kept = self._kept.get(id(worker.module))
        if kept is not None and worker.life is Life.FAILED:
            self._destroy(kept, worker)
            try:
                self._anew(kept, worker, [])
            except BaseException as error:
                self._start_failed(worker, error)
                raise

    def _start_failed(self, worker: Worker, error: BaseException) -> None:
        """Counted, told, and tried again by the policy, when whoever waits for the start has got its error."""
        worker.count_failure()
        worker.post(lambda: self.failed(worker, "start", error))

    def _watch(self, kept: Kept) -> None:
        module = kept.module
        self._kept[id(module)] = kept
        with contextlib.suppress(AttributeError):  # a class with slots of its own
            module.on_failure = functools.partial(self._failed_outside, kept, module)

    def _failed_outside(self, kept: Kept, module: Any, error: BaseException) -> bool:
        """A thread or a process of the module failed; called on a thread of the module's. False: nobody counts it,
        the module is no part of the gateway any more."""
        try:
            worker = self._broker.worker_of(module)
        except BrokerError:
            return False
        if isinstance(error, MessageFailed):
            if error.lost:
                worker.lose_stored(error.lost)
            worker.give_back(error.given_back, error)
            self._note(kept, worker, "buffer" if error.lost else "receive", error)
        elif isinstance(error, StepFailed) and error.step != "start":
            self._note(kept, worker, error.step, error)
        else:
            step = "process" if hasattr(module, "unhandled") else "run"
            step = error.step if isinstance(error, StepFailed) else step
            worker.post(lambda: self._handle_outside(kept, worker, module, step, error))
        return True

    def _note(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> None:
        """Counted and told; nothing is made anew."""
        worker.count_failure()
        self._told(kept, step, error)
        kept.supervisor.failures += 1

    def _handle_outside(self, kept: Kept, worker: Worker, module: Any, step: str, error: BaseException) -> None:
        # Else its own worker was first and counted it, or it was to end.
        if kept.module is module and worker.life in (Life.MADE, Life.RUNNING):
            if not isinstance(error, EndedByFailure):
                worker.count_failure()
            self.failed(worker, step, error)

    def _restart(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> None:
        """Tell, wait, make anew; as often as the policy says."""
        worker.busy_since = None  # waiting for a restart is not being stuck
        module = kept.module
        worker.owed = len(module.unhandled()) if hasattr(module, "unhandled") and not module.accounted else 0
        try:
            self._restart_by_policy(kept, worker, step, error)
        finally:
            worker.owed = 0

    def _restart_by_policy(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> None:
        # What a dead process had in hand is lost at once, not when the next one is made.
        kept.left = self._unhandled(kept, worker) if getattr(kept.module, "dead", None) is not None else None
        while True:
            if isinstance(error, EndedByFailure):
                kept.supervisor.failures -= 1  # it was noted and told when it happened
            else:
                self._told(kept, step, error)
            delay_s = kept.supervisor.failed(time.monotonic())
            ending = delay_s is None or worker.wait_to_restart(delay_s)
            if kept.module is None:
                return  # it was replaced meanwhile
            if ending:
                self._left(kept, worker, step, kept.left)
                return
            if not worker.destroyed:
                self._destroy(kept, worker)
                self._note_left(kept, worker)
            try:
                if self._anew(kept, worker, kept.left or []):
                    self._tell(Event.MODULE_RESTARTED, kept.shown)
                return
            except Exception as failure:
                step, error = "restart", failure

    def _destroy(self, kept: Kept, worker: Worker) -> None:
        worker.destroyed = True
        worker.doing, worker.busy_since = "destroy", time.monotonic()
        try:
            if hasattr(kept.module, "destroy"):
                worker.call(kept.module.destroy)
        except Exception as error:
            worker.failed += 1
            self._told(kept, "destroy", error)
        finally:
            worker.busy_since = None

    def _anew(self, kept: Kept, worker: Worker, left: list[Left]) -> bool:
        """A new module in the place of the old one: same name, id, queue, links. False when that has been removed."""
        new = kept.recipe.make(self._broker)
        self._kept.pop(id(kept.module), None)
        try:
            self._broker.replace_module(kept.module, new)
        except BrokerError:
            if hasattr(new, "destroy"):
                worker.call(new.destroy)
            return False
        kept.module = new
        self._watch(kept)
        kept.supervisor.restarted()
        worker.life = Life.MADE
        if kept.started:
            worker._begin()
        if left:
            worker.counters.add("redelivered", len(left))
            new.resend(left)
        return True

    # ---- replacement by another module

    def halt(self, kept: Kept, worker: Worker) -> None:
        """Stop and destroy a module, on its worker, which then waits for the next one (``put``) and its start."""
        worker.between = worker.life in (Life.RUNNING, Life.FAILED)
        if not worker.destroyed:
            if hasattr(kept.module, "leave_rest"):
                kept.module.leave_rest()
            if worker.between:
                for step in ("stop", "end"):
                    worker._step(step)
            self._destroy(kept, worker)
            self._note_left(kept, worker)
            worker.owed = len(kept.left or ())

    def put(self, old: Kept, new: Kept, worker: Worker) -> None:
        """Make the module of ``new`` and put it in the place of that of ``old``, which has been halted."""
        module = new.recipe.make(self._broker)
        self._broker.replace_module(old.module, module)
        self.forget(old)
        old.module = None
        new.take(module)
        self._watch(new)
        worker.life = Life.MADE
        worker.counters.state("")
        worker.take_over(old.left or [])
        worker.owed = 0

    def _note_left(self, kept: Kept, worker: Worker) -> None:
        """Note what the module's process leaves. One that was sent nothing does not know; the one before it does."""
        module = kept.module
        if kept.left is None or (getattr(module, "sent", 0) > 0 and not module.accounted):
            kept.left = self._unhandled(kept, worker)

    def _unhandled(self, kept: Kept, worker: Worker) -> list[Left]:
        """What a process that ended leaves; the message in its hand is lost, and counted."""
        module = kept.module
        if not hasattr(module, "unhandled"):
            return []
        left: list[Left] = module.unhandled()
        module.accounted = True
        lost = module.sent - module.handled - len(left)
        if lost:
            self._lost(worker, lost)
            log.error("module %r: %d message was in hand when its process ended; it is lost", kept.shown, lost)
        return left

    def _lost(self, worker: Worker, count: int) -> None:
        """Count what left the queue and was not handled in its process."""
        worker.lose_taken(count)

    def _left(self, kept: Kept, worker: Worker, step: str, left: list[Left] | None) -> None:
        """It is not made anew. What was left for the next one is lost, and so is what comes, if it cannot receive."""
        if step not in {"receive", "run"}:
            module = kept.module
            # The last one that was sent something knows what is left; one that was sent nothing yet does not.
            if hasattr(module, "unhandled") and not module.accounted and (left is None or module.sent > 0):
                module.kill()
                left = self._unhandled(kept, worker)
            if not worker.over:
                worker.life = Life.FAILED
                worker.counters.state("failed")
        if left:
            self._lost(worker, len(left))
            log.error("module %r: %d messages that its process had not handled are lost", kept.shown, len(left))
        if kept.supervisor.gave_up:
            worker.counters.state("given up")
            log.error("module %r failed %d times; it is not started again", kept.shown, kept.supervisor.failures)

    def _told(self, kept: Kept, step: str, error: BaseException) -> None:
        if kept.throttle.error("module %r failed in %s: %s", kept.shown, step, reason_of(error)):
            log.debug("module %r: where it failed", kept.shown, exc_info=error)
        self._tell(Event.MODULE_FAILED, (kept.shown, step, error))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
            except Exception:  # a module that went in the midst of it: the others are still looked after
                log.exception("looking after the modules failed; it goes on")

    def _look(self) -> None:
        now = time.monotonic()
        self._broker.count_links()
        for kept in list(self._kept.values()):
            try:
                worker = self._broker.worker_of(kept.module)
            except BrokerError:
                continue
            with contextlib.suppress(ValueError):  # it is gone, and its counters with it
                worker.count()
            step, seconds = worker.doing, worker.seconds_in_step(now)
            if hasattr(kept.module, "seconds_in_hand") and step != "start":
                step, seconds = "receive", kept.module.seconds_in_hand(now)
                if (still_s := kept.module.seconds_still(now)) > seconds:
                    step, seconds = "no call, and its process stands still while messages wait,", still_s
            is_stuck = kept.stuck_after_s is not None and seconds > kept.stuck_after_s
            if is_stuck and not worker.stuck:
                worker.counters.state(f"stuck in {step}".rstrip(","))
                log.warning("module %r has been in %s for %.1f s", kept.shown, step, seconds)
                self._tell(Event.MODULE_STUCK, (kept.shown, seconds))
                if hasattr(kept.module, "seconds_in_hand"):
                    log.error("module %r: its process is killed", kept.shown)
                    kept.module.kill()
            elif worker.stuck and not is_stuck:
                worker.counters.state("")
            worker.stuck = is_stuck
