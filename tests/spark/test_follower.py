"""Spark over a follower's directory gives the rows of the leader's, also those of a broker that took over."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from tests.replica.fake_blocks import FakeBlocks, FakeStream
from tests.replica.test_refill import opened

from penstock.replica.follower import Follower


def rows(spark: SparkSession, directory: Path) -> list[tuple[object, ...]]:
    frame = spark.read.format("penstock").load(str(directory))
    return [tuple(row) for row in frame.orderBy("position").collect()]


def test_rows_are_equal(spark: SparkSession, tmp_path: Path) -> None:
    stream = FakeStream()
    for leader in ("a", "b"):  # one after the other
        with opened(tmp_path / leader, stream) as journal:
            for number in range(60):  # over several segments
                journal.append(f"t{number % 3}", b"%d" % number + bytes(9_000), properties={"from": leader})
    with Follower(tmp_path / "follower", FakeBlocks(stream)):
        found = rows(spark, tmp_path / "follower")
        assert len(found) == 120 and found == rows(spark, tmp_path / "b")
