"""The broker of modules: who is linked to whom, and a worker for each module. Usable without a gateway.

A source module is an id of a bus of the broker's own, a link is a subscription to that id, a module's queue is a queue
subscriber. ``publish`` hands one message by reference to every sink and takes no lock; it waits only while a sink's
queue is full (unless that queue drops), which is how back-pressure reaches the source. Inside ``receive`` it waits for
a sink on its own cycle no longer than ``cycle_timeout_s``: such a wait could never end.

Every method may be called by any thread, ``receive`` included. The lock guards the tables only; nothing waits for a
module while it is held.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self

from penstock._core.gateway import GatewayMessage, Port, Router
from penstock.address import without_secrets
from penstock.bus import Bus, QueueSubscriber
from penstock.channel import Ledger
from penstock.errors import InvalidArgument
from penstock.gateway.bounds import LinkFull
from penstock.gateway.configuration import QueueOptions
from penstock.gateway.cycles import Cycles
from penstock.gateway.errors import AddLinkError, BrokerError, DrainError, RemoveLinkError, reason_of
from penstock.gateway.filters import Filter, Predicate, any_of
from penstock.gateway.flow import MAX_FLOWS, Flow, Uncounted
from penstock.gateway.links import DEFAULT, Delivery, LinkOptions
from penstock.gateway.losses import note_loss, note_parting
from penstock.gateway.marks import Mark
from penstock.gateway.module import PublishedValues
from penstock.gateway.place import Place
from penstock.gateway.worker import DROPPED, ERROR, Deadline, Joint, Life, OnFailure, Order, Output, Worker

MAX_MODULES = 65535
JOIN_TIMEOUT_S = 10.0
END_S = 0.5  # the shortest time-out of an orderly end
RESERVE_S = 5.0  # the most of a time-out that is kept back for them
POLL_S = 0.002
KEPT_OUT = ("filtered", "overflow")  # reasons for drops that have counts of their own; all others count as lost
log = logging.getLogger("penstock.gateway")
_live: weakref.WeakSet[ModuleBroker] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A snapshot of one module at work."""

    name: str
    handle: Any = field(repr=False)
    kind: str
    source_id: int
    thread: str
    waiting: int
    depth: int
    handled: int
    failed: int
    published: int
    sinks: tuple[str, ...]
    sources: tuple[str, ...]
    seconds_in_receive: float
    ledger: Ledger
    stored: int = 0  # not handled at the end; their durable source keeps them
    # being handled by a process that died, given up, dropped at the end, or removed from a buffer by its bounds
    lost: int = 0
    backlog: int = 0  # of a buffer: messages on disk that were not handled yet


class ModuleQueue(QueueSubscriber):
    """A module's queue."""

    def _tell_stuck(self, seconds: float) -> None:
        """Called by the native core when a source has waited this long for room here."""
        if self._may_tell_stuck():
            log.warning(
                "module %r: its queue of %d messages has been full for %g s, and its sources wait until there is room; "
                "queue.timeout_s or another queue.overflow ends such waits, a buffer in its link stores what comes",
                self.name.partition("/")[2],
                self.depth,
                seconds,
            )


