"""Shared-memory channels as seen from outside, joined to the counters of those who use them.

A handle of shared memory counts messages; how many slots it holds, how far behind it is and when the channel was last
written stands in the channel itself, which is read here without joining it. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.observe.snapshot import Block, Key, live

if TYPE_CHECKING:
    from penstock.shm import Channel, Member

__all__ = ["seen", "with_memory"]


def seen() -> list[Block]:
    """Every block of every live process, those of shared memory with what their channels tell."""
    blocks = live()
    if not any(block.room == "shm" for block in blocks):
        return blocks
    from penstock import shm

    return with_memory(blocks, shm.channels())


def with_memory(blocks: list[Block], channels: list[Channel]) -> list[Block]:
    """The blocks, those of shared memory with held slots as depth, and with lag and the time of the last message."""
    known: dict[Key, Block] = {}
    handles: dict[tuple[int, str], list[Block]] = {}
    for block in blocks:
        if block.room == "shm":
            handles.setdefault((block.pid, block.kind), []).append(block)
    for channel in channels:
        for block, member in _members(handles, channel):
            known[block.key] = _joined(block, channel, member)
    return [known.get(block.key, block) for block in blocks]


def _members(handles: dict[tuple[int, str], list[Block]], channel: Channel) -> Iterator[tuple[Block, Member]]:
    """Which block is which member: the same process, side and name, in the order of opening."""
    groups: dict[tuple[int, str, str], list[Member]] = {}
    for member in channel.members:
        name = channel.name if member.vchan_id is None else channel.vchans.get(member.vchan_id, "")
        groups.setdefault((member.pid, member.kind, name), []).append(member)
    for (pid, kind, name), members in groups.items():
        own = [block for block in handles.get((pid, kind), ()) if block.name in (name, channel.name)]
        if len(own) == len(members):  # else one of them opens or closes just now
            own.sort(key=lambda block: block.opened_ns)
            yield from zip(own, sorted(members, key=lambda member: member.joined_ns), strict=True)


def _joined(block: Block, channel: Channel, member: Member) -> Block:
    if member.kind == "publisher":
        used = channel.held_slots + channel.owned_slots
        return replace(
            block, depth=used, capacity=channel.slots, memory_bytes=channel.memory_bytes,
            last_ns=max(block.last_ns, channel.last_ns if block.matched else 0),
        )  # fmt: skip
    lag = max(0, channel.published + 1 - member.next_ordinal)
    last_ns = channel.last_ns if block.delivered and not lag else block.last_ns
    return replace(block, depth=member.held, capacity=member.most_held, lag=lag, last_ns=max(block.last_ns, last_ns))
