"""Storing messages durably in the embedded journal, against a bare write and fdatasync loop and SQLite."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Candidate, compare, options
from wishes import at_least, reaching

from penstock.journal import Journal

AHEAD = 64 << 20
Run = Callable[[int], float]


def timed(step: Callable[[], object]) -> Run:
    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - began

    return run


def bare(root: Path, data: bytes) -> Candidate:
    """The floor: overwrite zeros that are on disk already, sync each time."""
    file = os.open(root / "bare", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, bytes(AHEAD), 0)
    os.fsync(file)
    at = 0

    def step() -> None:
        nonlocal at
        os.pwrite(file, data, at)
        os.fdatasync(file)
        at = (at + len(data)) % (AHEAD - len(data))

    return Candidate("bare write + fdatasync", timed(step), 2000, close=lambda: os.close(file))


def sqlite(root: Path, data: bytes, batch: int, count: int) -> Candidate:
    """WAL, synchronous FULL, a commit for each batch."""
    connection = sqlite3.connect(root / f"sqlite{batch}", isolation_level=None)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=full")
    connection.execute("create table messages (position integer primary key, topic text, time integer, data blob)")
    rows = [("a", 0, data)] * batch

    def step() -> None:
        connection.execute("begin")
        connection.executemany("insert into messages (topic, time, data) values (?, ?, ?)", rows)
        connection.execute("commit")

    return Candidate(f"SQLite WAL FULL, {batch} a commit", timed(step), count, batch, close=connection.close)


def one_by_one(root: Path, data: bytes) -> Candidate:
    journal = Journal(root / "one")
    step = timed(lambda: journal.append("a", data))
    wishes = (at_least(0.9, "bare write + fdatasync"), at_least(1, "SQLite WAL FULL, 1 a commit"))
    return Candidate("journal.append", step, 2000, wishes=wishes, close=journal.close)


def many(root: Path, data: bytes, batch: int, count: int) -> Candidate:
    journal = Journal(root / f"many{batch}", retain_bytes=1 << 30)
    messages = [data] * batch
    step = timed(lambda: journal.append_many("a", messages))
    wishes = [reaching(2_000_000)] if len(data) == 64 and batch > 100 else []
    return Candidate(f"append_many of {batch}", step, count, batch, wishes=wishes, close=journal.close)


def staged(root: Path, data: bytes, batch: int, count: int) -> Candidate:
    """From one buffer, as the broker does it."""
    import array

    journal = Journal(root / f"staged{batch}", retain_bytes=1 << 30)
    topic = journal.topic_id("a")
    offsets = array.array("Q", range(0, batch * len(data), len(data)))
    lengths = array.array("Q", [len(data)] * batch)
    buffer = data * batch

    def step() -> None:
        journal.writer.stage_many(topic, buffer, offsets, lengths)
        journal.commit_staged()

    return Candidate(f"stage_many of {batch}, then commit", timed(step), count, batch, close=journal.close)


def main() -> None:
    arguments = options()
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-journal-"))
    try:
        for size in (64, 4096):
            place = root / str(size)
            place.mkdir()
            data = os.urandom(size)
            # what a commit of one message writes is its batch: the bare loop writes as much
            compare(
                f"journal: one at a time, synced, {size} B",
                [bare(place, bytes(64 + 48) + data), one_by_one(place, data), sqlite(place, data, 1, 2000)],
                "bare write + fdatasync",
                arguments,
            )
            batches = 200 if size == 64 else 40
            compare(
                f"journal: batches, synced, {size} B",
                [
                    sqlite(place, data, 100, 500),
                    many(place, data, 100, 2000),
                    many(place, data, 10_000 if size == 64 else 1000, batches),
                    staged(place, data, 10_000 if size == 64 else 1000, batches),
                ],
                "SQLite WAL FULL, 100 a commit",
                arguments,
            )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
