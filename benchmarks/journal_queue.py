"""Consuming from a durable queue with acks on disk, against SQLite."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from harness import Candidate, compare, options
from wishes import at_least

from penstock.journal import Journal

MESSAGES = 500_000
DATA = b"x" * 64


def journal_queue(root: Path) -> Candidate:
    """A hundred at a time, acknowledged, the acks synced."""
    journal = Journal(root / "journal")
    queue = journal.queue("q", topics=["a"])
    for _ in range(MESSAGES // 10_000):
        journal.append_many("a", [DATA] * 10_000)

    def run(count: int) -> float:
        queue.seek(1)
        began = time.perf_counter()
        left = count
        while left > 0:
            left -= queue.ack_many(queue.read_many(100, 0))
            queue.flush()
        return time.perf_counter() - began

    name = "journal queue, acks of 100 synced"
    return Candidate(name, run, MESSAGES, wishes=[at_least(1, "SQLite cursor, commit per 100")], close=journal.close)


def sqlite_queue(root: Path) -> Candidate:
    connection = sqlite3.connect(root / "sqlite", isolation_level=None)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=full")
    connection.execute("create table messages (position integer primary key, topic text, data blob)")
    connection.execute("create table cursor (position integer)")
    connection.execute("insert into cursor values (0)")
    connection.execute("begin")
    connection.executemany("insert into messages (topic, data) values (?, ?)", (("a", DATA) for _ in range(MESSAGES)))
    connection.execute("commit")

    def run(count: int) -> float:
        position, left = 0, count
        began = time.perf_counter()
        while left > 0:
            query = "select position, data from messages where position > ? order by position limit 100"
            rows = connection.execute(query, (position,)).fetchall()
            position = rows[-1][0]
            connection.execute("update cursor set position = ?", (position,))
            left -= len(rows)
        return time.perf_counter() - began

    return Candidate("SQLite cursor, commit per 100", run, MESSAGES, close=connection.close)


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-journal-"))
    try:
        compare(
            "journal: consuming 64 B with synced acks, 100 at a time",
            [sqlite_queue(root), journal_queue(root)],
            "SQLite cursor, commit per 100",
            options(),
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
