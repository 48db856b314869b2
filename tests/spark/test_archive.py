"""The archive as a Spark job: tasks on workers write, the driver commits; the lake comes back as frames and views."""

from __future__ import annotations

import json

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from tests.spark.journals import extend, make
from tests.spark.test_lake import as_made, old_archive, read_by_others, rows_of
from tests.spark.test_stream import forget_before

from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import Journal
from penstock.spark import lake
from penstock.spark import table as table_of
from penstock.spark.lake import archiving, planning
from penstock.spark.pipelines import archive, compact, history, read_all


def positions(frame):
    return sorted(row.position for row in frame.select("position").collect())


def test_archive_then_read_all(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_RANGE_BYTES", 1 << 15)
    monkeypatch.setattr(planning, "RANGE_BYTES", 1 << 16)  # several tasks
    rows = make(tmp_path / "j", 2000, step_ns=60 * 10**9)  # over two days
    done = archive(spark, str(tmp_path / "j"), tmp_path / "archive", most_messages=1500, compact_files=0)
    assert done.rows == 2000 and done.lag == 0 and done.payload_bytes == sum(len(row[3]) for row in rows)
    assert as_made(rows_of(tmp_path / "archive")) == rows and done.files > 4
    compact(spark, tmp_path / "archive", 1)
    found = lake.info(tmp_path / "archive")
    assert found.files == len(found.days) < done.files
    with Journal(tmp_path / "j") as journal:
        rows += extend(journal, 500, step_ns=60 * 10**9)
    everything = read_all(spark, str(tmp_path / "j"), tmp_path / "archive")
    got = everything.select("topic", "position", "timestamp_ns", "payload", "properties", "message_id").collect()
    assert sorted((r[0], r[1], r[2], bytes(r[3]), r[4] or {}, r[5]) for r in got) == sorted(rows)
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 500
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 0
    for reader, found in {"spark": positions(history(spark, tmp_path / "archive")), **read_by_others(tmp_path / "archive")}.items():
        assert found == list(range(1, 2501)), reader


def test_the_table_as_a_frame_and_a_view(spark, tmp_path, days):
    make(tmp_path / "j", 3000, step_ns=60 * 10**9)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "archive", most_messages=1000, compact_files=0)
    before = lake.info(tmp_path / "archive")
    lake.compact(None, tmp_path / "archive", 1)
    frame = table_of(spark, tmp_path / "archive")
    frame.createOrReplaceTempView("measurements")
    found = spark.sql("SELECT topic, count(*) AS n FROM measurements WHERE date = '2026-01-02' GROUP BY topic").collect()
    dataset = DeltaTable(str(tmp_path / "archive")).to_pyarrow_dataset().to_table(columns=["topic", "date"]).to_pylist()
    for row in found:
        assert row.n == sum(item["topic"] == row.topic and str(item["date"]) == "2026-01-02" for item in dataset)
    plan = spark.sql("SELECT payload FROM measurements WHERE topic = 'b'")._jdf.queryExecution().executedPlan().toString()
    assert "PushedFilters: [IsNotNull(topic), EqualTo(topic,b)]" in plan and "ColumnarToRow" in plan, "vectorised"
    assert positions(table_of(spark, tmp_path / "archive", version=before.version)) == list(range(1, 3001))
    assert table_of(spark, tmp_path / "archive", topics="a.*").count() == 2000
    assert positions(frame) == list(range(1, 3001))


def test_segments_may_go_once_archived(spark, tmp_path):
    make(tmp_path / "j", 5000)
    archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    forget_before(tmp_path / "j", 3)
    assert positions(read_all(spark, str(tmp_path / "j"), tmp_path / "archive")) == list(range(1, 5001))
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 0


def test_what_goes_while_it_is_archived_is_told(spark, tmp_path, monkeypatch):
    """Retention between planning and reading: the round fails, and nothing counts as archived that is not."""
    make(tmp_path / "j", 5000)
    tail = read_all(spark, str(tmp_path / "j"), tmp_path / "archive")
    real = archiving.run

    def run(*arguments):
        forget_before(tmp_path / "j", 3)
        return real(*arguments)

    monkeypatch.setattr(archiving, "run", run)
    with pytest.raises(PySparkException, match="were deleted by retention before they were read"):
        archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    assert lake.info(tmp_path / "archive").reached == {}
    with pytest.raises(PySparkException, match="were deleted by retention before they were read"):
        tail.count()


def test_an_archive_of_some_topics_stays_one(spark, tmp_path):
    """What was left out counts as archived: other topics are refused, and the tail is of the same ones."""
    make(tmp_path / "j", 90)
    archive(None, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "b,a.x"})
    with Journal(tmp_path / "j") as journal:
        extend(journal, 90)
    for options in ({}, {"topics": "a.y"}, {"topics": "a.x,b", "startTime": "0"}):
        with pytest.raises(InvalidArgument, match=r"was made with topics=a\.x,b; this run asks for .*another directory"):
            archive(spark, str(tmp_path / "j"), tmp_path / "archive", options=options)
    wanted = [number for number in range(1, 181) if number % 3 != 1]
    for options in (None, {"topics": "a.x, b"}):
        assert positions(read_all(spark, str(tmp_path / "j"), tmp_path / "archive", options=options)) == wanted
    with pytest.raises(InvalidArgument, match=r"asks for topics=a\.y"):
        read_all(spark, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "a.y"})
    archive(spark, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "a.x,b"}, compact_files=1)
    assert positions(history(spark, tmp_path / "archive")) == wanted


def test_an_archive_of_version_1_is_taken_over_by_a_job(spark, tmp_path):
    made = old_archive(tmp_path)
    for read in (lambda: history(spark, tmp_path / "lake"), lambda: read_all(spark, str(tmp_path / "j"), tmp_path / "lake")):
        with pytest.raises(InvalidArgument, match="of version 1: archive to it once"):
            read()
    archive(spark, str(tmp_path / "j"), tmp_path / "lake")
    assert as_made(rows_of(tmp_path / "lake")) == made


def test_an_error_of_a_task_comes_back_as_itself(spark, tmp_path):
    make(tmp_path / "j", 500)
    log = min((tmp_path / "j").glob("*.log"))
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(PySparkException, match="is damaged"):
        archive(spark, str(tmp_path / "j"), tmp_path / "lake")
    assert lake.info(tmp_path / "lake").rows == 0


def test_a_log_that_cannot_be_read_is_told(spark, tmp_path):
    make(tmp_path / "j", 10)
    archive(None, str(tmp_path / "j"), tmp_path / "lake")
    (tmp_path / "lake" / "_delta_log" / f"{1:020d}.json").write_text(json.dumps({"add": 1}))
    with pytest.raises(CorruptionError, match="penstock lake verify"):
        read_all(spark, str(tmp_path / "j"), tmp_path / "lake")
