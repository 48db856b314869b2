"""One bit of a journal's directory turned over, and every reader asked what it sees: harmless or told, never wrong.

Readers, each of all and by topic: native, Arrow, the numpy reader without native code, Spark's reader of directories
(without a JVM) with the log and of the index alone.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.journal import Entry, Journal
from penstock.journal.format import open_directory
from penstock.journal.journal import topic_filter

Row = tuple[Any, ...]
COLUMNS = ["position", "topic", "ordinal", "timestamp_ns", "stored_ns", "payload", "message_id", "key", "properties"]
TOPICS = ["sensors.>"]


def make(path: Path) -> None:
    """Sealed segments, a compacted one, an active one; topics that are first used in each of them."""
    with Journal(path, segment_bytes=65536, compact_topics=["state.>"]) as journal:
        journal.on_snapshot(lambda: [(7, b"state" * 20)])
        for i in range(60):
            journal.append("state.k", b"%03d" % i * 50, key=f"k{i % 3}")
        for part in range(4):
            for i in range(45):
                properties = {"i": str(i)} if i % 3 == 0 else None
                time_ns = None if i % 2 else -i
                data = random.Random(i).randbytes(i % 3 * 300 + 40)
                name = f"sensors.{part}" if i % 5 else "other"
                journal.append(name, data, properties=properties, message_id=f"m{i}", timestamp_ns=time_ns)
            journal.append_many(f"many.{part}", [b"%06d" % i * 10 for i in range(250)])
        journal.compact()
        journal.commit([Entry("late", b"late", {"a": "b"})], [(7, b"more")])
        for i in range(20):
            journal.append("sensors.last", b"%03d" % i * 40)


def native_rows(path: Path, topics: list[str] | None) -> Iterator[Row]:
    with Journal(path, mode="read") as journal:
        at, stop, chosen = journal.first, journal.frontier, topic_filter(topics)
        while at < stop:
            batch, at = journal.read_from(at, 500, None, chosen)
            for message in batch:
                details = journal.details(message.position or 0)
                times = message.timestamp_ns, message.stored_ns
                texts = details.message_id, details.key, dict(message.properties)
                yield (message.position, message.channel, message.ordinal, *times, bytes(message), *texts)


def arrow_rows(batches: Iterator[Any]) -> Iterator[Row]:
    for batch in batches:
        for row in batch.to_pylist():
            texts = row["message_id"] or "", row["key"] or "", dict(row["properties"])
            yield (*(row[name] for name in COLUMNS[:6]), *texts)


def spark_rows(path: Path, topics: list[str] | None) -> Iterator[Row]:
    import pyarrow

    from penstock.journal.arrow import TYPES
    from penstock.spark.bounds import Bounds
    from penstock.spark.places import DirectoryPlace, Reading

    schema = pyarrow.schema([(name, TYPES[name]) for name in COLUMNS])
    bounds = Bounds() if topics is None else Bounds().with_topics(tuple(topics))
    place = DirectoryPlace(str(path))
    return arrow_rows(place.batches(1, place.frontier, Reading(schema, bounds)))


def spark_index_rows(path: Path, topics: list[str] | None) -> Iterator[Row]:
    """Columns of the index alone: the log is not opened."""
    import pyarrow

    from penstock.spark.bounds import Bounds
    from penstock.spark.places import DirectoryPlace, Reading

    schema = pyarrow.schema([("position", pyarrow.int64()), ("ordinal", pyarrow.int64())])
    bounds = Bounds() if topics is None else Bounds().with_topics(tuple(topics))
    place = DirectoryPlace(str(path))
    for batch in place.batches(1, place.frontier, Reading(schema, bounds)):
        for row in batch.to_pylist():
            yield row["position"], row["ordinal"]


def arrow_by_core(path: Path, topics: list[str] | None) -> Iterator[Row]:
    with Journal(path, mode="read") as journal:
        yield from arrow_rows(journal.batches(columns=COLUMNS, topics=topics))


def numpy_rows(path: Path, topics: list[str] | None) -> Iterator[Row]:
    core = sys.modules.pop("penstock._core")  # as where there is none
    try:
        yield from list(arrow_rows(open_directory(path).batches(columns=COLUMNS, topics=topics)))
    finally:
        sys.modules["penstock._core"] = core


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    f"{name} {how}": (lambda path, read=read, topics=topics: read(path, topics))  # type: ignore[misc]
    for name, read in (
        ("native", native_rows),
        ("arrow", arrow_by_core),
        ("numpy", numpy_rows),
        ("spark", spark_rows),
        ("spark index", spark_index_rows),
    )
    for how, topics in (("all", None), ("by topic", TOPICS))
}


def flip(path: Path, chance: random.Random) -> str:
    """Turn one bit over, in any file; every file is as likely, zeros written ahead less so."""
    files = sorted(file for file in path.iterdir() if file.stat().st_size)
    file = chance.choice(files)
    data = file.read_bytes()
    used = len(data.rstrip(b"\0")) or len(data)
    at, bit = chance.randrange(min(len(data), used + 64)), chance.randrange(8)
    with file.open("r+b") as target:
        target.seek(at)
        target.write(bytes([data[at] ^ 1 << bit]))
    return f"{file.name} byte {at} bit {bit}"


def wrong_answers(made: Path, work: Path, seed: int, flips: int) -> list[str]:
    """What is neither harmless nor told, for so many flips."""
    chance = random.Random(seed)
    truth = {name: list(read(made)) for name, read in READERS.items()}
    assert all(truth.values())
    found = []
    for _ in range(flips):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(made, work)
        where = flip(work, chance)
        for name, read in READERS.items():
            try:
                rows = list(read(work))
            except (PenstockError, OSError):
                continue
            unnamed = [(row[0], "unknown", *row[2:]) if str(row[1]).startswith("unknown#") else row for row in rows]
            expected = truth[name]
            if rows != expected and not _told_by_name(unnamed, expected):
                found.append(f"{name}: {where}: {_difference(rows, expected)}")
    return found


def _told_by_name(rows: list[Row], expected: list[Row]) -> bool:
    """A topic whose name is damaged is called unknown; all else must be as it was."""
    return len(rows) == len(expected) and all(
        mine == theirs or (mine[1] == "unknown" and (mine[0], *mine[2:]) == (theirs[0], *theirs[2:]))
        for mine, theirs in zip(rows, expected, strict=True)
    )


def _difference(rows: list[Row], expected: list[Row]) -> str:
    if len(rows) != len(expected):
        return f"{len(rows)} of {len(expected)} rows"
    return next(f"{mine[:5]} for {theirs[:5]}" for mine, theirs in zip(rows, expected, strict=True) if mine != theirs)
