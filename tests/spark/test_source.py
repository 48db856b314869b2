"""Reading journals as tables: every row, every column, only the segments that are needed, clear errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions
from pyspark.sql.datasource import EqualTo, GreaterThan, LessThan, LessThanOrEqual
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType
from tests.spark.journals import BEGIN_NS, extend, make

from penstock.errors import CorruptionError, PenstockError
from penstock.journal import Journal
from penstock.spark import directory as directory_module
from penstock.spark import push_down
from penstock.spark.directory import Directory
from penstock.spark.failure import unwrap
from penstock.spark.source import JournalReader


def load(spark, path, **options):
    return spark.read.format("penstock").options(**options).load(str(path))


def as_rows(frame):
    wanted = frame.select("topic", "position", "timestamp_ns", "payload", "properties", "message_id").collect()
    return sorted(((r[0], r[1], r[2], bytes(r[3]), r[4], r[5]) for r in wanted), key=lambda row: row[1])


def segments(path):
    return sorted(path.glob("*.log"))


def test_every_row_and_column(spark, tmp_path):
    rows = make(tmp_path / "j", 5000)
    assert len(segments(tmp_path / "j")) > 3
    frame = load(spark, tmp_path / "j")
    assert frame.columns == [
        "topic", "ordinal", "position", "timestamp", "timestamp_ns", "payload", "properties", "message_id", "vchan_id",
    ]  # fmt: skip
    assert as_rows(frame) == rows
    by_topic = frame.selectExpr("topic", "ordinal", "position").orderBy("topic", "position").collect()
    for topic in ("a.x", "a.y", "b"):
        ordinals = [row.ordinal for row in by_topic if row.topic == topic]
        assert ordinals == list(range(1, len(ordinals) + 1))
    row = frame.filter("position = 15").selectExpr("vchan_id", "unix_micros(timestamp) as us").first()
    assert row.vchan_id == 0 and row.us == (BEGIN_NS + 15 * 10**9) // 1000


def test_an_empty_journal(spark, tmp_path):
    Journal(tmp_path / "j").close()
    assert load(spark, tmp_path / "j").count() == 0


def test_several_directories_and_globs(spark, tmp_path):
    expected = sorted(make(tmp_path / "one", 100) + make(tmp_path / "two", 200))
    (tmp_path / "other").mkdir()
    both = spark.read.format("penstock").load([str(tmp_path / "one"), str(tmp_path / "two")])
    assert both.count() == 300
    assert load(spark, f"{tmp_path}/*").count() == len(expected)
    assert load(spark, f"{tmp_path}/*", columns="journal,position").groupBy("journal").count().count() == 2


def test_only_the_named_columns(spark, tmp_path):
    make(tmp_path / "j", 200)
    frame = load(spark, tmp_path / "j", columns="ordinal, topic")
    assert frame.columns == ["ordinal", "topic"] and frame.count() == 200
    frame = spark.read.format("penstock").schema("payload binary, position bigint").load(str(tmp_path / "j"))
    assert frame.columns == ["payload", "position"]
    assert frame.orderBy("position").first().payload.startswith(b"1:")


def test_options_pick_rows(spark, tmp_path):
    make(tmp_path / "j", 300)
    count = lambda **options: load(spark, tmp_path / "j", **options).count()  # noqa: E731
    assert count(topics="a.*") == 200 and count(topics="b,a.x") == 200 and count(topics=">") == 300
    assert count(topics="nothing") == 0
    assert count(startPosition=11, endPosition=20) == 10
    assert count(startOrdinal=2, endOrdinal=3) == 6
    assert count(startTime=str(BEGIN_NS + 5 * 10**9), endTime="2026-01-01T00:00:09Z") == 5


def without(path, keep):
    """Take away the log and index of all segments but ``keep``: what is not there cannot have been opened."""
    for log in segments(path):
        if log not in keep:
            log.with_suffix(".index").unlink()
            log.write_bytes(log.read_bytes()[:8192])  # the header and the topics stay: planning reads them


def test_push_down_opens_only_the_segments_that_match(spark, tmp_path):
    make(tmp_path / "j", 6000)
    logs = segments(tmp_path / "j")
    assert len(logs) > 5
    first = int(logs[2].name.split("-")[0])
    next_first = int(logs[3].name.split("-")[0])
    without(tmp_path / "j", [logs[2], logs[-1]])  # the active one has no summary yet and is always looked at
    frame = load(spark, tmp_path / "j")
    query = frame.filter
    at = BEGIN_NS + first * 10**9
    by_time = query(f"timestamp_ns >= {at} and timestamp_ns < {BEGIN_NS + next_first * 10**9}")
    assert by_time.count() == next_first - first
    micros = query(f"timestamp >= timestamp_micros({at // 1000}) and timestamp < timestamp_micros({at // 1000 + 3})")
    assert [row.position for row in micros.collect()] == [first]
    ordinal = first // 3 + 10
    assert query(f"ordinal = {ordinal} and topic = 'a.x'").count() == 1
    assert query(f"position between {first} and {first + 9}").count() == 10
    assert load(spark, tmp_path / "j", startPosition=first, endPosition=next_first - 1).count() == next_first - first
    assert load(spark, tmp_path / "j", startTime=at, endTime=at).count() == 1
    with pytest.raises(PySparkException):
        frame.count()


@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_header_in_permissive_mode(tmp_path, sealed):
    """Its segment is read all the same; without the mode, and where its first batch is damaged too, it is told."""
    make(tmp_path / "j", 3000)
    logs = segments(tmp_path / "j")
    log = logs[1] if sealed else logs[-1]
    data = bytearray(log.read_bytes())
    data[40:48] = bytes(8)
    log.write_bytes(data)

    def read(**options):
        schema = StructType([StructField("position", LongType()), StructField("payload", BinaryType())])
        reader = JournalReader({"path": str(tmp_path / "j"), **options}, schema)
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        rows = pyarrow.Table.from_batches(batches).to_pylist()
        return {row["position"]: row["payload"].split(b":")[0] for row in rows}

    with pytest.raises(CorruptionError, match=log.name):
        read()
    assert read(mode="permissive") == {number: b"%d" % number for number in range(1, 3001)}
    assert len(read(mode="permissive", topics="b")) == 1000
    data[4100:4110] = bytes(10)
    log.write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"{log.name}: neither .*; run: .*journal verify"):
        read(mode="permissive")


@pytest.mark.parametrize("options", [{}, {"check": "false"}, {"batchBytes": "2000"}, {"topics": "b"}, {"partitionBytes": "9000"}])
@pytest.mark.parametrize("kept", [0, 4096, 20_000, -700])
def test_a_log_that_is_cut_short_in_permissive_mode(tmp_path, kept, options):
    """The whole messages are read; of the others all that the index has: a null payload, no properties, no id."""
    rows = make(tmp_path / "j", 3000)
    log = segments(tmp_path / "j")[1]
    size = kept if kept >= 0 else log.stat().st_size + kept
    os.truncate(log, size)
    fields = [StructField("position", LongType()), StructField("topic", StringType()), StructField("payload", BinaryType())]
    fields += [StructField("properties", MapType(StringType(), StringType())), StructField("message_id", StringType())]

    def read(**more):
        reader = JournalReader({"path": str(tmp_path / "j"), **options, **more}, StructType(fields))
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return pyarrow.Table.from_batches(batches).to_pylist()

    with pytest.raises(CorruptionError, match=rf"{log.name}.*mode=permissive .*journal verify"):
        read()
    if size < 4096:  # not even a header
        with pytest.raises(CorruptionError, match=rf"{log.name}: neither .*; run: .*journal verify"):
            read(mode="permissive")
        return
    found = read(mode="permissive")
    wanted = [row for row in rows if row[0] == "b" or "topics" not in options]
    assert [(row["topic"], row["position"]) for row in found] == [row[:2] for row in wanted]
    lost = [number for number, row in enumerate(found) if row["payload"] is None]
    first, end = (int(name.name.split("-")[0]) for name in segments(tmp_path / "j")[1:3])
    assert lost == list(range(lost[0], lost[-1] + 1)) and first <= found[lost[0]]["position"] <= found[lost[-1]]["position"] < end
    for number, (row, made) in enumerate(zip(found, wanted, strict=True)):
        there = (made[3], list(made[4].items()), made[5]) if number not in lost else (None, [], None)
        assert (row["payload"], row["properties"], row["message_id"]) == there
    if kept == -700:
        assert found[lost[-1]]["position"] >= end - 3 and len(lost) <= 8, "what stands before the cut is there"


def test_a_sealed_segment_is_looked_at_once_by_all_plans(tmp_path, monkeypatch):
    """Planning again, as each trigger of a stream does, reads no header and no summary of one that is known."""
    rows = make(tmp_path / "j", 6000)
    seen = []

    def counted(function):
        def read(path, *arguments):
            seen.append(str(path))
            return function(path, *arguments)

        return read

    monkeypatch.setattr(directory_module, "read_part", counted(directory_module.read_part))
    monkeypatch.setattr(directory_module, "read_all", counted(directory_module.read_all))
    schema = StructType([StructField("position", LongType())])
    counts = []
    for topics in ("b", "a.x", "a.*"):
        reader = JournalReader({"path": str(tmp_path / "j"), "topics": topics}, schema)
        parts = reader.partitions()
        counts.append(sum("log" in name or "topics" in name for name in seen))
        seen.clear()
        got = [position for part in parts for batch in reader.read(part) for position in batch["position"].to_pylist()]
        assert got == [row[1] for row in rows if row[0] == topics or (topics == "a.*" and row[0] != "b")]
        seen.clear()
    assert counts[0] >= 2 * len(segments(tmp_path / "j")) - 2 and max(counts[1:]) <= 4, counts


def test_names_of_topics_are_read_once_and_where_they_are_asked_for(tmp_path, monkeypatch):
    """They are never renamed: of thousands of topics each segment's head need not be read again."""
    rows = make(tmp_path / "j", 6000)
    read = []
    names = directory_module.TopicNames

    def counted(directory, segment, *listed):
        read.append(segment.first)
        return names(directory, segment, *listed)

    monkeypatch.setattr(directory_module, "TopicNames", counted)
    for kind, options, most in ((LongType(), {}, 0), (StringType(), {}, 1), (LongType(), {"topics": "b"}, 2)):
        name = "topic" if isinstance(kind, StringType) else "position"
        reader = JournalReader({"path": str(tmp_path / "j"), **options}, StructType([StructField(name, kind)]))
        (part,) = reader.partitions()
        got = [value for batch in reader.read(part) for value in batch[name].to_pylist()]
        wanted = [row for row in rows if not options or row[0] == "b"]
        assert got == [row[0] if name == "topic" else row[1] for row in wanted]
        assert len(read) <= most, (name, options, read)
        read.clear()


