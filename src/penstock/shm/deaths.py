"""Deaths: what was known of processes that died as members of channels, when others found them dead.

Whoever puts right what a dead member left writes it down before, in a file of its user's state directory that holds the
last 32 processes (``native/shm/deaths.hpp``). Any thread; looking puts nothing right.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._core import shm as native


@dataclass(frozen=True, slots=True)
class DeadMember:
    """A publisher or subscriber that a dead process had."""

    kind: str
    channel: str
    reliable: bool
    vchan_id: int | None
    messages: int  #: published or read
    total_bytes: int
    dropped: int
    joined_ns: int
    held: int  #: slots that a subscriber held, or that a publisher had reserved and not published
    unread: int  #: of a subscriber: messages of the channel that it never read
    last_ordinal: int  #: of the last message that it published (0: that is gone) or read
    last_size: int  #: of a publisher: bytes of its last message
    last_ns: int  #: when that was published; of a subscriber, when the oldest message that it held was
    beginning: bytes  #: of a publisher: the first bytes of its last message


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was found dead."""

    pid: int
    found_ns: int
    found_by: int  #: pid of the process that found it
    members: tuple[DeadMember, ...]
    left_out: int = 0  #: members that there was no room for
    program: str = ""  #: its script, module or program, without arguments; empty: not known


def deaths() -> list[Death]:
    """The last processes that died as members of channels, the newest first; those that nobody has found yet too."""
    found = []
    for entry in native.deaths():
        members = tuple(_member(**member) for member in entry.pop("members"))
        found.append(Death(members=members, **entry))
    return found


def _member(
    *, ordinal: int, tail: int, before: int, time_ns: int, size: int, vchan_id: int, kind: str, **same: object
) -> DeadMember:
    """``tail`` and a subscriber's ``ordinal`` count the channel's messages from 1; ``before`` went before those."""
    reads = kind == "subscriber"
    return DeadMember(
        kind=kind,
        vchan_id=None if vchan_id < 0 else vchan_id,
        unread=max(0, tail + 1 - ordinal) if reads else 0,
        last_ordinal=max(0, ordinal - 1 + before) if reads else ordinal,
        last_size=size,
        last_ns=time_ns,
        **same,  # type: ignore[arg-type]
    )
