"""Rules for the output of a replay: the first message that breaks one, and the inputs that are needed for that.

A rule is a filter expression (``penstock.filter``) that every output message must satisfy; a message without the fields
that the rule names is not judged, and a rule that has judged no message has no result. ``shrink`` is delta debugging:
it leaves inputs out, first many, then fewer at a time, as long as the same topic still breaks the rule by the same
moment. Each try is a replay of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import InvalidArgument
from penstock.filter import compile_rule
from penstock.replay.output import topic_of_sink, topic_of_source
from penstock.replay.run import Report, replay
from penstock.replay.script import Input
from penstock.replay.target import Target
from penstock.topics import matches

__all__ = ["Break", "Rule", "Shown", "Verdict", "first_break", "judge", "judge_all", "minimal", "shrink"]

AROUND = 3  # messages shown before and after a break
MAX_INPUTS = 1_000_000  # most inputs that shrinking keeps in memory
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shown:
    """An output message, kept for display."""

    topic: str
    time_ns: int
    properties: dict[str, str]
    payload: bytes


@dataclass(slots=True)
class Break:
    """Where a rule breaks: the message, the number of inputs before it, and the messages around it."""

    shown: Shown
    number: int  # of the message in the output
    inputs: int
    before: list[Shown]
    after: list[Shown] = field(default_factory=list)
    at_end: bool = False  # the modules published it when they were stopped


class Rule:
    """An expression for the outputs of some topics; None: of all."""

    def __init__(self, expression: str, topics: list[str] | None = None) -> None:
        if isinstance(topics, str):
            raise InvalidArgument(f"topics is a list of topics, not {topics!r}")
        self.expression = expression
        self._judge = compile_rule(expression)
        self.topics = topics

    def keeps(self, topic: str, message: Any) -> bool | None:
        """Whether this message satisfies it; None: the rule does not apply to it."""
        if self.topics is not None and not any(matches(pattern, topic) for pattern in self.topics):
            return None
        return self._judge(message)

    def breaks(self, topic: str, message: Any) -> bool:
        """Whether this message breaks it."""
        return self.keeps(topic, message) is False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a rule for a replay: where it breaks, how many messages it judged until then, and the replay's
    report.
    """

    found: Break | None
    judged: int
    report: Report

    @property
    def holds(self) -> bool | None:
        """Whether the rule holds; None: nothing was judged."""
        return False if self.found is not None else True if self.judged else None


class _Watch:
    """Checks the output of a replay until the rule is broken."""

    def __init__(self, rule: Rule, only: str | None, around: int) -> None:
        self._rule, self._only, self._around = rule, only, around
        self._last: deque[Shown] = deque(maxlen=around)
        self._number = 0
        self.judged = 0
        self.inputs = 0
        self._ending = False
        self.found: Break | None = None

    def published(self, name: str, message: Any) -> None:
        self._see(topic_of_source(name), message)

    def left(self, name: str, message: Any) -> None:
        self._see(topic_of_sink(name), message)

    def _see(self, topic: str, message: Any) -> None:
        self._number += 1
        if self.found is not None:
            if len(self.found.after) < self._around:
                self.found.after.append(_shown(topic, message))
            return
        kept = self._rule.keeps(topic, message) if self._only is None or topic == self._only else None
        self.judged += kept is not None
        if kept is False:
            self.found = Break(_shown(topic, message), self._number, self.inputs, list(self._last), at_end=self._ending)
        elif self._around:
            self._last.append(_shown(topic, message))

    def enough(self) -> bool:
        return self.found is not None and len(self.found.after) >= self._around

    def end(self) -> None:
        self._ending = True

    def count_input(self) -> None:
        self.inputs += 1


def _shown(topic: str, message: Any) -> Shown:
    return Shown(topic, message.timestamp_ns, dict(message.properties), bytes(message))


