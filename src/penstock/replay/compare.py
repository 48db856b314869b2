"""Two outputs compared, message by message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import StateError
from penstock.replay.script import Script

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Difference", "first_difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: the number of the message, the differing fields, and both messages; None: one output has
    ended.
    """

    number: int
    fields: tuple[str, ...]
    first: Message | None
    second: Message | None


def first_difference(first: Path | str, second: Path | str) -> tuple[Difference | None, int]:
    """The first difference between two outputs (or recordings), and how many messages before it are equal;
    ``StateError`` names an output that is incomplete.
    """
    with Script(first) as one, Script(second) as other:
        for script in (one, other):
            # without a message it is not even known what wrote it: a complete output says that it ended
            if not script.story.ended and (script.story.known or not script.topics):
                raise StateError(f"{script.directory} is not complete: what wrote it did not come to its end")
        count = 0
        for left, right in zip_longest(_all(one), _all(other)):
            fields = _differing(left, right)
            if fields:
                return Difference(count + 1, fields, left, right), count
            count += 1
    return None, count


def _all(script: Script) -> Iterator[Message]:
    return (found.message for found in script.inputs({topic: topic for topic in script.topics}))


def _differing(left: Message | None, right: Message | None) -> tuple[str, ...]:
    if left is None or right is None:
        return ("end",)
    mine, others = _fields(left), _fields(right)
    return tuple(name for name in mine if mine[name] != others[name])


def _fields(message: Message) -> dict[str, Any]:
    return {
        "topic": message.channel,
        "ordinal": message.ordinal,
        "time": message.timestamp_ns,
        "properties": list(message.properties.items()),
        "payload": bytes(message),
    }
