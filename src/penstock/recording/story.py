"""What a recording is: a journal (or several, in numbered folders) whose topic ``_recording`` tells its story.

Each record of that topic is a JSON object with an ``event``: ``started`` (the addresses and their topics), ``joined``
(an address that was added, and its topic), ``lost``
(how many, where, why), ``failed`` (an address that was not recorded from then on, and why), ``going_on`` (the addresses
and the losses so far again, where the beginning may be let go by size), ``span`` (of inputs that a replay needs: from
and to which moment it goes), ``ordinals`` (of those inputs: the ordinals that each topic's next messages had),
``ended`` (what was counted, and every failure again: a full disk may have refused it
before). A recording without ``ended`` was cut off: its recorder died, and what it had not yet synced is missing. One
that does not begin at position 1 has lost its beginning to its bound in size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import address as addresses
from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal.layout import FRONTIER_NAME, MARKER_NAME
from penstock.printable import command
from penstock.topics import topic_for

if TYPE_CHECKING:
    from penstock.journal import Journal

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
    return topic_for(plain, parsed.scheme)


def is_journal(directory: Path) -> bool:
    """Whether a folder is a journal itself, made to the end."""
    return (directory / FRONTIER_NAME).exists()


def parts(directory: Path) -> list[Path]:
    """The journals of a recording, in order: the folder itself, or its numbered folders."""
    if is_journal(directory):
        return [directory]
    found = sorted(path for path in directory.glob("[0-9]*") if is_journal(path)) if directory.is_dir() else []
    if not found and directory.suffix == ".mcap" and directory.is_file():
        raise InvalidArgument(
            f"{directory} is no recording yet; make one of it: {command('import', directory, '-o', 'DIRECTORY')}"
        )
    for folder in (directory, *directory.glob("[0-9]*")) if not found else ():
        if (folder / MARKER_NAME).exists():
            missing = folder / FRONTIER_NAME
            raise CorruptionError(f"{missing} is missing; run: {command('journal', 'verify', folder)}", str(missing))
    if not found:
        raise InvalidArgument(f"{directory} is no recording: neither a journal nor a folder of numbered journals")
    return found


@dataclass(slots=True)
class Story:
    """What ``_recording`` says: where each topic came from, what was lost on the way, whether both ends are there."""

    addresses: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    ended: bool = False
    damaged: bool = False  #: a part of it cannot be read
    missing_parts: list[str] = field(default_factory=list)  #: missing folders between two others
    written_now: bool = False  #: a process has it open for writing
    known: bool = False
    trimmed: bool = False
    cut_out: int = 0  #: messages that a repair could not keep
    first_part: int = 1  #: its number; those before it are gone
    span_ns: tuple[int, int] | None = None
    ordinals: dict[str, list[int]] = field(default_factory=dict)

    def ordinal(self, topic: str, stored: int) -> int:
        """The ordinal that a replay gives a message: ``stored``, the one it has here, or where these are inputs that a
        replay needed the one it had in the recording that they were taken from."""
        known = self.ordinals.get(topic, ())
        return known[stored - 1] if 0 < stored <= len(known) else stored

    def take(self, event: dict[str, Any]) -> None:
        self.known = True
        kind = event["event"]
        self.addresses.update({topic: address for address, topic in event.get("addresses", {}).items()})
        if kind == "started":
            self.ended = False
        elif kind == "lost":
            self.lost += int(event.get("count", 0))
        elif kind == "span":
            self.span_ns = int(event["first_ns"]), int(event["last_ns"])
        elif kind == "ordinals":
            for topic, numbers in event["ordinals"].items():
                self.ordinals.setdefault(topic, []).extend(int(number) for number in numbers)
        elif kind == "failed":
            self.failed[str(event.get("address"))] = str(event.get("error"))
        elif kind == "ended":
            self.ended = True
            self.failed.update({str(address): str(error) for address, error in event.get("failed", {}).items()})
        # totals of the whole recording, including events in segments that were removed
        if kind in ("going_on", "ended"):
            self.lost = max(self.lost, int(event.get("lost", 0)))

    def missing(self) -> list[str]:
        """What is missing in the recording, one sentence each; single lost messages are counted in ``lost``."""
        found = []
        if self.known and self.trimmed:
            found.append("the beginning is missing, the recording was bound in size (--max-size)")
        if self.known and self.first_part > 1:
            found.append(f"the beginning is missing: the first part is {self.first_part:05d}")
        if self.cut_out:
            found.append(f"damaged messages were cut out by a repair: {self.cut_out}")
        if self.damaged:
            found.append(f"the topic {STORY} cannot be read: what it tells of losses and ends is not known")
        if self.known and self.missing_parts:
            found.append(f"part {', '.join(self.missing_parts[:5])} is missing")
        if self.known and not self.ended and self.written_now:
            found.append("it is still being recorded; what is there so far is taken")
        elif self.known and not self.ended:
            found.append("the recorder did not end properly; what it had not yet synced is missing")
        return found + [f"{address} was not recorded to the end: {error}" for address, error in self.failed.items()]


def read_story(directory: Path) -> Story:
    """The story of all parts of a recording; of any other journal an empty one."""
    story = Story()
    from penstock.journal import Journal
    from penstock.journal.lock import writer_pid

    folders = parts(directory)
    there = [
        int(part.name) for part in folders if len(part.name) == 5 and part.name.isdigit()
    ]  # as a recorder names them
    if there and folders != [directory]:
        story.first_part = there[0]
        story.missing_parts = [f"{n:05d}" for n in range(there[0], there[-1]) if n not in there]
    for part in folders:
        with Journal(part, mode="read") as journal:
            story.trimmed = story.trimmed or journal.first > 1
            story.cut_out += sum(hole.last - hole.first + 1 for hole in journal.holes if hole.reason == "lost")
            for event in _events(journal):
                try:
                    story.take(event)
                except (AttributeError, KeyError, TypeError, ValueError):
                    story.damaged = True
        story.written_now = writer_pid(part) is not None
    return story


def _events(journal: Journal) -> Iterator[dict[str, Any]]:
    from penstock.journal.journal import topic_filter

    if STORY not in journal.topics:
        return
    position, frontier, chosen = journal.first, journal.frontier, topic_filter([STORY])
    while position < frontier:
        batch, following = journal.read_from(position, 1024, None, chosen)
        for message in batch:
            try:
                event = json.loads(bytes(message))
            except ValueError:
                event = None
            yield event if isinstance(event, dict) else {}
        position = max(following, position + 1)
