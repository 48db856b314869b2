"""Why nothing arrives at an address: what the bus knows about it. Only reads; subscribes to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock import address as addresses
from penstock._core import counters_read
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Finds stuck subscribers of it in any process; a bus itself can only be seen inside its own process."""
    mine = [block for block in counters_read() if block["room"] == "bus" and _bus_of(block) == parts.name]
    for block in mine:
        if block["state"].startswith("stuck"):
            name = block["name"].partition("?subscriber=")[2] or block["name"]
            who = f"subscriber {name!r} of process {block['pid']} ({block['program']})"
            remedy = "read it, close it, or give it timeout= or another overflow="
            yield Finding(f"{who} is full and nobody reads it: its bus waits", remedy)
    text = f"bus:{parts.name} reaches one process: a command outside of it never hears it"
    # Where a program reads it, nothing is wrong: it is no command that waits for its messages.
    only_published = {block["kind"] for block in mine} <= {"publisher", "bus"}
    yield Finding(text, f"use shm:/{parts.name}", grave=only_published)


def _bus_of(block: Mapping[str, Any]) -> str:
    """Handles are named BUS, BUS?id=1 or BUS?subscriber=NAME."""
    name: str = block["name"]
    return name.partition("?")[0]