def test_segments_opened_are_counted(tmp_path, monkeypatch):
    make(tmp_path / "j", 6000)
    opened = set()
    keep = Directory.index

    def index(self, segment, start, end):
        opened.add(segment.first)
        return keep(self, segment, start, end)

    monkeypatch.setattr(Directory, "index", index)
    schema = StructType([StructField("position", LongType()), StructField("payload", BinaryType())])
    for filters, rows, most in (
        ([], 6000, len(segments(tmp_path / "j"))),
        ([LessThanOrEqual(("position",), 10)], 10, 1),
        ([GreaterThan(("timestamp_ns",), BEGIN_NS + 3000 * 10**9), LessThan(("timestamp_ns",), BEGIN_NS + 3003 * 10**9)], 2, 3),
        ([EqualTo(("topic",), "nothing")], 0, 1),
    ):  # fmt: skip
        opened.clear()
        reader = JournalReader({"path": str(tmp_path / "j"), "pushdown": "true"}, schema)
        assert reader.pushFilters(filters) == filters, "Spark must look at every filter again"
        assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == rows
        assert len(opened) <= most, filters
    assert len(segments(tmp_path / "j")) > 5


def test_one_frame_in_several_queries(spark, tmp_path):
    """Spark keeps the plan of a loaded frame: filters of one query must not reach another."""
    make(tmp_path / "j", 3000)
    frame = load(spark, tmp_path / "j")
    assert "TableOfScans" in frame._jdf.queryExecution().analyzed().table().getClass().getName()
    assert frame.filter("position <= 10").count() == 10
    assert frame.count() == 3000
    assert frame.filter("position <= 10").union(frame.filter("position > 2995")).count() == 15
    assert frame.filter("topic = 'b'").join(frame.filter("topic = 'a.x'"), "ordinal").count() == 1000
    few = frame.filter("position <= 10")
    assert few.union(frame).count() == 3010 and frame.select("topic").filter("topic = 'b'").count() == 1000
    kept = few.cache()
    assert kept.count() == 10 and frame.filter("position <= 20").count() == 20
    kept.unpersist()


