"""The link table: which source sends to which sinks. Pure data, no threads; its owner guards it.

A star link (source ``"*"``) links every other module to its sink, including modules added later. Explicit and star
links are kept in two sets, from which the set of sinks of each source is computed. So a pair that is linked both ways
gets a message once, and removing one of the links leaves the other.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import TypeVar

from penstock.address import without_secrets
from penstock.channel import Overflow
from penstock.errors import InvalidArgument
from penstock.gateway.filters import Filter
from penstock.gateway.place import Checks, check_options

STAR = "*"
Node = TypeVar("Node", bound=Hashable)


class Delivery(enum.StrEnum):
    """The delivery guarantee of a link."""

    AT_MOST_ONCE = "at_most_once"  # a message at which the sink fails is lost to it; this is counted and reported
    AT_LEAST_ONCE = "at_least_once"  # such a message is redelivered, and its source knows when it was handled


CHECKS: Checks = {
    "delivery": lambda place: None if place.value is None else place.member(Delivery),
    "max_tries": lambda place: place.integer(1, optional=True),
    "backoff_s": lambda place: place.seconds(),
    "max_backoff_s": lambda place: place.seconds(),
    "ordered": lambda place: place.truth(),
    "ttl_s": lambda place: place.seconds(optional=True),
    "max_messages": lambda place: place.integer(1, optional=True),
    "max_bytes": lambda place: place.integer(1, optional=True),
    "overflow": lambda place: Overflow(place.choice(("block", "drop_newest"))),
}


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a link delivers. ``delivery=None``: at least once from a durable source and if options of redelivery are
    given, else at most once.

    A message that fails is redelivered after ``backoff_s``, doubled each time up to ``max_backoff_s``; after
    ``max_tries`` (None: no limit) it goes to the sink's output ``error``. ``ordered``: later messages wait meanwhile.
    ``ttl_s``: messages that have waited longer are dropped. ``max_messages`` and ``max_bytes`` bound the waiting
    messages of this link; ``overflow`` (block or drop_newest) says what happens at that bound.
    """

    delivery: Delivery | None = None
    max_tries: int | None = None
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    ordered: bool = False
    ttl_s: float | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    overflow: Overflow = Overflow.BLOCK

    def __post_init__(self) -> None:
        check_options(self, CHECKS)
        if self.backoff_s > self.max_backoff_s:
            raise InvalidArgument(f"backoff_s={self.backoff_s} is above max_backoff_s={self.max_backoff_s}")
        if self.delivery is Delivery.AT_MOST_ONCE and self.tries_again:
            raise InvalidArgument("max_tries, ordered and backoff_s are for links with delivery at_least_once")
        if self.overflow is not Overflow.BLOCK and not self.bounded:
            raise InvalidArgument("overflow says what happens at a link's max_messages or max_bytes: give one of these")

    @property
    def tries_again(self) -> bool:
        """Whether options of redelivery are given."""
        return self.max_tries is not None or self.ordered or (self.backoff_s, self.max_backoff_s) != (0.1, 30.0)

    def chosen(self, durable: bool) -> LinkOptions:
        """The same options with ``delivery`` set, depending on whether the source is ``durable``."""
        return _chosen(self, durable) if self.delivery is None else self

    @property
    def bounded(self) -> bool:
        """Whether it bounds the link's waiting messages."""
        return self.max_messages is not None or self.max_bytes is not None


DEFAULT = LinkOptions()


@functools.lru_cache(64)  # most links of a gateway have equal options
def _chosen(options: LinkOptions, durable: bool) -> LinkOptions:
    again = durable or options.tries_again
    return replace(options, delivery=Delivery.AT_LEAST_ONCE if again else Delivery.AT_MOST_ONCE)


@dataclass(frozen=True, slots=True, repr=False)
class Link:
    """From ``source`` (a name, an output ``NAME.OUTPUT``, an address or ``"*"``) to ``sink`` (a name or an address).

    ``buffer`` (``journal:DIRECTORY``) stores the messages on their way; ``error`` gets those at which the sink fails
    for good."""

    source: str
    sink: str
    filter: Filter | None = None
    options: LinkOptions = DEFAULT
    buffer: str | None = None
    error: str | None = None
    where: tuple[str, str | None] = field(default=("", None), compare=False)  # its path, and its file

    def __str__(self) -> str:
        return f"{without_secrets(self.source)} -> {without_secrets(self.sink)}"

    def __repr__(self) -> str:
        more = "" if self.filter is None else f", {self.filter!r}"
        return f"Link({without_secrets(self.source)!r}, {without_secrets(self.sink)!r}{more})"

    @property
    def ends(self) -> tuple[str, str]:
        """The key that identifies a link."""
        return self.source, self.sink


