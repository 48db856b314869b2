"""The channels of this machine, seen from outside: their members, the slots these hold, and what killed processes left.

Any thread may call this. It joins no channel and changes nothing, except ``sweep`` and ``clean``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock import _core
from penstock._core import shm as native


@dataclass(frozen=True, slots=True)
class Member:
    """A publisher or subscriber of a channel."""

    kind: str
    index: int
    pid: int
    alive: bool
    reliable: bool
    asleep: bool
    most_held: int
    vchan_id: int | None
    messages: int
    total_bytes: int
    dropped: int
    joined_ns: int
    next_ordinal: int
    held: int = 0  #: slots that it holds, which cannot be reused meanwhile
    oldest_held_ns: int = 0  #: when the oldest message among them was published
    process: int = 0  #: its process, by a number that no other has: containers have pids of their own
    here: bool = True  #: it is alive, and /proc shows it under ``pid``
    waiting: int = 0  #: messages that a subscriber can still read
    overwritten: int = 0  #: messages that a subscriber can read no more, and has not counted in ``dropped`` itself


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel, its memory and its members. ``problem`` says what is wrong where its files are damaged or belong to
    another user."""

    name: str
    type: str
    problem: str
    slots: int
    slot_size: int
    metadata_size: int
    mux: bool
    fixed_size: bool
    local: bool
    mode: int
    owner: int
    memory_bytes: int
    published: int
    made_ns: int
    free_slots: int
    owned_slots: int
    live_slots: int
    held_slots: int
    last_ns: int = 0  #: when the last message was published; 0 before the first
    members: tuple[Member, ...] = ()
    vchans: Mapping[int, str] = field(default_factory=dict)
    vchan_types: Mapping[int, str] = field(default_factory=dict)  #: of those virtual channels that have a type
    durable: str = ""  #: the directory where its publisher keeps the messages; subscribers with start= read them there

    @property
    def publishers(self) -> tuple[Member, ...]:
        """Members that publish."""
        return tuple(member for member in self.members if member.kind == "publisher")

    @property
    def subscribers(self) -> tuple[Member, ...]:
        """Members that subscribe."""
        return tuple(member for member in self.members if member.kind == "subscriber")

    def most_for(self, member: Member) -> int:
        """How many messages a subscriber may hold that has no bound of its own: what the others leave, but one."""
        return self.slots - 1 - sum(max(m.most_held, m.held) for m in self.members if m != member)


def channels() -> list[Channel]:
    """Every channel of this machine, by name."""
    found = []
    for entry in native.channels():
        members = []
        for member in entry.pop("members"):
            vchan_id = member.pop("vchan_id")
            members.append(Member(vchan_id=None if vchan_id < 0 else vchan_id, **member))
        found.append(Channel(members=tuple(members), **entry))
    return found


def schemas(name: str) -> list[str]:
    """What describes the type of a channel, every version, the newest last. Who only looks is no subscriber: a
    publisher may wait for its first one.
    """
    return native.described_type(name).splitlines()


class Swept(NamedTuple):
    """The names of channels in which killed processes had left something."""

    removed: list[str]  #: nobody is left there
    recovered: list[str]  #: others go on there; what the killed ones held is free again


def sweep() -> Swept:
    """Remove what killed processes left behind, also in the channels that others go on using."""
    return Swept(*native.clean())


def clean() -> list[str]:
    """``sweep``; gives the names of the channels removed."""
    return sweep().removed


def include_directory() -> Path:
    """Where ``penstock_shm.h`` is, for C programs."""
    return Path(str(_core.__file__)).parent / "include"


def library_path() -> Path:
    """The library that C programs link."""
    return Path(str(_core.__file__)).parent / "lib" / "libpenstock_shm.so"
