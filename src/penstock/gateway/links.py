"""The link table: who sends to whom. Pure data, no threads; its owner guards it.

A star link (source ``"*"``) joins every other module to its sink, those added later included. Explicit and star links
are two sets; what a message follows is one computed set of sinks for its source, so a pair joined by both delivers
once, and removing either leaves the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.address import without_secrets
from penstock.gateway.filters import Filter

STAR = "*"


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
    """Names in order of adding, and the links between them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def copy(self) -> LinkTable:
        """Another table with the same names and links, to change and then take or leave."""
        other = LinkTable()
        other._names = dict(self._names)
        other._links = dict(self._links)
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """In order of adding."""
        return tuple(self._names)

    @property
    def links(self) -> tuple[Link, ...]:
        """In order of adding."""
        return tuple(self._links.values())

    def __contains__(self, link: Link | tuple[str, str]) -> bool:
        return (link.ends if isinstance(link, Link) else link) in self._links

    def get(self, source: str, sink: str) -> Link | None:
        """The link between these ends, if there is one."""
        return self._links.get((source, sink))

    def add_name(self, name: str) -> None:
        """A module that links may join."""
        self._names[name] = None

    def remove_name(self, name: str) -> None:
        """Forget the module and every link that names it."""
        del self._names[name]
        self._links = {ends: link for ends, link in self._links.items() if name not in ends}

    def add(self, link: Link) -> None:
        """Join; the same ends again take the new filter."""
        self._links[link.ends] = link

    def remove(self, source: str, sink: str) -> None:
        """Part them; KeyError when they were not joined."""
        del self._links[(source, sink)]

    def sinks(self, source: str) -> dict[str, tuple[Filter, ...]]:
        """Every sink of ``source`` with the filters of its links; no filter when one of its links has none."""
        found: dict[str, list[Filter | None]] = {}
        for link in self._links.values():
            if link.source == source or (link.source == STAR and link.sink != source):
                found.setdefault(link.sink, []).append(link.filter)
        return {sink: _together(filters) for sink, filters in found.items()}

    def sources(self, sink: str) -> tuple[str, ...]:
        """The modules whose messages reach ``sink``, in order of adding."""
        return tuple(name for name in self._names if sink in self.sinks(name))

    def graph(self) -> dict[str, tuple[str, ...]]:
        """Each module's sinks."""
        return {name: tuple(self.sinks(name)) for name in self._names}


def _together(filters: Iterable[Filter | None]) -> tuple[Filter, ...]:
    kept = [f for f in filters if f is not None and not f.empty]
    return tuple(kept) if len(kept) == len(list(filters)) else ()


def drain_order(graph: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Groups of modules in link order: who comes later is fed only by who came earlier or by his own group.

    A group of more than one is a cycle: nobody in it can be done before the others. (Tarjan's strongly connected
    components come out with sinks first, so the list is turned round.)
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[tuple[str, ...]] = []

    def close(node: str) -> None:
        group = []
        while True:
            member = stack.pop()
            low[member] = len(graph) + 1  # no longer on the stack
            group.append(member)
            if member == node:
                break
        groups.append(tuple(sorted(group, key=list(graph).index)))

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
