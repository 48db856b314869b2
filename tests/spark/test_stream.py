"""Streams over a journal: offsets, limits, restarts, retention, a directory made anew."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import time

import numpy
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, LongType, StructField, StructType
from tests.spark.journals import extend, make

from penstock.errors import InvalidArgument, StateError
from penstock.journal import Journal, layout
from penstock.spark.source import JournalReader, PenstockSource
from penstock.spark.stream import JournalStreamReader, behind, lag, share

PAYLOAD = StructType([StructField("payload", BinaryType())])


def stream(spark, path, **options):
    return spark.readStream.format("penstock").options(columns="position,topic", **options).load(str(path))


def start(frame, tmp_path, **trigger):
    out = tmp_path / "out"
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    return writer.trigger(**(trigger or {"availableNow": True})).start(str(out))


def run(frame, tmp_path):
    query = start(frame, tmp_path)
    query.awaitTermination()
    return query


def positions(spark, tmp_path):
    return sorted(row.position for row in spark.read.parquet(str(tmp_path / "out")).collect())


def test_available_now_in_bounded_batches_then_what_came_later(spark, tmp_path):
    make(tmp_path / "j", 2500)
    query = run(stream(spark, tmp_path / "j", maxMessagesPerTrigger=1000), tmp_path)
    counts = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert counts == [1000, 1000, 500] and positions(spark, tmp_path) == list(range(1, 2501))
    with Journal(tmp_path / "j") as journal:
        extend(journal, 100)
        query = run(stream(spark, tmp_path / "j"), tmp_path)
        assert lag(query) == 0
    assert positions(spark, tmp_path) == list(range(1, 2601))
    ((uuid, position),) = json.loads(query.lastProgress["sources"][0]["endOffset"]).items()
    assert position == 2601 and len(uuid) == 36


def test_it_follows_a_live_writer(spark, tmp_path):
    with Journal(tmp_path / "j") as journal:
        extend(journal, 10)
        query = start(stream(spark, tmp_path / "j"), tmp_path, processingTime="100 milliseconds")
        try:
            for _ in range(3):
                extend(journal, 50, topics=("new.topic", "b"))
                query.processAllAvailable()
        finally:
            query.stop()
            query.awaitTermination(60)
    assert positions(spark, tmp_path) == list(range(1, 161))


@pytest.mark.parametrize(("text", "first"), [
    ("latest", None), ("position:90", 90), ("ordinal:30", 88), ("time:stored", 51), ("time:2026-01-01T00:01:00+00:00", 1),
])  # fmt: skip
def test_starting_offsets(spark, tmp_path, text, first):
    """A time is that of storing, which is one for a commit: the second begins with message 51."""
    make(tmp_path / "j", 100)
    with Journal(tmp_path / "j", mode="read") as journal:
        text = text.replace("stored", str(journal.read(51).stored_ns))
    frame = stream(spark, tmp_path / "j", startingOffset=text)
    query = frame.writeStream.format("memory").queryName("starting").trigger(availableNow=True).start()
    query.awaitTermination()
    got = sorted(row.position for row in spark.table("starting").collect())
    assert got == (list(range(first, 101)) if first is not None else [])


def test_bytes_per_trigger(spark, tmp_path):
    make(tmp_path / "j", 5000)
    query = run(stream(spark, tmp_path / "j", maxBytesPerTrigger=200_000), tmp_path)
    assert len([p for p in query.recentProgress if p["numInputRows"]]) >= 2
    assert positions(spark, tmp_path) == list(range(1, 5001))


@pytest.mark.parametrize("most", [1, 3000, 50_000, 400_000])
def test_bytes_per_trigger_hold_with_uneven_sizes(tmp_path, most):
    """Counted by the payloads that were written: none of the triggers has more, but for one message alone."""
    random = numpy.random.default_rng(most)
    sizes = [int(random.choice([10, 500, 90_000], p=[0.6, 0.37, 0.03])) for _ in range(600)]
    with Journal(tmp_path / "j", segment_bytes=1 << 20, sync=False) as journal:
        for at in range(0, len(sizes), 100):
            journal.append_many("a", [bytes(size) for size in sizes[at : at + 100]])
    reader = JournalStreamReader({"path": str(tmp_path / "j"), "maxBytesPerTrigger": str(most)}, PAYLOAD)
    offset, triggers = reader.initialOffset(), []
    (uuid,) = offset
    while offset[uuid] <= len(sizes) and len(triggers) < 2000:
        following = reader.latestOffset(offset, reader.getDefaultReadLimit())
        triggers.append(sizes[offset[uuid] - 1 : following[uuid] - 1])
        offset = following
    assert list(itertools.chain.from_iterable(triggers)) == sizes
    assert all(len(taken) == 1 or 0 < sum(taken) <= most for taken in triggers)
    for taken, after in itertools.pairwise(triggers):  # 200: what a record has around its payload, and a commit's head
        assert sum(size + 200 for size in (*taken, after[0])) > most * 0.95, "it stopped too early"


def test_several_journals_and_one_that_comes_later(spark, tmp_path):
    make(tmp_path / "journals" / "one", 100)
    run(stream(spark, f"{tmp_path}/journals/*"), tmp_path)
    make(tmp_path / "journals" / "two", 50)
    run(stream(spark, f"{tmp_path}/journals/*"), tmp_path)
    assert len(positions(spark, tmp_path)) == 150


def forget_before(path, count):
    """What retention does: the oldest segments go and the least position kept moves."""
    logs = sorted(path.glob("*.log"))
    for log in logs[:count]:
        for part in path.glob(log.stem + ".*"):
            part.unlink()
    first = int(logs[count].name.split("-")[0])
    uuid = layout.decode_marker((path / layout.MARKER_NAME).read_bytes(), str(path))
    words = layout.decode_frontier((path / layout.FRONTIER_NAME).read_bytes(), uuid)
    moved = dataclasses.replace(words, first=first, sequence=words.sequence + 2)
    (path / layout.FRONTIER_NAME).write_bytes(layout.encode_frontier(uuid, moved))
    return first


def test_retention_that_passed_an_offset_is_told(spark, tmp_path):
    make(tmp_path / "j", 200)
    run(stream(spark, tmp_path / "j"), tmp_path)
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        extend(journal, 5000)
    first = forget_before(tmp_path / "j", 3)
    with pytest.raises(PySparkException, match="were deleted by retention before this query"):
        run(stream(spark, tmp_path / "j"), tmp_path)
    run(stream(spark, tmp_path / "j", failOnDataLoss="false"), tmp_path)
    assert positions(spark, tmp_path) == [*range(1, 201), *range(first, 5201)]


def take_segment(path, number):
    """Delete a segment from between others; gives its first position and its end."""
    logs = sorted(path.glob("*.log"))
    for part in path.glob(logs[number].stem + ".*"):
        part.unlink()
    return tuple(int(log.name.split("-")[0]) for log in logs[number : number + 2])


def planned_by_triggers(path, **options):
    """What the triggers of a stream over all that is there read, without Spark."""
    reader = JournalStreamReader({"path": str(path)} | options, PAYLOAD)
    at, reached = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        reached += [(piece.start, piece.end) for part in reader.partitions(at, end) for piece in part.ranges]
        at = end
    return reached


@pytest.mark.parametrize("limit", [{}, {"maxMessagesPerTrigger": "300"}, {"maxBytesPerTrigger": "50000"}])
def test_each_position_that_is_skipped_is_told_once(tmp_path, caplog, limit):
    make(tmp_path / "j", 6000)
    first = forget_before(tmp_path / "j", 1)
    low, high = take_segment(tmp_path / "j", 1)
    read = planned_by_triggers(tmp_path / "j", failOnDataLoss="false", startingOffset="position:2", **limit)
    assert sorted({at for begin, end in read for at in range(begin, end)}) == [*range(first, low), *range(high, 6001)]
    told = [record.getMessage() for record in caplog.records if record.name == "penstock.spark"]
    assert [text.split(" of journal")[0] for text in told] == [
        f"positions 2 to {first - 1}", f"positions {low} to {high - 1}"
    ]  # fmt: skip
    assert "were deleted by retention" in told[0] and "damage" in told[1]


def test_a_table_tells_what_it_goes_on_without(tmp_path, caplog):
    make(tmp_path / "j", 6000)
    low, high = take_segment(tmp_path / "j", 1)
    JournalReader({"path": str(tmp_path / "j"), "failOnDataLoss": "false"}, PAYLOAD).partitions()
    (told,) = (record.getMessage() for record in caplog.records if record.name == "penstock.spark")
    assert f"positions {low} to {high - 1} of journal" in told


def test_a_starting_position_that_is_gone_is_a_loss(tmp_path):
    make(tmp_path / "j", 6000)
    forget_before(tmp_path / "j", 1)
    with pytest.raises(StateError, match=r"positions 2 to \d+ .* were deleted by retention"):
        planned_by_triggers(tmp_path / "j", startingOffset="position:2")
    assert planned_by_triggers(tmp_path / "j", startingOffset="earliest")


def test_a_directory_made_anew_is_told(spark, tmp_path):
    make(tmp_path / "j", 100)
    run(stream(spark, tmp_path / "j"), tmp_path)
    shutil.rmtree(tmp_path / "j")
    make(tmp_path / "j", 300)
    with pytest.raises(PySparkException, match="made anew or not named"):
        run(stream(spark, tmp_path / "j"), tmp_path)
    assert positions(spark, tmp_path) == list(range(1, 101))


def test_wrong_options(spark, tmp_path):
    make(tmp_path / "j", 10)
    for options, text in (
        ({"startingOffset": "yesterday"}, "is not one of earliest"),
        ({"maxMessagesPerTrigger": "0"}, "at least 1"),
        ({"maxMessagesPerTrigger": "many"}, "not a whole number"),
    ):
        with pytest.raises(PySparkException, match=text) as told:
            query = (
                stream(spark, tmp_path / "j", **options).writeStream.format("noop").trigger(availableNow=True).start()
            )
            query.awaitTermination()
        assert "UnboundLocalError" not in str(told.value)


def test_shares_are_even_and_use_the_whole_limit():
    assert share({"a": 1, "b": 1}, {"a": 101, "b": 11}, 50) == {"a": 41, "b": 11}
    assert share({"a": 1}, {"a": 1}, 50) == {"a": 1}
    assert share({"a": 1, "b": 5}, {"a": 4, "b": 9}, 1) == {"a": 2, "b": 5}
    assert behind('{"a": 10}', '{"a": 4}') == 6 and behind(None, None) == 0


def rows_of(reader, start, end):
    parts = reader.partitions(start, end)
    return [row["position"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


POSITION = StructType([StructField("position", LongType())])


@pytest.mark.parametrize("limit", [{}, {"maxMessagesPerTrigger": "7"}, {"maxBytesPerTrigger": "2000"}])
def test_an_ordinal_that_no_topic_has_yet_is_awaited(tmp_path, limit):
    """Also by a process that goes on from the checkpoint, which was given another option meanwhile."""
    with Journal(tmp_path / "j") as journal:
        journal.append_many("t", [b"1"] * 10)
    options = {"path": str(tmp_path / "j"), "startingOffset": "ordinal:40", **limit}
    offset, read = JournalStreamReader(options, POSITION).initialOffset(), []
    for _ in range(3):
        reader = JournalStreamReader(options, POSITION)
        while (following := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
            following = json.loads(json.dumps(following))
            read += rows_of(reader, offset, following)
            assert rows_of(JournalStreamReader(options, POSITION), offset, following) == rows_of(reader, offset, following)
            offset = following
        assert behind(reader.reportLatestOffset(), offset) == 0
        options["startingOffset"] = "latest"
        with Journal(tmp_path / "j") as journal:
            journal.append_many("t", [b"1"] * 25)
    assert read == list(range(40, 61)) and len(offset) == 1


def test_a_time_of_the_future_is_awaited(tmp_path):
    make(tmp_path / "j", 10)
    options = {"path": str(tmp_path / "j"), "startingOffset": "time:2100-01-01T00:00:00Z"}
    reader = JournalStreamReader(options, POSITION)
    offset = reader.initialOffset()
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"")
    following = reader.latestOffset(offset, reader.getDefaultReadLimit())
    assert rows_of(reader, offset, following) == [] and following["startingOffset"] == options["startingOffset"]
    now = {**options, "startingOffset": f"time:{time.time_ns()}"}
    reader = JournalStreamReader(now, POSITION)
    offset = reader.initialOffset()
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"")
    following = reader.latestOffset(offset, reader.getDefaultReadLimit())
    assert rows_of(reader, offset, following) == [12] and len(following) == 1


@pytest.mark.parametrize(("options", "text"), [
    ({"maxMessagesPerTrigger": "0"}, "at least 1"), ({"startPosition": "x"}, "not a whole number"),
    ({"failOnDataLoss": "nein"}, "is not a choice"), ({"topics": ","}, "names no topic"), ({"path": ""}, "name a journal"),
    ({"maxMessagesPerTrigger": "5", "maxBytesPerTrigger": "5"}, "not both"),
])  # fmt: skip
def test_a_wrong_option_is_what_spark_shows(tmp_path, options, text):
    """PySpark runs the constructor of a reader where another error would stand in the place of its own."""
    make(tmp_path / "j", 10)
    reader = PenstockSource({"path": str(tmp_path / "j"), **options}).streamReader(POSITION)
    calls = (
        reader.initialOffset, reader.getDefaultReadLimit, reader.prepareForTriggerAvailableNow, reader.reportLatestOffset,
        lambda: reader.latestOffset({}, ReadAllAvailable()), lambda: reader.partitions({}, {}), lambda: reader.read(None),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgument, match=text):
            call()


@pytest.mark.parametrize("options", [
    {"startingOffset": "position:91"}, {"startingOffsets": "latest"}, {"startingOffset": "nonsense"},
    {"maxMessagesPerTrigger": "-5"}, {"maxOffsetsPerTrigger": "5"}, {"maxBytesPerTrigger": "5"},
])  # fmt: skip
def test_a_table_refuses_options_of_streams(tmp_path, options):
    make(tmp_path / "j", 10)
    with pytest.raises(InvalidArgument, match=r"is for streams \(spark.readStream\)"):
        JournalReader({"path": str(tmp_path / "j"), **options}, POSITION)
    JournalReader({"path": str(tmp_path / "j"), "startingOffsets": "earliest"}, POSITION)
