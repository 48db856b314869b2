"""Writing to a journal: all rows, one atomic commit, once per (query, batch) even when Spark runs the batch again."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from tests.spark.journals import make

from penstock.journal import Journal


def everything(path):
    found, position = [], 1
    with Journal(path, mode="read") as journal:
        while position < journal.frontier:
            batch = journal.read_many(position, 100_000)
            found += [(message.channel, bytes(message)) for message in batch]
            position = batch[len(batch) - 1].position + 1
    return found


def write(frame, path, **options):
    frame.write.format("penstock").mode("append").options(**options).save(str(path))


def test_rows_become_messages(spark, tmp_path):
    frame = spark.createDataFrame(
        [("a", bytearray(b"1"), {"k": "v"}, "id1", 10**18), ("b", bytearray(b"2"), None, None, 10**18 + 1)],
        "topic string, payload binary, properties map<string,string>, message_id string, timestamp_ns bigint",
    ).coalesce(1)
    write(frame, tmp_path / "j")
    back = spark.read.format("penstock").load(str(tmp_path / "j")).orderBy("position").collect()
    assert [(r.topic, bytes(r.payload), r.properties, r.message_id, r.timestamp_ns) for r in back] == [
        ("a", b"1", {"k": "v"}, "id1", 10**18), ("b", b"2", {}, None, 10**18 + 1),
    ]  # fmt: skip
    assert not list(tmp_path.glob("*.staging"))
    write(spark.range(1000).selectExpr("cast(id as string) as payload"), tmp_path / "j", topic="numbers")
    rows = everything(tmp_path / "j")
    assert sorted(int(data) for topic, data in rows if topic == "numbers") == list(range(1000))


def test_a_named_job_publishes_once(spark, tmp_path):
    frame = spark.range(10).selectExpr("'a' as topic", "cast(id as string) as payload")
    for _ in range(3):
        write(frame, tmp_path / "j", transaction="nightly-2026-01-01")
    assert len(everything(tmp_path / "j")) == 10
    write(frame, tmp_path / "j", transaction="nightly-2026-01-02")
    assert len(everything(tmp_path / "j")) == 20


def stream_once(spark, source, target, checkpoint, **options):
    frame = spark.readStream.format("penstock").options(**options).load(str(source)).select("topic", "payload")
    query = (
        frame.writeStream.format("penstock").option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True).start(str(target))
    )  # fmt: skip
    query.awaitTermination()
    return query


def test_a_replayed_batch_is_published_once(spark, tmp_path):
    rows = make(tmp_path / "source", 1000)
    checkpoint = tmp_path / "checkpoint"
    stream_once(spark, tmp_path / "source", tmp_path / "j", checkpoint, maxMessagesPerTrigger=300)
    expected = sorted((row[0], row[3]) for row in rows)
    assert sorted(everything(tmp_path / "j")) == expected
    commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (commits[-1], checkpoint / "commits" / f".{commits[-1].name}.crc"):
        path.unlink(missing_ok=True)  # as if the driver had died between the journal's commit and Spark's
    query = stream_once(spark, tmp_path / "source", tmp_path / "j", checkpoint, maxMessagesPerTrigger=300)
    assert any(progress["numInputRows"] for progress in query.recentProgress), "the batch was not run again"
    assert sorted(everything(tmp_path / "j")) == expected
    with Journal(tmp_path / "source") as journal:
        journal.append("more", b"x")
    stream_once(spark, tmp_path / "source", tmp_path / "j", checkpoint)
    assert sorted(everything(tmp_path / "j")) == sorted([*expected, ("more", b"x")])


def test_a_failed_job_publishes_nothing(spark, tmp_path):
    frame = spark.range(100).repartition(2).select(
        F.lit("a").alias("topic"),
        F.when(F.col("id") == 57, F.raise_error(F.lit("boom")).cast("string")).otherwise(F.col("id").cast("string")).alias("payload"),
    )  # fmt: skip
    with pytest.raises(PySparkException, match="boom"):
        write(frame, tmp_path / "j")
    assert not (tmp_path / "j").exists() or everything(tmp_path / "j") == []
    assert not list(tmp_path.glob("*.staging"))


def test_the_marks_survive_a_roll(spark, tmp_path):
    frame = spark.range(3000).selectExpr("'a' as topic", "repeat('x', 100) as payload")
    for number in range(3):
        write(frame, tmp_path / "j", transaction=f"job{number}", segmentBytes=1 << 16)
    for number in range(3):
        write(frame, tmp_path / "j", transaction=f"job{number}", segmentBytes=1 << 16)
    assert len(everything(tmp_path / "j")) == 9000
    assert len(list((tmp_path / "j").glob("*.log"))) > 1


def test_a_live_writer_is_told(spark, tmp_path):
    frame = spark.range(1).selectExpr("'a' as topic", "'x' as payload")
    with Journal(tmp_path / "j"), pytest.raises(PySparkException, match="through its broker"):
        write(frame, tmp_path / "j")


@pytest.mark.parametrize(("columns", "text"), [
    (["'a' as topic"], "column 'payload' is needed"),
    (["'x' as payload"], "column 'topic' or the option"),
    (["'a' as topic", "1 as payload"], "must be binary or string"),
    (["'a' as topic", "'x' as payload", "1 as speed"], "no place for column 'speed'"),
])  # fmt: skip
def test_frames_that_are_no_messages(spark, tmp_path, columns, text):
    with pytest.raises(PySparkException, match=text):
        write(spark.range(1).selectExpr(*columns), tmp_path / "j")


def test_a_time_that_no_message_has_is_refused(spark, tmp_path):
    frame = spark.sql("select 'a' as topic, 'x' as payload, timestamp'9999-12-31 00:00:00' as timestamp")
    with pytest.raises(PySparkException, match="is no message's time"):
        frame.write.format("penstock").mode("append").save(str(tmp_path / "j"))


def test_no_overwriting(spark, tmp_path):
    frame = spark.range(1).selectExpr("'a' as topic", "'x' as payload")
    with pytest.raises(PySparkException, match="only added to"):
        frame.write.format("penstock").mode("overwrite").save(str(tmp_path / "j"))
