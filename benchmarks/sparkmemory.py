"""Memory of Spark over a large journal: written once, read with Spark's default heap, the processes watched.

``run.py`` and ``penstock bench`` leave it out. Ten gigabytes take some minutes and as much disk; ``--gigabytes`` makes
it smaller, ``--journal`` keeps the journal for the next run.

    python benchmarks/sparkmemory.py --gigabytes 10
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.journal import Journal
from penstock.spark import session

PAYLOAD_BYTES = 1024
BEGIN_NS = 1_767_225_600_000_000_000
STEP_NS = 1_000
BATCH = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="payload bytes / 1e9 (default 10)")
    parser.add_argument("--journal", type=Path, help="write here, or read what is here, and keep it")
    parser.add_argument("--write-only", action="store_true", help="no Spark, only the journal")
    arguments = parser.parse_args()
    work = arguments.journal or Path(tempfile.mkdtemp(prefix="penstock-bench-")) / "journal"
    messages = int(arguments.gigabytes * 1e9) // PAYLOAD_BYTES // BATCH * BATCH
    try:
        write(work, messages)
        if not arguments.write_only:
            read(work, messages)
    finally:
        if arguments.journal is None:
            shutil.rmtree(work.parent, ignore_errors=True)


def write(path: Path, messages: int) -> None:
    """Go on from what is there already; no two payloads are alike."""
    began = time.perf_counter()
    with Journal(path, sync=False) as journal:
        for start in range(journal.frontier - 1, messages, BATCH):
            data = memoryview(os.urandom(PAYLOAD_BYTES * BATCH))
            with journal.transaction() as transaction:
                for number in range(BATCH):
                    payload = data[number * PAYLOAD_BYTES : (number + 1) * PAYLOAD_BYTES]
                    transaction.append("large.data", payload, timestamp_ns=BEGIN_NS + (start + number) * STEP_NS)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"written: {messages:,} messages, {size / 1e9:.2f} GB, {time.perf_counter() - began:.1f} s", flush=True)


def read(path: Path, messages: int) -> None:
    """Sum of sizes over everything, and one hundredth of the time by a filter; two tasks at once."""
    spark = session("memory", master="local[2]", **{"spark.log.level": "ERROR"})
    heap = spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()
    print(f"heap at most: {heap / 1e6:.0f} MB", flush=True)
    first = BEGIN_NS + messages // 2 * STEP_NS
    last = first + messages // 100 * STEP_NS - 1
    load = lambda: spark.read.format("penstock").load(str(path))  # noqa: E731
    sizes = lambda frame: frame.selectExpr("count(*)", "sum(octet_length(payload))", "sum(ordinal)").collect()[0]  # noqa: E731
    part = lambda: load().filter(f"timestamp_ns between {first} and {last}")  # noqa: E731
    try:
        watched("a hundredth by a filter", lambda: sizes(part()), messages // 100)
        watched("count and sum of all", lambda: sizes(load()), messages)
    finally:
        spark.stop()


def watched(name: str, query: Callable[[], Any], messages: int) -> None:
    """Run it while looking at what its processes hold, ten times a second."""
    ended = threading.Event()
    most = {"java": 0, "python": 0}

    def look() -> None:
        while not ended.wait(0.1):
            for kind, held in resident().items():
                most[kind] = max(most[kind], held)

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    try:
        row = query()
    finally:
        ended.set()
        watcher.join()
    took = time.perf_counter() - began
    assert row[0] == messages and row[1] == messages * PAYLOAD_BYTES, (row, messages)
    print(
        f"{name}: {row[0]:,} messages, {took:.1f} s, {row[1] / 1e6 / took:.0f} MB/s; at most"
        f" {most['java'] / 1e6:.0f} MB in the JVM, {most['python'] / 1e6:.0f} MB in a Python worker's own memory",
        flush=True,
    )


def resident() -> dict[str, int]:
    """Bytes of the JVM, and of the largest Python worker, without pages of mapped files: those are the page cache."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    most = {"java": 0, "python": 0}
    waiting = list(children.get(os.getpid(), ()))
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, ())
        try:
            kind = "java" if Path(f"/proc/{process}/comm").read_text().startswith("java") else "python"
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        held = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
        most[kind] = max(most[kind], held)
    return most


if __name__ == "__main__":
    main()
