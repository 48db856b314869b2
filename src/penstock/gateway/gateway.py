"""The gateway: modules by name, links between them, made from a file or step by step, changed while it runs.

Every method may be called by any thread, a module's ``receive`` included. The lock guards the tables and is never held
while a module's code runs or a queue drains, so that a module may change the gateway it lives in.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from penstock.address import without_secrets
from penstock.channel import check_timeout, choose
from penstock.clock import refuse_if_virtual
from penstock.errors import InvalidArgument, RefusedError, StateError, nearest
from penstock.gateway import configuration as configurations
from penstock.gateway.broker import Ending, ModuleBroker, ModuleInfo, emptying, sleep_until_done
from penstock.gateway.buffer import Buffer
from penstock.gateway.configuration import BUFFER, Configuration, LoaderEntry, ModuleEntry, QueueOptions, is_address
from penstock.gateway.endpoint import Endpoint
from penstock.gateway.errors import AddLinkError, BrokerError, DrainError, ModuleError, reason_of
from penstock.gateway.events import Callback, Event, Events
from penstock.gateway.filters import Filter
from penstock.gateway.keeper import Keeper, Kept
from penstock.gateway.links import DEFAULT, STAR, Delivery, Link, LinkOptions, LinkTable, drain_order, drain_plan
from penstock.gateway.loaders import Recipe, of_class, recipe
from penstock.gateway.module import check_types, typed
from penstock.gateway.place import Place, located
from penstock.gateway.supervision import Policy, Restart
from penstock.gateway.worker import ERROR, Deadline, Life, Order, Worker
from penstock.quantities import number_of

log = logging.getLogger("penstock.gateway")
EXIT_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.25  # time for callbacks of events that happen while modules are destroyed
START_S = 30.0  # time for starting all modules, and for one that is added later
REPLACE_S = 10.0  # time for stopping and destroying a module that is replaced
UNDO_S = 10.0  # time for destroying a module that could not be added
_live: weakref.WeakSet[Gateway] = weakref.WeakSet()
Registration = tuple[Event, Callback] | tuple[Event, Callback, Any]


@dataclass(frozen=True, slots=True)
class ListedModule:
    """One line of the module list."""

    name: str
    sources: tuple[str, ...]


class Gateway:
    """Modules joined by links."""

    def __init__(
        self,
        configuration: Configuration | Mapping[str, Any] | None = None,
        *,
        name: str = "gateway",
        callbacks: Iterable[Registration] = (),
        cycle_timeout_s: float = 1.0,
    ) -> None:
        """Create a gateway without starting it. Callbacks given here get the event CREATED too. A failure leaves
        nothing behind.
        """
        refuse_if_virtual(f"gateway {name!r}, whose modules have threads (penstock.replay runs one without),")
        self.name = name
        self.broker = ModuleBroker(cycle_timeout_s=cycle_timeout_s)
        self._events = Events(self, name)
        self._keeper = Keeper(self.broker, self._events.tell)
        self.broker.on_refused = self._refused
        self.broker.on_filter_error = self._filter_failed
        self.broker.on_abandoned = self._was_abandoned
        self.abandoned: list[str] = []  # modules that did not return from a call
        self.draining: bool | None = None  # True while ``destroy`` drains the queues, then False
        self._lock = threading.RLock()
        self._changing = threading.Lock()  # one update or reload at a time
        self._kept: dict[str, Kept] = {}
        self._table = LinkTable()
        # by ends: the link and the name of the buffer's module
        self._buffered: dict[tuple[str, str], tuple[Link, str]] = {}
        # error links, with the links that asked for them
        self._error_links: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self._joined: dict[str, dict[str, tuple[tuple[Filter, ...], LinkOptions]]] = {}  # source to sinks
        self._loaders: dict[str, LoaderEntry] = {}
        self._applied = Configuration()
        self._dotted: set[str] = set()  # names of modules with a dot, which look like outputs
        self._ended: list[ModuleInfo] = []  # snapshots of the modules, taken at the end
        self._started = self._closed = False
        self._all_handled = True  # whether no message was lost at the end
        _live.add(self)
        try:
            for registration in callbacks:
                if not isinstance(registration, Sequence) or not 2 <= len(registration) <= 3:
                    raise InvalidArgument(f"a callback is (event, function, parameter), not {registration!r}")
                self._events.add(*registration)
            if configuration is not None:
                self.apply(configuration)
        except BaseException:
            self.destroy(timeout=0)
            raise
        self._events.tell(Event.CREATED)

    @classmethod
    def from_json(cls, text: str, **options: Any) -> Self:
        """Create a gateway from a JSON text and start it."""
        gateway = cls(configurations.parse(configurations.from_json(text)), **options)
        return gateway._begun()

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> Self:
        """Create a gateway from a JSON, TOML or YAML file and start it."""
        return cls(configurations.read(path), **{"name": Path(path).stem, **options})._begun()

    def _begun(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.destroy(timeout=0)
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else "started" if self._started else "made"
        return f"<Gateway {self.name}, {len(self._kept)} modules, {len(self._table.links)} links, {state}>"

    # ---- life

    def start(self, timeout: float | None = START_S) -> None:
        """Call start on each module in order of adding. A module added later is started by itself.

        A module whose start raises does not keep the others from starting. The failure is reported and counted. With a
        restart policy the module is created again; otherwise it stays failed (its messages are dropped and counted) and
        ``ModuleError`` names it at the end. Calling this again tries the failed ones again. A module that does not
        return from start is reported as stuck after its ``stuck_after_s``, and the next one is started meanwhile. After
        ``timeout`` seconds ``ModuleError`` names the modules that are still in start; they receive messages once it
        returns.
        """
        check_timeout(timeout)
        with self._lock:
            self._check()
            again = [kept for kept in self._kept.values() if kept.started and self._has_failed(kept)]
            waiting = [kept for kept in self._kept.values() if kept.module is not None and not kept.started]
            first, self._started = not self._started, True
        deadline = Deadline(timeout)
        try:
            begun = [(kept, *self._begin(kept, deadline.until(kept.stuck_after_s))) for kept in (*waiting, *again)]
        except BrokerError:
            self._check()  # destroyed meanwhile, which the error is to say
            raise
        errors = [self._outcome(kept, worker, order, deadline) for kept, worker, order in begun]
        failures = [error for error in errors if error is not None]
        if first:
            self._events.tell(Event.STARTED)
        if failures:
            raise failures[0] if len(failures) == 1 else ModuleError("; ".join(map(str, failures)))

    def _has_failed(self, kept: Kept) -> bool:
        try:
            return self.broker.worker_of(kept.module).life is Life.FAILED and kept.supervisor.gave_up is False
        except BrokerError:
            return False

    def _begin(self, kept: Kept, patience: Deadline) -> tuple[Worker, Order]:
        """Start one module under supervision, and wait ``patience`` seconds for it."""
        worker = self.broker.worker_of(kept.module)
        again, kept.started = kept.started, True
        order = worker.post(functools.partial(self._keeper.start_again if again else self._keeper.start, worker))
        if not worker.mine:
            order.wait(patience)
        return worker, order

    def _outcome(self, kept: Kept, worker: Worker, order: Order, deadline: Deadline) -> ModuleError | None:
        """The error of a start, or None: also if a failed module is created again, or if this is its own thread."""
        if not worker.mine and not order.wait(deadline):
            return self._start_error(kept, "has not come back from start", None)
        error = order.error
        if error is None or kept.supervisor.restart.policy is Policy.ON_FAILURE:
            return None
        return self._start_error(kept, f"failed in start: {reason_of(error)}", error)

    def _start_error(self, kept: Kept, what: str, cause: BaseException | None) -> ModuleError:
        told = ModuleError(f"module {kept.shown!r} {what}")
        told.__cause__ = cause
        located(kept.where, told)
        return told

    def _start_added(self, kept: Kept) -> None:
        """Start a module that was added to a running gateway; on a failure the module is removed again and the error
        raised.
        """
        worker = self.broker.worker_of(kept.module)
        order = worker.begin()
        if not worker.mine and not order.wait(Deadline(START_S)):
            raise self._start_error(kept, f"did not come back from start in {START_S} s", None)
        if order.error is not None:
            error = order.error
            raise self._start_error(kept, f"failed in start: {reason_of(error)}", error)

    def destroy(self, timeout: float | None = 10.0) -> bool:
        """Stop and drain in link order, then end everything, all within ``timeout`` seconds (half a second at least).
        Returns True exactly if no message was lost and no module abandoned meanwhile. Messages that were not handled
        are dropped, counted and logged, unless a durable source keeps them (``stored``). What a module publishes after
        its ``stop`` is refused. A module that does not return in time is abandoned: reported, counted (``abandoned``),
        and never called again. An exception during draining (Ctrl-C) ends the draining; it is raised when everything
        else is done.
        """
        check_timeout(timeout)
        with self._lock:
            if self._closed:
                return self._all_handled
            self._closed = True
            kept = list(self._kept.values())
        ending = Ending.within(timeout)
        workers = self.broker.workers_at_end([one.module for one in kept if one.module is not None])
        # The result is about the end only: losses and abandoned modules from before do not count.
        lost_before = sum(worker.lost_at_end for worker in workers)
        abandoned_before = len(self.abandoned)
        joined = [self.broker.info_of(worker) for worker in workers]
        # A paused module would never drain.
        self._resume_all(kept)
        interrupted: BaseException | None = None
        try:
            self.draining = True
            self._drain_all(ending)
            self.draining = False
        except BaseException as error:
            self.draining = False
            # Ctrl-C ends the draining, not the rest: modules must still be stopped and freed before the error is
            # raised.
            interrupted, ending = error, Ending.within(0)
            self._drop_all(drain_order(self._table.graph()), ending)
        self._keeper.close()
        self._events.tell(Event.DESTROYED)
        # Callbacks of earlier events may use the modules, so they run before these are destroyed.
        self._events.wait_told(ending.over_by)
        self.broker.end_all([one.module for one in kept if one.module is not None], ending.over_by)
        self._events.close(LAST_WORDS_S)
        self._kept.clear()
        self._ended = [
            replace(self.broker.info_of(worker), handle=None, sinks=info.sinks, sources=info.sources)
            for worker, info in zip(workers, joined, strict=True)
        ]
        self.broker.dec_ref()
        lost = sum(worker.lost_at_end for worker in workers) - lost_before
        if lost:
            what = "message was" if lost == 1 else "messages were"
            log.warning("%d %s not handled by the end: dropped and counted", lost, what)
        self._all_handled = len(self.abandoned) == abandoned_before and lost == 0
        if interrupted is not None:
            raise interrupted
        return self._all_handled

    close = destroy

    def _drain_all(self, ending: Ending) -> None:
        """Sources first: a group is stopped as soon as all that feed it have been. So a module that hangs keeps nobody
        from an orderly end but those behind it."""
        left, order = drain_plan(self._table.graph())
        emptied: set[tuple[str, ...]] = set()
        busy: dict[tuple[str, ...], Iterator[Order | None]] = {}
        while order.is_active():
            busy.update((group, self._end_in_order(group, emptied)) for group in order.get_ready())
            ended, waited = False, None
            # one step of each group that may end now: a group that hangs must not delay the others
            for group, steps in list(busy.items()):
                try:
                    waited = next(steps)
                except StopIteration:
                    ended = True
                    del busy[group], left[group]
                    order.done(group)
            if not ended and ending.drained_by.passed:
                break
            if not ended:
                sleep_until_done(waited)
        for group in (one for one in busy if one not in emptied):
            told = f"the cycle of {' and '.join(group)}" if len(group) > 1 else group[0]
            log.warning("%s still had messages when the time was over; what no durable source keeps is dropped", told)
        if left:
            self._drop_all(left, ending)

    def _end_in_order(self, group: tuple[str, ...], emptied: set[tuple[str, ...]]) -> Iterator[Order | None]:
        """Let modules handle what they got, then stop them; gives what it waits for. What durable sources keep is not
        waited for: those have stopped, and it comes with the next start."""
        workers = [self.broker.worker_of(module) for module in self._modules_of((group,))]
        for worker in workers:
            worker.let_go()
        yield from emptying([worker for worker in workers if not worker.backed])
        emptied.add(group)
        # Asked again: a process that died may have been replaced meanwhile.
        yield from self.broker.stopping(self._modules_of((group,)))

    def _drop_all(self, groups: Iterable[tuple[str, ...]], ending: Ending) -> None:
        """End all modules at once: nothing waits any more, and queued messages are dropped."""
        rest = self._modules_of(groups)
        self.broker.cut_all(rest)
        self.broker.end_stopping(rest, ending)

    def _modules_of(self, groups: Iterable[tuple[str, ...]]) -> list[Any]:
        kept = [self._kept.get(name) for group in groups for name in group]
        return [one.module for one in kept if one is not None and one.module is not None]

    # ---- modules

    def add_module(
        self,
        name: str,
        entrypoint: Any,
        args: Any = None,
        *,
        loader: str = "python",
        queue: QueueOptions | None = None,
        restart: Restart | Policy | str | None = None,
        stuck_after_s: float | None = 10.0,
    ) -> ModuleInfo:
        """Load, create and attach a module, link it by star links, and start it if the gateway is started.
        ``entrypoint`` is what the loader takes, or a class. A failure undoes every step.
        """
        if queue is not None and not isinstance(queue, QueueOptions):
            raise TypeError(f"queue is given as QueueOptions(...), not {type(queue).__name__}")
        stuck_after_s = Place(stuck_after_s, "stuck_after_s").seconds(optional=True)
        if restart is not None and not isinstance(restart, Restart):
            restart = Restart(choose(Policy, restart, "restart"))
        if isinstance(entrypoint, type):
            if loader != "python":
                text = f"{entrypoint.__module__}:{entrypoint.__qualname__}"
                raise InvalidArgument(f"loader={loader!r} takes an entry point as text, such as {text!r}, not a class")
            checked_name = configurations.module_name(Place(name, "name"))
            build, parse = of_class(entrypoint, Place(entrypoint, "entrypoint"))
            made = Recipe(checked_name, build, parse(args))
            return self._add(Kept(made, restart, stuck_after_s), queue or QueueOptions())
        if not isinstance(entrypoint, str | Mapping):
            raise InvalidArgument(f"a module is a class, or a text such as 'package.module:Class', not {entrypoint!r}")
        data: dict[str, Any] = {"name": name, "loader": {"name": loader, "entrypoint": entrypoint}, "args": args}
        entry = configurations.module_entry(data, tuple(self._loaders.values()))
        entry = configurations.with_supervision(entry, queue, restart, stuck_after_s)
        return self._add_entry(entry)

    def _add_entry(self, entry: ModuleEntry, *, start: bool = True, made: Recipe | None = None) -> ModuleInfo:
        kept = Kept(made or recipe(entry, self._loaders), entry.restart, entry.stuck_after_s, entry)
        return self._add(kept, entry.queue, start=start)

    def _add(self, kept: Kept, queue: QueueOptions, *, passes_stars: bool = True, start: bool = True) -> ModuleInfo:
        """With ``start`` False the caller calls ``_start_linked`` when the links exist. Before that, a durable source
        would publish its messages to nobody.
        """
        with self._lock:
            self._check()
            if kept.name in self._kept:
                raise InvalidArgument(f"there is a module {kept.shown!r} already")
            if passes_stars and not is_address(kept.name):
                self._check_outputs(kept.name)
            self._kept[kept.name] = kept  # from here on the name is in use
        try:
            module = kept.recipe.make(self.broker)
            try:
                info = self._attach(kept, module, queue, passes_stars)
                if start:
                    self._start_linked(kept)
            except BaseException:
                self._undo_attach(kept, module)
                raise
        except BaseException:
            with self._lock:
                self._kept.pop(kept.name, None)
            raise
        self._changed()
        return info

    def _check_outputs(self, name: str) -> None:
        """Refuse a name that a link could not tell from an output. Under the lock."""
        owner = configurations.output_of(name, self._kept)
        if owner is None and self._dotted:
            owner = next((name for other in self._dotted if other in self._kept and other.startswith(f"{name}.")), None)
        if owner is not None:
            raise InvalidArgument(f"beside a module {owner!r} no name can begin with '{owner}.', as its outputs do")
        if "." in name:
            self._dotted.add(name)

    def _attach(self, kept: Kept, module: Any, queue: QueueOptions, passes_stars: bool) -> ModuleInfo:
        _be_first_at_exit()
        info = self.broker.add_module(
            module, name=kept.name, queue=queue, on_failure=self._keeper.failed, started=False
        )
        with self._lock:
            kept.take(module)
            self._table.add_name(kept.name, passes_stars)
            self._sync(self._sources_of(kept.name))
        self._keeper.keep(kept)
        return info

    def _start_linked(self, kept: Kept) -> None:
        """Start an added module if the gateway is running; otherwise ``start`` will."""
        with self._lock:
            mine = self._started and not kept.started
            kept.started = kept.started or mine
        if mine:
            self._start_added(kept)

    def _undo_attach(self, kept: Kept, module: Any) -> None:
        self._keeper.forget(kept)
        kept.removing = True
        with self._lock:
            self._remove_name(kept.name)
        if not self.broker.end_all([module], Deadline(UNDO_S)) and kept.module is None and hasattr(module, "destroy"):
            module.destroy()  # it was not attached

    def remove_module(self, name: str, *, drain: bool = True, timeout: float | None = 10.0) -> int:
        """Remove a module: cut off its sources, handle what is queued (or drop and count it), stop it, remove its
        links, destroy it. ``DrainError`` if it has not handled everything in time: then it stays as it was, unless
        durable sources keep everything that it gets. Messages of buffers stay stored and are not waited for. A module
        that does not return from another call in time is removed all the same, and abandoned. Returns how many messages
        were lost with it, which is also logged (for a module that removes itself only logged: it ends later).
        """
        check_timeout(timeout)
        with self._lock:
            kept = self._find(name)
            if kept.removing:
                raise BrokerError(f"module {kept.shown!r} is being removed already")
            kept.removing = True
            # Buffers first: without its sink a buffer would forward to nobody and take that as handled.
            buffered = {buffer: link for link, buffer in self._buffered.values() if link.sink == name}
            stored = self.broker.worker_of(kept.module).has_durable_sources
            drain = drain and not (stored and buffered.keys() >= set(self._table.sources_to(name)))
        self._resume_all((kept,))
        worker = self.broker.worker_of(kept.module)
        kept_by_sources, lost_before, lost = worker.has_keepers, worker.lost_at_end, 0

        def removed(_: Worker) -> None:
            nonlocal lost
            self._was_removed(kept)
            lost = 0 if kept_by_sources else worker.lost_at_end - lost_before
            if lost:
                what = number_of(lost, "message that it had not handled was", "messages that it had not handled were")
                log.warning("module %r was removed: %s dropped", kept.shown, what)

        worker.let_go()  # failed messages that durable sources keep need not be tried again here
        if isinstance(kept.module, Buffer):
            # do not wait for its sink, which stays and may be failing: what it has not handled stays stored
            kept.module.kill()
        remove = functools.partial(self.broker.remove_module, kept.module, steps=True, done=removed)
        try:
            for link in buffered.values():
                self.remove_link(*link.ends)
            try:
                remove(drain=drain, timeout=timeout)
            except DrainError:
                if not stored:
                    raise
                remove(drain=False, timeout=0)
        except BaseException:
            kept.removing = False
            worker.let_go(kept=False)
            with self._lock:
                self._sync(self._sources_of(name))
            for link in buffered.values():
                if not self._has_link(link.ends):
                    self._add_link(link)
            raise
        return lost

    def _halt(self, name: str) -> bool:
        """Stop and destroy a module that ``_put`` will replace; its messages wait meanwhile. False: it did not
        return.
        """
        kept = self._find(name)
        worker = self.broker.worker_of(kept.module)
        if worker.mine:
            raise StateError(f"module {kept.shown!r} cannot be replaced by itself; apply the change on another thread")
        ending = Ending.within(REPLACE_S)
        order = worker.post(functools.partial(self._keeper.halt, kept, worker), in_backoff=True)
        if not order.wait(ending.drained_by) and hasattr(kept.module, "kill"):
            kept.module.kill()
        return order.wait(ending.over_by)

    def _put(self, entry: ModuleEntry, made: Recipe | None = None) -> None:
        """Put a new module in the place of one that ``_halt`` has stopped: same name, queue and links. It is started
        later.
        """
        old = self._find(entry.name)
        new = Kept(made or recipe(entry, self._loaders), entry.restart, entry.stuck_after_s, entry)
        worker = self.broker.worker_of(old.module)
        was_durable = worker.is_durable
        self._keeper.put(old, new, worker)
        with self._lock:
            self._kept[entry.name] = new
            if worker.is_durable is not was_durable:  # the default guarantee of its links depends on this
                sources = self._table.sources_within(entry.name)
                for source in sources:
                    self._joined.pop(source, None)
                self._sync(sources)
            touched = [link for link in self._table.links if entry.name in (self._table.owner(link.source), link.sink)]
        for link in touched:
            self._check_types(link)

    def pause(self, name: str) -> None:
        """Let a module receive nothing until ``resume``; its messages wait in its queue. Removing it or ending the
        gateway resumes it.
        """
        with self._lock:
            kept = self._find(name)
        self.broker.worker_of(kept.module).pause()

    def resume(self, name: str) -> None:
        """Resume a paused module."""
        with self._lock:
            kept = self._find(name)
        self.broker.worker_of(kept.module).resume()

    def _resume_all(self, kept: Iterable[Kept]) -> None:
        for one in kept:
            with contextlib.suppress(BrokerError, InvalidArgument):  # removed meanwhile, or not created yet
                worker = self.broker.worker_of(one.module)
                if worker.paused:
                    worker.resume()

    def _was_removed(self, kept: Kept) -> None:
        self._keeper.forget(kept)
        with self._lock:
            buffers = [name for link, name in self._buffered.values() if self._table.owner(link.source) == kept.name]
            self._buffered = {ends: one for ends, one in self._buffered.items() if one[1] != kept.name}
            ends = self._remove_name(kept.name)
            self._kept.pop(kept.name, None)
        for name in buffers:
            self._remove_quietly(name)
        self._drop_endpoints(ends)
        self._drop_error_links()
        self._changed()

    def _remove_name(self, name: str) -> list[str]:
        """Remove a module and its links from the table; returns the modules that it was linked with. The caller holds
        the lock.
        """
        if name not in self._table.names:
            return []
        sources, sinks = self._sources_of(name), list(self._table.sinks(name))
        self._table.remove_name(name)
        self._sync(sources)
        return [*sources, *sinks]

    # ---- links

    def add_link(
        self,
        source: str,
        sink: str,
        link_filter: Filter | None = None,
        options: LinkOptions = DEFAULT,
        *,
        buffer: str | None = None,
        error: str | None = None,
    ) -> None:
        """Join two modules or addresses; ``"*"`` as the source stands for every other module, now and later, and
        ``NAME.OUTPUT`` for what a module publishes under a name. ``buffer`` (``journal:DIRECTORY``) stores messages on
        their way; ``error`` names the module or address that gets the messages at which the sink fails for good.
        """
        for end, which in ((source, "source"), (sink, "sink")):
            if not isinstance(end, str):
                raise InvalidArgument(f"a link's {which} is the name of a module or an address, not {end!r}")
        if link_filter is not None and not isinstance(link_filter, Filter):
            raise TypeError(f"a link's filter is a Filter(...), not {type(link_filter).__name__}")
        if not isinstance(options, LinkOptions):
            raise TypeError(f"a link's options are LinkOptions(...), not {type(options).__name__}")
        if buffer is not None:
            configurations.check_buffer(Place(buffer, "buffer"))
        self._add_link(Link(source, sink, link_filter, options, buffer, error))

    def _add_link(self, link: Link) -> None:
        if link.error == link.sink:
            raise AddLinkError(f"link {link}: error={without_secrets(link.sink)!r} {configurations.OWN_ERROR}")
        if link.buffer is not None:
            self._add_buffered(link)
        else:
            self._add_plain(link)
        if link.error is not None:
            try:
                self._add_error_link(link)
            except BaseException:
                self.remove_link(*link.ends)
                raise

    def _add_error_link(self, link: Link) -> None:
        """Dead letters have the delivery guarantee of the link that failed: a durable source also waits for the dead
        letters of an at_least_once link.
        """
        ends = f"{link.sink}.{ERROR}", str(link.error)
        options = replace(DEFAULT, delivery=self._delivery(link))
        if ends not in self._table:
            self._add_plain(Link(*ends, options=options))
            self._error_links[ends] = set()
        # otherwise the user has added this link
        elif ends in self._error_links and options.delivery is Delivery.AT_LEAST_ONCE:
            with self._lock:
                self._table.add(Link(*ends, options=options))
                self._sync((ends[0],))
        if ends in self._error_links:
            self._error_links[ends].add(link.ends)
        with self._lock:
            leads_back = self._table.leads(ends[1], link.sink)
        if leads_back:
            shown = without_secrets(ends[1])
            log.warning("link %s: error %r leads back to it; what its sink can never handle goes round", link, shown)

    def _delivery(self, link: Link) -> Delivery | None:
        if link.buffer is not None:
            return link.options.delivery or Delivery.AT_LEAST_ONCE
        sources = [kept.module for kept in map(self._kept.get, (link.source, self._table.owner(link.source))) if kept]
        return link.options.chosen(any(getattr(module, "durable", False) for module in sources)).delivery

    def _drop_error_links(self) -> None:
        """Remove error links that no link asks for any more."""
        with self._lock:
            for ends, asked_by in list(self._error_links.items()):
                asked_by.intersection_update([one for one in asked_by if self._has_link(one)])
                if ends not in self._table:
                    del self._error_links[ends]
            idle = [ends for ends, asked_by in self._error_links.items() if not asked_by]
        for ends in idle:
            self.remove_link(*ends)

    def _has_link(self, ends: tuple[str, str]) -> bool:
        return ends in self._table or ends in self._buffered

    def _can_link(self, link: Link) -> bool:
        try:
            self._check_link(link)
        except AddLinkError:
            return False
        return True

    def _add_buffered(self, link: Link) -> None:
        """Make two links with a buffer module between them, which stores messages on their way."""
        with self._lock:
            self._check()
            self._check_link(link)
            if link.ends in self._buffered:
                raise AddLinkError(f"link {link} is there already")
        self._check_types(link)
        name = f"{link}{BUFFER}"
        build = functools.partial(Buffer, str(link.buffer), str(link))
        kept = Kept(Recipe(name, build, None), None, None)
        self._add(kept, QueueOptions(), passes_stars=False, start=False)
        onward = replace(link.options, delivery=link.options.delivery or Delivery.AT_LEAST_ONCE)
        try:
            self._add_plain(Link(name, link.sink, None, onward))
            self._add_plain(Link(link.source, name, link.filter, replace(DEFAULT, delivery=Delivery.AT_LEAST_ONCE)))
            self._start_linked(kept)
        except BaseException:
            self.remove_module(name, drain=False)
            raise
        self._buffered[link.ends] = link, name

    def _add_plain(self, link: Link) -> None:
        opened: list[str] = []
        if any(is_address(end) for end in link.ends):  # check before opening: a refused link must not open an endpoint
            with self._lock:
                self._check()
                self._check_link(link)
            opened = self._open_endpoints(link)
        try:
            self._check_types(link)
            with self._lock:
                self._check()
                self._check_link(link)
                self._table.add(link)
                self._sync([*self._table.names] if link.source == STAR else (link.source,))
            for end in filter(is_address, link.ends):
                self._start_linked(self._kept[end])
                self._kept[end].module.read()
        except BaseException:
            for name in opened:
                self._remove_quietly(name)
            raise
        self._changed()

    def _change_link(self, link: Link) -> None:
        """Change the filter or the options of a link; messages that are published meanwhile still pass it."""
        with self._lock:
            self._check()
            self._table.add(link)
            self._sync([*self._table.names] if link.source == STAR else (link.source,))
        self._changed()

    def remove_link(self, source: str, sink: str) -> None:
        """Remove a link; does nothing if there is none. What a buffer holds stays stored."""
        with self._lock:
            self._check()
            _, buffer = self._buffered.get((source, sink), (None, None))
        if buffer is not None:
            self.remove_module(buffer)
        with self._lock:
            if (source, sink) not in self._table:
                return
            self._table.remove(source, sink)
            self._sync([*self._table.names] if source == STAR else (source,))
        self._drop_endpoints((source, sink))
        self._drop_error_links()
        self._changed()

    def _check_link(self, link: Link) -> None:
        if link.sink == STAR:
            raise AddLinkError(f'link {link}: "{STAR}" stands for every source and cannot be a sink')
        for end in (self._table.owner(link.source) or link.source, link.sink):
            if not is_address(end) and end != STAR and end not in self._table.names:
                known = [name for name in self._table.names if not is_address(name)]
                raise AddLinkError(f"link {link}: {configurations.missing_end(end, known)}")
        if link.source.endswith(".") and not is_address(link.source):
            raise AddLinkError(f"link {link}: {link.source!r} names no output; an output of a module is MODULE.OUTPUT")
        if link in self._table:
            raise AddLinkError(f"link {link} is there already")

    def _check_types(self, link: Link) -> None:
        """Raise ``AddLinkError`` if the sink's type cannot read the source's type. Modules in their own processes, star
        links and error links are not checked.
        """
        owner = self._table.owner(link.source) or link.source
        source, sink = self._kept.get(owner), self._kept.get(link.sink)
        if source is None or sink is None or link.source.endswith(f".{ERROR}"):
            return
        written, read = typed(source.module, "output_type"), typed(sink.module, "input_type")
        try:
            if isinstance(source.module, Endpoint) and read is not None:
                source.module.compare(read)
            if isinstance(sink.module, Endpoint) and written is not None:
                sink.module.announce(written)
        except RefusedError as error:
            raise AddLinkError(f"link {link}: {error}") from None
        check_types(link, written, read)

    def _sync(self, sources: Iterable[str]) -> None:
        """Bring the broker's links from ``sources`` in line with the table, which gives one set of sinks for each. The
        caller holds the lock.
        """
        for source in sources:
            wanted = {}
            if self._table.owner(source) in self._table.names:
                sinks = self._table.sinks(source)
                wanted = {
                    sink: (filters, self._table.options(source, sink))
                    for sink, filters in sinks.items()
                    if not self._kept[sink].removing
                }
            joined = self._joined.setdefault(source, {})
            for sink in [sink for sink in joined if sink not in wanted]:
                del joined[sink]
                self._broker_link(self.broker.remove_link, (source, sink))
            for sink, terms in wanted.items():
                if joined.get(sink) != terms:
                    self._broker_link(self.broker.add_link, (source, sink), *terms)
                    joined[sink] = terms
            if not joined:
                del self._joined[source]

    def _sources_of(self, name: str) -> list[str]:
        """The sources of all links that a module takes part in: its own and those that lead to it."""
        return [*dict.fromkeys((*self._table.sources_within(name), *self._table.sources_to(name)))]

    def _broker_link(self, change: Callable[..., None], ends: tuple[str, str], *more: Any) -> None:
        owner = self._table.owner(ends[0]) or ends[0]
        kept = [self._kept.get(end) for end in (owner, ends[1])]
        if any(one is None or one.module is None for one in kept):
            return  # it was removed with its module
        try:
            change(*(one.module for one in kept if one), *more, output=ends[0][len(owner) + 1 :])
        except BrokerError as error:
            log.debug("%s", error)

    # ---- addresses

    def _open_endpoints(self, link: Link) -> list[str]:
        """Open the endpoints of a link that do not exist yet; returns the new ones."""
        opened: list[str] = []
        try:
            for end, role in zip(link.ends, ("reads", "writes"), strict=True):
                if not is_address(end):
                    continue
                if end not in self._kept:
                    kept = Kept(Recipe(end, functools.partial(Endpoint, end), None), None, None)
                    self._add(kept, QueueOptions(), start=False)
                    opened.append(end)
                self._kept[end].module.open(reads=role == "reads", writes=role == "writes")
                _be_first_at_exit()
        except BaseException:
            for name in opened:
                self._remove_quietly(name)
            raise
        return opened

    def _drop_endpoints(self, ends: Iterable[str]) -> None:
        """Remove those of ``ends`` that are endpoints and that no link names any more."""
        with self._lock:
            addresses = [end for end in ends if is_address(end) and end in self._kept]
            idle = [end for end in addresses if not self._table.is_named(end) and not self._kept[end].removing]
        for name in idle:
            self._remove_quietly(name)

    def _remove_quietly(self, name: str) -> None:
        try:
            self.remove_module(name)
        except (BrokerError, InvalidArgument) as error:
            log.debug("%s", error)

    # ---- changes by description

    def update(self, data: str | Mapping[str, Any]) -> None:
        """Add the modules and links of a JSON text (or data): all of them, or none on a failure."""
        from penstock.gateway.changes import add_all

        parsed = configurations.parse(configurations.from_json(data) if isinstance(data, str) else data, partial=True)
        with self._one_change():
            add_all(self, parsed)

    def apply(
        self, configuration: Configuration | Mapping[str, Any] | str | Path, *, again: Iterable[str] = ()
    ) -> list[str]:
        """Apply ``configuration`` (or a file), changing only what differs from the configuration applied before, and
        create the modules named in ``again`` anew; on a failure all changes are undone. Returns a line for each
        change.
        """
        from penstock.gateway.changes import apply

        if isinstance(configuration, str | Path):
            configuration = configurations.read(configuration)
        elif not isinstance(configuration, Configuration):
            configuration = configurations.parse(configuration)
        with self._one_change():
            before = set(self._kept)
            try:
                done = apply(self, self._applied, configuration, frozenset(again))
            except BaseException:
                self._applied = self._applied.without(before - set(self._kept))  # without what could not be restored
                raise
            self._applied = configuration
        return done

    def _one_change(self) -> _Change:
        return _Change(self._changing)

    # ---- what there is

    def module_list(self) -> list[ListedModule]:
        """A snapshot: each module and the modules whose messages reach it."""
        with self._lock:
            return [ListedModule(name, self._table.sources(name)) for name in self._table.names]

    def links(self) -> list[Link]:
        """A snapshot of the links, as they were added."""
        with self._lock:
            hidden = {name for _, name in self._buffered.values()}
            plain = [link for link in self._table.links if not hidden.intersection(link.ends)]
            return [*plain, *(link for link, _ in self._buffered.values())]

    def modules(self) -> list[ModuleInfo]:
        """A snapshot of every module at work; after the end, how each ended (without the module itself)."""
        return list(self._ended) if self._ended else self.broker.modules()

    def module(self, name: str) -> Any:
        """The module of that name."""
        with self._lock:
            return self._find(name).module

    def supervisor(self, name: str) -> Any:
        """The failures and restarts of the module of that name."""
        with self._lock:
            return self._find(name).supervisor

    def add_event_callback(self, event: Event | str, callback: Callback, parameter: Any = None) -> None:
        """Call ``callback(gateway, event, context, parameter)`` on the events' thread at each ``event``."""
        self._events.add(Event(event), callback, parameter)

    # ---- inside

    def _check(self) -> None:
        if self._closed:
            raise StateError(f"gateway {self.name!r} has been destroyed")

    def _find(self, name: str) -> Kept:
        self._check()
        kept = self._kept.get(name)
        if kept is None or kept.module is None:
            known = [one.shown for one in self._kept.values()]
            raise BrokerError(f"there is no module {without_secrets(name)!r}; {nearest(name, known)}")
        return kept

    def _changed(self) -> None:
        if self._events.wanted(Event.MODULE_LIST_CHANGED):
            self._events.tell(Event.MODULE_LIST_CHANGED, self.module_list())

    def _refused(self, name: str, error: BaseException) -> None:
        self._events.tell(Event.PUBLISH_REFUSED, (name, error))

    def _was_abandoned(self, name: str, step: str) -> None:
        self.abandoned.append(name)
        self._events.tell(Event.MODULE_ABANDONED, (name, step))

    def _filter_failed(self, name: str, error: BaseException) -> None:
        log.error("a filter on a link of module %r raised: %s", name, reason_of(error))
        self._events.tell(Event.MODULE_FAILED, (name, "filter", error))


class _Change:
    """Allows one update or reload at a time; a second one is refused, because waiting for it could last for ever."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=30):
            raise StateError("another update of this gateway is still under way")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _be_first_at_exit() -> None:
    """Register the exit handler again, so that it runs first: handlers run in reverse order, and a module or address
    may have imported a room with an exit handler of its own.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Destroy gateways that were not destroyed, before the interpreter shuts down under their modules' threads."""
    for gateway in list(_live):
        gateway.destroy(EXIT_TIMEOUT_S)


def _after_fork() -> None:
    """A forked child has none of the threads: mark the parent's gateways as ended there."""
    for gateway in list(_live):
        gateway._closed = True
        gateway._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
