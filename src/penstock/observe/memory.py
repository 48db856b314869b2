"""The counters of every process, completed from shared-memory channels and the other handles.

A handle of shared memory only counts messages. How many slots it holds, how far behind it is and when the channel was
last written is in the channel itself, which this module reads without joining it. What a subscriber has not read and
is in no slot any more is lost, even if it has not noticed yet. For handles that do not count their peers, those open
on this machine are counted. How far a reader of a journal is behind is the journal's frontier less its position. A
tail is no reader of the program's: neither it nor what a broker keeps for it counts as one. A gateway's module that
gets nothing and publishes is a source. Any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from penstock.observe.rates import PRODUCERS, reads
from penstock.observe.snapshot import Block, Key, live

if TYPE_CHECKING:
    from penstock.shm import Channel, Member

__all__ = ["TAIL", "seen", "tailing", "with_journals", "with_memory", "with_peers", "with_sources", "without_tails"]

#: The kind of a handle that only displays messages, and is no part of the watched program.
TAIL = "tail"

#: Reaches whose handles are all on this machine, so that they can be counted from here.
LOCAL = ("bus", "shm", "journal")


def seen() -> list[Block]:
    """Every block of every live process, completed as the module says."""
    blocks = live()
    if any(block.room == "shm" for block in blocks):
        from penstock import shm

        blocks = with_memory(blocks, shm.channels())
    return with_peers(without_tails(with_journals(with_sources(blocks))))


@contextlib.contextmanager
def tailing() -> Iterator[None]:
    """Inside this block, handles that this thread opens are tails."""
    from penstock import _core

    _core.counters_kind(TAIL)
    try:
        yield
    finally:
        _core.counters_kind("")


def without_tails(blocks: list[Block]) -> list[Block]:
    """Merge the temporary queue of a tail with the tail, and do not count tails among a publisher's readers."""
    tails: dict[str, int] = {}
    queues = set()
    for block in blocks:
        if block.kind == TAIL:
            tails[block.channel] = tails.get(block.channel, 0) + 1
            queues.add(block.name.partition("?queue=")[2])

    def joined(block: Block) -> Block:
        if (block.room, block.kind) == ("broker", "queue") and block.name in queues:
            return replace(block, kind=TAIL)
        if block.kind in PRODUCERS and block.peers and block.channel in tails:
            return replace(block, peers=max(0, block.peers - tails[block.channel]))
        return block

    return [joined(block) for block in blocks] if tails else blocks


def with_sources(blocks: list[Block]) -> list[Block]:
    """Mark gateway modules that publish and whose queues never got a message as sources, which count what they publish.
    An address that a gateway reads is no source, since its subscriber counts already.
    """
    if not any(block.room == "gateway" for block in blocks):
        return blocks
    queues: dict[tuple[int, str], int] = {}
    for block in blocks:
        if block.inside_gateway and block.kind == "queue":
            own = block.key[0], block.name.partition("/")[2]
            queues[own] = queues.get(own, 0) + block.matched

    def publishes(block: Block) -> bool:
        is_module = (block.room, block.kind) == ("gateway", "module") and not block.address
        return is_module and block.matched > 0 and queues.get((block.key[0], block.name)) == 0

    return [replace(block, kind="source") if publishes(block) else block for block in blocks]


def with_journals(blocks: list[Block]) -> list[Block]:
    """Give readers of journals their lag, in positions: other topics of the journal count too."""
    readers = [b for b in blocks if b.room == "journal" and b.position and b.address]
    if not readers:
        return blocks
    from penstock.journal.explain import end_of

    directories = {b.key: kept_in(b.address) for b in readers}
    ends = {directory: end_of(directory) for directory in set(directories.values())}
    return [
        replace(b, lag=max(0, end - b.position)) if (end := ends.get(directories.get(b.key, ""))) else b for b in blocks
    ]


def kept_in(address: str) -> str:
    """The directory of a journal's address, or of ``shm:/camera?start=first&durable=DIRECTORY``."""
    if address.startswith("journal:"):
        return address.removeprefix("journal:").partition("#")[0]
    return dict(parse_qsl(address.partition("?")[2])).get("durable", "")


def with_peers(blocks: list[Block]) -> list[Block]:
    """Give handles that count no peers the number of handles of the other side at the same address."""
    sides: dict[tuple[str, int, bool], int] = {}

    def side(block: Block, produces: bool) -> tuple[str, int, bool]:
        return block.channel, (block.process or block.pid) if block.room == "bus" else 0, produces

    for block in blocks:
        if has_side(block):
            own = side(block, block.kind in PRODUCERS)
            sides[own] = sides.get(own, 0) + 1
    return [
        replace(block, peers=sides.get(side(block, block.kind not in PRODUCERS), 0))
        if not block.peers and block.room in LOCAL and has_side(block)
        else block
        for block in blocks
    ]


def has_side(block: Block) -> bool:
    """Whether the block produces or consumes messages, so that handles on the other side are its peers."""
    return block.kind in PRODUCERS or reads(block)


def with_memory(blocks: list[Block], channels: list[Channel]) -> list[Block]:
    """Give blocks of shared memory their held slots (as depth), their lag, and a publisher its last time."""
    known: dict[Key, Block] = {}
    handles: dict[tuple[int, str], list[Block]] = {}
    for block in blocks:
        if block.room == "shm":
            handles.setdefault((block.process or block.pid, block.kind), []).append(block)
    for channel in channels:
        for block, member in _members(handles, channel):
            known[block.key] = _with_member(block, channel, member)
    return [known.get(block.key, block) for block in blocks]


def _members(handles: dict[tuple[int, str], list[Block]], channel: Channel) -> Iterator[tuple[Block, Member]]:
    """Match blocks to members: the same process, side and name, in the order of opening."""
    groups: dict[tuple[int, str, str], list[Member]] = {}
    for member in channel.members:
        name = channel.name if member.vchan_id is None else channel.vchans.get(member.vchan_id, "")
        groups.setdefault((member.process or member.pid, member.kind, name), []).append(member)
    for (process, kind, name), members in groups.items():
        own = [block for block in handles.get((process, kind), ()) if block.name == name]
        if len(own) == len(members):  # otherwise one is being opened or closed, and the order would mislead
            own.sort(key=lambda block: block.opened_ns)
            yield from zip(own, sorted(members, key=lambda member: member.joined_ns), strict=True)


def _with_member(block: Block, channel: Channel, member: Member) -> Block:
    if member.kind == "publisher":
        used = channel.held_slots + channel.owned_slots
        return replace(
            block, depth=used, capacity=channel.slots, memory_bytes=channel.memory_bytes,
            last_ns=max(block.last_ns, channel.last_ns if block.matched else 0),
        )  # fmt: skip
    lost = member.overwritten
    dropped = {**block.dropped, "overflow": block.dropped.get("overflow", 0) + lost} if lost else block.dropped
    return replace(
        block, depth=member.held, capacity=block.capacity or channel.most_for(member), lag=member.waiting,
        matched=block.matched + lost, dropped=dropped,
    )  # fmt: skip
