"""The messages that a query selects: topics, ordinals, positions and times, from options and pushed-down filters.

A ``Bounds`` is asked twice: by the planner, whether a segment with these least and greatest values can hold a match,
and by the reader, for the mask over an index. Filters go back to Spark as well, so that ours may be too wide, never
too narrow. Knows no Spark class but the names of its filters; immutable, so any thread may use it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy

from penstock.errors import InvalidArgument
from penstock.quantities import datetime_ns, iso_ns
from penstock.topics import check_pattern, matches

LEAST, GREATEST = -(2**63), 2**63 - 1
_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive ranges; of each of ``patterns``, a tuple of alternatives, one must match."""

    patterns: tuple[tuple[str, ...], ...] = ()
    ordinals: tuple[int, int] = (LEAST, GREATEST)
    positions: tuple[int, int] = (LEAST, GREATEST)
    times: tuple[int, int] = (LEAST, GREATEST)  # when a message was published
    stored: tuple[int, int] = (LEAST, GREATEST)  # when it was stored

    @property
    def by_row(self) -> bool:
        """Whether rows must be tested one by one, not by their position alone."""
        return bool(self.patterns) or any(
            bounds != (LEAST, GREATEST) for bounds in (self.ordinals, self.times, self.stored)
        )

    def wants_topic(self, name: str) -> bool:
        """Whether messages of this topic can match."""
        return all(any(topic_matches(name, pattern) for pattern in choices) for choices in self.patterns)

    def wants(
        self,
        ordinals: tuple[int, int],
        positions: tuple[int, int],
        times: tuple[int, int],
        stored: tuple[int, int] = (LEAST, GREATEST),
    ) -> bool:
        """Whether a segment with these least and greatest values can hold a match."""
        pairs = ((self.ordinals, ordinals), (self.positions, positions), (self.times, times), (self.stored, stored))
        return all(low <= greatest and least <= high for (low, high), (least, greatest) in pairs)

    def narrowed(self, kind: str, low: int | None = None, high: int | None = None) -> Bounds:
        """These bounds with one range cut down."""
        old_low, old_high = getattr(self, kind)
        new = (max(old_low, LEAST if low is None else low), min(old_high, GREATEST if high is None else high))
        return replace(self, **{kind: new})

    def with_topics(self, choices: tuple[str, ...]) -> Bounds:
        """These bounds for topics that also match one of ``choices``."""
        return replace(self, patterns=(*self.patterns, choices))

    def mask(
        self, index: numpy.ndarray[Any, Any], topic_ids: numpy.ndarray[Any, Any] | None
    ) -> numpy.ndarray[Any, Any]:
        """Which entries match; ``topic_ids`` are those that ``wants_topic``, None for all."""
        wanted = numpy.ones(len(index), numpy.bool_)
        for field, (low, high) in (
            ("ordinal", self.ordinals),
            ("timestamp_ns", self.times),
            ("stored_ns", self.stored),
            ("position", self.positions),
        ):
            if (low, high) == (LEAST, GREATEST):
                continue
            values = index[field]
            if low > LEAST:
                wanted &= values >= max(low, 0) if values.dtype.kind == "u" else values >= low
            if high < GREATEST:
                wanted &= values <= high if high >= 0 or values.dtype.kind == "i" else numpy.bool_(False)
        if topic_ids is not None:
            wanted &= numpy.isin(index["topic"], topic_ids)
        return wanted


def topic_matches(name: str, pattern: str) -> bool:
    """As the journal's patterns; ``=NAME`` is exact and ``^TEXT`` a beginning, for filters that Spark pushes down."""
    if pattern.startswith("="):
        return name == pattern[1:]
    if pattern.startswith("^"):
        return name.startswith(pattern[1:])
    return matches(pattern, name)


