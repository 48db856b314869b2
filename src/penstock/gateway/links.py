"""The link table: who sends to whom. Pure data, no threads; its owner guards it.

A star link (source ``"*"``) joins every other module to its sink, those added later included. Explicit and star links
are two sets; what a message follows is one computed set of sinks for its source, so a pair joined by both delivers
once, and removing either leaves the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.address import without_secrets
from penstock.gateway.filters import Filter

STAR = "*"
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True, repr=False)
class Link:
    """From ``source`` (a name, an address or ``"*"``) to ``sink`` (a name or an address)."""

    source: str
    sink: str
    filter: Filter | None = None

    def __str__(self) -> str:
        return f"{without_secrets(self.source)} -> {without_secrets(self.sink)}"

    def __repr__(self) -> str:
        more = "" if self.filter is None else f", {self.filter!r}"
        return f"Link({without_secrets(self.source)!r}, {without_secrets(self.sink)!r}{more})"

    @property
    def ends(self) -> tuple[str, str]:
        """What makes a link the same link."""
        return self.source, self.sink


class LinkTable:
    """Names in order of adding, and the links between them, found by either end."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  # with a number that grows: the order of adding
        self._links: dict[tuple[str, str], Link] = {}
        self._from: dict[str, dict[str, Link]] = {}
        self._to: dict[str, dict[str, Link]] = {}
        self._added = 0

    @property
    def names(self) -> Mapping[str, int]:
        """In order of adding."""
        return self._names

    @property
    def links(self) -> tuple[Link, ...]:
        """In order of adding."""
        return tuple(self._links.values())

    def __contains__(self, link: Link | tuple[str, str]) -> bool:
        return (link.ends if isinstance(link, Link) else link) in self._links

    def get(self, source: str, sink: str) -> Link | None:
        """The link between these ends, if there is one."""
        return self._links.get((source, sink))

    def is_named(self, name: str) -> bool:
        """Whether any link names it."""
        return bool(self._from.get(name) or self._to.get(name))

    def add_name(self, name: str) -> None:
        """A module that links may join."""
        self._added += 1
        self._names[name] = self._added

    def remove_name(self, name: str) -> None:
        """Forget the module and every link that names it."""
        del self._names[name]
        for link in [*self._from.get(name, {}).values(), *self._to.get(name, {}).values()]:
            if link in self:
                self.remove(*link.ends)

    def add(self, link: Link) -> None:
        """Join; the same ends again take the new filter."""
        self._links[link.ends] = link
        self._from.setdefault(link.source, {})[link.sink] = link
        self._to.setdefault(link.sink, {})[link.source] = link

    def remove(self, source: str, sink: str) -> None:
        """Part them; KeyError when they were not joined."""
        del self._links[(source, sink)]
        for table, key, other in ((self._from, source, sink), (self._to, sink, source)):
            del table[key][other]
            if not table[key]:
                del table[key]

    def sinks(self, source: str) -> dict[str, tuple[Filter, ...]]:
        """Every sink of ``source`` with the filters of its links; no filter when one of its links has none."""
        found: dict[str, list[Filter | None]] = {}
        stars = {sink: link for sink, link in self._from.get(STAR, {}).items() if sink != source}
        for table in (self._from.get(source, {}), stars):
            for sink, link in table.items():
                found.setdefault(sink, []).append(link.filter)
        return {sink: _together(filters) for sink, filters in found.items()}

    def sources(self, sink: str) -> tuple[str, ...]:
        """The modules whose messages reach ``sink``, in order of adding."""
        direct = self._to.get(sink, {})
        if STAR in direct:
            return tuple(name for name in self._names if name != sink or name in direct)
        return tuple(sorted((name for name in direct if name in self._names), key=self._names.__getitem__))

    def graph(self) -> dict[str, tuple[str, ...]]:
        """Each module's sinks."""
        return {name: tuple(self.sinks(name)) for name in self._names}


def _together(filters: Iterable[Filter | None]) -> tuple[Filter, ...]:
    kept = [f for f in filters if f is not None and not f.empty]
    return tuple(kept) if len(kept) == len(list(filters)) else ()


def drain_order(graph: Mapping[Node, Iterable[Node]]) -> list[tuple[Node, ...]]:
    """Groups of modules in link order: who comes later is fed only by who came earlier or by his own group.

    A group of more than one is a cycle: nobody in it can be done before the others. (Tarjan's strongly connected
    components come out with sinks first, so the list is turned round.)
    """
    order = {name: number for number, name in enumerate(graph)}
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    groups: list[tuple[Node, ...]] = []

    def close(node: Node) -> None:
        group = []
        while True:
            member = stack.pop()
            low[member] = len(graph) + 1  # no longer on the stack
            group.append(member)
            if member == node:
                break
        groups.append(tuple(sorted(group, key=order.__getitem__)))

    for root in reversed(list(graph)):
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for sink in rest:
                if sink not in graph:
                    continue
                if sink not in index:
                    work.append((sink, iter(graph[sink])))
                    break
                low[node] = min(low[node], low[sink])
            else:
                work.pop()
                lowest = low[node]
                if lowest == index[node]:
                    close(node)
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], lowest)
    return groups[::-1]