def test_one_frame_in_several_threads(spark, tmp_path):
    make(tmp_path / "j", 3000)
    frame = load(spark, tmp_path / "j")
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda most: frame.filter(f"position <= {most}").count(), range(100, 2400, 100)))
    assert counts == list(range(100, 2400, 100))


def test_a_frame_is_what_was_there_when_it_was_loaded(spark, tmp_path):
    with Journal(tmp_path / "j") as journal:
        extend(journal, 100)
        frame = load(spark, tmp_path / "j")
        extend(journal, 100)
        assert frame.count() == 100 and frame.filter("position > 50").count() == 50
        assert frame.union(frame).count() == 200 and load(spark, tmp_path / "j").count() == 200
    shutil.rmtree(tmp_path / "j")
    make(tmp_path / "j", 300)
    with pytest.raises(PySparkException, match="created anew since this frame was loaded"):
        frame.count()


def test_gaps_that_compaction_left(spark, tmp_path):
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False, compact_topics=["state"]) as journal:
        for number in range(4000):
            journal.append("state" if number % 2 else "other", f"{number}".encode().ljust(60), key=f"k{number % 20}")
        gone = journal.compact()
        journal.append("other", b"last")
        expected = [(m.channel, m.position, m.ordinal, bytes(m)) for m in read_all(journal)]
    assert gone > 1000 and len(expected) == 4001 - gone
    frame = load(spark, tmp_path / "j", partitionBytes=50_000)
    got = frame.select("topic", "position", "ordinal", "payload").collect()
    assert sorted((r[0], r[1], r[2], bytes(r[3])) for r in got) == sorted(expected)
    middle = expected[len(expected) // 2][1]
    assert frame.filter(f"position >= {middle}").count() == len([row for row in expected if row[1] >= middle])
    stream = spark.readStream.format("penstock").option("maxMessagesPerTrigger", 900).load(str(tmp_path / "j"))
    query = stream.select("position").writeStream.format("memory").queryName("gaps").trigger(availableNow=True).start()
    query.awaitTermination()
    assert sorted(row.position for row in spark.table("gaps").collect()) == sorted(row[1] for row in expected)


def read_all(journal):
    position = 1
    while len(batch := journal.read_many(position, 1000)):
        yield from batch
        position = batch[-1].position + 1


def test_push_down_by_topic(spark, tmp_path):
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        for topic in ("early", "late"):
            for _ in range(40):
                journal.append_many(topic, [bytes(100)] * 50)
    logs = segments(tmp_path / "j")
    summaries = [log.with_suffix(".topics").read_bytes() for log in logs if log.with_suffix(".topics").exists()]
    late_only = [log for log, summary in zip(logs, summaries, strict=False) if len(summary) == 64 and summary[0] == 2]
    mixed = [log for log, summary in zip(logs, summaries, strict=False) if len(summary) > 64]
    without(tmp_path / "j", [*late_only, *mixed, logs[-1]])
    assert load(spark, tmp_path / "j").filter("topic = 'late'").count() == 2000
    assert load(spark, tmp_path / "j").filter("topic in ('late', 'nothing')").count() == 2000
    assert load(spark, tmp_path / "j", topics="late").count() == 2000


def test_without_push_down_it_works_too(spark, tmp_path):
    make(tmp_path / "j", 100)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert load(spark, tmp_path / "j", pushdown="true").filter("topic = 'b' and ordinal < 5").count() == 4
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_push_down_in_a_session_of_another_maker(spark, tmp_path):
    """A plain session has none until ``push_down``, whether or not another session of this process has it."""
    make(tmp_path / "j", 3000)
    plain = spark.newSession()
    plain.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    table = lambda frame: frame._jdf.queryExecution().analyzed().table().getClass().getSimpleName()  # noqa: E731
    before = load(plain, tmp_path / "j")
    push_down(plain)
    after = load(plain, tmp_path / "j")
    assert (table(before), table(after)) == ("PythonTable", "TableOfScans")
    logs = segments(tmp_path / "j")
    without(tmp_path / "j", [logs[0], logs[-1]])
    assert after.filter("position <= 10").count() == 10 and after.filter("position <= 20").count() == 20


def test_partitions_of_even_bytes(spark, tmp_path):
    make(tmp_path / "j", 20_000, size=100, segment_bytes=1 << 20)
    frame = load(spark, tmp_path / "j", partitionBytes=300_000)
    tasks = frame.groupBy(functions.spark_partition_id())
    sizes = [row[1] for row in tasks.agg(functions.sum(functions.octet_length("payload"))).collect()]
    assert len(sizes) >= 8 and max(sizes) < 1.5 * min(sizes)
    counts = [row["count"] for row in tasks.count().collect()]  # reads the index alone, so fewer tasks are enough
    assert sum(counts) == 20_000 and 2 <= len(counts) < len(sizes) and max(counts) < 1.5 * min(counts)


def test_a_journal_that_is_being_written(spark, tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"1")
        assert load(spark, tmp_path / "j").count() == 1
        journal.append("new.topic", b"2", properties={"k": "v"})
        row = load(spark, tmp_path / "j").filter("topic = 'new.topic'").first()
        assert bytes(row.payload) == b"2" and row.properties == {"k": "v"}


def damage(path, text):
    log = next(log for log in segments(path) if text in log.read_bytes())
    data = bytearray(log.read_bytes())
    at = data.index(text)
    data[at] ^= 0xFF
    log.write_bytes(data)
    return log


def test_damage_is_told_with_its_place(spark, tmp_path):
    rows = make(tmp_path / "j", 3000)
    log = damage(tmp_path / "j", b"777:")
    with pytest.raises(PySparkException, match=rf"{log.name}:\d+: position 777 is damaged"):
        load(spark, tmp_path / "j").select(functions.sum(functions.octet_length("payload"))).collect()
    permissive = load(spark, tmp_path / "j", mode="permissive")
    got = {row.position: row for row in permissive.select("position", "payload", "topic").collect()}
    assert len(got) == 3000 and got[777].payload is None
    assert all(bytes(got[row[1]].payload) == row[3] for row in rows if row[1] != 777)
    assert permissive.filter("payload is null").count() == 1


def test_a_bad_checksum_over_good_records_is_no_damage(spark, tmp_path):
    make(tmp_path / "j", 3000)
    sums = segments(tmp_path / "j")[0].with_suffix(".sums")
    sums.write_bytes(b"\0" * len(sums.read_bytes()))
    assert load(spark, tmp_path / "j").filter("payload is not null").count() == 3000


def test_wrong_requests_are_told_clearly(spark, tmp_path):
    make(tmp_path / "j", 10)
    (tmp_path / "plain").mkdir()
    cases = [
        (lambda: load(spark, tmp_path / "plain").count(), "is not a journal"),
        (lambda: load(spark, tmp_path / "missing").count(), "no such directory"),
        (lambda: load(spark, tmp_path / "j", columns="payload,speed").count(), "no column 'speed'"),
        (lambda: load(spark, tmp_path / "j", colums="payload").count(), "did you mean columns"),
        (lambda: load(spark, tmp_path / "j", mode="lenient").count(), "mode='lenient' is not a choice"),
        (lambda: load(spark, tmp_path / "j", startTime="noon").count(), "neither nanoseconds nor a time"),
        (lambda: spark.read.format("penstock").schema("ordinal string").load(str(tmp_path / "j")).count(), "is bigint"),
        (
            lambda: (
                spark.read.format("penstock")
                .schema("position bigint, speed double")
                .load(str(tmp_path / "j"))
                .collect()
            ),
            "no column 'speed'",
        ),
        (lambda: spark.read.format("penstock").load().count(), "name a journal"),
    ]
    for run, text in cases:
        with pytest.raises((PySparkException, PenstockError), match=text) as caught:
            run()
        ours = unwrap(caught.value) if isinstance(caught.value, PySparkException) else caught.value
        assert isinstance(ours, PenstockError) and len(str(ours).splitlines()) == 1
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")  # as in a session that is not ours
    try:
        for run, text in cases:
            with pytest.raises(PySparkException, match=text):
                run()
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


@pytest.mark.parametrize("native", [False, True])
def test_executors_need_no_native_code_and_check_alike(tmp_path, native):
    """Without the compiled core zlib checks the blocks; with it the core does. Damage is found by both."""
    make(tmp_path / "j", 10)
    code = (
        f"import sys\nif not {native}: sys.modules['penstock._core'] = None\n"
        "import pyspark_penstock, pyarrow, zlib\n"
        "from penstock.errors import CorruptionError\n"
        "from penstock.spark import checksum\n"
        "from penstock.spark.places import open_place, Reading\n"
        "from penstock.spark.bounds import Bounds\n"
        f"assert (checksum.crc32 is zlib.crc32) is not {native}\n"
        "assert all(checksum.crc32(memoryview(bytes(range(256)) * 9)[:n]) == "
        "zlib.crc32((bytes(range(256)) * 9)[:n]) for n in (0, 1, 63, 64, 65, 2304))\n"
        f"place = open_place({str(tmp_path / 'j')!r})\n"
        "schema = pyarrow.schema([('payload', pyarrow.binary())])\n"
        "read = lambda: [value for b in place.batches(1, 11, Reading(schema, Bounds())) for value in b[0].to_pylist()]\n"
        "values = read()\n"
        "assert len(values) == 10\n"
        f"log = next(__import__('pathlib').Path({str(tmp_path / 'j')!r}).glob('*.log'))\n"
        "data = bytearray(log.read_bytes())\n"
        "data[data.index(values[4])] ^= 1\n"
        "log.write_bytes(data)\n"
        "try: read()\n"
        "except CorruptionError as error: assert 'position 5 is damaged' in str(error), error\n"
        "else: raise AssertionError('damage was not found')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_or_stale_index_is_made_good(spark, tmp_path):
    rows = make(tmp_path / "j", 2000)
    indexes = sorted((tmp_path / "j").glob("*.index"))
    indexes[0].unlink()
    indexes[1].write_bytes(bytes(len(indexes[1].read_bytes())))
    assert as_rows(load(spark, tmp_path / "j")) == rows


MEMORY = """
import gc, json, sys, tracemalloc
from pathlib import Path
from pyspark.sql.types import BinaryType, LongType, StructField, StructType
from penstock.spark.source import JournalReader
planned, read = {}, {}
schema = StructType([StructField("position", LongType()), StructField("payload", BinaryType())])
for path in map(Path, sys.argv[1:]):
    gc.collect()
    tracemalloc.start()
    reader = JournalReader({"path": str(path), "batchBytes": "65536"}, schema)
    parts = reader.partitions()
    planned[path.name] = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == int(path.name)
    read[path.name] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
print(json.dumps([planned, read]))
"""


def test_memory_does_not_grow_with_the_journal(tmp_path):
    """Planning holds a few hundred bytes a segment, reading one batch, whatever the size of the journal.

    Measured in a process of its own: what other tests' threads do is no memory of the reader's.
    """
    paths = [tmp_path / str(messages) for messages in (500, 2000, 8000)]  # the first imports what is imported at first use
    for path in paths:
        make(path, int(path.name), size=400)
    done = subprocess.run([sys.executable, "-c", MEMORY, *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    planned, read = ({int(name): size for name, size in sizes.items()} for sizes in json.loads(done.stdout))
    segments_more = 6000 * 500 // (1 << 16)
    assert planned[8000] - planned[2000] < segments_more * 10_000, planned
    assert read[8000] < 1.5 * read[2000] + segments_more * 10_000, read
