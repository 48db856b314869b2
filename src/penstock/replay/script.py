"""The script of a replay: a recording, opened for reading, and the part of it that is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.recording.span import Span, messages, reader, time_range, topic_names
from penstock.recording.story import parts, read_story

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Input", "Script"]


@dataclass(frozen=True, slots=True)
class Input:
    """A recorded message and the name of the source that it stands for."""

    source: str
    message: Message


class Script:
    """A recording's topics, addresses and times; ``with`` closes it."""

    def __init__(
        self, directory: Path, topics: list[str] | None = None, start: str | None = None, length: str | None = None
    ) -> None:
        """``start`` and ``length`` are as ``--from`` and ``--for`` say it."""
        self.directory = directory
        self._chosen = topics
        self._stack = contextlib.ExitStack()
        self.story = read_story(directory)
        try:
            self._journals = [self._stack.enter_context(reader(folder)) for folder in parts(directory)]
            self._span = Span.of(self._journals, start, length)
        except BaseException:
            self._stack.close()
            raise
        self.topics = sorted({name for journal in self._journals for name in topic_names(journal, topics)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def times_ns(self, topics: Iterable[str]) -> tuple[int, int]:
        """The first and the last moment of what is replayed of these topics."""
        first, last = self.story.span_ns or time_range(self._journals, set(topics))
        first = first if self._span.begin_ns is None else self._span.begin_ns
        return first, max(first, last if self._span.end_ns is None else min(last, self._span.end_ns))

    def inputs(self, sources: dict[str, str]) -> Iterator[Input]:
        """Every message whose topic has a source, in the order of the recording."""
        for message in messages(self._journals, self._chosen, self._span):
            source = sources.get(message.channel or "")
            if source is not None:
                yield Input(source, message)
