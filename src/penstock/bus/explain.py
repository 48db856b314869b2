"""Why nothing arrives: what the bus can tell about the silence of an address. Looks, and joins nothing."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import address as addresses
from penstock._core import counters_read
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Stuck subscribers of any process; the bus itself is heard in its own process only."""
    for block in counters_read():
        if block["room"] == "bus" and block["state"].startswith("stuck"):
            who = f"subscriber {block['name']!r} of process {block['pid']} ({block['program']})"
            remedy = "read it, close it, or give it timeout= or another overflow="
            yield Finding(f"{who} is full and nobody reads it: its bus waits", remedy)
    text = f"bus:{parts.name} reaches one process: a command outside of it never hears it"
    yield Finding(text, f"use shm:/{parts.name}")