class ModuleBroker(Router):
    """Routes messages between modules; made with one reference.

    ``publish(source, message)``, which is native, sends a message from an attached module to every sink linked to it.
    The caller keeps its reference and may publish the message again. ``TimeoutError`` names the sink that stayed full.
    """

    def __init__(self, *, cycle_timeout_s: float = 1.0) -> None:
        self.id = uuid.uuid4().hex
        self.cycle_timeout_s = Place(cycle_timeout_s, "cycle_timeout_s").seconds()
        self._bus = Bus(f"gateway-{self.id[:12]}", mode="direct")
        self._lock = threading.RLock()
        self._workers: dict[int, Worker] = {}
        self._held_ids: weakref.WeakValueDictionary[int, Port] = weakref.WeakValueDictionary()
        self._next_id = itertools.cycle(range(1, MAX_MODULES + 1))
        self._references = 1
        self._flows: dict[tuple[Output, Worker], Flow] = {}
        self._uncounted = Uncounted()
        self._cycles: Cycles[Worker] = Cycles()
        self._deferring = 0  # how many blocks of ``many_changes`` are open
        #: Called when a full sink ended a publish, or a link's predicate raised: (source's name, error).
        self.on_refused: Callable[[str, BaseException], object] | None = None
        self.on_filter_error: Callable[[str, BaseException], object] | None = None
        #: Called when a module did not return from a step: (its name, the step).
        self.on_abandoned: Callable[[str, str], object] | None = None
        _live.add(self)

    def __repr__(self) -> str:
        return f"<ModuleBroker {self.id[:12]}, {len(self._workers)} modules, {self._references} references>"

    # ---- the handle

    def inc_ref(self) -> Self:
        """Add a reference; returns the broker itself."""
        with self._lock:
            self._check()
            self._references += 1
        return self

    def dec_ref(self) -> None:
        """Drop a reference; the last one stops every worker and frees everything, whether modules are attached or
        not.
        """
        with self._lock:
            if self._references == 0:
                return
            self._references -= 1
            if self._references:
                return
        self._end(JOIN_TIMEOUT_S)

    def destroy(self) -> None:
        """The same as ``dec_ref``."""
        self.dec_ref()

    @property
    def references(self) -> int:
        """How many references there are; 0: destroyed."""
        return self._references

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dec_ref()

    # ---- messages

    def _timed_out(self, port: Port, error: BaseException) -> None:
        """Called natively when a publish ended in a time-out."""
        if self.on_refused is not None:
            self.on_refused(port.name, error)

    def _refuse(self, source: Any, message: Any) -> NoReturn:
        """Called natively when the source is not attached."""
        self._check()
        if source is None or message is None:
            raise InvalidArgument("publish takes a module and a message, not None")
        worker = self._workers.get(id(source))
        if worker is None:
            name = getattr(source, "name", "") or type(source).__name__
            raise BrokerError(
                f"module {name!r} is not attached to this broker: it publishes before create has returned or too late"
            )
        raise BrokerError(f"module {worker.name!r} was stopped; what it publishes now is refused")

    def _refuse_publishes(self, workers: Sequence[Worker]) -> None:
        """Refuse from now on what these modules publish: they were stopped, and their sinks will be next."""
        with self._lock:
            for worker in workers:
                self._ports.pop(id(worker.module), None)

    # ---- modules

    def add_module(
        self,
        module: Any,
        *,
        name: str | None = None,
        queue: QueueOptions | None = None,
        on_failure: OnFailure | None = None,
        started: bool = True,
    ) -> ModuleInfo:
        """Attach ``module`` (anything with a ``receive``) with a queue and a worker of its own. With ``started=False``
        it receives nothing until its worker gets the order to begin.
        """
        if module is None or not callable(getattr(module, "receive", None)):
            raise InvalidArgument(f"a module has a receive method, {module!r} has none")
        queue = queue or QueueOptions()
        with self._lock:
            self._check()
            if id(module) in self._workers:
                raise BrokerError(f"{module!r} is attached to this broker already")
            name = name or getattr(module, "name", "") or f"{type(module).__name__}-{len(self._workers) + 1}"
            name = without_secrets(name)  # the name of an endpoint is an address, which may contain a token
            port = self._port(name)
            port.on_error = functools.partial(self._filter_failed, name)
            reader = ModuleQueue(
                name=f"{self.id[:12]}/{name}",
                depth=queue.depth,
                overflow=queue.overflow,
                timeout=queue.timeout_s,
                priority=queue.priority,
                max_public_id=MAX_MODULES,
            )
            self._bus.add(reader)
            worker = Worker(module, name, port, reader, on_failure or log_failure)
            worker.timeout_s = math.inf if queue.timeout_s is None else queue.timeout_s
            if started:
                worker.life = Life.RUNNING
            try:
                worker.start()
            except RuntimeError as error:  # the system allows no more threads
                reader.close()
                raise BrokerError(f"module {name!r} got no thread: {error}") from error
            self._workers[id(module)] = worker
            self._ports[id(module)] = port
        return self.info_of(worker)

    def remove_module(
        self,
        module: Any,
        *,
        drain: bool = True,
        timeout: float | None = 10.0,
        steps: bool = False,
        done: Callable[[Worker], object] | None = None,
    ) -> bool:
        """Detach ``module``: nothing new reaches it; what is queued is handled first (``drain``) or dropped and
        counted. Its links are removed with it. If draining takes longer than ``timeout``, ``DrainError`` is raised and
        nothing has changed. A module that removes itself leaves when its ``receive`` has returned.

        With ``steps`` the module's ``stop`` and ``destroy`` are called too; ``done`` is called with the worker when the
        module is detached. All of this takes at most ``timeout``: a module that has not returned by then is abandoned,
        and the result is False.
        """
        worker, incoming = self._begin_removal(module)
        if worker.mine:  # called inside its own `receive`: waiting for itself here would never end
            worker.after = lambda: self._leave(worker, steps, done)
            if not drain:
                worker.cut()
            return True
        ending, taken = Ending.within(timeout), worker.taken
        if drain and not _in_time(_draining((worker,)), ending.drained_by):
            # hung: it is still in the call that it was in when the removal began
            left, hung = worker.waiting, worker.busy_since is not None and worker.taken == taken
            self._restore(worker, incoming)
            told = DrainError(
                f"module {worker.name!r} still had {left} messages after {timeout} s; nothing was changed. "
                "Give it more time (timeout=), or drop them (drain=False)"
            )
            told.hung = hung
            raise told
        if drain and steps:
            self._emptied((worker,), ending.drained_by)
        if not drain:
            worker.cut()
            if hasattr(worker.module, "leave_rest"):  # its process has received more than it has handled
                worker.module.leave_rest()
        if steps:
            self._stop_all((worker,), ending)
        self._detach(worker)
        return self._end_all((worker,), ending.over_by, ("destroy",) if steps else (), done) == []

    def _leave(self, worker: Worker, steps: bool, done: Callable[[Worker], object] | None) -> None:
        """Remove a module that removes itself, on its worker's thread."""
        if steps:
            for step in ("stop", "end"):
                worker._step(step)
        self._detach(worker)
        worker.queue.close()
        if steps:
            worker._step("destroy")
        self._forget(worker)
        if done is not None:
            done(worker)

    def stopping(self, modules: list[Any]) -> Iterator[Order]:
        """Call ``stop`` and ``end`` of these modules; yields what it waits for until all have returned. One that does
        not return may be waiting for others: call ``cut_all``, then ``end_stopping``.
        """
        orders = self._post_stops(self._workers_of(modules))
        for _, *steps in orders:
            for order in steps:
                while not order.done:
                    yield order
        stopped = [worker for worker, *_ in orders]
        self._refuse_publishes(stopped)
        for worker in stopped:
            # only when all are stopped: modules on a cycle may publish while they are being stopped
            worker.queue.close()
            count_unhandled(worker)

    def _post_stops(self, workers: Sequence[Worker]) -> list[tuple[Worker, Order, Order]]:
        """The orders to wait for, without that of the caller's own worker, which runs when the caller has returned."""
        orders = [(worker, worker.stop(), worker.run_step("end")) for worker in workers]
        return [posted for posted in orders if not posted[0].mine]

    def end_stopping(self, modules: list[Any], ending: Ending) -> None:
        """The same for modules whose time is over: the waits of those that do not return are ended by force."""
        self._stop_all(self._workers_of(modules), ending)

    def _stop_all(self, workers: Sequence[Worker], ending: Ending) -> None:
        orders = self._post_stops(workers)
        patience = ending.stopped_by if ending.drained_by.passed else ending.drained_by
        late = [(worker, steps) for worker, *steps in orders if not all(o.wait(patience) for o in steps)]
        force([worker for worker, _ in late])
        soon = ending.over_by.part(0.5)
        for _, steps in late:
            for order in steps:
                order.wait(soon)
        for worker, *_ in orders:
            worker.queue.close()
            count_unhandled(worker)

    def end_all(self, modules: list[Any], deadline: Deadline) -> list[str]:
        """Detach these modules, call their ``destroy`` and end their threads; returns the names of those that did not
        return and were abandoned.
        """
        workers = self._workers_of(modules)
        with self.many_changes():
            for worker in workers:
                self._detach(worker)
        return self._end_all(workers, deadline, ("destroy",))

    def _end_all(
        self,
        workers: Sequence[Worker],
        deadline: Deadline,
        steps: Sequence[str],
        done: Callable[[Worker], object] | None = None,
    ) -> list[str]:
        for worker in workers:
            worker.cut()  # cut all of them first: one may be waiting for another
        orders, hurried = [], False
        for worker in workers:  # one after the other, until one takes too long: then all of them at once
            orders.append((worker, worker.end(*steps, last=functools.partial(self._forget, worker))))
            if not hurried and not worker.mine:
                hurried = not orders[-1][1].wait(deadline.part(0.25))
        abandoned = []
        for worker, order in orders:
            if not worker.mine and order.wait(deadline):
                worker.thread.join(JOIN_TIMEOUT_S)  # its thread has nothing left to do
            elif not worker.mine and self._abandon(worker):
                abandoned.append(worker.name)
                self._forget(worker)
            elif not worker.thread.is_alive():
                self._forget(worker)
            if done is not None:
                done(worker)
        return abandoned

    def cut_all(self, modules: list[Any]) -> None:
        """Let these modules receive nothing more and end all waits for them. Their processes end after the current
        message (``end_stopping`` kills those that do not).
        """
        workers = self._workers_of(modules)
        self._refuse_publishes(workers)  # before the queues are closed, where messages would be lost
        for worker in workers:
            worker.cut()
        for worker in workers:
            if hasattr(worker.module, "leave_rest"):
                worker.module.leave_rest()
            else:
                force((worker,))

    def _abandon(self, worker: Worker) -> bool:
        step = worker.doing
        if not worker.abandon():
            return False
        force((worker,))
        log.error("module %r did not come back from %s; it is abandoned: it gets no further call", worker.name, step)
        if self.on_abandoned is not None:
            self.on_abandoned(worker.name, step)
        return True

    def workers_at_end(self, modules: list[Any]) -> list[Worker]:
        """The workers of these modules, each with ``backed`` set: whether durable sources keep everything it gets."""
        workers = self._workers_of(modules)
        with self._lock:
            bare = [worker for worker in workers if not worker.has_keepers]
            found = set(bare)
            for worker in bare:  # the list grows: a module that passes on messages which nobody keeps adds its sinks
                if not worker.is_durable:
                    reached = {sink for output in (worker.output, *worker.outputs.values()) for sink in output.sinks}
                    bare += reached - found
                    found |= reached
            for worker in workers:
                worker.backed = worker not in found
        return workers

    def _workers_of(self, modules: list[Any]) -> list[Worker]:
        with self._lock:
            return [self._workers[id(module)] for module in modules if id(module) in self._workers]

    def replace_module(self, old: Any, new: Any) -> None:
        """Replace ``old`` by ``new``: same name, id, queue and links. Called on its worker's thread, or while that
        thread waits for it.
        """
        with self._lock:
            worker = self._worker(old, BrokerError)
            worker.adopt(new)
            # Keep its place in the table, which is in order of adding.
            self._workers = {id(new) if one is worker else key: one for key, one in self._workers.items()}
            if self._ports.pop(id(old), None) is not None:
                self._ports[id(new)] = worker.port

    def _begin_removal(self, module: Any) -> tuple[Worker, list[tuple[Output, Joint]]]:
        with self._lock:
            worker = self._worker(module, BrokerError)
            if worker.removing:
                raise BrokerError(f"module {worker.name!r} is being removed already")
            worker.removing = True
            incoming = list(worker.sources.items())
            for other, _ in incoming:
                self._unlink(other, worker)
        return worker, incoming

    def _restore(self, worker: Worker, incoming: list[tuple[Output, Joint]]) -> None:
        with self._lock:
            worker.removing = False
            for other, joint in incoming:
                if id(other.worker.module) in self._workers:
                    self._join(other, worker, Joint.of(joint.accepts, joint.options))
                    note_parting(other)  # messages that were published meanwhile have missed this sink

    def _detach(self, worker: Worker) -> None:
        """Remove it from the tables, so that it can no longer publish."""
        with self._lock:
            self._workers.pop(id(worker.module), None)
            self._ports.pop(id(worker.module), None)
            for output in (worker.output, *worker.outputs.values()):
                for sink in list(output.sinks):
                    self._unlink(output, sink)
            for source in list(worker.sources):
                self._unlink(source, worker)

    def _forget(self, worker: Worker) -> None:
        for output in (worker.output, *worker.outputs.values()):
            # messages that users keep hold their port, so the port must not hold anything else
            output.port.rules = output.port.on_error = None
        worker.counters.close()

    # ---- links

    def add_link(
        self,
        source: Any,
        sink: Any,
        link_filter: Filter | tuple[Filter, ...] | None = None,
        options: LinkOptions = DEFAULT,
        *,
        output: str = "",
    ) -> None:
        """From now on what ``source`` publishes (as its ``output``, where one is named) reaches ``sink``. Adding the
        same link again replaces its filter and options. With several filters a message passes if any of them accepts
        it.
        """
        if source is None or sink is None:
            raise InvalidArgument("a link has a source and a sink, not None")
        filters = (link_filter,) if isinstance(link_filter, Filter) else link_filter or ()
        with self._lock:
            self._check()
            worker, other = self._worker(source, AddLinkError), self._worker(sink, AddLinkError)
            # messages of an error link come from other modules
            read = None if output == ERROR else PublishedValues(worker)
            compiled = [one.compile(read=read) for one in filters if not one.empty]
            accepts = any_of(compiled) if compiled and len(compiled) == len(filters) else None
            self._join(self._output(worker, output), other, self._new_joint(worker, accepts, options))

    def _new_joint(self, source: Worker, accepts: Predicate | None, options: LinkOptions) -> Joint:
        return Joint.of(accepts, options.chosen(source.is_durable))

    def _output(self, worker: Worker, name: str) -> Output:
        """A module's output of that name, created if it does not exist."""
        if not name:
            return worker.output
        if name not in worker.outputs:
            port = self._port(f"{worker.name}.{name}")
            port.on_error = functools.partial(self._filter_failed, worker.name)
            port.worker = worker.port.worker
            worker.outputs[name] = Output(worker, port.name, port)
        return worker.outputs[name]

    def publish_output(self, source: Any, output: str, message: GatewayMessage) -> None:
        """Send a message from an attached module to every sink linked to its ``output``. A message to the output
        ``dropped`` counts as filtered by the module, whether or not anybody is linked to it.
        """
        worker = self._worker(source, BrokerError)
        found, key = worker.outputs.get(output), id(source)
        if output == DROPPED:
            worker.count_filtered()
        if found is None:
            return  # nobody is linked to it
        # check right before publishing: a module that is silenced later counts as having published
        if key not in self._ports:
            self._refuse(source, message)
        found.port.publish(message)

    def mark(self, source: Any, since: int = 0, after: Mark | None = None) -> Mark:
        """A mark of what ``source`` has published so far, which says whether it was handled over the at_least_once
        links. ``since`` is ``last_loss()`` from before the publishing: earlier losses do not concern it. ``after`` is
        the mark of what was published before: what that mark waits for, this one need not wait for.
        """
        return Mark(self._worker(source, BrokerError), since, after)

    def linked(self, source: Any) -> bool:
        """Whether anything is linked to ``source``, to any of its outputs."""
        return any(output.sinks for output in self._worker(source, BrokerError).own_outputs)

    def note_refused(self, source: Any) -> None:
        """Note that a sink refused what ``source`` published while handling messages that count as handled: those
        messages must be redelivered.
        """
        note_loss(self._worker(source, BrokerError))

    def remove_link(self, source: Any, sink: Any, *, output: str = "") -> None:
        """What ``source`` publishes from now on no longer reaches ``sink``; what is queued still does."""
        if source is None or sink is None:
            raise InvalidArgument("a link has a source and a sink, not None")
        with self._lock:
            self._check()
            ends = self._worker(source, RemoveLinkError), self._worker(sink, RemoveLinkError)
            found = ends[0].outputs.get(output) if output else ends[0].output
            if found is None or ends[1] not in found.sinks:
                raise RemoveLinkError(f"there is no link {ends[0].name} -> {ends[1].name}")
            self._unlink(found, ends[1])

    @contextmanager
    def many_changes(self) -> Iterator[None]:
        """Inside this block, changes of links are examined together at the end, so that cycles are searched for only
        once.
        """
        with self._lock:
            outermost = not self._deferring
            self._deferring += 1
            if outermost:
                self._cycles.defer()
        try:
            yield
        finally:
            with self._lock:
                self._deferring -= 1
                if not self._deferring:
                    for worker in self._cycles.settle():
                        self._set_rules(worker)

    def _join(self, source: Output, sink: Worker, joint: Joint) -> None:
        old = source.sinks.get(sink)
        if old is not None and old.bound is not None:
            if joint.bound is not None:
                joint.bound = old.bound
                joint.bound.change(joint.options)
            else:
                old.bound.close()
                sink.overflowed_before += old.bound.dropped
        first = not self._linked(source.worker, sink)
        source.sinks[sink] = sink.sources[source] = sink.joints[source.port.id] = joint
        sink.special = sink.special or joint.bound is not None or joint.options.ttl_s is not None
        if (source, sink) not in self._flows:
            if len(self._flows) < MAX_FLOWS:
                self._flows[source, sink] = Flow(source, sink)
                self._uncounted.discard(source, sink)
            else:
                self._uncounted.add(source, sink)
        if first:
            for worker in self._cycles.join(source.worker, sink):
                self._set_rules(worker)
        self._set_rules(source.worker)
        sink.queue.subscribe(source.port.id)

    def _unlink(self, source: Output, sink: Worker) -> None:
        joint = source.sinks.get(sink)
        if joint is None:
            return
        # In this order: a mark that no longer finds the sink then sees that a link was removed, unless its messages
        # were published later.
        if not sink.queue.closed:
            sink.queue.unsubscribe(source.port.id)
        if joint.options.delivery is Delivery.AT_LEAST_ONCE:
            note_parting(source)
        del source.sinks[sink]
        sink.sources.pop(source, None)
        if joint.bound is not None:
            joint.bound.close()
            sink.overflowed_before += joint.bound.dropped
        flow = self._flows.pop((source, sink), None)
        if flow is not None:
            flow.close()
        self._uncounted.discard(source, sink)
        if not self._linked(source.worker, sink):
            for worker in self._cycles.part(source.worker, sink):
                self._set_rules(worker)
        self._set_rules(source.worker)

    def _linked(self, source: Worker, sink: Worker) -> bool:
        return any(sink in output.sinks for output in (source.output, *source.outputs.values()))

    def _set_rules(self, worker: Worker) -> None:
        """Set the rules of a module's ports: the filters of its links, and the sinks that it must not wait for."""
        for output in (worker.output, *worker.outputs.values()):
            rules = {}
            for sink, joint in output.sinks.items():
                cyclic = self._cycles.together(worker, sink)
                predicate = joint.predicate
                if predicate is not None or cyclic:
                    flow = self._flows.get((output, sink))
                    seconds = min(self.cycle_timeout_s, sink.timeout_s) if cyclic else None
                    if joint.bound is not None:
                        joint.bound.limit(sink.name, functools.partial(_patience, worker, sink, seconds))
                    full = LinkFull if joint.bound is not None else None
                    rules[sink.queue] = (predicate, seconds, flow.refused if flow else None, full)
            output.port.rules = rules or None

    # ---- snapshots

    def count_links(self) -> None:
        """Update the counters of every link and buffer, which the monitor reads from another process."""
        with self._lock:
            for flow in self._flows.values():
                flow.count()
            durable = [worker for worker in self._workers.values() if worker.is_durable]
        for worker in durable:
            with contextlib.suppress(ValueError):  # its counters were closed meanwhile
                worker.count_backlog()

    def modules(self) -> list[ModuleInfo]:
        """Every module attached, in order of adding."""
        with self._lock:
            workers = list(self._workers.values())
        return [self.info_of(worker) for worker in workers]

    def info(self, module: Any) -> ModuleInfo:
        """One module's snapshot."""
        return self.info_of(self._worker(module, BrokerError))

    def drain(self, modules: list[Any], timeout: float | None) -> bool:
        """Wait until these modules have no message queued or being handled, also in their own processes."""
        return self._emptied(self._workers_of(modules), Deadline(timeout))

    def worker_of(self, module: Any) -> Worker:
        """The worker of an attached module."""
        return self._worker(module, BrokerError)

    def info_of(self, worker: Worker) -> ModuleInfo:
        """The snapshot of a worker's module, also of one that has ended."""
        with self._lock:
            sources = tuple(dict.fromkeys(source.worker.name for source in worker.sources))
            sinks = tuple(sink.name for sink in worker.sinks)
        # read first: what expires later is then still counted as delivered
        expired, filtered = worker.expired, worker.filtered
        ledger = worker.queue.ledger
        kept = worker.backed and worker.over
        closed = ledger.dropped.get("closed", 0) if worker.backed else 0
        dropped = _by_reason(ledger.dropped, worker.overflowed, closed, filtered)
        return ModuleInfo(
            name=worker.name,
            handle=worker.module,
            kind=type(worker.module).__name__,
            source_id=worker.port.id,
            thread=worker.thread.name,
            waiting=0 if kept else worker.waiting + worker.at_process,
            depth=worker.queue.depth,
            handled=worker.handled,
            failed=worker.failed,
            published=sum(o.port.published for o in worker.own_outputs),
            sinks=sinks,
            sources=sources,
            seconds_in_receive=worker.seconds_in_step(time.monotonic()),
            ledger=replace(
                ledger,
                delivered=ledger.delivered - expired - filtered,
                expired=ledger.expired + expired,
                dropped=dropped,
                in_flight=ledger.in_flight + closed,
            ),
            lost=worker.lost + worker.gone + sum(n for reason, n in dropped.items() if reason not in KEPT_OUT),
            stored=worker.stored + closed + (worker.waiting if kept else 0),
            backlog=worker.backlog,
        )

    # ---- inside

    def _check(self) -> None:
        if self._references == 0:
            raise BrokerError(f"broker {self.id[:12]} has been destroyed")

    def _worker(self, module: Any, error: type[BrokerError]) -> Worker:
        if module is None:
            raise InvalidArgument("a module is wanted, not None")
        self._check()
        worker = self._workers.get(id(module))
        if worker is None:
            raise error(f"{module!r} is not attached to this broker; add_module it first")
        return worker

    def _port(self, name: str) -> Port:
        """A port with an unused id: neither a module has it, nor a message in flight (which keeps its port alive)."""
        for _ in range(MAX_MODULES):
            number = next(self._next_id)
            if number not in self._held_ids:
                port = Port(self._bus, number, name)
                self._held_ids[number] = port
                return port
        raise BrokerError(f"all {MAX_MODULES} source ids are in use")

    def _emptied(self, workers: Sequence[Worker], deadline: Deadline) -> bool:
        return _in_time(emptying(workers), deadline)

    def _end(self, timeout: float) -> None:
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
            self._ports.clear()
            flows, self._flows = self._flows, {}
            self._uncounted.close()
        for flow in flows.values():
            flow.close()
        self._end_all(workers, Deadline(timeout), ())
        self._bus.close()

    def _filter_failed(self, name: str, error: BaseException) -> None:
        if self.on_filter_error is not None:
            self.on_filter_error(name, error)
        else:
            log.error("a filter on a link of module %r raised: %s", name, reason_of(error))
            log.debug("module %r: where its filter failed", name, exc_info=error)


