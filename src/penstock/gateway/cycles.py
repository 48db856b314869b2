"""Cycles: which nodes of a graph that grows and shrinks link by link lie on a common cycle. Pure; its owner guards it.

A new link merges groups only if its end leads back to its start; removing a link can split a group only if both ends
were in it. Nothing else is examined again, so that in a graph without cycles each link costs a short search. While many
changes are made together (``defer`` to ``settle``), every new link counts as part of a cycle, and the whole graph is
examined once at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from penstock.gateway.links import drain_order

Node = TypeVar("Node", bound=Hashable)


class Cycles(Generic[Node]):
    """The graph, and for each node on a cycle the group of nodes that lie on one with it."""

    def __init__(self) -> None:
        self._ahead: dict[Node, dict[Node, None]] = {}
        self._back: dict[Node, dict[Node, None]] = {}
        self._group: dict[Node, frozenset[Node]] = {}
        self._deferred: set[tuple[Node, Node]] | None = None

    def defer(self) -> None:
        """Postpone all searches until ``settle``."""
        self._deferred = set()

    def settle(self) -> Iterable[Node]:
        """Examine the whole graph; returns the nodes whose links may have become or ceased to be part of a cycle."""
        self._deferred = None
        nodes = {*self._ahead, *self._back}
        graph = {node: tuple(self._ahead.get(node, ())) for node in nodes}
        self._group = {}
        for group in drain_order(graph):
            if len(group) > 1 or group[0] in graph[group[0]]:
                self._take(frozenset(group))
        return nodes

    def together(self, source: Node, sink: Node) -> bool:
        """Whether a link between the two is part of a cycle."""
        if self._deferred is not None and (source, sink) in self._deferred:
            return True
        group = self._group.get(source)
        return group is not None and sink in group

    def join(self, source: Node, sink: Node) -> Iterable[Node]:
        """Add a link; gives the nodes whose group has changed."""
        self._ahead.setdefault(source, {})[sink] = None
        self._back.setdefault(sink, {})[source] = None
        if self._deferred is not None:
            self._deferred.add((source, sink))
            return ()
        if self.together(source, sink):
            return ()
        group = self._on_cycle_with(sink, source)
        before = {self._group[node] for node in group if node in self._group}
        self._take(group)
        if len(before) > 1:
            return group
        # One group has grown: its links to the new nodes have become part of a cycle, the others were before.
        new = group - next(iter(before), frozenset())
        return new | {node for one in new for node in self._back.get(one, ()) if node in group} | {source}

    def part(self, source: Node, sink: Node) -> Iterable[Node]:
        """Remove a link; returns the nodes whose group has changed."""
        for table, key, other in ((self._ahead, source, sink), (self._back, sink, source)):
            there = table.get(key, {})
            there.pop(other, None)
            if not there:
                table.pop(key, None)
        if self._deferred is not None:
            self._deferred.discard((source, sink))
            return ()
        if not self.together(source, sink):
            return ()
        changed = self._group[source]
        for node in changed:
            self._group.pop(node, None)
        for node in changed:
            if node not in self._group:
                self._take(self._on_cycle_with(node, node, changed))
        return changed

    def _take(self, group: frozenset[Node]) -> None:
        for node in group:
            self._group[node] = group

    def _on_cycle_with(self, first: Node, last: Node, within: frozenset[Node] | None = None) -> frozenset[Node]:
        """Every node on a path from ``first`` to ``last``; none if there is no path."""
        if first is not last and not self._leads(first, last):
            return frozenset()
        reached: set[Node] = _reach(self._ahead, first, within)
        reached &= _reach(self._back, last, within)
        if len(reached) == 1 and first not in self._ahead.get(first, ()):
            return frozenset()
        return frozenset(reached)

    def _leads(self, first: Node, last: Node) -> bool:
        """Whether there is a path. Searches from both ends in turn, and ends when the smaller search is exhausted."""
        ahead, back = {first}, {last}
        forward, backward = [first], [last]
        while forward and backward:
            for seen, work, others, table in ((ahead, forward, back, self._ahead), (back, backward, ahead, self._back)):
                for node in table.get(work.pop(), ()) if work else ():
                    if node in others:
                        return True
                    if node not in seen:
                        seen.add(node)
                        work.append(node)
        return False


def _reach(table: Mapping[Any, Mapping[Any, None]], start: Node, within: frozenset[Node] | None) -> set[Node]:
    reached, work = {start}, [start]
    while work:
        for node in table.get(work.pop(), {}):
            if node not in reached and (within is None or node in within):
                reached.add(node)
                work.append(node)
    return reached
