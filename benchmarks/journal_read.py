"""Reading a journal back: Arrow batches and native views, against SQLite; and how long opening takes as it grows."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from harness import Candidate, compare, options
from wishes import at_most, reaching

from penstock.journal import Journal

MESSAGES = 2_000_000
DATA = b"x" * 64


def fill(directory: Path, count: int) -> None:
    batch = [DATA] * 50_000
    with Journal(directory, sync=False) as journal:
        for _ in range(count // len(batch)):
            journal.append_many("sensors.temp", batch)


def arrow(directory: Path, check: bool) -> Candidate:
    def run(count: int) -> float:
        began = time.perf_counter()
        rows = 0
        with Journal(directory, mode="read") as journal:
            for batch in journal.batches(end=count + 1, columns=["position", "topic", "payload"], check=check):
                rows += batch.num_rows
        assert rows == count
        return time.perf_counter() - began

    name = "Arrow batches" + (", checked" if check else "")
    return Candidate(name, run, MESSAGES, wishes=[reaching(5_000_000)])


def views(directory: Path) -> Candidate:
    def run(count: int) -> float:
        with Journal(directory, mode="read") as journal:
            began = time.perf_counter()
            at = 1
            while at <= count:
                batch, at = journal.read_from(at, min(10_000, count + 1 - at))
                batch.release()
            return time.perf_counter() - began

    return Candidate("read_many (native, checked)", run, MESSAGES)


def sqlite(place: Path) -> Candidate:
    connection = sqlite3.connect(place)
    connection.execute("create table messages (position integer primary key, topic text, data blob)")
    rows = (("sensors.temp", DATA) for _ in range(MESSAGES))
    with connection:
        connection.executemany("insert into messages (topic, data) values (?, ?)", rows)

    def run(count: int) -> float:
        began = time.perf_counter()
        cursor = connection.execute("select position, topic, data from messages limit ?", (count,))
        while cursor.fetchmany(10_000):
            pass
        return time.perf_counter() - began

    return Candidate("SQLite fetchmany", run, MESSAGES, close=connection.close)


def opening(directory: Path, count: int, name: str) -> Candidate:
    fill(directory, count)

    def run(times: int) -> float:
        took = []
        for _ in range(times):
            began = time.perf_counter()
            Journal(directory).close()
            took.append(time.perf_counter() - began)
        return sorted(took)[len(took) // 2]

    return Candidate(name, run, 50, latency=True, wishes=[] if name == "1 million" else [at_most(1.2, "1 million")])


def main() -> None:
    arguments = options()
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-journal-"))
    try:
        fill(root / "read", MESSAGES)
        compare(
            "journal: reading 64 B messages back",
            [sqlite(root / "sqlite"), arrow(root / "read", True), arrow(root / "read", False), views(root / "read")],
            "SQLite fetchmany",
            arguments,
        )
        # both end in a last segment about equally full: opening depends on that one only
        large = 10_000_000 if arguments.quick else 100_000_000
        compare(
            f"journal: opening 1 million and {large // 1_000_000} million messages",
            [
                opening(root / "small", 1_000_000, "1 million"),
                opening(root / "large", large, f"{large // 1_000_000} million"),
            ],
            "1 million",
            arguments,
            unit="s",
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
