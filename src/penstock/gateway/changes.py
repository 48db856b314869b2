"""Changes by description: adding what a configuration names, or becoming what it says, with roll-back.

Each step that succeeds leaves how to undo it; a failure undoes them in reverse and is raised. What cannot be loaded is
found before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.gateway.configuration import Configuration, LoaderEntry, ModuleEntry
from penstock.gateway.errors import DrainError
from penstock.gateway.links import Link
from penstock.gateway.loaders import recipe
from penstock.gateway.place import located

if TYPE_CHECKING:
    from penstock.gateway.gateway import Gateway

log = logging.getLogger("penstock.gateway")


class _Undo:
    """The way back."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def note(self, step: Callable[[], None]) -> None:
        """How to undo what was just done."""
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


def apply(
    gateway: Gateway, old: Configuration, new: Configuration, again: frozenset[str] = frozenset()
) -> list[str]:
    """Change only what differs, and the modules of ``again``; gives a line for each change."""
    loaders = _by_name(new)
    for entry in new.modules:
        recipe(entry, loaders)  # what cannot be loaded stops it here, with nothing changed
    changed = {loader.name for loader in new.loaders if loader not in old.loaders}
    before = {entry.name: entry for entry in old.modules}
    after = {entry.name: entry for entry in new.modules}
    same = {name for name, entry in after.items() if before.get(name) == entry and entry.loader not in changed} - again
    old_links, new_links = ({link.ends: link for link in one.links} for one in (old, new))
    done: list[str] = []
    with gateway.broker.many_changes(), _Undo() as undo:
        old_loaders = gateway._loaders
        undo.note(lambda: setattr(gateway, "_loaders", old_loaders))
        for link in old.links:
            if new_links.get(link.ends) != link or any(end in before and end not in same for end in link.ends):
                _remove_link(gateway, link, undo)
                done += [f"- {link}"] if new_links.get(link.ends) != link else []
        for name, entry in before.items():
            if name not in same:
                _remove_module(gateway, entry, undo)
                done += [f"- {name}"] if name not in after else []
        gateway._loaders = loaders
        for name, entry in after.items():
            if name not in same:
                _add_module(gateway, entry, undo)
                done.append(f"~ {name}" if name in before else f"+ {name}")
        there = {link.ends for link in gateway.links()}
        for link in new.links:
            if link.ends not in there:
                _add_link(gateway, link, undo)
                done += [f"+ {link}"] if old_links.get(link.ends) != link else []
    return done


@contextmanager
def _told_at(where: tuple[str, str | None]) -> Iterator[None]:
    """What fails inside is told with its place in the file."""
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
    with _told_at(entry.where):
        gateway._add_entry(entry)
    undo.note(lambda: gateway.remove_module(entry.name, drain=False))


def _remove_module(gateway: Gateway, entry: ModuleEntry, undo: _Undo) -> None:
    with _told_at(entry.where):
        try:
            gateway.remove_module(entry.name)
        except DrainError as error:
            if not error.hung:
                raise
            gateway.remove_module(entry.name, drain=False)  # who does not come back cannot keep the gateway as it was
    undo.note(lambda: (gateway._add_entry(entry), None)[1])


def _add_link(gateway: Gateway, link: Link, undo: _Undo) -> None:
    with _told_at(link.where):
        gateway._add_link(link)
    undo.note(lambda: gateway.remove_link(link.source, link.sink))


def _remove_link(gateway: Gateway, link: Link, undo: _Undo) -> None:
    if link in gateway._table:
        gateway.remove_link(link.source, link.sink)
        undo.note(lambda: gateway._add_link(link))
