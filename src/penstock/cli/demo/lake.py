"""Spark on the recording: archive to Parquet as it grows; at the end rollup and quality over everything."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.demo.part import Stage
from penstock.cli.recording import STORY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SETTINGS: dict[str, Any] = {
    "spark.driver.memory": "900m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
}


def run(stage: Stage) -> None:
    """Archive until told to stop; then what is left, the rollup and the report."""
    from penstock import _core
    from penstock.spark import session

    logging.getLogger("py4j").setLevel(logging.ERROR)
    began = time.monotonic()
    spark = session("penstock-demo", master="local[2]", **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    stage.tell(ready=True, started_s=time.monotonic() - began)
    place = Path(stage.configuration["directory"])
    archive = _Archive(spark, stage, place, _core.Counters("spark", "pipeline", "archive"))
    try:
        query = archive.start(once=False)
        while not stage.stop.wait(0.5):
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
        query.stop()
        archive.start(once=True).awaitTermination()
        stage.tell(archive=archive.report(), finishing="rollup")
        stage.tell(**_finish(spark, place), finished=True)
    finally:
        archive.close()
        spark.stop()


class _Archive:
    """The streaming query from the recording to Parquet."""

    def __init__(self, spark: SparkSession, stage: Stage, place: Path, counters: Any) -> None:
        self._spark, self._stage, self._place, self._counters = spark, stage, place, counters
        self._rows = self._batches = 0

    def start(self, once: bool) -> StreamingQuery:
        frame = self._spark.readStream.format("penstock").load(self._stage.configuration["recording"])
        writer = frame.where(f"topic != '{STORY}'").writeStream.foreachBatch(self._store)
        writer = writer.option("checkpointLocation", str(self._place / "checkpoint"))
        trigger: dict[str, Any] = {"availableNow": True} if once else {"processingTime": "3 seconds"}
        return writer.trigger(**trigger).start()

    def _store(self, frame: DataFrame, batch: int) -> None:
        """One micro-batch, to a folder of its own number: stored again after a crash it replaces itself."""
        frame.persist()
        count = frame.count()
        target = self._place / "parquet" / f"batch={batch}"
        frame.write.mode("overwrite").parquet(str(target))
        frame.unpersist()
        self._rows += count
        self._batches += 1
        self._counters.add("matched", count)
        self._counters.add("delivered", count)
        self._counters.set("last_ns", time.time_ns())
        self._counters.state(f"batch {batch}: {count} rows")
        self._stage.tell(archive=self.report())

    def close(self) -> None:
        """Give the counters back: Spark keeps this object until the process ends."""
        self._counters.close()
        self._counters = None

    def report(self) -> dict[str, Any]:
        return {"rows": self._rows, "batches": self._batches}


def _finish(spark: SparkSession, place: Path) -> dict[str, Any]:
    """Rows counted from the files themselves, a rollup of the temperatures, and the quality of every topic."""
    from pyspark.sql import functions as F

    from penstock.spark.pipelines import quality, report, rollup

    stored = spark.read.parquet(str(place / "parquet"))
    rows = {row["topic"]: row["count"] for row in stored.groupBy("topic").count().collect()}
    decoded = stored.where("topic = 'temperature'").withColumn(
        "value", F.from_json(F.col("payload").cast("string"), "n long, device string, celsius double")
    )
    sums = {"mean": "avg(value.celsius)", "most": "max(value.celsius)", "readings": "count(*)"}
    table = rollup(decoded.withColumn("device", F.col("value.device")), sums, by=["device"], window="10 seconds")
    table.write.mode("overwrite").parquet(str(place / "rollup"))
    written = spark.read.parquet(str(place / "rollup"))
    figures = quality(stored, window="10 seconds")
    figures.persist()
    page = report(figures, place / "quality.html", title="Quality of the demo's topics")
    faults = figures.agg(*(F.sum(name).alias(name) for name in ("missing", "duplicates", "out_of_order"))).first()
    assert faults is not None
    return {
        "parquet": {"rows": rows, "directory": str(place / "parquet")},
        "rollup": {"rows": written.count(), "readings": written.agg(F.sum("readings")).first()[0]},  # type: ignore[index]
        "quality": {**{name: int(value or 0) for name, value in faults.asDict().items()}, "page": str(page)},
    }
