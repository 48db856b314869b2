"""The keeper: supervises a gateway's modules. It counts and reports failures and carries out the restart policy. A
module that stays too long in a call is reported as stuck; if it has its own process, that is killed and started again.
A failure is handled on the module's worker thread, which makes every call to the module, so that a restart never
overlaps a call. A failure that is noticed elsewhere (a source's thread ended, a process died) becomes an order for that
worker. The keeper's thread starts with the first module and checks four times a second for stuck modules.
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
from penstock.gateway.errors import BrokerError, EndedByFailure, MessageFailed, ModuleError, StepFailed, reason_of
from penstock.gateway.events import Event
from penstock.gateway.loaders import Recipe
from penstock.gateway.supervision import Policy, Restart, Supervisor
from penstock.gateway.worker import Life, Worker
from penstock.throttle import Throttle

LOOK_S = 0.25
#: The default policy of modules with their own thread or process: restart after each failure, without a limit.
UNLESS_CHOSEN = Restart(Policy.ON_FAILURE, limit=None)
log = logging.getLogger("penstock.gateway")
Left = tuple[GatewayMessage, int]  # a message and how often it was tried


@dataclass
class Kept:
    """A module under care."""

    recipe: Recipe
    restart: Restart | None  # None: the default for its kind
    stuck_after_s: float | None
    entry: ModuleEntry | None = None
    module: Any = None
    started: bool = False
    removing: bool = False
    left: list[Left] | None = None  # messages that a process has not handled, for the next process
    supervisor: Supervisor = field(init=False)
    throttle: Throttle = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.restart or Restart())
        self.throttle = Throttle(log)

    def take(self, module: Any) -> None:
        """Set the new module. Without a chosen policy, a module with its own thread or process gets the default one."""
        self.module = module
        if self.restart is None and getattr(module, "restarts", False):
            self.supervisor.restart = UNLESS_CHOSEN

    @property
    def keeps_state(self) -> bool:
        """Whether a failure in ``receive`` costs only the message and causes no restart, because no policy was
        chosen.
        """
        return self.restart is None

    @property
    def name(self) -> str:
        """The module's name; of an endpoint, its whole address."""
        return self.recipe.name

    @property
    def shown(self) -> str:
        """The name without secrets."""
        return self.recipe.shown

    @property
    def where(self) -> tuple[str, str | None]:
        """Its path in the configuration, and the file, if it comes from one."""
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
        """Supervise ``kept`` from now on; its module is attached."""
        self._watch(kept)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gateway keeper", daemon=True)
            self._thread.start()

    def forget(self, kept: Kept) -> None:
        """Stop supervising it."""
        self._kept.pop(id(kept.module), None)

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(LOOK_S)

    # ---- failures, on the worker's thread

    def failed(self, worker: Worker, step: str, error: BaseException) -> None:
        """A step of a module failed: report it, and restart the module if its policy says so."""
        kept = self._kept.get(id(worker.module))
        if kept is None:
            worker.count_failure()
            return
        if step == "receive" and getattr(worker.module, "dead", None) is not None:
            step = "process"  # the process died, which is why the message could not be passed to it
        if step in ("receive", "start", "run", "process") and not (step == "receive" and kept.keeps_state):
            self._restart(kept, worker, step, error)
        else:
            self._note(kept, worker, step, error)

    def start(self, worker: Worker) -> None:
        """Start a module, on its worker's thread; raises what ``start`` raises, and handles the failure afterwards."""
        try:
            worker._begin()
        except BaseException as error:
            self._start_failed(worker, error)
            raise

    def start_again(self, worker: Worker) -> None:
        """Create a module again whose start failed, and start it; raises what that raises, and handles the failure
        afterwards.
        """
        kept = self._kept.get(id(worker.module))
        if kept is not None and worker.life is Life.FAILED:
            self._destroy(kept, worker)
            try:
                self._recreate(kept, worker, [])
            except BaseException as error:
                self._start_failed(worker, error)
                raise

    def _start_failed(self, worker: Worker, error: BaseException) -> None:
        """Report a failed start, and restart by the policy after the thread that waits for the start has its error."""
        kept = self._kept.get(id(worker.module))
        if kept is not None:
            self._log_failure(kept, worker, "start", error)
            worker.post(lambda: self._restart(kept, worker, "start", error, logged=True))

    def _watch(self, kept: Kept) -> None:
        module = kept.module
        self._kept[id(module)] = kept
        with contextlib.suppress(AttributeError):  # its class may have ``__slots__``
            module.on_failure = functools.partial(self._failed_outside, kept, module)

    def _failed_outside(self, kept: Kept, module: Any, error: BaseException) -> bool:
        """A thread or process of the module failed; called on a thread of the module. False: not counted, because the
        module is no longer part of the gateway.
        """
        try:
            worker = self._broker.worker_of(module)
        except BrokerError:
            return False
        if isinstance(error, MessageFailed):
            self._note(kept, worker, "buffer" if error.lost else "receive", error)
            if error.lost:
                worker.lose_stored(error.lost)
            worker.give_back(error.given_back, error)
        elif isinstance(error, StepFailed) and error.step != "start":
            self._note(kept, worker, error.step, error)
        else:
            step = "process" if hasattr(module, "unhandled") else "run"
            step = error.step if isinstance(error, StepFailed) else step
            worker.post(lambda: self._handle_outside(kept, worker, module, step, error))
        return True

    def _note(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> None:
        """Report and count a failure, without a restart."""
        self._log_failure(kept, worker, step, error)
        kept.supervisor.failures += 1
        self._tell(Event.MODULE_FAILED, (kept.shown, step, error))

    def _handle_outside(self, kept: Kept, worker: Worker, module: Any, step: str, error: BaseException) -> None:
        # Otherwise its worker has noticed and counted it before, or the module was ending anyway.
        if kept.module is module and worker.life in (Life.MADE, Life.RUNNING):
            self.failed(worker, step, error)

    def _restart(self, kept: Kept, worker: Worker, step: str, error: BaseException, logged: bool = False) -> None:
        """Report, wait, create again; as often as the policy says."""
        worker.busy_since = None  # waiting for a restart is not being stuck
        module = kept.module
        worker.owed = len(module.unhandled()) if hasattr(module, "unhandled") and not module.accounted else 0
        try:
            self._restart_by_policy(kept, worker, step, error, logged)
        finally:
            worker.owed = 0

    def _restart_by_policy(self, kept: Kept, worker: Worker, step: str, error: BaseException, logged: bool) -> None:
        # That try has failed at once for what a dead process had in hand, not only when the next process is started.
        kept.left = self._unhandled(kept, worker) if getattr(kept.module, "dead", None) is not None else None
        while True:
            known = isinstance(error, EndedByFailure)
            if known:
                kept.supervisor.failures -= 1  # it was counted and reported when it happened
            elif not logged:
                self._log_failure(kept, worker, step, error)
            logged = False
            delay_s = kept.supervisor.failed(time.monotonic())
            if not known:
                self._tell(Event.MODULE_FAILED, (kept.shown, step, error))
            ending = delay_s is None or worker.wait_to_restart(delay_s)
            if kept.module is None:
                return  # it was replaced meanwhile
            if ending:
                self._end_without_restart(kept, worker, step, error, kept.left)
                return
            if not worker.destroyed:
                self._destroy(kept, worker)
                self._note_left(kept, worker)
            try:
                if self._recreate(kept, worker, kept.left or []):
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
            self._log_failure(kept, worker, "destroy", error)
            self._tell(Event.MODULE_FAILED, (kept.shown, "destroy", error))
        finally:
            worker.busy_since = None

    def _recreate(self, kept: Kept, worker: Worker, left: list[Left]) -> bool:
        """Create a new module in place of the old one: same name, id, queue, links. False if the old one was removed
        meanwhile.
        """
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
        worker.run_failed = False
        if kept.started:
            worker._begin()
        if left:
            worker.counters.add("redelivered", len(left))
            new.resend(left)
            worker.resent += len(left)
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
        """Create the module of ``new`` in place of that of ``old``, which was halted."""
        module = new.recipe.make(self._broker)
        self._broker.replace_module(old.module, module)
        self.forget(old)
        old.module = None
        new.take(module)
        self._watch(new)
        worker.life = Life.MADE
        worker.run_failed = False
        worker.counters.state("")
        worker.take_over(old.left or [])
        worker.owed = 0

    def _note_left(self, kept: Kept, worker: Worker) -> None:
        """Note the unhandled messages of the module's process. A process that was sent nothing has none; then those of
        the process before it count.
        """
        module = kept.module
        if kept.left is None or (getattr(module, "sent", 0) > 0 and not module.accounted):
            kept.left = self._unhandled(kept, worker)

    def _unhandled(self, kept: Kept, worker: Worker) -> list[Left]:
        """The unhandled messages of a process that ended. For those that it had in hand that try has failed."""
        module = kept.module
        if not hasattr(module, "unhandled"):
            return []
        left: list[Left] = module.unhandled()
        worker.fail_in_hand(module.in_hand(), module.dead or ModuleError("its process was ended"))
        module.accounted = True
        return left

    def _count_lost(self, worker: Worker, count: int) -> None:
        """Count messages that left the queue and were not handled by the process."""
        worker.lose_taken(count)

    def _end_without_restart(
        self, kept: Kept, worker: Worker, step: str, error: BaseException, left: list[Left] | None
    ) -> None:
        """It is not restarted. What was left for the next process is lost; so are later messages, if it cannot
        receive.
        """
        if step not in {"receive", "run"}:
            module = kept.module
            # The last process that was sent something knows what is left; one that was sent nothing yet does not.
            if hasattr(module, "unhandled") and not module.accounted and (left is None or module.sent > 0):
                module.give_up(error)
                left = self._unhandled(kept, worker)
        if left:
            log.error("module %r: %d messages that its process had not handled are lost", kept.shown, len(left))
            self._count_lost(worker, len(left))
        if kept.supervisor.gave_up:
            log.error("module %r failed %d times; it is not started again", kept.shown, kept.supervisor.failures)
        # after the lines: whoever sees the state finds the reason
        worker.run_failed = worker.run_failed or step == "run"
        if step not in {"receive", "run"} and not worker.over:
            worker.life = Life.FAILED
            worker.counters.state("failed")
        if kept.supervisor.gave_up:
            worker.counters.state("given up")

    def _log_failure(self, kept: Kept, worker: Worker, step: str, error: BaseException) -> None:
        """Log it, then count it; its event is told last: whoever sees the one finds what came before."""
        if kept.throttle.error("module %r failed in %s: %s", kept.shown, step, reason_of(error)):
            log.debug("module %r: where it failed", kept.shown, exc_info=error)
        if not isinstance(error, EndedByFailure):  # it was counted when it happened
            worker.count_failure()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._check_modules()
            except Exception:  # a module may be removed meanwhile; the others must still be checked
                log.exception("supervising the modules failed; trying again")

    def _check_modules(self) -> None:
        now = time.monotonic()
        self._broker.count_links()
        for kept in list(self._kept.values()):
            try:
                worker = self._broker.worker_of(kept.module)
            except BrokerError:
                continue
            with contextlib.suppress(ValueError):  # it was removed, and its counters closed
                worker.count()
            step, seconds = worker.doing, worker.seconds_in_step(now)
            if hasattr(kept.module, "seconds_in_hand") and step != "start":
                step, seconds = "receive", kept.module.seconds_in_hand(now)
                if (still_s := kept.module.seconds_still(now)) > seconds:
                    step, seconds = "no call, and its process stands still while messages wait,", still_s
            is_stuck = kept.stuck_after_s is not None and seconds > kept.stuck_after_s
            if is_stuck and not worker.stuck:
                log.warning("module %r has been in %s for %.1f s", kept.shown, step, seconds)
                worker.counters.state(f"stuck in {step}".rstrip(","))
                worker.stuck = True  # before it is told
                self._tell(Event.MODULE_STUCK, (kept.shown, seconds))
                if hasattr(kept.module, "seconds_in_hand"):
                    log.error("module %r: its process is killed", kept.shown)
                    kept.module.kill()
            elif worker.stuck and not is_stuck:
                worker.counters.state("")
                worker.stuck = False
