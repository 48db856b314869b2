"""What is read of a recording: its messages in the order of the journals, of some topics, within a span of time.

The recorder stores messages in the order of their times, as far as it can know it (``penstock.recording.merge``): from
one topic to another times go back where a publisher's clock is wrong, or a backlog was too long to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument, nearest
from penstock.quantities import duration_s, iso_time, moment_ns
from penstock.recording.story import STORY
from penstock.topics import matches

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

__all__ = [
    "ARGUMENTS", "OPTIONS", "Span", "check_segments", "check_topics", "last_until", "located", "messages", "reader",
    "time_range", "topic_names",
]  # fmt: skip


#: What the bounds are called in Python, and in the command.
ARGUMENTS, OPTIONS = ("start", "length"), ("--from", "--for")
MAX_BACK = 8  # segments that are searched backwards for the last messages before a moment


class Span:
    """A span of time in a recording. None: no bound on that side."""

    def __init__(self, begin_ns: int | None, end_ns: int | None) -> None:
        self.begin_ns, self.end_ns = begin_ns, end_ns

    @classmethod
    def of(
        cls,
        journals: list[Journal],
        start: str | None,
        length: str | None,
        names: tuple[str, str] = ARGUMENTS,
    ) -> Span:
        """The span from ``start`` on, for ``length``; ``names`` are what errors call these two."""
        for name, value in zip(names, (start, length), strict=True):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is a text such as '10s', not {value!r}")
        begin_ns = None if start is None else _begin_ns(journals, start, names[0])
        if begin_ns is not None:
            _check_begin(journals, begin_ns, f"{names[0]} {start}")
        if length is None:
            return cls(begin_ns, None)
        length_ns = int(duration_s(length, names[1]) * 1e9)
        if not length_ns:
            raise InvalidArgument(f"{names[1]} {length} is no time at all")
        return cls(begin_ns, (_first_time_ns(journals) if begin_ns is None else begin_ns) + length_ns)


def _begin_ns(journals: list[Journal], start: str, name: str) -> int:
    try:
        after_ns = int(duration_s(start, name) * 1e9)
    except InvalidArgument:
        try:
            return moment_ns(start, name)
        except InvalidArgument:
            raise InvalidArgument(
                f"{name} {start!r} is no time; write 10s for ten seconds after the start, or 2026-01-31T12:00:00 (UTC) "
                "or ...+01:00"
            ) from None
    return _first_time_ns(journals) + after_ns


def _check_begin(journals: list[Journal], begin_ns: int, given: str) -> None:
    first, last = time_range(journals)
    if last < begin_ns and last:
        raise InvalidArgument(
            f"{given} is after the end: the recording is {(last - first) / 1e9:.1f} s long, "
            f"from {iso_time(first)} to {iso_time(last)}"
        )


def reader(folder: Path) -> Journal:
    """A part of a recording, opened for reading."""
    from penstock.journal import Journal

    return Journal(folder, mode="read")


def _first_time_ns(journals: list[Journal]) -> int:
    """The least time of all messages."""
    return time_range(journals)[0]


def time_range(journals: list[Journal], names: Container[str] | None = None) -> tuple[int, int]:
    """The least and the greatest time of all messages, or of these topics; 0 and 0 where there are none."""
    topics = [topic for journal in journals for topic in journal.info().topics if topic.name != STORY]
    topics = [topic for topic in topics if names is None or topic.name in names]
    least = min((topic.least_time_ns for topic in topics if topic.least_time_ns is not None), default=0)
    return least, max((topic.greatest_time_ns for topic in topics if topic.greatest_time_ns is not None), default=least)


def topic_names(journal: Journal, topics: list[str] | None) -> set[str]:
    """The journal's topics that were asked for."""
    names = {name for name in journal.topics if name != STORY}
    return names if topics is None else {n for n in names if any(matches(p, n) for p in topics)}