def from_options(options: Mapping[str, str]) -> Bounds:
    """Options ``topics``, ``startOrdinal`` .. ``endTime`` as bounds. Ranges include both ends."""
    bounds = Bounds()
    topics = options.get("topics") or options.get("topic")
    if topics is not None:
        choices = tuple(part.strip() for part in topics.split(",") if part.strip())
        if not choices:
            raise InvalidArgument(f"topics={topics!r} names no topic; give names or patterns, as in 'sensors.*'")
        bounds = bounds.with_topics(tuple(check_pattern(choice) for choice in choices))
    for kind, suffix, convert in (
        ("ordinals", "Ordinal", integer),
        ("positions", "Position", integer),
        ("times", "Time", time_ns),
    ):
        low, high = options.get("start" + suffix), options.get("end" + suffix)
        bounds = bounds.narrowed(
            kind,
            None if low is None else convert(low, "start" + suffix),
            None if high is None else convert(high, "end" + suffix, last=True),
        )
    return bounds


def integer(text: str, option: str, last: bool = False) -> int:
    """``text`` as a whole number."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{option}={text!r} is not a whole number") from None


def time_ns(text: str, option: str, last: bool = False) -> int:
    """``text`` as nanoseconds since 1970: a whole number of them, or ISO 8601 (UTC unless it says otherwise)."""
    if re.fullmatch(r"-?\d+", text.strip()):
        return int(text)
    try:
        return iso_ns(text) + (_NS_PER_US - 1 if last else 0)
    except ValueError:
        raise InvalidArgument(
            f"{option}={text!r} is neither nanoseconds nor a time such as 2026-11-15T20:00:00Z"
        ) from None


def push(bounds: Bounds, filter_: Any) -> Bounds:
    """``bounds`` narrowed by one of Spark's filters; unchanged if the filter is of no use here."""
    kind = type(filter_).__name__
    attribute = getattr(filter_, "attribute", None)
    if attribute is None or len(attribute) != 1 or not hasattr(filter_, "value"):
        return bounds
    column, value = attribute[0], filter_.value
    if column == "topic":
        return _push_topic(bounds, kind, value)
    ranges = {"ordinal": "ordinals", "position": "positions", "timestamp_ns": "times", "timestamp": "times"}
    ranges["stored_ns"] = "stored"
    return _push_range(bounds, ranges[column], kind, value) if column in ranges else bounds


def _push_topic(bounds: Bounds, kind: str, value: Any) -> Bounds:
    if kind in ("EqualTo", "EqualNullSafe") and isinstance(value, str):
        return bounds.with_topics(("=" + value,))
    if kind == "In":
        return bounds.with_topics(tuple("=" + item for item in value if isinstance(item, str)))
    if kind == "StringStartsWith":
        return bounds.with_topics(("^" + value,))
    return bounds


def _push_range(bounds: Bounds, name: str, kind: str, value: Any) -> Bounds:
    if kind == "In":
        ranges = [_range(item) for item in value if item is not None]
        if not ranges or None in ranges:
            return bounds
        known = [pair for pair in ranges if pair is not None]
        return bounds.narrowed(name, min(low for low, _ in known), max(high for _, high in known))
    pair = _range(value)
    if pair is None:
        return bounds
    # a value may cover several integers (see ``_range``): "greater" begins after the last of them, "less" ends before
    # the first; too wide a range is harmless, since Spark filters again
    low, high = pair
    if kind in ("EqualTo", "EqualNullSafe"):
        return bounds.narrowed(name, low, high)
    if kind == "GreaterThan":
        return bounds.narrowed(name, low=high + 1)
    if kind == "GreaterThanOrEqual":
        return bounds.narrowed(name, low=low)
    if kind == "LessThan":
        return bounds.narrowed(name, high=low - 1)
    if kind == "LessThanOrEqual":
        return bounds.narrowed(name, high=high)
    return bounds


def _range(value: Any) -> tuple[int, int] | None:
    """The least and greatest integer that a value stands for: a time in microseconds covers a thousand nanoseconds."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value, value
    if isinstance(value, datetime.datetime):
        first = datetime_ns(value)
        return first, first + _NS_PER_US - 1
    return None
