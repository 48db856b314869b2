"""The link table and the order of draining: pure data."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.filters import Filter
from penstock.gateway.links import Link, LinkTable, drain_order

NAMES = "abcdef"
ENDS = st.tuples(st.sampled_from(NAMES + "*"), st.sampled_from(NAMES))


def table(*links: tuple[str, str]) -> LinkTable:
    made = LinkTable()
    for name in NAMES:
        made.add_name(name)
    for source, sink in links:
        made.add(Link(source, sink))
    return made


def test_a_star_and_an_explicit_link_are_one_sink_and_either_may_go() -> None:
    for order in ((("*", "b"), ("a", "b")), (("a", "b"), ("*", "b"))):
        for gone, left in (order, order[::-1]):
            links = table(*order)
            assert list(links.sinks("a")) == ["b"]
            links.remove(*gone)
            assert list(links.sinks("a")) == ["b"]
            assert set(links.sinks("c")) == ({"b"} if left[0] == "*" else set())


def test_a_star_never_feeds_its_own_sink_but_a_self_link_does() -> None:
    assert table(("*", "b")).sinks("b") == {}
    assert list(table(("*", "b"), ("b", "b")).sinks("b")) == ["b"]


def test_a_module_added_later_is_joined_by_the_star() -> None:
    links = table(("*", "b"))
    links.add_name("late")
    assert list(links.sinks("late")) == ["b"]
    assert "late" in links.sources("b")


def test_removing_a_module_removes_its_links() -> None:
    links = table(("*", "b"), ("a", "b"), ("b", "c"), ("a", "c"))
    links.remove_name("b")
    assert [link.ends for link in links.links] == [("a", "c")]


def test_filters_of_two_links_are_both_kept_and_an_open_one_opens_the_pair() -> None:
    links = table()
    links.add(Link("a", "b", Filter(one_in=2)))
    links.add(Link("*", "b", Filter(max_bytes=3)))
    assert links.sinks("a")["b"] == (Filter(one_in=2), Filter(max_bytes=3))
    links.add(Link("*", "b"))
    assert links.sinks("a")["b"] == ()


@given(st.lists(ENDS, max_size=12))
def test_the_computed_set_is_what_the_rules_say(links: list[tuple[str, str]]) -> None:
    made = table(*links)
    for source in NAMES:
        wanted = {sink for s, sink in links if s == source or (s == "*" and sink != source)}
        assert set(made.sinks(source)) == wanted


@given(st.lists(ENDS, max_size=14))
def test_drain_order_follows_the_links_and_groups_cycles(links: list[tuple[str, str]]) -> None:
    graph = table(*links).graph()
    groups = drain_order(graph)
    assert sorted(name for group in groups for name in group) == sorted(NAMES)
    place = {name: index for index, group in enumerate(groups) for name in group}
    reach = {name: reachable(graph, name) for name in NAMES}
    for source, sinks in graph.items():
        for sink in sinks:
            assert place[source] <= place[sink]
            assert (place[source] == place[sink]) == (source == sink or source in reach[sink])


def reachable(graph: dict[str, tuple[str, ...]], start: str) -> set[str]:
    found: set[str] = set()
    work = list(graph[start])
    while work:
        name = work.pop()
        if name not in found:
            found.add(name)
            work += graph[name]
    return found


def test_independent_modules_keep_their_order() -> None:
    assert drain_order({"a": (), "b": (), "c": ("a",)}) == [("b",), ("c",), ("a",)] or drain_order(
        {"a": (), "b": (), "c": ("a",)}
    )[0] in (("b",), ("c",))