@dataclass(frozen=True, slots=True)
class Ending:
    """The deadlines of an orderly end, for draining, stopping and destroying; whatever is not done by its deadline is
    given up.
    """

    drained_by: Deadline
    stopped_by: Deadline
    over_by: Deadline

    @classmethod
    def within(cls, timeout: float | None) -> Ending:
        """Deadlines within ``timeout`` seconds, of which a part is kept back for stop and destroy; None: no limit."""
        if timeout is None:
            return cls(Deadline(None), Deadline(None), Deadline(None))
        timeout = max(0.0, timeout)  # nan becomes 0 too
        drained_s = timeout - min(timeout / 4, RESERVE_S)
        over_s = max(timeout, END_S)
        return cls(Deadline(drained_s), Deadline((drained_s + over_s) / 2), Deadline(over_s))


def _patience(source: Worker, sink: Worker, on_cycle_s: float | None) -> float:
    """How long the calling thread may wait for room on a link: as long as for room in the sink's queue."""
    return on_cycle_s if on_cycle_s is not None and source.mine else sink.timeout_s


def _by_reason(dropped: Mapping[str, int], overflowed: int, stored: int, filtered: int) -> dict[str, int]:
    """The drops of a module by reason. The port counts a message that a link's bound refused as filtered; here it is
    counted as overflow. Of the messages dropped with the queue, ``stored`` are not lost; ``filtered`` ones were dropped
    by the module itself.
    """
    refused = dropped.get("filtered", 0)
    overflowed = min(overflowed, refused)
    found = {**dropped, "filtered": refused - overflowed + filtered, "closed": dropped.get("closed", 0) - stored,
             "overflow": dropped.get("overflow", 0) + overflowed}  # fmt: skip
    return {reason: count for reason, count in found.items() if count}


