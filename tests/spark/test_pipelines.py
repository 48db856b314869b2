"""quality, rollup, sessions and replay: batch and streaming give what a plain loop over the messages gives."""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import shutil
import sys

import pytest

from penstock.errors import InvalidArgument
from penstock.journal import Journal
from penstock.spark.pipelines import quality, replay, report, rollup, sessions, worst
from penstock.spark.pipelines.align import align, grid
from penstock.spark.pipelines.report import terminal
from penstock.spark.pipelines.sessions import merge

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SCHEMA = """topic string, ordinal long, position long, timestamp timestamp, timestamp_ns long, payload binary,
properties map<string,string>"""


def message(topic, ordinal, position, at_s, size=10, latency_ms=None):
    at = BEGIN + datetime.timedelta(seconds=at_s)
    at_ns = round(BEGIN.timestamp()) * 10**9 + round(at_s * 1e9)
    properties = {} if latency_ms is None else {"sent_ns": str(at_ns - latency_ms * 10**6)}
    return (topic, ordinal, position, at, at_ns, bytearray(size), properties)


def flawed():
    """Ordinals 1 to 40 of topic a, one a second, with faults at known places."""
    ordinals = list(range(1, 41))
    for missing in (5, 6, 20):  # 20 begins the third window: missing between windows
        ordinals.remove(missing)
    ordinals.insert(10, 9)  # a duplicate that is also out of order
    return [message("a", ordinal, index, ordinal - 1 if ordinal != 20 else 19, size=ordinal, latency_ms=ordinal)
            for index, ordinal in enumerate(ordinals)] + [message("b", 1, 1000, 3)]  # fmt: skip


def as_stream(spark, frame, path):
    """The rows as a stream of one file, read back in one batch."""
    frame.coalesce(1).write.parquet(str(path))
    return spark.readStream.schema(frame.schema).parquet(str(path))


