"""Rates: the change of counters between two looks, divided by the time between them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.observe.snapshot import Block, Key

__all__ = ["PRODUCERS", "READERS", "Rate", "between", "carries_calls", "flow", "reads"]

#: Kinds that produce messages; a client produces calls as a publisher does messages.
PRODUCERS = ("publisher", "source", "client")
#: Kinds that deliver messages to a program. Others (links, brokers' queues, channels) only pass on what these count
#: too.
READERS = ("subscriber", "callback", "fifo")


@dataclass(frozen=True, slots=True)
class Rate:
    """One block's change per second. ``dropped`` and ``errors`` are counts since the look before, not per second;
    ``dropped`` is what was lost, by reason."""

    messages_hz: float = 0.0
    bytes_hz: float = 0.0
    lost_hz: float = 0.0
    dropped: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0


def flow(block: Block) -> int:
    """Messages that went through a block: published by a publisher, asked of a server, delivered by all others."""
    return max(block.matched, block.delivered) if block.kind in (*PRODUCERS, "server") else block.delivered


def reads(block: Block) -> bool:
    """Whether the block delivers messages to a program."""
    return block.kind in READERS or (block.room, block.kind) == ("bus", "queue")


def carries_calls(block: Block) -> bool:
    """Whether the block is a channel that carries calls; the rows of the client and server count those."""
    return "/@server-" in block.name or "/@client-" in block.name or ".@answers." in block.name


def between(before: Iterable[Block], after: Iterable[Block], looked_ns: int) -> dict[Key, Rate]:
    """The rate of every block of ``after``; a new block's rate is taken from when it was opened.

    ``looked_ns`` is when the previous look began, 0 if there was none. Losses from before the first look are in the
    ledger, but do not count as losses since the last look."""
    known = {block.key: block for block in before}
    return {block.key: _rate(known.get(block.key), block, looked_ns) for block in after}


def _rate(old: Block | None, new: Block, looked_ns: int) -> Rate:
    since_ns = old.read_ns if old else new.opened_ns
    seconds = (new.read_ns - since_ns) / 1e9
    if seconds <= 0:
        return Rate()
    fresh = old is not None or 0 < looked_ns <= new.opened_ns
    change = {name: n - (old.dropped.get(name, 0) if old else 0) for name, n in new.losses.items() if fresh}
    dropped = {name: n for name, n in change.items() if n > 0}
    return Rate(
        messages_hz=max(0, flow(new) - (flow(old) if old else 0)) / seconds,
        bytes_hz=max(0, new.bytes - (old.bytes if old else 0)) / seconds,
        lost_hz=sum(dropped.values()) / seconds,
        dropped=dropped,
        errors=max(0, new.errors - (old.errors if old else 0)) if fresh else 0,
    )
