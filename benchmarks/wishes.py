"""What a candidate is to reach beside others of its run, or by itself; judged by the medians.

A wish that names a candidate which did not run is left unjudged, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """The medians of a run, as one candidate sees them."""

    name: str
    medians: Mapping[str, float]
    latency: bool  # less is better
    unit: str

    @property
    def own(self) -> float:
        return self.medians[self.name]

    def times(self, other: str) -> float | None:
        """How many times as good as ``other``; None when that did not run."""
        if other not in self.medians:
            return None
        theirs = self.medians[other]
        return theirs / self.own if self.latency else self.own / theirs


@dataclass
class Verdict:
    wanted: str
    got: str
    reached: bool | None  # None: it could not be judged


Wish = Callable[[Figures], Verdict]


def at_least(times: float, of: str) -> Wish:
    """So many times as good as ``of``, or better."""

    def judge(figures: Figures) -> Verdict:
        got = figures.times(of)
        return _verdict(f">= {times:g} x {of}", of, got, got is not None and got >= times)

    return judge


def at_most(times: float, of: str) -> Wish:
    """So many times as slow as ``of``, or less."""

    def judge(figures: Figures) -> Verdict:
        got = figures.times(of)
        slower = None if got is None else 1 / got
        return _verdict(f"<= {times:g} x {of}", of, slower, slower is not None and slower <= times)

    return judge


def ahead_of(*others: str, times: float = 1.0) -> Wish:
    """Better than each of them (``times`` as good, or better); judged by the best of those that ran."""

    def judge(figures: Figures) -> Verdict:
        ran = {name: got for name in others if (got := figures.times(name)) is not None}
        wanted = f">= {times:g} x every peer"
        if not ran:
            return Verdict(wanted, "no peer ran", None)
        nearest = min(ran, key=ran.__getitem__)
        return _verdict(wanted, nearest, ran[nearest], ran[nearest] >= times)

    return judge


def reaching(bound: float) -> Wish:
    """A rate of at least ``bound``; where less is better, a time of at most that."""

    def judge(figures: Figures) -> Verdict:
        reached = figures.own <= bound if figures.latency else figures.own >= bound
        sign = "<=" if figures.latency else ">="
        return Verdict(f"{sign} {figure(bound, figures.unit)}", figure(figures.own, figures.unit), reached)

    return judge


def within(text: str, bound: Callable[[Mapping[str, float]], float], *needed: str) -> Wish:
    """A time of at most what the medians of the candidates ``needed`` give."""

    def judge(figures: Figures) -> Verdict:
        missing = [name for name in needed if name not in figures.medians]
        if missing:
            return Verdict(text, f"{missing[0]} did not run", None)
        most = bound(figures.medians)
        got = f"{figure(figures.own, figures.unit)}, where {figure(most, figures.unit)} were allowed"
        return Verdict(text, got, figures.own <= most)

    return judge


def _verdict(wanted: str, of: str, got: float | None, reached: bool) -> Verdict:
    if got is None:
        return Verdict(wanted, f"{of} did not run", None)
    return Verdict(wanted, f"{got:.2f} x {of}", reached)


def figure(value: float, unit: str) -> str:
    """A number for people: 1.23 M messages/s, 4.5 us."""
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
            if value >= scale:
                return f"{value / scale:.2f} {name}"
        return f"{value * 1e9:.0f} ns"
    for scale, name in ((1e9, "G "), (1e6, "M "), (1e3, "k ")):
        if value >= scale:
            return f"{value / scale:.2f} {name}{unit}"
    return f"{value:.2f} {unit}"
