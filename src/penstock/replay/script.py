"""The script of a replay: a recording, opened for reading, and the part of it that is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.errors import InvalidArgument, nearest
from penstock.journal import Entry
from penstock.recording.span import ARGUMENTS, Span, check_segments, located, reader, time_range, topic_names
from penstock.recording.story import parts, read_story
from penstock.recording.tables import Described
from penstock.recording.tape import Plan, Tape
from penstock.topics import matches
from penstock.types import Schema

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Input", "Script", "store_inputs"]

AT_A_TIME = 10_000  # inputs that are stored together


@dataclass(frozen=True, slots=True)
class Input:
    """A recorded message, the name of its source, and its ordinal there."""

    source: str
    message: Message
    ordinal: int
    schema: Schema | None = None  #: its schema, if it is known


class Script:
    """A recording's topics, addresses and times; ``with`` closes it."""

    def __init__(
        self,
        directory: Path | str,
        topics: list[str] | None = None,
        start: str | None = None,
        length: str | None = None,
        *,
        names: tuple[str, str] = ARGUMENTS,
    ) -> None:
        """``start`` and ``length`` as for ``--from`` and ``--for``; ``names`` are their names in error texts."""
        self.directory = directory = Path(directory)
        self._chosen = topics
        self._stack = contextlib.ExitStack()
        self.story = read_story(directory)
        try:
            self._journals = [self._stack.enter_context(reader(folder)) for folder in parts(directory)]
            check_segments(self._journals)
            self._span = Span.of(self._journals, start, length, names)
        except BaseException:
            self._stack.close()
            raise
        self._described = Described(self._journals)
        known = {name for journal in self._journals for name in topic_names(journal, topics)}
        known |= {name for name in self.story.ordinals if topics is None or any(matches(one, name) for one in topics)}
        self.topics = sorted(known)
        if topics and not self.topics:
            every = {name for journal in self._journals for name in topic_names(journal, None)} | set(
                self.story.ordinals
            )
            self._stack.close()
            raise InvalidArgument(f"no topic matches {', '.join(topics)}; {nearest(topics[0], sorted(every))}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def times_ns(self, topics: Iterable[str]) -> tuple[int, int]:
        """The first and the last moment of what is replayed of these topics."""
        topics = set(topics)
        first, last = self.story.span_ns or time_range(self._journals, topics)
        # the first message's time, not the smallest: after one stray message from 1970, timers would run from 1970 on
        if self.story.span_ns is None:
            found = next(self.inputs(dict.fromkeys(topics, "")), None)
            first = first if found is None else found.message.timestamp_ns
        if self._span.begin_ns is not None:  # --from may lie before the beginning, when nothing was running
            first = max(self._span.begin_ns, (self.story.span_ns or time_range(self._journals))[0])
        return first, max(first, last if self._span.end_ns is None else min(last, self._span.end_ns))

    def inputs(self, sources: dict[str, str]) -> Iterator[Input]:
        """Every message whose topic has a source, in the order of the recording."""
        for journal, message in located(self._journals, self._chosen, self._span):
            source = sources.get(message.channel or "")
            if source is not None:
                ordinal = self.story.ordinal(message.channel or "", message.ordinal or 1)
                yield Input(source, message, ordinal, self._described.schema_at(journal, message))


def store_inputs(directory: Path, script: Script, inputs: Sequence[Input], span_ns: tuple[int, int]) -> None:
    """Store some of a script's inputs as a recording of their own. It is replayed from and to the same moments, so that
    timers tick as before; its topics are those of the script, and its messages keep their ordinals.
    """
    tape = Tape(Plan(directory, {at: name for name, at in script.story.addresses.items()}))
    tape.tell({"event": "span", "first_ns": span_ns[0], "last_ns": span_ns[1]})
    tape.tell({"event": "ordinals", "ordinals": {topic: [] for topic in script.topics}})
    for piece in (inputs[at : at + AT_A_TIME] for at in range(0, len(inputs), AT_A_TIME)):
        ordinals: dict[str, list[int]] = {}
        for one in piece:
            ordinals.setdefault(one.message.channel or "", []).append(one.ordinal)
        tape.tell({"event": "ordinals", "ordinals": ordinals})
        entries = [
            Entry(one.message.channel or "", bytes(one.message), dict(one.message.properties),
                  timestamp_ns=one.message.timestamp_ns)
            for one in piece
        ]  # fmt: skip
        for one in piece:
            tape.describe(one.message.channel or "", [] if one.schema is None else [one.schema.text])
        for commit in tape.pieces(entries):
            tape.commit(commit, sum(len(entry.payload) for entry in commit))
    tape.end({})