def check_segments(journals: list[Journal]) -> None:
    """Refuse a recording without topics that has lost its messages, as ``CorruptionError``."""
    if not any(journal.topics for journal in journals):
        next(messages(journals, None, Span(None, None)), None)


def check_topics(journals: list[Journal], topics: list[str] | None) -> None:
    """Refuse topics that the recording does not have."""
    check_segments(journals)
    if topics and not any(topic_names(journal, topics) for journal in journals):
        known = sorted({name for journal in journals for name in topic_names(journal, None)})
        raise InvalidArgument(f"no topic matches {', '.join(topics)}; {nearest(topics[0], known)}")


def _all(journal: Journal, topics: list[str] | None, first: int, stop: int) -> Iterator[Message]:
    """Messages of a range of positions, without the recording's own story."""
    from penstock.journal.journal import topic_filter

    chosen = topic_filter(topics)
    while first < stop:
        batch, following = journal.read_from(first, 1024, None, chosen)
        for message in batch:
            if (message.position or 0) >= stop:
                return
            if message.channel != STORY:
                yield message
        first = max(following, first + 1)


def messages(journals: list[Journal], topics: list[str] | None, span: Span) -> Iterator[Message]:
    """Every message of these topics within the span, without the recording's own story.

    Times are the publishers' own and may come in any order; each segment knows its least and greatest one.
    """
    return (message for _, message in located(journals, topics, span))


def located(journals: list[Journal], topics: list[str] | None, span: Span) -> Iterator[tuple[Journal, Message]]:
    """``messages``, each with the journal that holds it: positions are a journal's own."""
    for number, journal in enumerate(journals):
        found = journal.info()
        if not found.segments and _may_overlap(journals, number, span):
            next(_all(journal, topics, 1, found.frontier), None)  # raises if messages were stored there
        for segment in found.segments:
            begins = span.end_ns is None or segment.least_time_ns is None or segment.least_time_ns < span.end_ns
            ends = (
                span.begin_ns is None or segment.greatest_time_ns is None or segment.greatest_time_ns >= span.begin_ns
            )
            if not begins or not ends:
                continue
            for message in _all(journal, topics, segment.first, segment.next):
                early = span.begin_ns is not None and message.timestamp_ns < span.begin_ns
                late = span.end_ns is not None and message.timestamp_ns >= span.end_ns
                if not early and not late:
                    yield journal, message


def _may_overlap(journals: list[Journal], number: int, span: Span) -> bool:
    """Whether a part that lost its segments may have messages within the span, as far as the parts beside it know."""
    before, after = (time_range(journals[one : one + 1] if one >= 0 else []) for one in (number - 1, number + 1))
    ends_before = span.end_ns is not None and before[1] and span.end_ns <= before[0]
    begins_after = span.begin_ns is not None and after[1] and span.begin_ns > after[1]
    return not ends_before and not begins_after


def last_until(
    journals: list[Journal], topics: list[str], moment_ns: int, given_up: Callable[[], bool] = lambda: False
) -> dict[str, tuple[Journal, Message]]:
    """Of each of these topics the last message up to a moment, and the journal that holds it, where one lies within
    ``MAX_BACK`` segments of it."""
    found: dict[str, tuple[Journal, Message]] = {}
    segments = [(journal, segment) for journal in journals for segment in journal.info().segments]
    early = [pair for pair in segments if pair[1].least_time_ns is not None and pair[1].least_time_ns <= moment_ns]
    # newest segments first: most topics are found there, and older segments need not be read for them
    for journal, segment in reversed(early[-MAX_BACK:]):
        wanted = [topic for topic in topics if topic not in found]
        if not wanted:
            break
        latest: dict[str, tuple[Journal, Message]] = {}
        for message in _all(journal, wanted, segment.first, segment.next):
            if given_up():
                return {}
            if message.timestamp_ns <= moment_ns:
                latest[message.channel or ""] = journal, message
        found.update(latest)
    return found
