"""Limits: bounds on what clients can make grow, for the broker as a whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Limits:
    """Bounds on what clients can make grow. 0 switches the quota off.

    Topics are never removed, and each new segment of the journal begins with the table of all of them; a delayed
    message takes about 100 bytes of memory until it is due.
    """

    max_message_bytes: int = 64 << 20
    max_queues: int = 10_000
    max_topics: int = 100_000
    max_delayed: int = 1_000_000
    max_producers: int = 10_000
    max_schema_bytes: int = 8 << 20  # bytes of the names of all topics together
    max_transactions: int = 100_000
    max_staged_bytes: int = 256 << 20
    max_unfinished_bytes: int = 256 << 20  # bytes of incomplete messages, all connections together
    staged_idle_s: float = 3600.0
    quota_bytes: int = 0
    deduplication_ids: int = 100_000
    deduplication_s: float = 120.0
