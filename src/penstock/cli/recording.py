"""What a recording is: a journal (or several, in numbered folders) whose topic ``_recording`` tells its story.

Each record of that topic is a JSON object with an ``event``: ``started`` (the addresses and their topics), ``lost``
(how many, where, why), ``ended`` (what was counted). A recording without ``ended`` was cut off: its recorder died, and
what it had not yet synced is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import address as addresses
from penstock.errors import InvalidArgument
from penstock.journal.layout import FRONTIER_NAME, check_topic

__all__ = ["STORY", "Story", "is_journal", "parts", "read_story", "topic_of"]

STORY = "_recording"


def topic_of(address: str) -> str:
    """The topic that an address is recorded under: ``shm:/camera/front`` becomes ``camera.front``."""
    parsed = addresses.parse(address)
    if parsed.topic:
        plain = parsed.topic
    elif parsed.host:
        plain = f"{parsed.scheme}.{parsed.host}.{parsed.port}"
    else:
        plain = parsed.name
    plain = re.sub(r"[\s*>/]+", ".", plain)
    topic = re.sub(r"\.{2,}", ".", plain).strip(".")
    return check_topic(topic or parsed.scheme)


def is_journal(directory: Path) -> bool:
    """Whether a folder is a journal itself, made to the end."""
    return (directory / FRONTIER_NAME).exists()


def parts(directory: Path) -> list[Path]:
    """The journals of a recording, in order: the folder itself, or its numbered folders."""
    if is_journal(directory):
        return [directory]
    found = sorted(path for path in directory.glob("[0-9]*") if is_journal(path)) if directory.is_dir() else []
    if not found:
        raise InvalidArgument(f"{directory} is no recording: neither a journal nor a folder of numbered journals")
    return found


@dataclass(slots=True)
class Story:
    """What ``_recording`` says: where each topic came from, what was lost on the way, whether the end is there."""

    addresses: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    ended: bool = False
    known: bool = False

    def take(self, event: dict[str, Any]) -> None:
        self.known = True
        kind = event.get("event")
        self.addresses.update({topic: address for address, topic in event.get("addresses", {}).items()})
        if kind == "started":
            self.ended = False
        elif kind == "lost":
            self.lost += int(event.get("count", 0))
        elif kind == "ended":
            self.ended = True


def read_story(directory: Path) -> Story:
    """The story of all parts of a recording; of any other journal an empty one."""
    story = Story()
    for part in parts(directory):
        for event in _events(part):
            story.take(event)
    return story


def _events(part: Path) -> Iterator[dict[str, Any]]:
    from penstock.journal import Journal

    with Journal(part, mode="read") as journal:
        if STORY not in journal.topics:
            return
        position: int = journal.first
        while position < journal.frontier:
            batch = journal.read_many(position, 1024, topics=[STORY])
            if not len(batch):
                # Fewer at a segment's border: go on behind what was looked at.
                position = _after(journal, position)
                continue
            for message in batch:
                position = (message.position or 0) + 1
                event = json.loads(bytes(message))
                if isinstance(event, dict):
                    yield event


def _after(journal: Any, position: int) -> int:
    from penstock.journal.journal import topic_filter

    _, following = journal.read_from(position, 1024, None, topic_filter([STORY]))
    return max(int(following), position + 1)