class LinkTable:
    """Names in order of adding, and the links between them, found by either end."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  # with a growing number: the order of adding
        self._links: dict[tuple[str, str], Link] = {}
        self._from: dict[str, dict[str, Link]] = {}
        self._to: dict[str, dict[str, Link]] = {}
        self._outputs: dict[str, dict[str, None]] = {}  # for each module, its named outputs that links use
        self._starless: set[str] = set()
        self._added = 0

    def owner(self, source: str) -> str:
        """The module of a source: itself, or the one whose output it is."""
        return source if source in self._names else source.rpartition(".")[0]

    def sources_within(self, name: str) -> list[str]:
        """The module itself and its named outputs, as sources of links."""
        return [name, *self._outputs.get(name, ())]

    def sources_to(self, sink: str) -> list[str]:
        """Every source whose messages reach ``sink``."""
        direct = self._to.get(sink, {})
        stars = [name for name in self._names if name != sink and name not in self._starless] if STAR in direct else []
        return [*dict.fromkeys((*(source for source in direct if source != STAR), *stars))]

    def options(self, source: str, sink: str) -> LinkOptions:
        """The options of the link; those of an explicit link take precedence over a star link's."""
        link = self._links.get((source, sink)) or self._links.get((STAR, sink))
        return link.options if link is not None else DEFAULT

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

    def add_name(self, name: str, passes_stars: bool = True) -> None:
        """Add a module to the table; the flag says whether star links lead from it."""
        self._added += 1
        self._names[name] = self._added
        if not passes_stars:
            self._starless.add(name)

    def remove_name(self, name: str) -> None:
        """Remove the module and every link that names it."""
        leaving = [link for source in self.sources_within(name) for link in self._from.get(source, {}).values()]
        del self._names[name]
        self._starless.discard(name)
        self._outputs.pop(name, None)
        for link in [*leaving, *self._to.get(name, {}).values()]:
            if link in self:
                self.remove(*link.ends)

    def add(self, link: Link) -> None:
        """Add a link; one with the same ends is replaced."""
        self._links[link.ends] = link
        self._from.setdefault(link.source, {})[link.sink] = link
        self._to.setdefault(link.sink, {})[link.source] = link
        if link.source != STAR and link.source not in self._names:
            self._outputs.setdefault(self.owner(link.source), {})[link.source] = None

    def remove(self, source: str, sink: str) -> None:
        """Remove a link; KeyError if there is none."""
        del self._links[(source, sink)]
        for table, key, other in ((self._from, source, sink), (self._to, sink, source)):
            del table[key][other]
            if not table[key]:
                del table[key]

    def sinks(self, source: str) -> dict[str, tuple[Filter, ...]]:
        """Every sink of ``source`` with the filters of its links; no filter when one of its links has none."""
        found: dict[str, list[Filter | None]] = {}
        starred = source in self._names and source not in self._starless
        stars = {sink: link for sink, link in self._from.get(STAR, {}).items() if sink != source} if starred else {}
        for table in (self._from.get(source, {}), stars):
            for sink, link in table.items():
                found.setdefault(sink, []).append(link.filter)
        return {sink: _together(filters) for sink, filters in found.items()}

    def sources(self, sink: str) -> tuple[str, ...]:
        """The modules whose messages reach ``sink``, in order of adding."""
        owners = {self.owner(source) for source in self.sources_to(sink)}
        return tuple(sorted((name for name in owners if name in self._names), key=self._names.__getitem__))

    def leads(self, name: str, sink: str) -> bool:
        """Whether what a module publishes may reach ``sink``, through others too."""
        seen, left = {name}, [name]
        while left:
            reached = {one for source in self.sources_within(left.pop()) for one in self.sinks(source)}
            if sink in reached:
                return True
            left += reached - seen
            seen |= reached
        return False

    def graph(self) -> dict[str, tuple[str, ...]]:
        """Each module's sinks."""
        return {
            name: tuple(dict.fromkeys(sink for source in self.sources_within(name) for sink in self.sinks(source)))
            for name in self._names
        }


def _together(filters: Iterable[Filter | None]) -> tuple[Filter, ...]:
    kept = [f for f in filters if f is not None and not f.empty]
    return tuple(kept) if len(kept) == len(list(filters)) else ()


def drain_plan(
    graph: Mapping[Node, Iterable[Node]],
) -> tuple[dict[tuple[Node, ...], None], TopologicalSorter[tuple[Node, ...]]]:
    """The groups of ``drain_order``, and which of them must have ended before which."""
    groups = drain_order(graph)
    group_of = {name: group for group in groups for name in group}
    order = TopologicalSorter(dict.fromkeys(groups, ()))
    for name, sinks in graph.items():
        for sink in sinks:
            if sink in group_of and group_of[sink] is not group_of[name]:
                order.add(group_of[sink], group_of[name])
    order.prepare()
    return dict.fromkeys(groups), order


def drain_order(graph: Mapping[Node, Iterable[Node]]) -> list[tuple[Node, ...]]:
    """Groups of modules in link order: a group receives only from earlier groups or from itself.

    A group of more than one module is a cycle: none of them can finish before the others. (Tarjan's algorithm yields
    strongly connected components with the sinks first, so the list is reversed.)
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