# ---- waiting: each is a generator, so that one thread can wait for several at once


def _in_time(waiting: Iterator[None], deadline: Deadline) -> bool:
    """Whether a wait has ended before the deadline."""
    for _ in waiting:
        if deadline.passed:
            return False
        time.sleep(POLL_S)
    return True


def sleep_until_done(order: Order | None) -> None:
    """A short sleep, which ends when the order is done."""
    if order is None:
        time.sleep(POLL_S)
    else:
        order.wait(Deadline(POLL_S))


def emptying(workers: Sequence[Worker]) -> Iterator[None]:
    """Until these workers have nothing queued or in hand, in processes of their modules included, which may be replaced
    meanwhile. What failed in a process comes back to the worker, and is waited for once more."""
    while True:
        yield from _draining(workers)
        for worker in workers:
            yield from _flushing(worker)
        if _is_idle(workers):
            return


def _draining(workers: Sequence[Worker]) -> Iterator[None]:
    while not _is_idle(workers):
        yield


def _is_idle(workers: Sequence[Worker]) -> bool:
    return all(worker.idle or worker.over or worker.mine for worker in workers)


def _flushing(worker: Worker) -> Iterator[None]:
    """Until what a module passes on to a process of its own has been handled there. While a process that died is to be
    started again, what it left is still to be handled."""
    while hasattr(worker.module, "mark_sent") and not worker.mine:
        module, handled = worker.module, worker.module.mark_sent()
        while module.dead is None:
            if handled():
                return
            yield
        if worker.over or worker.life is Life.FAILED:
            return  # nothing will be handled; what was left is counted as lost
        yield


