"""Deaths: what was known of processes that died with handles open, when others found them dead.

Whoever puts right what a dead process left writes it down before, in a file of its user's state directory that holds
the last 32 processes (``native/platform/deaths.hpp``): of shared memory what the channel knows of its member, of all
other handles what their counters say. Any thread; looking puts nothing right.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._core import shm as native

MOST_LEFT_OUT = 50  # ``most_left_out`` in native/platform/deaths.hpp


@dataclass(frozen=True, slots=True)
class DeadMember:
    """A publisher, a subscriber or another handle that a dead process had."""

    room: str  #: shm, tcp, broker and so on
    kind: str
    channel: str  #: its name there
    reliable: bool
    vchan_id: int | None
    messages: int  #: published or read
    total_bytes: int
    dropped: int
    joined_ns: int
    held: int  #: slots that a subscriber held, or that a publisher had reserved and not published
    unread: int  #: of a subscriber of shm: messages of the channel that it never read; of others: what waited in it
    in_flight: int  #: not of shm: messages that it had taken and that were neither delivered nor dropped
    last_ordinal: int  #: of shm: of the last message that it published (0: that is gone) or read
    last_size: int  #: of a publisher of shm: bytes of its last message
    last_ns: int  #: of its last message; of a subscriber of shm, of the oldest message that it held; 0: not known
    beginning: bytes  #: of a publisher of shm: the first bytes of its last message


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was found dead."""

    pid: int
    found_ns: int
    found_by: int  #: pid of the process that found it
    members: tuple[DeadMember, ...]
    left_out: int = 0  #: members that there was no room for; ``MOST_LEFT_OUT``: so many or more
    program: str = ""  #: its script, module or program, without arguments; empty: not known
    found_by_program: str = ""


@dataclass(frozen=True, slots=True)
class DeathFile:
    """All of the file."""

    deaths: list[Death]
    path: str
    damaged: int  #: records that are not whole, and are left out
    problem: str  #: why nothing can be written into it; empty: it can


def deaths() -> list[Death]:
    """The last processes that died with handles open, the newest first; those that nobody has found yet too."""
    return death_file().deaths


def death_file() -> DeathFile:
    """The file as it is, after looking for those that nobody has found yet."""
    found = native.deaths()
    return DeathFile(
        [
            Death(members=tuple(_member(**member) for member in entry.pop("members")), **entry)
            for entry in found.pop("deaths")
        ],
        **found,
    )


def _member(
    *, ordinal: int, tail: int, before: int, time_ns: int, size: int, vchan_id: int, room: str, kind: str, waiting: int,
    **same: object,
) -> DeadMember:  # fmt: skip
    """``tail`` and a subscriber's ``ordinal`` count the channel's messages from 1; ``before`` went before those."""
    reads = room == "shm" and kind == "subscriber"
    return DeadMember(
        room=room,
        kind=kind,
        vchan_id=None if vchan_id < 0 else vchan_id,
        unread=max(0, tail + 1 - ordinal) if reads else waiting,
        last_ordinal=max(0, ordinal - 1 + before) if reads else ordinal,
        last_size=size,
        last_ns=time_ns,
        **same,  # type: ignore[arg-type]
    )
