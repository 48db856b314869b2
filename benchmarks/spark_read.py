# ruff: noqa: E501, PLW0108 - each candidate loads its frame anew, so the lambdas are no detour
"""Spark over a journal beside Parquet and a source of tuples: batch, pruned, payloads read, archive, a slice of time.

Variants run in turn in one session (local[2]). Data is made in a temporary directory and removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Candidate, compare, options
from wishes import at_least, reaching, within

from penstock.journal import Journal
from penstock.spark import session
from penstock.spark.pipelines import archive, read_all

TOPICS = ("a", "b", "c", "d")
BEGIN_NS = 1_767_225_600_000_000_000


def make(path: Path, messages: int, size: int) -> None:
    """Messages of ``size`` bytes over four topics, a microsecond apart, no two alike: Parquet would store those once."""
    with Journal(path, sync=False) as journal:
        for start in range(0, messages, 10_000):
            data = os.urandom(size * 10_000)
            with journal.transaction() as transaction:
                for number in range(start, min(start + 10_000, messages)):
                    at = number % 10_000 * size
                    transaction.append(TOPICS[number % 4], data[at : at + size], timestamp_ns=BEGIN_NS + number * 1000)


def tuples_source(path: str, most: int) -> Any:
    """What one writes at first: a source that yields a tuple a message; here of the first ``most``."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    from penstock.spark.source import JournalReader

    class Reader(DataSourceReader):
        def __init__(self, schema: Any) -> None:
            self.inner = JournalReader({"path": path, "endPosition": str(most)}, schema)

        def partitions(self) -> list[InputPartition]:
            return self.inner.partitions()

        def read(self, partition: InputPartition) -> Any:
            for batch in self.inner.read(partition):
                columns = [column.to_pylist(maps_as_pydicts="strict") for column in batch.columns]
                yield from zip(*columns, strict=True)

    class Tuples(DataSource):
        @classmethod
        def name(cls) -> str:
            return "tuples"

        def schema(self) -> str:
            from penstock.spark.columns import choose, ddl

            return ddl(choose(None))

        def reader(self, schema: Any) -> Any:
            return Reader(schema)

    return Tuples


def timed(query: Callable[[], Any]) -> Callable[[int], float]:
    def run(_: int) -> float:
        began = time.perf_counter()
        query()
        return time.perf_counter() - began

    return run


