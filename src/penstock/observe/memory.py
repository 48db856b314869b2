"""The counters of every process, completed from shared-memory channels, gateway links and the other handles.

A handle of shared memory only counts messages. How many slots it holds, how far behind it is and when the channel was
last written is in the channel itself, which this module reads without joining it. A subscriber that is further behind
than the channel has slots has lost the difference, even if it has not noticed yet. A gateway's source counts nothing
itself: its links do. For handles that do not count their peers, those open on this machine are counted. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.observe.rates import PRODUCERS, READERS
from penstock.observe.snapshot import Block, Key, live

if TYPE_CHECKING:
    from penstock.shm import Channel, Member

__all__ = ["seen", "with_memory", "with_peers", "with_sources"]

#: Reaches whose handles are all on this machine, so that they can be counted from here.
LOCAL = ("bus", "shm", "journal")


def seen() -> list[Block]:
    """Every block of every live process, completed as the module says."""
    blocks = live()
    if any(block.room == "shm" for block in blocks):
        from penstock import shm

        blocks = with_memory(blocks, shm.channels())
    return with_peers(with_sources(blocks))


def with_sources(blocks: list[Block]) -> list[Block]:
    """Give each gateway module that only sends the counts of its busiest outgoing link."""
    sent: dict[tuple[int, str], tuple[int, int]] = {}
    for block in blocks:
        if (block.room, block.kind) == ("gateway", "link"):
            key = (block.pid, block.name.partition(" -> ")[0])
            sent[key] = max(sent.get(key, (0, 0)), (block.matched, block.last_ns))

    def joined(block: Block) -> Block:
        count, last_ns = sent.get((block.pid, block.name), (0, 0))
        if (block.room, block.kind, block.matched) != ("gateway", "module", 0) or not count:
            return block
        return replace(block, matched=count, delivered=count, last_ns=last_ns)

    return [joined(block) for block in blocks]


def with_peers(blocks: list[Block]) -> list[Block]:
    """Give handles that count no peers the number of handles of the other side at the same address."""
    sides: dict[tuple[str, bool], int] = {}
    for block in blocks:
        if block.kind in (*PRODUCERS, *READERS):
            side = (block.address.partition("?")[0], block.kind in PRODUCERS)
            sides[side] = sides.get(side, 0) + 1
    return [
        replace(block, peers=sides.get((block.address.partition("?")[0], block.kind not in PRODUCERS), 0))
        if not block.peers and block.kind in (*PRODUCERS, *READERS) and block.room in LOCAL
        else block
        for block in blocks
    ]


def with_memory(blocks: list[Block], channels: list[Channel]) -> list[Block]:
    """Give blocks of shared memory their held slots (as depth), their lag, and a publisher its last time."""
    known: dict[Key, Block] = {}
    handles: dict[tuple[int, str], list[Block]] = {}
    for block in blocks:
        if block.room == "shm":
            handles.setdefault((block.pid, block.kind), []).append(block)
    for channel in channels:
        for block, member in _members(handles, channel):
            known[block.key] = _with_member(block, channel, member)
    return [known.get(block.key, block) for block in blocks]


def _members(handles: dict[tuple[int, str], list[Block]], channel: Channel) -> Iterator[tuple[Block, Member]]:
    """Match blocks to members: the same process, side and name, in the order of opening."""
    groups: dict[tuple[int, str, str], list[Member]] = {}
    for member in channel.members:
        name = channel.name if member.vchan_id is None else channel.vchans.get(member.vchan_id, "")
        groups.setdefault((member.pid, member.kind, name), []).append(member)
    for (pid, kind, name), members in groups.items():
        own = [block for block in handles.get((pid, kind), ()) if block.name in (name, channel.name)]
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
    behind = max(0, channel.published + 1 - member.next_ordinal)
    # Virtual channels share the channel's ordinals: nothing says how many of those behind are this one's.
    lost = max(0, behind - channel.slots) if member.vchan_id is None and not member.reliable else 0
    dropped = {**block.dropped, "overflow": block.dropped.get("overflow", 0) + lost} if lost else block.dropped
    return replace(
        block, depth=member.held, capacity=member.most_held, lag=behind - lost, matched=block.matched + lost,
        dropped=dropped,
    )  # fmt: skip
