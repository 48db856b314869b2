"""Why nothing arrives at an address: what shared memory knows about it. Only reads; joins no channel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from penstock import _core
from penstock import address as addresses
from penstock.finding import QUIET_S, Finding
from penstock.printable import printable
from penstock.quantities import iso_time
from penstock.shm.directory import Channel, Member, channels
from penstock.system import who

__all__ = ["carriers", "describe", "explain", "kept_at", "publishing"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    mux = parts.options.get("mux")
    channel = next((c for c in channels() if c.name == (mux or parts.name)), None)
    if channel is None:
        return  # no process has it open: the caller finds that from the counters
    if channel.problem:
        where = _core.counters_directory()
        yield Finding(
            f"the files of {channel.name} cannot be used: {channel.problem}",
            f"end those who use it, then remove its files from {where}",
        )
        return
    wanted = parts.options.get("type")
    if wanted is not None and wanted != channel.type:
        yield Finding(
            f"type mismatch: {channel.name} carries {channel.type or 'messages without a type'!r}, not {wanted!r}",
            "open it with the type it has, or choose another channel",
        )
    elif channel.type:
        yield Finding(f"its messages are of type {channel.type!r}; whoever names another type is refused", grave=False)
    if mux and parts.name not in channel.vchans.values():
        near = ", ".join(sorted(channel.vchans.values())[:5]) or "none"
        yield Finding(f"no virtual channel {parts.name} in {mux}", f"it has {near}")
    if not channel.subscribers and any(member.reliable and member.alive for member in channel.publishers):
        yield Finding("its reliable publishers wait with their first message until somebody subscribes", grave=False)
    yield from _overwriting(channel)
    for member in channel.members:
        yield from _member(channel, member)


def _overwriting(channel: Channel) -> Iterator[Finding]:
    """Publishers that are not reliable, where subscribers are: one side alone guards nothing."""
    wanting = [member for member in channel.subscribers if member.reliable and member.alive]
    for publisher in channel.publishers:
        read = any(member.vchan_id in (None, publisher.vchan_id) for member in wanting)
        if publisher.alive and not publisher.reliable and read:
            yield Finding(
                f"the publisher {_name(publisher)} is not reliable: it overwrites what reliable subscribers have not "
                "read; open both sides with reliable=True",
                grave=False,
            )


def carriers(parts: addresses.Address) -> set[str]:
    """The names under which publishers publish what arrives at the address: its own and its virtual channels'."""
    channel = next((c for c in channels() if c.name == parts.name), None)
    return {parts.name, *(channel.vchans.values() if channel is not None and channel.mux else ())}


def publishing(parts: addresses.Address, known: Mapping[str, Channel]) -> set[int]:
    """The live processes that publish what arrives at the address; 0 for one of another PID namespace."""
    channel = known.get(parts.options.get("mux") or parts.name)
    if channel is None:
        return set()
    publishers = [member for member in channel.publishers if member.alive]
    if "mux" in parts.options:
        publishers = [m for m in publishers if m.vchan_id is None or channel.vchans.get(m.vchan_id) == parts.name]
    return {member.pid if member.here else 0 for member in publishers}


def kept_at(parts: addresses.Address) -> str:
    """The directory where the channel's publisher keeps its messages, or empty."""
    return next((c.durable for c in channels() if c.name == parts.name), "")


def _member(channel: Channel, member: Member) -> Iterator[Finding]:
    """A member that is dead, or that holds slots and since when."""
    if not member.alive:  # of which PID namespace it was is not known any more: only the number that it had there
        reclaimed = "its slots are reclaimed by the next process that needs them"
        yield Finding(f"the {member.kind} pid {member.pid} died; {reclaimed}", grave=False)
        return
    name = _name(member)
    ended = member.pid if member.here else name
    yield from _blocked(channel, member, name)
    if not member.held:
        return
    now_ns = time.time_ns()
    age_s = (now_ns - member.oldest_held_ns) / 1e9
    said = (
        f"{member.held} of {channel.slots} slots held by {name}; the oldest message was published at "
        f"{iso_time(member.oldest_held_ns)} ({age_s:.1f} s ago)"
    )
    at_bound = member.held == member.most_held and member.waiting > 0  # if that is its bound: who holds more has none
    if channel.held_slots + channel.owned_slots >= channel.slots or at_bound or member.held >= channel.most_for(member):
        remedy = f"release messages there (message.release()), give the channel more slots, or end {ended}"
        yield Finding(said, remedy)
    elif age_s > QUIET_S:
        yield Finding(said, grave=False)


def _name(member: Member) -> str:
    return who(member.pid) if member.here else f"pid {member.pid} of another container"


def _blocked(channel: Channel, member: Member, name: str) -> Iterator[Finding]:
    """A reliable subscriber that does not read keeps reliable publishers waiting once the channel is full."""
    waits = any(publisher.reliable and publisher.alive for publisher in channel.publishers)
    reads = member.kind == "subscriber" and member.reliable and member.alive and member.vchan_id is None
    if reads and waits and not channel.free_slots and member.waiting + member.held >= channel.live_slots:
        yield Finding(
            f"the channel is full: {member.waiting} messages wait for the reliable subscriber {name}, and reliable "
            "publishers wait for it",
            f"read there, or end {member.pid if member.here else name}",
        )


def describe(parts: addresses.Address) -> dict[str, Any]:
    """The channel's memory and its members."""
    wanted = parts.options.get("mux") or parts.name
    channel = next((c for c in channels() if c.name == wanted), None)
    if channel is None:
        return {}
    facts: dict[str, Any] = {
        "slots": f"{channel.slots} of {channel.slot_size} bytes: {channel.live_slots} with a message, "
        f"{channel.held_slots} held",
        "published": channel.published,
        "publishers": len(channel.publishers),
        "subscribers": len(channel.subscribers),
    }
    optional = {"type": channel.type, "metadata": channel.metadata_size, "problem": channel.problem}
    if channel.durable:
        optional["on disk"] = f"journal:{printable(channel.durable)}"
    if channel.vchans:
        optional["virtual channels"] = ", ".join(list(channel.vchans.values())[:8])
    return {**facts, **{name: value for name, value in optional.items() if value}}
