"""Observation of running systems: counters of every live process, rates, health, the graph of links, decoded messages.

Counts come from the counter pages that every process maps anyway; only showing messages or trying a filter subscribes.
Importing this package loads none of its modules.
"""

from __future__ import annotations

__all__: list[str] = []
