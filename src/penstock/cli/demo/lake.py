"""Spark on the recording: archive to a Delta table as it grows; at the end rollup and quality over everything."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.demo.part import Stage
from penstock.recording.story import STORY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: dict[str, Any] = {
    "spark.driver.memory": "900m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
}


def run(stage: Stage) -> None:
    """Archive until told to stop; then archive the rest, and make the rollup and the report."""
    from penstock import _core
    from penstock.spark import session

    logging.getLogger("py4j").setLevel(logging.ERROR)
    began = time.monotonic()
    spark = session("penstock-demo", master="local[2]", **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    stage.tell(ready=True, started_s=time.monotonic() - began)
    place = Path(stage.configuration["directory"])
    counters = _core.Counters("spark", "pipeline", f"archive <- journal:{stage.configuration['recording']}")
    done = {"rows": 0, "rounds": 0}
    try:
        while not stage.stop.wait(stage.configuration["archive_every_s"]):
            _archive(spark, stage, place, counters, done)
        _archive(spark, stage, place, counters, done)
        stage.tell(**_finish(spark, place), finished=True)
    finally:
        counters.close()
        spark.stop()


def _archive(spark: SparkSession, stage: Stage, place: Path, counters: Any, done: dict[str, int]) -> None:
    """One round: all that the recording holds now goes to the table, exactly once."""
    from penstock.spark.pipelines import archive

    round_ = archive(spark, stage.configuration["recording"], place / "archive")
    done["rows"] += round_.rows
    done["rounds"] += 1
    counters.add("matched", round_.rows)
    counters.add("delivered", round_.rows)
    counters.add("bytes", round_.payload_bytes)
    counters.set("lag", round_.lag)
    counters.set("last_ns", time.time_ns())
    counters.state(f"round {done['rounds']}: {round_.rows} rows in {round_.seconds:.1f} s")
    stage.tell(archive=dict(done))


def _finish(spark: SparkSession, place: Path) -> dict[str, Any]:
    """Rows counted as a user reads them, a rollup of the temperatures, and the quality of every topic.

    A user may read the archive by Spark or by any other reader of Delta tables: both must give every row once.
    """
    from pyspark.sql import functions as F

    from penstock.spark.pipelines import history, quality, report, rollup

    archive = place / "archive"
    stored = history(spark, archive).where(f"topic != '{STORY}'")
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
        "parquet": {"rows": _count(stored), "plain_rows": _count_plain(archive), "directory": str(archive)},
        "rollup": {"rows": written.count(), "readings": written.agg(F.sum("readings")).first()[0]},  # type: ignore[index]
        "quality": {**{name: int(value or 0) for name, value in faults.asDict().items()}, "page": str(page)},
    }


def _count_plain(archive: Path) -> dict[str, int]:
    """The number of rows of each topic, counted by a reader that knows nothing of Penstock."""
    from deltalake import DeltaTable

    topics = DeltaTable(str(archive)).to_pyarrow_dataset().to_table(columns=["topic"])["topic"]
    counts = {row["values"]: row["counts"] for row in topics.value_counts().to_pylist()}
    counts.pop(STORY, None)
    return counts


def _count(frame: DataFrame) -> dict[str, int]:
    """Rows of each topic."""
    return {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
