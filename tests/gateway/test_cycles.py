"""Cycles, found link by link, against the components of the whole graph."""

from __future__ import annotations

import random

import pytest

from penstock.gateway.cycles import Cycles
from penstock.gateway.links import drain_order


def expected(links: set[tuple[int, int]], source: int, sink: int) -> bool:
    graph: dict[int, list[int]] = {node: [] for node in range(12)}
    for one, other in links:
        graph[one].append(other)
    group = next(group for group in drain_order(graph) if source in group)
    return sink in group and (source != sink or (source, sink) in links or len(group) > 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("together", [False, True])
def test_links_that_come_and_go_give_the_same_cycles_as_the_whole_graph(seed: int, together: bool) -> None:
    chance = random.Random(seed)
    cycles: Cycles[int] = Cycles()
    links: set[tuple[int, int]] = set()
    known: dict[tuple[int, int], bool] = {}
    for _ in range(40):
        changed: set[int] = set()
        if together:
            cycles.defer()
        for _ in range(3):
            link = chance.randrange(12), chance.randrange(12)
            if link in links:
                links.discard(link)
                known.pop(link, None)
                changed |= set(cycles.part(*link))
            else:
                links.add(link)
                changed |= {link[0], *cycles.join(*link)}
        if together:
            changed |= set(cycles.settle())
        for source, sink in links:
            now = cycles.together(source, sink)
            assert now == expected(links, source, sink)
            assert source in changed or known[source, sink] == now, "who must be told is named"
            known[source, sink] = now


def test_while_changes_are_made_together_every_new_link_passes_for_one_of_a_cycle() -> None:
    cycles: Cycles[str] = Cycles()
    cycles.join("a", "b")
    cycles.defer()
    cycles.join("b", "c")
    assert cycles.together("b", "c")
    assert not cycles.together("a", "b")
    cycles.settle()
    assert not cycles.together("b", "c")
