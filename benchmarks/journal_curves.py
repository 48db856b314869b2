"""What a journal's backlog costs: appending and reading the newest behind more and more of it, beside SQLite."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from harness import Candidate, Curve, compare, options
from journal_read import DATA, fill

from penstock.journal import Journal

BACKLOGS = (100_000, 1_000_000, 10_000_000)
NEWEST = 10_000


def appending(directory: Path) -> Candidate:
    journal = Journal(directory)
    batch = [DATA] * 100

    def run(count: int) -> None:
        for _ in range(count):
            journal.append_many("sensors.temp", batch)

    return Candidate("penstock", run, 2000, len(batch), close=journal.close)


def appending_sqlite(connection: sqlite3.Connection) -> Candidate:
    rows = [("sensors.temp", DATA)] * 100

    def run(count: int) -> None:
        for _ in range(count):
            with connection:
                connection.executemany("insert into messages (topic, data) values (?, ?)", rows)

    return Candidate("SQLite WAL full", run, 500, len(rows))


def newest(directory: Path, backlog: int) -> Candidate:
    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            with Journal(directory, mode="read") as journal:
                batch, _ = journal.read_from(backlog - NEWEST + 1, NEWEST)
                assert len(batch) > 0
                batch.release()
        return (time.perf_counter() - began) / count

    return Candidate("penstock", run, 100, latency=True)


def newest_sqlite(connection: sqlite3.Connection, backlog: int) -> Candidate:
    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            query = "select position, topic, data from messages where position > ? limit ?"
            assert connection.execute(query, (backlog - NEWEST, NEWEST)).fetchall()
        return (time.perf_counter() - began) / count

    return Candidate("SQLite WAL full", run, 50, latency=True)


def main() -> None:
    arguments = options()
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-backlog-"))
    try:
        for backlog in BACKLOGS[:2] if arguments.quick else BACKLOGS:
            place = root / str(backlog)
            fill(place, backlog)
            connection = sqlite3.connect(root / f"{backlog}.db")
            connection.execute("pragma journal_mode=wal")
            connection.execute("pragma synchronous=full")
            connection.execute("create table messages (position integer primary key, topic text, data blob)")
            with connection:
                rows = (("sensors.temp", DATA) for _ in range(backlog))
                connection.executemany("insert into messages (topic, data) values (?, ?)", rows)
            curve = Curve("journal: opening it and reading the newest 10,000, by backlog", "messages stored", backlog)
            reading = [newest(place, backlog), newest_sqlite(connection, backlog)]
            compare(f"journal: the newest of {backlog}", reading, "SQLite WAL full", arguments, unit="s", curve=curve)
            curve = Curve("journal: appends a second, 100 a commit, synced, by backlog", "messages stored", backlog)
            writing = [appending(place), appending_sqlite(connection)]
            compare(f"journal: appending behind {backlog}", writing, "SQLite WAL full", arguments, curve=curve)
            connection.close()
            shutil.rmtree(place)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