def count_unhandled(worker: Worker) -> None:
    """Count as lost what a process had received and not handled when it ended."""
    module = worker.module
    if hasattr(module, "unhandled") and not module.accounted:
        module.accounted = True
        if module.sent > module.handled:
            worker.lose_taken(module.sent - module.handled, "closed")


def force(workers: Sequence[Worker]) -> None:
    """End all waits for these workers, and kill their modules' processes."""
    for worker in workers:
        worker.queue.close()
        kill = getattr(worker.module, "kill", None)
        if kill is not None:
            kill()


def log_failure(worker: Worker, step: str, error: BaseException) -> None:
    """The default reaction to a failure: the first one is logged, all are counted."""
    if worker.failed == 0:
        log.error("module %r failed in %s: %s", worker.name, step, reason_of(error))
        log.debug("module %r: where it failed", worker.name, exc_info=error)
    worker.count_failure()  # count after logging: who sees the count finds the line in the log


def _after_fork() -> None:
    """In a forked child the workers' threads do not exist: mark every broker of the parent as destroyed there."""
    for broker in list(_live):
        broker._references = 0
        broker._workers = {}
        broker._ports.clear()
        broker._flows = {}
        broker._uncounted = Uncounted()
        broker._cycles = Cycles()
        broker._lock = threading.RLock()


def _at_exit() -> None:
    for broker in list(_live):
        if broker._references:
            broker._references = 0
            broker._end(1.0)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
