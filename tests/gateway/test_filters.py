"""Filters on links, by a clock of the test's own."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidArgument, types
from penstock.gateway import GatewayMessage
from penstock.gateway.filters import Filter, any_of


def accepted(link_filter: Filter, *messages: GatewayMessage) -> list[bool]:
    accepts = link_filter.compile()
    return [bool(accepts(message)) for message in messages]


def test_by_property() -> None:
    warm, cold, bare = (GatewayMessage(b"", p) for p in ({"kind": "warm", "n": "1"}, {"kind": "cold"}, {}))
    assert accepted(Filter({"kind": "warm"}), warm, cold, bare) == [True, False, False]
    assert accepted(Filter({"kind": ("warm", "cold")}), warm, cold, bare) == [True, True, False]
    assert accepted(Filter({"kind": "?o*"}), warm, cold, bare) == [False, True, False]
    assert accepted(Filter({"n": None}), warm, cold, bare) == [True, False, False]
    assert accepted(Filter({"kind": "warm", "n": "2"}), warm, cold, bare) == [False, False, False]


def test_by_size() -> None:
    messages = [GatewayMessage(bytes(size)) for size in range(5)]
    assert accepted(Filter(min_bytes=2), *messages) == [False, False, True, True, True]
    assert accepted(Filter(max_bytes=2), *messages) == [True, True, True, False, False]
    assert accepted(Filter(min_bytes=1, max_bytes=3), *messages) == [False, True, True, True, False]


def test_by_sample_after_the_other_parts() -> None:
    messages = [GatewayMessage(bytes(n % 2)) for n in range(12)]
    assert accepted(Filter(one_in=3), *messages) == [n % 3 == 0 for n in range(12)]
    assert sum(accepted(Filter(min_bytes=1, one_in=3), *messages)) == 2


def test_by_predicate() -> None:
    messages = [GatewayMessage(bytes([n])) for n in range(4)]
    assert accepted(Filter(predicate=lambda m: m.content[0] > 1), *messages) == [False, False, True, True]


@given(st.sampled_from([0.5, 1.0, 2.5, 3.0, 10.0]), st.lists(st.floats(0, 0.4), min_size=1, max_size=80))
def test_by_rate_never_more_than_so_many_in_any_second(rate_per_s: float, gaps: list[float]) -> None:
    now = [0.0]
    accepts = Filter(rate_per_s=rate_per_s).compile(clock=lambda: now[0])
    times = []
    for gap in gaps:
        now[0] += gap
        if accepts(GatewayMessage()):
            times.append(now[0])
    assert times[0] == gaps[0]
    window_s = max(1.0, 1 / rate_per_s)
    for begin in times:
        inside = [t for t in times if begin <= t < begin + window_s - 1e-9]
        assert len(inside) <= -(-rate_per_s // 1)


def test_by_rate_lets_the_full_rate_through() -> None:
    now = [0.0]
    accepts = Filter(rate_per_s=10).compile(clock=lambda: now[0])
    count = 0
    for step in range(1000):
        now[0] = step / 100
        count += bool(accepts(GatewayMessage()))
    assert count == 100


def test_two_links_let_through_what_either_does() -> None:
    small, every_second = Filter(max_bytes=0).compile(), Filter(one_in=2).compile()
    together = any_of([small, every_second])
    assert [bool(together(GatewayMessage(bytes(n)))) for n in (0, 1, 1, 1)] == [True, False, True, False]


@pytest.mark.parametrize(
    "given_",
    [{"min_bytes": -1}, {"min_bytes": 3, "max_bytes": 2}, {"one_in": 0}, {"rate_per_s": 0}, {"predicate": 7}],
)
def test_senseless_filters_are_refused(given_: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Filter(**given_)  # type: ignore[arg-type]


class Reading(msgspec.Struct):
    celsius: float
    unit: str = "C"


@pytest.mark.parametrize("kind", [None, Reading, types.plain(Reading, "msgpack")])
def test_by_fields_of_any_encoding(kind: Any) -> None:
    codec = types.codec_of(kind or Reading)
    accepts = Filter(where=".celsius > 20 and .unit == 'C'", type=kind).compile()
    bodies = [bytes(codec.encode(Reading(celsius))) for celsius in (19.0, 21.0)]
    assert [bool(accepts(GatewayMessage(body))) for body in (*bodies, b"\xff", b"")] == [False, True, False, False]


def test_an_expression_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(InvalidArgument, match="a value is missing at the end"):
        Filter(where=".celsius >")
    with pytest.raises(InvalidArgument, match="where="):
        Filter(type=Reading)
    with pytest.raises(InvalidArgument, match="give the class itself"):
        Filter(where=".x > 1", type=3)


@pytest.mark.parametrize("rate_per_s", [-1, 0, -0.5])
def test_a_rate_that_is_too_small_is_refused_in_the_same_words(rate_per_s: float) -> None:
    with pytest.raises(InvalidArgument, match="must be above 0"):
        Filter(rate_per_s=rate_per_s)


@pytest.mark.parametrize(("number", "bounds"), [(0, "it must be 1 or more"), (10**30, "1 to 4611686018427387904 are")])
def test_a_number_out_of_its_bounds_is_told_the_bound_that_it_breaks(number: int, bounds: str) -> None:
    with pytest.raises(InvalidArgument, match=bounds):
        Filter(one_in=number)
