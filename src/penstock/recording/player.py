"""The player: publishes what a recording holds, each message at its moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import InvalidArgument
from penstock.recording.span import topic_names
from penstock.recording.story import Story
from penstock.secrecy import without_secrets
from penstock.topics import matches

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
    if homeless:
        raise InvalidArgument(f"no address for {', '.join(sorted(homeless)[:5])}: give --map TOPIC=ADDRESS")
    return found


class Player:
    """Publishers of all topics, and what went through them."""

    def __init__(self, stack: contextlib.ExitStack, targets: dict[str, str], wait: int, timeout: float) -> None:
        opened = {to: stack.enter_context(penstock.publisher(to)) for to in dict.fromkeys(targets.values())}
        self._publish = {name: _publishing(opened[to]) for name, to in targets.items()}
        self.counts = dict.fromkeys(targets, 0)
        self.seconds = 0.0
        for to, publisher in opened.items():
            if wait and not publisher.wait_ready(wait, timeout):
                shown = without_secrets(to)
                raise TimeoutError(f"{shown}: no {wait} subscriber(s) within {timeout:g} s (--timeout, --wait)")

    def play(self, chosen: Iterator[Message], speed: float, advance: Callable[[int], None]) -> int:
        """Publish each at its moment: the time since the first one, divided by the speed. Gives how many."""
        began = time.monotonic()
        before = sum(self.counts.values())
        first_ns: int | None = None
        for message in chosen:
            if first_ns is None:
                first_ns = message.timestamp_ns
            if speed:
                left = began + (message.timestamp_ns - first_ns) / 1e9 / speed - time.monotonic()
                if left > 0:
                    time.sleep(left)
            name = message.channel or ""
            if name in self._publish:
                self._publish[name](message)
                self.counts[name] += 1
            advance(message.position or 0)
        self.seconds += time.monotonic() - began
        return sum(self.counts.values()) - before


def _publishing(publisher: penstock.Publisher) -> Callable[[Message], Any]:
    """``publish``, with the properties where the reach carries them."""
    if not publisher.carries_properties:
        return publisher.publish
    keeps: Any = publisher.publish
    return lambda message: keeps(message, properties=dict(message.properties))