def main() -> None:
    arguments = options()
    messages = 400_000 if arguments.quick else 4_000_000
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    spark = session("benchmark", master="local[2]", **{"spark.log.level": "ERROR", "spark.driver.memory": "2g"})
    try:
        small(spark, work, messages, arguments)
        large(spark, work, messages // 8, arguments)
        streaming(spark, work, messages, arguments)
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


def total(frame: Any) -> Callable[[], Any]:
    return lambda: frame.selectExpr("count(*)", "sum(ordinal)").collect()


def every_column(frame: Any) -> Callable[[], Any]:
    """Count and sum in which every column has a part, so that none is left out by the optimizer."""
    return lambda: frame.selectExpr(
        "count(*)", "sum(ordinal)", "sum(position)", "max(timestamp)", "max(timestamp_ns)", "max(topic)",
        "sum(octet_length(payload))", "sum(size(properties))", "max(message_id)", "max(vchan_id)",
    ).collect()  # fmt: skip


def small(spark: Any, work: Path, messages: int, arguments: Any) -> None:
    """100 B payloads: count and sum, and the archive."""
    journal = str(work / "small")
    make(work / "small", messages, 100)
    load = lambda **given: spark.read.format("penstock").options(**given).load(journal)  # noqa: E731
    load().write.parquet(str(work / "parquet"))
    parquet = lambda: spark.read.parquet(str(work / "parquet"))  # noqa: E731
    spark.dataSource.register(tuples_source(journal, messages // 20))
    rows = float(messages)
    few = lambda: spark.read.format("tuples").load(journal)  # noqa: E731
    candidates = [
        Candidate("parquet", lambda n: timed(every_column(parquet()))(n), 1, rows),
        Candidate("penstock", lambda n: timed(every_column(load()))(n), 1, rows, wishes=[at_least(0.4, "parquet"), at_least(10, "tuples")]),
        Candidate("penstock, unchecked", lambda n: timed(every_column(load(check="false")))(n), 1, rows),
        Candidate("tuples", lambda n: timed(every_column(few()))(n), 1, rows / 20, note="on a twentieth of the rows"),
    ]  # fmt: skip
    compare("Spark: count and sum over 100 B messages, every column used", candidates, "parquet", arguments, "rows/s")
    candidates = [
        Candidate("parquet", lambda n: timed(total(parquet()))(n), 1, rows),
        Candidate("penstock", lambda n: timed(total(load()))(n), 1, rows, wishes=[at_least(0.5, "parquet")]),
    ]  # fmt: skip
    compare("Spark: count and sum over 100 B messages, one column used", candidates, "parquet", arguments, "rows/s")
    by_topic = lambda frame: lambda: frame.groupBy("topic").sum("ordinal").collect()  # noqa: E731
    candidates = [
        Candidate("parquet", lambda n: timed(by_topic(parquet()))(n), 1, rows),
        Candidate("penstock", lambda n: timed(by_topic(load()))(n), 1, rows, wishes=[at_least(0.5, "parquet")]),
    ]  # fmt: skip
    compare("Spark: sum by topic", candidates, "parquet", arguments, "rows/s")
    first, last = BEGIN_NS + messages * 500, BEGIN_NS + messages * 510 - 1
    part = lambda: load(startTime=first, endTime=last)  # noqa: E731
    pushed = lambda: load().filter(f"timestamp_ns between {first} and {last}")  # noqa: E731
    start_up = "nothing (start-up)"
    slice_wish = within("<= 5 % of whole + start-up", lambda took: 0.05 * took["whole"] + took[start_up], "whole", start_up)
    candidates = [
        Candidate("whole", lambda n: timed(every_column(load()))(n), 1, 1.0, latency=True),
        Candidate("1 % by option", lambda n: timed(every_column(part()))(n), 1, 1.0, latency=True),
        Candidate("1 % by push-down", lambda n: timed(every_column(pushed()))(n), 1, 1.0, latency=True, wishes=[slice_wish]),
        Candidate(start_up, lambda n: timed(every_column(load(startPosition=1, endPosition=1)))(n), 1, 1.0, latency=True),
    ]  # fmt: skip
    compare("Spark: one percent of the time", candidates, "whole", arguments, "s")
    history(spark, work, messages, arguments)


def history(spark: Any, work: Path, messages: int, arguments: Any) -> None:
    """What ``read_all`` costs over plain Parquet."""
    journal, rows = str(work / "small"), float(messages)
    question = "Spark: history after archive"
    if arguments.only and not any(part in question for part in arguments.only):
        return
    archive(spark, journal, work / "archive")
    copy = str(work / "plain")
    read_all(spark, journal, work / "archive").write.partitionBy("topic").option("compression", "zstd").parquet(copy)
    scan = lambda frame: lambda: frame.selectExpr("count(*)", "sum(ordinal)", "sum(octet_length(payload))").collect()  # noqa: E731
    candidates = [
        Candidate("parquet", lambda n: timed(scan(spark.read.parquet(copy)))(n), 1, rows),
        Candidate("read_all", lambda n: timed(scan(read_all(spark, journal, work / "archive")))(n), 1, rows,
                  wishes=[at_least(0.95, "parquet")]),
    ]  # fmt: skip
    compare(question, candidates, "parquet", arguments, "rows/s")


def large(spark: Any, work: Path, messages: int, arguments: Any) -> None:
    """1 KiB payloads that are read."""
    journal = str(work / "large")
    make(work / "large", messages, 1024)
    spark.read.format("penstock").load(journal).write.parquet(str(work / "large-parquet"))
    read = lambda frame: lambda: frame.selectExpr("sum(crc32(payload))").collect()  # noqa: E731
    load = lambda: spark.read.format("penstock").option("columns", "payload").load(journal)  # noqa: E731
    candidates = [
        Candidate("parquet", lambda n: timed(read(spark.read.parquet(str(work / "large-parquet"))))(n), 1, float(messages)),
        Candidate("penstock", lambda n: timed(read(load()))(n), 1, float(messages), wishes=[at_least(1, "parquet")]),
    ]  # fmt: skip
    compare("Spark: 1 KiB payloads that are read", candidates, "parquet", arguments, "rows/s")


def streaming(spark: Any, work: Path, messages: int, arguments: Any) -> None:
    """A no-op sink at two million a trigger, and a small micro-batch."""
    journal = str(work / "small")

    def stream(most: int, **given: Any) -> float:
        frame = spark.readStream.format("penstock").options(maxMessagesPerTrigger=most, **given).load(journal)
        query = frame.writeStream.format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        steps = [step for step in query.recentProgress if step["numInputRows"]]
        return sum(step["batchDuration"] for step in steps) / 1000.0 if steps else float("nan")

    def small_batch(_: int) -> float:
        start = messages - 20
        frame = (
            spark.readStream.format("penstock")
            .options(maxMessagesPerTrigger=2, startingOffset=f"position:{start}")
            .load(journal)
        )
        query = frame.writeStream.format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        times = sorted(step["batchDuration"] for step in query.recentProgress if step["numInputRows"])
        return times[len(times) // 2] / 1000.0

    candidates = [Candidate("penstock", lambda _: stream(2_000_000), 1, float(messages), wishes=[reaching(1e6)])]
    compare("Spark: streaming to a no-op sink, 2 million a trigger", candidates, "penstock", arguments, "rows/s")
    candidates = [Candidate("penstock", small_batch, 1, 1.0, latency=True, wishes=[reaching(0.3)])]
    compare("Spark: a micro-batch of 2 messages", candidates, "penstock", arguments, "s")


if __name__ == "__main__":
    main()
