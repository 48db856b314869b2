"""Applies a configuration to a running gateway: adds what it names, or changes only what differs, with roll-back.

Each step notes how to undo it; after a failure the steps are undone in reverse order and the error is raised.
Everything is loaded before the first step, so that what cannot be loaded changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.gateway.configuration import Configuration, LoaderEntry, ModuleEntry
from penstock.gateway.errors import DrainError
from penstock.gateway.links import Link, drain_order
from penstock.gateway.loaders import recipe
from penstock.gateway.place import located

if TYPE_CHECKING:
    from penstock.gateway.gateway import Gateway

log = logging.getLogger("penstock.gateway")


class _Undo:
    """The undo steps of a change, run in reverse order if it fails."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def note(self, step: Callable[[], object]) -> None:
        """Note how to undo the last step."""
        self._steps.append(step)

    def __enter__(self) -> _Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for step in reversed(self._steps):
            try:
                step()
            except Exception:
                log.exception("a change could not be undone")


def add_all(gateway: Gateway, wanted: Configuration) -> None:
    """Add every module, then every link."""
    loaders = dict(gateway._loaders)
    gateway._loaders = {**loaders, **_by_name(wanted)}
    with gateway.broker.many_changes(), _Undo() as undo:
        undo.note(lambda: setattr(gateway, "_loaders", loaders))
        for entry in wanted.modules:
            _add_module(gateway, entry, undo)
        for link in wanted.links:
            _add_link(gateway, link, undo)
        _start(gateway, list(wanted.modules))


def apply(
    gateway: Gateway, old: Configuration, new: Configuration, again: frozenset[str] = frozenset()
) -> list[str]:
    """Change only what differs, and replace the modules of ``again``; returns a line for each change."""
    loaders = _by_name(new)
    for entry in new.modules:
        recipe(entry, loaders)  # raises if something cannot be loaded; nothing has changed yet
    changed = {loader.name for loader in new.loaders if loader not in old.loaders}
    before = {entry.name: entry for entry in old.modules}
    after = {entry.name: entry for entry in new.modules}
    same = {name for name, entry in after.items() if before.get(name) == entry and entry.loader not in changed} - again
    in_place = {name for name in after.keys() & before.keys() - same if after[name].queue == before[name].queue}
    old_links, new_links = ({link.ends: link for link in one.links} for one in (old, new))
    done: list[str] = []
    there = [link for link in gateway.links() if link.ends not in gateway._error_links]
    with gateway.broker.many_changes(), _Undo() as undo:
        old_loaders = gateway._loaders
        undo.note(lambda: _put_back(gateway, there, old))  # undone last, when every module exists again
        for link in old.links:
            wanted = new_links.get(link.ends)
            if wanted != link:
                stays = link.sink not in before or link.sink in same | in_place
                if stays and not (wanted is not None and _differ_in_terms(link, wanted)):
                    gateway.remove_link(*link.ends)
                done.append(f"- {link}")
        for name, entry in before.items():  # its links are removed with it
            if name not in same | in_place:
                _remove_module(gateway, entry, undo)
                done += [f"- {name}"] if name not in after else []
        for name in [name for group in drain_order(gateway._table.graph()) for name in group if name in in_place]:
            _halt_module(gateway, before[name], undo)  # sources first: one may wait for room in the queue of its sink
        gateway._loaders = loaders
        undo.note(lambda: setattr(gateway, "_loaders", old_loaders))  # undone before the old modules are created again
        for name, entry in after.items():
            if name in in_place and name in gateway._kept:
                with _told_at(entry.where):
                    gateway._put(entry)
            elif name not in same:
                _add_module(gateway, entry, undo)
            if name not in same:
                done.append(f"~ {name}" if name in before else f"+ {name}")
        for link in new.links:
            was = old_links.get(link.ends)
            if not gateway._has_link(link.ends):
                _add_link(gateway, link, undo)
            elif was is not None and was != link:
                with _told_at(link.where):
                    gateway._change_link(link)
                undo.note(functools.partial(gateway._change_link, was))
            done += [f"+ {link}"] if was != link else []
        for link in there:  # added at run time, and removed together with a module that is replaced
            if link.ends not in old_links and not gateway._has_link(link.ends) and gateway._can_link(link):
                _add_link(gateway, link, undo)
        _start(gateway, [entry for name, entry in after.items() if name not in same])
    return done


@contextmanager
def _told_at(where: tuple[str, str | None]) -> Iterator[None]:
    """Add the place in the file to errors raised inside."""
    try:
        yield
    except Exception as error:
        told = located(where, error)
        if told is error:
            raise
        raise told from error


def _by_name(configuration: Configuration) -> dict[str, LoaderEntry]:
    return {loader.name: loader for loader in configuration.loaders}


def _add_module(gateway: Gateway, entry: ModuleEntry, undo: _Undo) -> None:
    """Add a module without starting it: ``_start`` does that when its links exist."""
    with _told_at(entry.where):
        gateway._add_entry(entry, start=False)
    undo.note(lambda: gateway.remove_module(entry.name, drain=False))


def _start(gateway: Gateway, entries: list[ModuleEntry]) -> None:
    for entry in entries:
        with _told_at(entry.where):
            gateway._start_linked(gateway._kept[entry.name])


def _remove_module(gateway: Gateway, entry: ModuleEntry, undo: _Undo, **how: Any) -> None:
    there = gateway._kept.get(entry.name)
    with _told_at(entry.where):
        try:
            gateway.remove_module(entry.name, **how)
        except DrainError as error:
            if not error.hung:
                raise
            gateway.remove_module(entry.name, drain=False)  # a module that hangs must not prevent the roll-back
    # made again as it was made: its code may have changed since
    made = there.recipe if there is not None else None
    undo.note(lambda: (gateway._add_entry(entry, start=False, made=made), None)[1])


def _halt_module(gateway: Gateway, entry: ModuleEntry, undo: _Undo) -> None:
    """Stop a module that is replaced in place; one that hangs is removed instead, and added again."""
    made = gateway._find(entry.name).recipe
    if not gateway._halt(entry.name):
        _remove_module(gateway, entry, undo, drain=False, timeout=0)
        return

    def put_back() -> None:
        try:
            gateway._halt(entry.name)
            gateway._put(entry, made)
        except BaseException:
            gateway.remove_module(entry.name, drain=False)
            raise

    undo.note(put_back)


def _differ_in_terms(one: Link, other: Link) -> bool:
    """Whether two links with the same ends differ in what can be changed while messages pass."""
    return one.buffer is None and other.buffer is None and one.error == other.error


def _add_link(gateway: Gateway, link: Link, undo: _Undo) -> None:
    with _told_at(link.where):
        gateway._add_link(link)
    undo.note(lambda: gateway.remove_link(link.source, link.sink))


def _put_back(gateway: Gateway, links: list[Link], old: Configuration) -> None:
    """Restore the links, then start the modules that were created again."""
    for link in links:
        if not gateway._has_link(link.ends):
            gateway._add_link(link)
    _start(gateway, [entry for entry in old.modules if entry.name in gateway._kept])