def run(stream, path, mode="append"):
    """What a stream gives when all that is there has gone through."""
    query = stream.writeStream.format("memory").queryName(path.name).outputMode(mode)
    query = query.option("checkpointLocation", str(path / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    return stream.sparkSession.table(path.name).collect()


def test_quality_finds_every_fault(spark, tmp_path):
    frame = spark.createDataFrame(flawed(), SCHEMA)
    table = quality(frame, window="10 seconds").cache()
    rows = {(row.topic, row.window_start.second): row for row in table.collect()}
    first, second, third = rows[("a", 0)], rows[("a", 10)], rows[("a", 20)]
    assert (first.messages, first.missing, first.duplicates) == (9, 2, 1)
    assert sum(row.out_of_order for row in rows.values()) == 1
    assert (second.messages, second.missing, third.missing) == (9, 0, 1)
    assert first.latency_max_ms == 10 and first.size_max == 10 and third.rate_per_s == 1.0
    assert rows[("b", 0)].messages == 1 and rows[("b", 0)].missing == 0
    assert [(row.topic, row.window_start.second) for row in worst(table, 2).collect()] == [("a", 0), ("a", 20)]
    page = report(table, tmp_path / "quality.html", title="<test>").read_text()
    assert "<svg" in page and "&lt;test&gt;" in page and "3 missing, 1 duplicates, 1 out of order" in page
    assert terminal(table).row_count > 0


def test_quality_in_streaming_is_the_same(spark, tmp_path):
    frame = spark.createDataFrame(flawed(), SCHEMA)
    late = message("zz", 1, 5000, 10_000)  # moves the watermark past all windows
    stream = as_stream(spark, frame.union(spark.createDataFrame([late], SCHEMA)), tmp_path / "rows")
    streamed = run(quality(stream, window="10 seconds"), tmp_path)
    batch = quality(frame, window="10 seconds").drop("missing").collect()
    key = lambda row: (row.topic, row.window_start)  # noqa: E731
    drop = lambda row: {name: value for name, value in row.asDict().items() if name != "missing"}  # noqa: E731
    assert [drop(row) for row in sorted(streamed, key=key)] == [row.asDict() for row in sorted(batch, key=key)]
    assert sum(row.missing for row in streamed) == 2  # the one between windows is added by between_windows


def test_rollup(spark):
    frame = spark.createDataFrame(flawed(), SCHEMA)
    table = rollup(frame, {"mean": "avg(octet_length(payload))", "n": "count(*)"}, window="20 seconds")
    rows = {(row.topic, row.window_start.second): row for row in table.collect()}
    assert rows[("a", 20)].n == 20 and rows[("a", 20)].mean == sum(range(21, 41)) / 20
    assert rows[("a", 0)].n == 18
    with pytest.raises(InvalidArgument, match="at least one aggregate"):
        rollup(frame, {})


def parts_as_stream(spark, parts, tmp_path):
    """Each part one micro-batch, in order: Spark takes files by their time of change."""
    files = tmp_path / "files"
    files.mkdir()
    for number, part in enumerate(parts):
        folder = tmp_path / f"part{number}"
        spark.createDataFrame(part, SCHEMA).coalesce(1).write.parquet(str(folder))
        (source,) = folder.glob("*.parquet")
        shutil.copy(source, files / f"{number}.parquet")
        os.utime(files / f"{number}.parquet", (1_700_000_000 + number, 1_700_000_000 + number))
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(files))


def test_rollup_leaves_late_rows_out_in_streaming(spark, tmp_path):
    times = (5, 500, 501, 6, 2000)  # Spark tells late by the watermark before last, so 501 lies between
    parts = [[message("a", number, number, at)] for number, at in enumerate(times)]
    stream = parts_as_stream(spark, parts, tmp_path)
    got = run(rollup(stream, {"n": "count(*)"}, window="10 seconds", watermark="1 minute"), tmp_path)
    assert sorted(((utc(row.window_start) - BEGIN).total_seconds(), row.n) for row in got) == [(0, 1), (500, 2)]


def brute_sessions(rows, gap_s):
    found = []
    by_key = {}
    for row in rows:
        by_key.setdefault(row[0], []).append(row[3])
    for key, times in by_key.items():
        times.sort()
        begin, last, count = times[0], times[0], 1
        for at in times[1:]:
            if (at - last).total_seconds() < gap_s:
                last, count = at, count + 1
            else:
                found.append((key, begin, last, count))
                begin, last, count = at, at, 1
        found.append((key, begin, last, count))
    return sorted(found)


def utc(value):
    return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value


def ends(rows):
    return sorted((row.topic, utc(row.started), utc(row.ended), row.messages) for row in rows if row.event == "end")


def random_activity():
    source = random.Random(3)
    rows = []
    for topic in ("a", "b", "c"):
        at = 0.0
        for ordinal in range(60):
            at += source.choice([0.5, 1, 2, 15, 40])
            rows.append(message(topic, ordinal, ordinal, at))
    source.shuffle(rows)
    return rows


def test_sessions_in_batch(spark):
    rows = random_activity()
    frame = spark.createDataFrame(rows, SCHEMA)
    assert ends(sessions(frame, gap_s=10).collect()) == brute_sessions(rows, 10)
    assert sessions(frame, gap_s=10, starts=True).filter("event = 'start'").count() == len(brute_sessions(rows, 10))


def test_sessions_in_streaming(spark, tmp_path):
    """Time-outs end sessions, messages out of order within the watermark join them, later ones are left out."""
    rows = random_activity()
    late = message("a", 999, 999, 1.0)  # far behind the watermark by then
    flushes = [[message("flush", number, number, at)] for number, at in enumerate((100_000, 100_001, 300_000), 1)]
    stream = parts_as_stream(spark, [rows[:90], rows[90:], *flushes[:2], [late], flushes[2]], tmp_path)
    table = sessions(stream, gap_s=10, watermark="1 hour", starts=True)
    got = run(table, tmp_path)
    assert [row for row in ends(got) if row[0] != "flush"] == brute_sessions(rows, 10)
    starts = [row for row in got if row.event == "start" and row.topic != "flush"]
    assert starts and all(row.ended is None for row in starts)


def test_merge_joins_what_a_late_message_connects():
    assert merge([(0, 5, 2), (30, 40, 3)], [17], 15) == ([(0, 40, 6)], [])
    assert merge([(0, 5, 2)], [100, 90], 15) == ([(0, 5, 2), (90, 100, 2)], [(90, 100, 2)])


def test_replay_keeps_order_and_pace(spark, monkeypatch):
    rows = [
        message(topic, number, number, at) for number, (topic, at) in enumerate([("b", 2.0), ("a", 0.0), ("a", 1.0)])
    ]
    sent, now = [], [0.0]

    class Recorder:
        def __init__(self, address):
            self.address = address

        def forward_details(self, batch, _):
            sent.extend((self.address, round(now[0], 6)) for _ in batch)

        def close(self):
            sent.append((self.address, "closed"))

    module = sys.modules["penstock.spark.pipelines.replay"]
    monkeypatch.setattr(module, "publisher", lambda address, **_: Recorder(address))
    done = replay(
        spark.createDataFrame(rows, SCHEMA), "bus:{topic}", speed=2.0, clock=lambda: now[0],
        sleep=lambda wait: now.__setitem__(0, now[0] + wait),
    )  # fmt: skip
    assert sent == [("bus:a", 0.0), ("bus:a", 0.5), ("bus:b", 1.0), ("bus:a", "closed"), ("bus:b", "closed")]
    assert done.messages == 3 and done.payload_bytes == 30 and done.seconds == 1.0
    with pytest.raises(InvalidArgument, match="speed"):
        replay(spark.createDataFrame(rows, SCHEMA), "bus:x", speed=-1)


def test_replay_to_a_journal_keeps_times_ids_and_keys(spark, tmp_path):
    rows = [("a", time_ns, b"x", f"m{time_ns}", f"k{time_ns}") for time_ns in (-5, 0, 3)]
    frame = spark.createDataFrame(rows, "topic string, timestamp_ns bigint, payload binary, message_id string, key string")
    replay(frame, f"journal:{tmp_path / 'j'}#a", speed=0)
    with Journal(tmp_path / "j", mode="read") as journal:
        got = [(m.timestamp_ns, *dataclasses.astuple(journal.details(m.position))) for m in journal.read_many(1, 9)]
    assert got == [(time_ns, f"m{time_ns}", f"k{time_ns}") for time_ns in (-5, 0, 3)]


def test_replay_takes_text_and_refuses_rows_without_a_topic_or_a_payload(spark, tmp_path):
    address = f"journal:{tmp_path / 'j'}" + "#{topic}"
    text = spark.createDataFrame([("a", 1, "text")], "topic string, timestamp_ns bigint, payload string")
    assert replay(text, address, speed=0).messages == 1
    kinds = "topic string, timestamp_ns bigint, payload binary"
    for row, why in (((None, 1, b"x"), "no topic"), (("a", 1, None), "null payload")):
        with pytest.raises(InvalidArgument, match=why):
            replay(spark.createDataFrame([row], kinds), address, speed=0)
    with Journal(tmp_path / "j", mode="read") as journal:
        assert [bytes(message) for message in journal.read_many(1, 9)] == [b"text"]


def test_replay_to_a_journal(spark, tmp_path):
    rows = [message("a", number, number, number / 10) for number in range(50)]
    frame = spark.createDataFrame(rows[25:] + rows[:25], SCHEMA)
    done = replay(frame, f"journal:{tmp_path / 'j'}" + "#{topic}", speed=None, options={"sync": False})
    assert done.messages == 50
    with Journal(tmp_path / "j", mode="read") as journal:
        assert [(m.channel, m.ordinal) for m in journal.read_many(1, 100)] == [("a", n) for n in range(1, 51)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "soon", True])
def test_seconds_that_are_none(value):
    """They are checked before the frame is looked at."""
    for call in (
        lambda: sessions(None, gap_s=value), lambda: grid(None, value),
        lambda: align(None, "a", topics=["b"], tolerance_s=value),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"_s.*'?(seconds|duration)"):
            call()
