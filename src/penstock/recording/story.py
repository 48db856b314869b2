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
from uuid import UUID

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
    for folder in (directory, *sorted(directory.glob("[0-9]*"))):
        # one that a recorder is just making, or died while making it, has no segment yet
        if (folder / MARKER_NAME).exists() and not is_journal(folder) and (not found or any(folder.glob("*.log"))):
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
    unreadable: list[str] = field(default_factory=list)  #: parts with damage that was not repaired, how much
    mixed_up: list[str] = field(default_factory=list)  #: parts that are a copy of another one, or in its place
    followed: bool = False  #: its last part says that another one follows
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
            self.ended = self.followed = False
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
            self.followed = "part" in event  # the last part ends with totals instead
            self.ended = not self.followed
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
        found += self.unreadable
        if self.damaged:
            found.append(f"the topic {STORY} cannot be read: what it tells of losses and ends is not known")
        if self.known and self.missing_parts:
            found.append(f"part {', '.join(self.missing_parts[:5])} is missing")
        if self.mixed_up:
            found.append(f"its parts are mixed up: {', '.join(self.mixed_up[:5])}")
        if self.known and not self.ended and self.written_now:
            found.append("it is still being recorded; what is there so far is taken")
        elif self.followed:
            found.append("the end is missing: the last part that is there says that another one follows")
        elif self.known and not self.ended:
            found.append("the recorder did not end properly; what it had not yet synced is missing")
        return found + [f"{address} was not recorded to the end: {error}" for address, error in self.failed.items()]


def read_story(directory: Path) -> Story:
    """The story of all parts of a recording; of any other journal an empty one."""
    from penstock.journal import Journal
    from penstock.journal.lock import writer_pid

    story, numbers = Story(), _Numbers()
    folders = parts(directory)
    there = [
        int(part.name) for part in folders if len(part.name) == 5 and part.name.isdigit()
    ]  # as a recorder names them
    in_parts = bool(there) and folders != [directory]
    if in_parts:
        story.first_part = there[0]
        story.missing_parts = [f"{n:05d}" for n in range(there[0], there[-1]) if n not in there]
    for part in folders:
        with Journal(part, mode="read") as journal:
            _look_for_damage(story, journal)
            number = None
            for event in _events(journal):
                try:
                    story.take(event)
                except (AttributeError, KeyError, TypeError, ValueError):
                    story.damaged = True
                if event.get("event") == "started":
                    number = event.get("part")
            numbers.take(part.name, journal.uuid, number)
        story.written_now = writer_pid(part) is not None
    story.mixed_up = numbers.mixed_up() if in_parts else []
    if story.followed:
        if not in_parts or story.mixed_up:  # what its last part says means nothing for what was asked for
            story.followed, story.ended = False, True
        else:  # its recorder may be making the next part at this moment
            following = directory / f"{there[-1] + 1:05d}"
            story.written_now = following.is_dir() and writer_pid(following) is not None
    return story


def _look_for_damage(story: Story, journal: Journal) -> None:
    segments = journal.info().segments
    lost_all = not segments or (segments[0].after_loss and not journal.topics)
    if journal.first > 1 and lost_all:  # a repair has begun anew
        story.cut_out += journal.first - 1
    story.trimmed = story.trimmed or (journal.first > 1 and not lost_all)
    unreadable = 0 if segments else journal.frontier - 1
    for hole in journal.holes:
        if hole.reason != "lost":
            continue
        count = hole.last - hole.first + 1
        if any(segment.repaired and segment.first <= hole.first < segment.next for segment in segments):
            story.cut_out += count
        else:  # reading it is an error
            unreadable += count
    if unreadable:
        verify = command("journal", "verify", journal.directory)
        story.unreadable.append(f"damaged or missing messages that cannot be read: {unreadable} ({verify})")


class _Numbers:
    """Which part of a recording each folder holds, as far as they say it themselves."""

    def __init__(self) -> None:
        self._copies: list[str] = []
        self._held: dict[str, int] = {}
        self._names: dict[UUID, str] = {}

    def take(self, name: str, uuid: UUID, number: object) -> None:
        if uuid in self._names:
            self._copies.append(f"{name} is a copy of {self._names[uuid]}")
        else:
            self._names[uuid] = name
            if isinstance(number, int):
                self._held[name] = number

    def mixed_up(self) -> list[str]:
        """One sentence for each folder that holds another part than its name says. Where all hold a first one, these
        are recordings of their own, side by side."""
        if not any(number > 1 for number in self._held.values()):
            return self._copies
        named = {name: number for name, number in self._held.items() if name.isdigit() and len(name) == 5}
        return self._copies + [f"{name} holds part {n:05d}" for name, n in named.items() if int(name) != n]


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
