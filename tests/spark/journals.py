"""Journals for the Spark tests: made by the real writer, with what is in them known."""

from __future__ import annotations

from pathlib import Path

from penstock.journal import Journal

BEGIN_NS = 1_767_225_600_000_000_000  # 2026-01-01


def make(
    path: Path, messages: int = 1000, *, topics=("a.x", "a.y", "b"), segment_bytes=1 << 16, size=40, step_ns=10**9
):
    """``messages`` over ``topics`` in turn, one every ``step_ns``; gives the rows as they must be read."""
    rows = []
    with Journal(path, segment_bytes=segment_bytes, sync=False) as journal:  # on disk or not is not the point here
        rows = extend(journal, messages, topics=topics, size=size, step_ns=step_ns)
    return rows


def extend(journal, messages, *, topics=("a.x", "a.y", "b"), size=40, step_ns=10**9, commit=50, begin=None):
    rows = []
    ordinals = {}
    first = journal.frontier
    for start in range(0, messages, commit):
        with journal.transaction() as transaction:
            for number in range(first + start, first + min(start + commit, messages)):
                topic = topics[number % len(topics)]
                data = f"{number}:".encode().ljust(size + number % 7, b".")
                properties = {"n": str(number), "vchan_id": str(number % 5)} if number % 3 == 0 else None
                message_id = f"id{number}" if number % 4 == 0 else None
                at = (BEGIN_NS if begin is None else begin) + number * step_ns
                transaction.append(topic, data, properties=properties, message_id=message_id, timestamp_ns=at)
                ordinals[topic] = ordinals.get(topic, 0) + 1
                rows.append((topic, number, at, data, properties or {}, message_id))
    return rows
