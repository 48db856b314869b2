"""The wishes of the benchmarks: what is wanted of a candidate, judged by the medians of its run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from wishes import Figures, Wish, ahead_of, at_least, at_most, reaching, within

RATES = Figures("ours", {"ours": 200.0, "a": 100.0, "b": 150.0}, latency=False, unit="messages/s")
TIMES = Figures("ours", {"ours": 2e-6, "a": 1e-6, "b": 4e-6}, latency=True, unit="s")


@pytest.mark.parametrize(
    ("wish", "figures", "got", "reached"),
    [
        (at_least(2, "a"), RATES, "2.00 x a", True),
        (at_least(2.1, "a"), RATES, "2.00 x a", False),
        (at_least(0.5, "a"), TIMES, "0.50 x a", True),
        (at_most(2, "a"), TIMES, "2.00 x a", True),
        (at_most(1.9, "a"), TIMES, "2.00 x a", False),
        (at_most(1, "a"), RATES, "0.50 x a", True),
        (ahead_of("a", "b", "c"), RATES, "1.33 x b", True),
        (ahead_of("a", "b", "c", times=1.5), RATES, "1.33 x b", False),
        (ahead_of("a", "b"), TIMES, "0.50 x a", False),
        (reaching(200), RATES, "200.00 messages/s", True),
        (reaching(201), RATES, "200.00 messages/s", False),
        (reaching(2e-6), TIMES, "2.00 us", True),
        (reaching(1e-6), TIMES, "2.00 us", False),
        (within("half of b", lambda took: took["b"] / 2, "b"), TIMES, "2.00 us, where 2.00 us were allowed", True),
        (within("a", lambda took: took["a"], "a"), TIMES, "2.00 us, where 1.00 us were allowed", False),
        (at_least(2, "c"), RATES, "c did not run", None),
        (at_most(2, "c"), RATES, "c did not run", None),
        (ahead_of("c"), RATES, "no peer ran", None),
        (ahead_of(), RATES, "no peer ran", None),
        (within("c", lambda took: took["c"], "c"), TIMES, "c did not run", None),
    ],
)
def test_a_wish_is_judged(wish: Wish, figures: Figures, got: str, reached: bool | None) -> None:
    verdict = wish(figures)
    assert (verdict.got, verdict.reached) == (got, reached)


def test_what_is_wanted_is_said_as_the_unit_has_it() -> None:
    assert reaching(500_000)(RATES).wanted == ">= 500.00 k messages/s"
    assert reaching(0.3)(TIMES).wanted == "<= 300.00 ms"
    assert at_most(1.15, "a")(TIMES).wanted == "<= 1.15 x a" and at_least(3, "a")(RATES).wanted == ">= 3 x a"