def first_break(
    target: Target,
    inputs: Iterable[Input],
    times_ns: tuple[int, int],
    rule: Rule,
    *,
    seed: int = 0,
    only: str | None = None,
    around: int = AROUND,
    stops: bool = True,
) -> Break | None:
    """Where the rule breaks first; None: nowhere. Parameters as for ``judge``."""
    return judge(target, inputs, times_ns, rule, seed=seed, only=only, around=around, stops=stops).found


def judge(
    target: Target,
    inputs: Iterable[Input],
    times_ns: tuple[int, int],
    rule: Rule,
    *,
    seed: int = 0,
    only: str | None = None,
    around: int = AROUND,
    stops: bool = True,
) -> Verdict:
    """Replay until a message (of the topic ``only``) breaks the rule.
    Without ``stops`` the modules are not stopped in order at the end, so that stopping publishes nothing."""
    return _watched(target, inputs, times_ns, [_Watch(rule, only, around)], seed, stops)[0]


def judge_all(
    target: Target, inputs: Iterable[Input], times_ns: tuple[int, int], rules: Iterable[Rule], *, seed: int = 0
) -> list[Verdict]:
    """Replay once, until every rule is broken."""
    return _watched(target, inputs, times_ns, [_Watch(rule, None, AROUND) for rule in rules], seed, stops=True)


def _watched(
    target: Target, inputs: Iterable[Input], times_ns: tuple[int, int], watches: list[_Watch], seed: int, stops: bool
) -> list[Verdict]:
    def published(name: str, message: Any) -> None:
        for watch in watches:
            watch.published(name, message)

    def left(name: str, message: Any) -> None:
        for watch in watches:
            watch.left(name, message)

    def end() -> None:
        for watch in watches:
            watch.end()

    def count_input() -> None:
        for watch in watches:
            watch.count_input()

    report = replay(
        target,
        inputs,
        times_ns,
        on_published=published,
        on_left=left,
        seed=seed,
        on_input=count_input,
        enough=lambda: all(watch.enough() for watch in watches),
        on_end=end if stops else None,
    )
    return [Verdict(watch.found, watch.judged, report) for watch in watches]


def shrink(
    target: Target,
    inputs: Sequence[Input],
    times_ns: tuple[int, int],
    rule: Rule,
    found: Break,
    *,
    seed: int = 0,
    max_runs: int = 1000,
    run: Callable[[Callable[[], bool]], bool] = lambda replays: replays(),
    on_smaller: Callable[[list[Input]], object] = lambda _: None,
) -> tuple[list[Input], bool, int]:
    """The ``inputs`` that are needed for the topic of ``found`` to break the rule by that moment; whether none of them
    can be left out (False: ``max_runs`` replays were not enough to be sure); how many replays it took. ``run`` calls a
    function: ``apart.apart`` does so in a process of its own. ``on_smaller`` gets what is left, each time that is less.
    """
    until = times_ns[0], max(times_ns[0], found.shown.time_ns)

    def still_breaks(some: Sequence[Input]) -> bool:
        only, stops = found.shown.topic, found.at_end
        return run(
            lambda: first_break(target, some, until, rule, seed=seed, only=only, around=0, stops=stops) is not None
        )

    return minimal(list(inputs[: found.inputs]), still_breaks, max_runs, on_smaller)


def minimal(
    items: list[Item],
    holds: Callable[[Sequence[Item]], bool],
    max_runs: int,
    on_smaller: Callable[[list[Item]], object] = lambda _: None,
) -> tuple[list[Item], bool, int]:
    """A subset of ``items`` for which ``holds`` is true and from which no single one can be left out; False if
    ``max_runs`` ended the search before; how often ``holds`` was called. ``on_smaller`` gets each smaller subset.
    """
    runs, pieces = 0, 1
    while items:
        size = -(-len(items) // pieces)
        for begin in range(0, len(items), size):
            if runs >= max_runs:
                return items, False, runs
            rest = items[:begin] + items[begin + size :]
            runs += 1
            if holds(rest):
                items, pieces = rest, max(1, pieces - 1)
                on_smaller(items)
                break
        else:
            if size == 1:
                break
            pieces = min(len(items), pieces * 2)
    return items, True, runs
