"""The gateway: modules by name, links between them, made from a file or step by step, changed while it runs.

Every method may be called by any thread, a module's ``receive`` included. The lock guards the tables and is never held
while a module's code runs or a queue drains, so that a module may change the gateway it lives in.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.address import without_secrets
from penstock.errors import InvalidArgument, StateError, nearest
from penstock.gateway import configuration as configurations
from penstock.gateway.broker import ModuleBroker, ModuleInfo
from penstock.gateway.configuration import Configuration, LoaderEntry, ModuleEntry, QueueOptions, is_address
from penstock.gateway.endpoint import Endpoint
from penstock.gateway.errors import AddLinkError, BrokerError, ModuleError
from penstock.gateway.events import Callback, Event, Events
from penstock.gateway.filters import Filter
from penstock.gateway.keeper import Keeper, Kept, finish
from penstock.gateway.links import STAR, Link, LinkTable, drain_order
from penstock.gateway.loaders import Recipe, recipe
from penstock.gateway.supervision import Restart

log = logging.getLogger("penstock.gateway")
EXIT_TIMEOUT_S = 5.0
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
        """Made, not started. Callbacks given here are told of CREATED too. A failure leaves nothing behind."""
        self.name = name
        self.broker = ModuleBroker(cycle_timeout_s=cycle_timeout_s)
        self._events = Events(self, name)
        self._keeper = Keeper(self.broker, self._events.tell)
        self.broker.on_refused = self._refused
        self.broker.on_filter_error = self._filter_failed
        self._lock = threading.RLock()
        self._changing = threading.Lock()  # one update or reload at a time
        self._kept: dict[str, Kept] = {}
        self._table = LinkTable()
        self._joined: dict[tuple[str, str], tuple[Filter, ...]] = {}
        self._loaders: dict[str, LoaderEntry] = {}
        self._applied = Configuration()
        self._started = self._closed = False
        _live.add(self)
        try:
            for registration in callbacks:
                self._events.add(*registration)
            if configuration is not None:
                self.apply(configuration)
        except BaseException:
            self.destroy(timeout=0)
            raise
        self._events.tell(Event.CREATED)

    @classmethod
    def from_json(cls, text: str, **options: Any) -> Self:
        """From a JSON text, and started."""
        gateway = cls(configurations.parse(configurations.from_json(text)), **options)
        return gateway._begun()

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> Self:
        """From a JSON or TOML file, and started."""
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

    def start(self) -> None:
        """Call start on each module in order of adding. A module added later is started by itself."""
        with self._lock:
            self._check()
            if self._started:
                return
            self._started = True
            waiting = [kept for kept in self._kept.values() if kept.module is not None]
        for kept in waiting:
            self._start(kept)
        self._events.tell(Event.STARTED)

    def _start(self, kept: Kept) -> None:
        if kept.started:
            return
        kept.started = True
        try:
            if hasattr(kept.module, "start"):
                kept.module.start()
        except Exception as error:
            raise ModuleError(f"module {kept.shown!r} failed in start: {type(error).__name__}: {error}") from error

    def destroy(self, timeout: float | None = 10.0) -> bool:
        """Stop and drain in link order within ``timeout`` seconds, then end everything. Whether all was handled; what
        was not is dropped, counted and logged."""
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            kept = list(self._kept.values())
        drained = self._drain_all(timeout)
        self._keeper.close()
        self._events.tell(Event.DESTROYED)
        self._events.close()
        for module in kept:
            self._detach(module)
        self._kept.clear()
        self.broker.dec_ref()
        return drained

    close = destroy

    def _drain_all(self, timeout: float | None) -> bool:
        """Sources first: who comes later in link order is fed only by who has been stopped and emptied."""
        deadline = None if timeout is None else time.monotonic() + timeout
        drained = True
        for group in drain_order(self._table.graph()):
            modules = [self._kept[name].module for name in group if name in self._kept]
            modules = [module for module in modules if module is not None]
            drained &= self._drain(group, modules, deadline)
            for module in modules:
                finish(module, "stop")
            drained &= self._drain(group, modules, deadline)
            for module in modules:
                finish(module, "end")
        return drained

    def _drain(self, group: tuple[str, ...], modules: list[Any], deadline: float | None) -> bool:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        drained = self.broker.drain(modules, left_s)
        for module in modules:
            if hasattr(module, "flush"):
                drained &= module.flush(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not drained:
            loop = "the cycle of " if len(group) > 1 else ""
            log.warning("%s%s still had messages when the time was over; they are dropped", loop, " and ".join(group))
        return drained

    def _detach(self, kept: Kept) -> None:
        if kept.module is None:
            return
        kept.removing = True
        try:
            self.broker.remove_module(kept.module, drain=False)
        except BrokerError as error:
            log.debug("%s", error)
        finish(kept.module, "destroy")

    # ---- modules

    def add_module(
        self,
        name: str,
        entrypoint: Any,
        args: Any = None,
        *,
        loader: str = "python",
        queue: QueueOptions | None = None,
        restart: Restart | None = None,
        stuck_after_s: float | None = 10.0,
    ) -> ModuleInfo:
        """Load, create, attach, link by stars, start when the gateway has been started. ``entrypoint`` is what the
        loader takes, or a class. A failure undoes every step."""
        if isinstance(entrypoint, type):
            parse: Callable[[Any], Any] = getattr(entrypoint, "parse", lambda given: given)
            made = Recipe(_checked(name), entrypoint, parse(args))
            return self._add(Kept(made, restart or Restart(), stuck_after_s), queue or QueueOptions())
        data: dict[str, Any] = {"name": name, "loader": {"name": loader, "entrypoint": entrypoint}, "args": args}
        entry = configurations.module_entry(data, tuple(self._loaders.values()))
        entry = configurations.with_care(entry, queue, restart, stuck_after_s)
        return self._add_entry(entry)

    def _add_entry(self, entry: ModuleEntry) -> ModuleInfo:
        kept = Kept(recipe(entry, self._loaders), entry.restart, entry.stuck_after_s, entry)
        return self._add(kept, entry.queue)

    def _add(self, kept: Kept, queue: QueueOptions) -> ModuleInfo:
        with self._lock:
            self._check()
            if kept.name in self._kept:
                raise InvalidArgument(f"there is a module {kept.shown!r} already")
            self._kept[kept.name] = kept  # the name is taken from here on
        try:
            module = kept.recipe.make(self.broker)
            try:
                info = self._attach(kept, module, queue)
            except BaseException:
                self._undo_attach(kept, module)
                raise
        except BaseException:
            with self._lock:
                self._kept.pop(kept.name, None)
            raise
        self._changed()
        return info

    def _attach(self, kept: Kept, module: Any, queue: QueueOptions) -> ModuleInfo:
        _be_first_at_exit()
        info = self.broker.add_module(module, name=kept.name, queue=queue, on_failure=self._keeper.failed)
        with self._lock:
            kept.module = module
            self._table.add_name(kept.name)
            self._sync()
            started = self._started
        self._keeper.keep(kept)
        if started:
            self._start(kept)
        return info

    def _undo_attach(self, kept: Kept, module: Any) -> None:
        self._keeper.forget(kept)
        kept.removing = True
        with self._lock:
            if kept.name in self._table.names:
                self._table.remove_name(kept.name)
                self._sync()
        try:
            self.broker.remove_module(module, drain=False)
        except BrokerError:
            log.debug("module %r was not attached", kept.shown)
        finish(module, "destroy")

    def remove_module(self, name: str, *, drain: bool = True, timeout: float | None = 10.0) -> None:
        """Cut off its sources, handle what is queued (or drop and count it), stop it, take its links away, destroy it.
        ``DrainError`` when the time is over first: then it stays as it was."""
        with self._lock:
            kept = self._find(name)
            if kept.removing:
                raise BrokerError(f"module {kept.shown!r} is being removed already")
            kept.removing = True
        try:
            self.broker.remove_module(
                kept.module,
                drain=drain,
                timeout=timeout,
                last=lambda module: self._last(module, drain, timeout),
                done=lambda module: self._gone(kept, module),
            )
        except BaseException:
            kept.removing = False
            with self._lock:
                self._sync()
            raise

    def _last(self, module: Any, drain: bool, timeout: float | None) -> None:
        finish(module, "stop")
        if drain and hasattr(module, "flush"):
            module.flush(timeout)
        finish(module, "end")

    def _gone(self, kept: Kept, module: Any) -> None:
        self._keeper.forget(kept)
        with self._lock:
            self._kept.pop(kept.name, None)
            self._table.remove_name(kept.name)
            self._sync()
        finish(module, "destroy")
        self._drop_endpoints()
        self._changed()

    # ---- links

    def add_link(self, source: str, sink: str, link_filter: Filter | None = None) -> None:
        """Join two modules or addresses; ``"*"`` as the source stands for every other module, now and later."""
        link = Link(source, sink, link_filter)
        with self._lock:
            self._check()
            self._check_link(link)
        opened = self._open_endpoints(link)
        try:
            with self._lock:
                self._check_link(link)
                self._table.add(link)
                self._sync()
        except BaseException:
            for name in opened:
                self._remove_endpoint(name)
            raise
        self._changed()

    def remove_link(self, source: str, sink: str) -> None:
        """Part them; when they are not joined, nothing happens."""
        with self._lock:
            self._check()
            if (source, sink) not in self._table:
                return
            self._table.remove(source, sink)
            self._sync()
        self._drop_endpoints()
        self._changed()

    def _check_link(self, link: Link) -> None:
        if link.sink == STAR:
            raise AddLinkError(f'link {link}: "{STAR}" stands for every source and cannot be a sink')
        for end in link.ends:
            if not is_address(end) and end != STAR and end not in self._table.names:
                known = [name for name in self._table.names if not is_address(name)]
                raise AddLinkError(f"link {link}: there is no module {without_secrets(end)!r}; {nearest(end, known)}")
        if link in self._table:
            raise AddLinkError(f"link {link} is there already")

    def _sync(self) -> None:
        """Make the broker's links what the table says, one computed set of sinks a source. Under the lock."""
        wanted: dict[tuple[str, str], tuple[Filter, ...]] = {}
        for source in self._table.names:
            for sink, filters in self._table.sinks(source).items():
                if not self._kept[sink].removing:
                    wanted[source, sink] = filters
        for ends in [ends for ends in self._joined if ends not in wanted]:
            del self._joined[ends]
            self._broker_link(self.broker.remove_link, ends)
        for ends, filters in wanted.items():
            if self._joined.get(ends) != filters or ends not in self._joined:
                self._broker_link(self.broker.add_link, ends, filters)
                self._joined[ends] = filters

    def _broker_link(self, change: Callable[..., None], ends: tuple[str, str], *more: Any) -> None:
        kept = [self._kept.get(end) for end in ends]
        if any(one is None or one.module is None for one in kept):
            return  # went with its module
        try:
            change(*(one.module for one in kept if one), *more)
        except BrokerError as error:
            log.debug("%s", error)

    # ---- addresses

    def _open_endpoints(self, link: Link) -> list[str]:
        """The endpoints of a link, made where they are missing; gives the new ones."""
        opened: list[str] = []
        try:
            for end, role in zip(link.ends, ("reads", "writes"), strict=True):
                if not is_address(end):
                    continue
                if end not in self._kept:
                    kept = Kept(Recipe(end, functools.partial(Endpoint, end), None), Restart(), None)
                    self._add(kept, QueueOptions())
                    opened.append(end)
                self._kept[end].module.open(reads=role == "reads", writes=role == "writes")
                _be_first_at_exit()
        except BaseException:
            for name in opened:
                self._remove_endpoint(name)
            raise
        return opened

    def _drop_endpoints(self) -> None:
        """Endpoints that no link names any more."""
        with self._lock:
            named = {end for link in self._table.links for end in link.ends}
            idle = [n for n, kept in self._kept.items() if is_address(n) and n not in named and not kept.removing]
        for name in idle:
            self._remove_endpoint(name)

    def _remove_endpoint(self, name: str) -> None:
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

    def apply(self, configuration: Configuration | Mapping[str, Any] | str | Path) -> list[str]:
        """Make the gateway what ``configuration`` (also a file) says, changing only what differs from the one applied
        before; on a failure it is put back as it was. Gives what was done, a line each."""
        from penstock.gateway.changes import apply

        if isinstance(configuration, str | Path):
            configuration = configurations.read(configuration)
        elif not isinstance(configuration, Configuration):
            configuration = configurations.parse(configuration)
        with self._one_change():
            done = apply(self, self._applied, configuration)
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
            return list(self._table.links)

    def modules(self) -> list[ModuleInfo]:
        """A snapshot of every module at work."""
        return self.broker.modules()

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
        self._events.tell(Event.MODULE_LIST_CHANGED, self.module_list())

    def _refused(self, name: str, error: BaseException) -> None:
        self._events.tell(Event.PUBLISH_REFUSED, (name, error))

    def _filter_failed(self, name: str, error: BaseException) -> None:
        log.error("a filter on a link of module %r raised: %s", name, error)
        self._events.tell(Event.MODULE_FAILED, (name, "filter", error))


class _Change:
    """One update or reload at a time; a second one is refused rather than made to wait for ever."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=30):
            raise StateError("another update of this gateway is still under way")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _be_first_at_exit() -> None:
    """Handlers run last come, first served, and a module or address may have loaded a room that has one too."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """A gateway that was not destroyed is, before the interpreter ends: its modules' threads would outlive it."""
    for gateway in list(_live):
        gateway.destroy(EXIT_TIMEOUT_S)


def _after_fork() -> None:
    """Threads did not come along into a forked child: the parent's gateways are at their end there."""
    for gateway in list(_live):
        gateway._closed = True
        gateway._lock = threading.RLock()


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name or name == STAR or is_address(name) or "\0" in name:
        shown = without_secrets(name) if isinstance(name, str) else name
        raise InvalidArgument(f"{shown!r} cannot name a module")
    return name


os.register_at_fork(after_in_child=_after_fork)
