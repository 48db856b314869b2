"""Why nothing arrives at an address: what the bus knows about it. Only reads; subscribes to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import address as addresses
from penstock._core import counters_read
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Finds stuck subscribers of any process; a bus itself can only be seen inside its own process."""
    for block in counters_read():
        if block["room"] == "bus" and block["state"].startswith("stuck"):
            who = f"subscriber {block['name']!r} of process {block['pid']} ({block['program']})"
            remedy = "read it, close it, or give it timeout= or another overflow="
            yield Finding(f"{who} is full and nobody reads it: its bus waits", remedy)
    kinds = {block["kind"] for block in counters_read() if (block["room"], block["name"]) == ("bus", parts.name)}
    text = f"bus:{parts.name} reaches one process: a command outside of it never hears it"
    # Where a program reads it, nothing is wrong: it is no command that waits for its messages.
    yield Finding(text, f"use shm:/{parts.name}", grave=not kinds - {"publisher", "bus"})
