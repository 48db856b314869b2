"""Why nothing arrives: what the bus can tell about the silence of an address. Looks, and joins nothing."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import address as addresses
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    yield Finding(f"bus:{parts.name} reaches one process: a command outside of it never hears it", "use shm:/NAME")
