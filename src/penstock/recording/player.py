"""The player: publishes the messages of a recording, each at its time."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import penstock
from penstock.carry import due
from penstock.errors import InvalidArgument, nearest
from penstock.journal import Details, Journal
from penstock.recording.span import check_topics, topic_names
from penstock.recording.story import Story
from penstock.secrecy import without_secrets
from penstock.topics import matches
from penstock.types import Schema, Terms

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.recording.tables import Described

__all__ = ["Player", "targets"]


def targets(
    journals: list[Journal], topics: list[str] | None, mapping: list[str] | None, story: Story
) -> dict[str, str]:
    """The address of every topic that is played; ``InvalidArgument`` names those that have none."""
    rules: list[tuple[str, str]] = []
    for rule in mapping or []:
        name, equals, address = rule.partition("=")
        if not equals or not address:
            raise InvalidArgument(f"--map {rule!r} is not of the form TOPIC=ADDRESS")
        for placeholder in re.findall(r"\{\w*\}", address):
            if placeholder != "{topic}":
                raise InvalidArgument(f"--map {name}=...: there is no placeholder {placeholder}, only {{topic}}")
        if (other := dict(rules).get(name, address)) != address:
            both = f"--map {name}={without_secrets(other)} and --map {name}={without_secrets(address)}"
            raise InvalidArgument(f"{both} contradict each other")
        rules.append((name, address))
    known = sorted({name for journal in journals for name in topic_names(journal, None)})
    for pattern, _ in rules:  # otherwise a misspelt pattern would send its topic back to where it was recorded
        if pattern != "*" and not any(matches(pattern, name) for name in known):
            raise InvalidArgument(f"--map: no topic matches {pattern}; {nearest(pattern, known)}")
    found, homeless = {}, []
    for name in sorted({name for journal in journals for name in topic_names(journal, topics)}):
        chosen = (to for pattern, to in rules if pattern == "*" or matches(pattern, name))
        mapped = next(chosen, story.addresses.get(name))
        if mapped is None:
            homeless.append(name)
        else:
            found[name] = mapped.replace("{topic}", name)
    if not found and not homeless:
        check_topics(journals, topics)
    if homeless:
        raise InvalidArgument(f"no address for {', '.join(sorted(homeless)[:5])}: give --map TOPIC=ADDRESS")
    return found


class Player:
    """Publishers of all topics, and what went through them."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        targets: dict[str, str],
        wait: int,
        timeout: float,
        described: Described | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """``tell`` gets one line for each sink that does not keep what the recording has."""
        opened = {to: stack.enter_context(penstock.publisher(to)) for to in dict.fromkeys(targets.values())}
        self._publishers = {name: opened[to] for name, to in targets.items()}
        self._described = described
        self._tell = tell
        # those that keep no ids and keys, until a message that has them goes there
        self._losing = {id(publisher): to for to, publisher in opened.items() if not publisher.carries_details}
        # by topic whose type changes within the recording: the schema announced last
        self._declared: dict[str, Schema] = {}
        for to, publisher in opened.items():
            self._describe(publisher, [name for name, address in targets.items() if address == to])
        self.counts = dict.fromkeys(targets, 0)
        self.seconds = 0.0
        for to, publisher in opened.items():
            if wait and not publisher.wait_ready(wait, timeout):
                shown = without_secrets(to)
                raise TimeoutError(f"{shown}: no {wait} subscriber(s) within {timeout:g} s (--timeout, --wait)")

    def _describe(self, publisher: Any, names: list[str]) -> None:
        """Announce the schema of what will be published, if it has one type: for one topic its first version, and later
        ones as they come; for several topics the newest.
        """
        if self._described is None:
            return
        lines = [self._described.schemas(name) for name in names]
        if not all(lines) or len({line[-1].text for line in lines}) > 1:
            return
        first = lines[0][0] if len(names) == 1 else lines[0][-1]
        # The channel may already have a later version from this same recording.
        there = publisher.schema in [schema.text for schema in lines[0]]
        publisher.agree(Terms(first, writes=True, lenient=there))
        if len(names) == 1 and len(lines[0]) > 1:
            self._declared[names[0]] = first

    def play(self, chosen: Iterator[tuple[Journal, Message]], speed: float, advance: Callable[[int], None]) -> int:
        """Publish each at its moment: the time since the first one, divided by the speed. Gives how many.

        The order of the recording holds, also between places (topics of one journal are one place): messages that are
        due together and follow each other to one place go as one batch.
        """
        began = time.monotonic()
        before = sum(self.counts.values())
        try:
            for group in due(chosen, _time_ns, _size, speed):
                self._play_group(group)
                advance(len(group))
        finally:  # also when it is interrupted
            self.seconds += time.monotonic() - began
        return sum(self.counts.values()) - before

    def _play_group(self, group: list[tuple[Journal, Message]]) -> None:
        ready: list[tuple[str, Journal, Message]] = []
        for journal, message in group:
            name = message.channel or ""
            if name in self._declared and (schema := self._new_version(name, journal, message)):
                self._forward(ready)
                ready = []
                self._publishers[name].agree(Terms(schema, writes=True, lenient=True))
            if name in self._publishers:
                ready.append((name, journal, message))
        self._forward(ready)

    def _new_version(self, name: str, journal: Journal, message: Message) -> Schema | None:
        """The schema of a message, if it differs from the one announced last for its topic."""
        assert self._described is not None
        schema = self._described.schema_at(journal, message)
        if schema is None or schema == self._declared[name]:
            return None
        self._declared[name] = schema
        return schema

    def _forward(self, group: list[tuple[str, Journal, Message]]) -> None:
        """Publish runs of messages for one place as one batch each, so that a reader of two places sees the order of
        the recording.
        """
        for place, run in itertools.groupby(group, lambda item: self._place(item[0])):
            together = list(run)
            if isinstance(place, Journal):
                self._store(place, together)
            else:
                messages = [message for _, _, message in together]
                if place.carries_details:
                    place.forward_details(messages, _details(together))
                else:
                    self._look_for_details(place, together)
                    place.forward(messages)
                self._count(together)

    def _look_for_details(self, place: Any, together: list[tuple[str, Journal, Message]]) -> None:
        """Before the first message with an id or a key goes to a sink that does not keep them: say so, once."""
        if self._tell is None or id(place) not in self._losing:
            return
        if any(one.message_id or one.key for one in _details(together)):
            sink = without_secrets(self._losing.pop(id(place)))
            self._tell(f"{sink} cannot hold id and key of messages: they end here")

    def _store(self, place: Journal, together: list[tuple[str, Journal, Message]]) -> None:
        """One atomic batch. A Ctrl-C during the call may be raised before or after it was stored: the journal knows."""
        pairs: list[tuple[Any, Message]] = [(self._publishers[name], message) for name, _, message in together]
        details = _details(together)
        before = place.frontier
        try:
            pairs[0][0].forward_together(pairs, details)
        finally:
            if place.frontier > before:
                self._count(together)

    def _count(self, sent: list[tuple[str, Journal, Message]]) -> None:
        for name, _, _ in sent:
            self.counts[name] += 1

    def _place(self, name: str) -> Any:
        publisher = self._publishers[name]
        return getattr(publisher, "journal", publisher)


def _details(items: list[tuple[str, Journal, Message]]) -> list[Details]:
    return [journal.details(message.position or 0) for _, journal, message in items]


def _time_ns(item: tuple[Journal, Message]) -> int:
    return item[1].timestamp_ns


def _size(item: tuple[Journal, Message]) -> int:
    return len(item[1])
