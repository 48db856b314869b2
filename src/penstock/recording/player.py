"""The player: publishes what a recording holds, each message at its moment."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import penstock
from penstock.carry import due
from penstock.errors import InvalidArgument, nearest
from penstock.journal.follow import JournalPublisher
from penstock.recording.span import topic_names
from penstock.recording.story import Story
from penstock.secrecy import without_secrets
from penstock.topics import matches
from penstock.types import Schema, Terms

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

__all__ = ["Player", "targets"]


def targets(
    journals: list[Journal], topics: list[str] | None, mapping: list[str] | None, story: Story
) -> dict[str, str]:
    """The address of every topic that is played; ``InvalidArgument`` names those that have none."""
    rules = []
    for rule in mapping or []:
        name, equals, address = rule.partition("=")
        if not equals or not address:
            raise InvalidArgument(f"--map {rule!r} is not of the form TOPIC=ADDRESS")
        rules.append((name, address))
    found, homeless = {}, []
    for name in sorted({name for journal in journals for name in topic_names(journal, topics)}):
        chosen = (to for pattern, to in rules if pattern == "*" or matches(pattern, name))
        mapped = next(chosen, story.addresses.get(name))
        if mapped is None:
            homeless.append(name)
        else:
            found[name] = mapped.replace("{topic}", name)
    if topics and not found and not homeless:
        known = sorted({name for journal in journals for name in topic_names(journal, None)})
        raise InvalidArgument(f"no topic matches {', '.join(topics)}; {nearest(topics[0], known)}")
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
        schemas: Mapping[str, str] | None = None,
    ) -> None:
        opened = {to: stack.enter_context(penstock.publisher(to)) for to in dict.fromkeys(targets.values())}
        self._publishers = {name: opened[to] for name, to in targets.items()}
        for to, publisher in opened.items():
            said = {(schemas or {}).get(name) for name, address in targets.items() if address == to}
            if len(said) == 1 and (text := said.pop()):  # all that goes there is of one type
                publisher.agree(Terms(Schema.parse(text), writes=True))
        self.counts = dict.fromkeys(targets, 0)
        self.seconds = 0.0
        for to, publisher in opened.items():
            if wait and not publisher.wait_ready(wait, timeout):
                shown = without_secrets(to)
                raise TimeoutError(f"{shown}: no {wait} subscriber(s) within {timeout:g} s (--timeout, --wait)")

    def play(self, chosen: Iterator[Message], speed: float, advance: Callable[[int], None]) -> int:
        """Publish each at its moment: the time since the first one, divided by the speed. Gives how many.

        The order of the recording holds, also between places (topics of one journal are one place): messages that are
        due together and follow each other to one place go as one batch.
        """
        began = time.monotonic()
        before = sum(self.counts.values())
        for group in due(chosen, _time_ns, len, speed):
            self._forward([(m.channel or "", m) for m in group if m.channel in self._publishers])
            advance(len(group))
        self.seconds += time.monotonic() - began
        return sum(self.counts.values()) - before

    def _forward(self, group: list[tuple[str, Message]]) -> None:
        """Runs of messages for one place are a batch each: who reads two places sees the order of the recording."""
        for _, run in itertools.groupby(group, lambda pair: self._place(pair[0])):
            pairs = []
            for name, message in run:
                pairs.append((self._publishers[name], message))
                self.counts[name] += 1  # before it is sent: a Ctrl-C that comes meanwhile is raised when it is stored
            publisher = pairs[0][0]
            if isinstance(publisher, JournalPublisher):
                publisher.forward_together(pairs)  # type: ignore[arg-type]
            else:
                publisher.forward([message for _, message in pairs])

    def _place(self, name: str) -> Any:
        publisher = self._publishers[name]
        return getattr(publisher, "journal", publisher)


def _time_ns(message: Message) -> int:
    return message.timestamp_ns
