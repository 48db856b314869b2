"""``option("decode", "auto")``: the column ``value``, by the types that publishers gave their topics."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil

import msgspec
import numpy
import pyarrow
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

import penstock
from penstock.broker import Server
from penstock.errors import InvalidArgument
from penstock.spark import arrow_batches, columns, described
from penstock.spark.lake import archive, read_all, table, types, verify
from penstock.spark.lake.store import store
from penstock.types import plain


@dataclasses.dataclass
class Pose:
    x: float
    name: str = ""


@dataclasses.dataclass
class Later:
    x: float
    name: str = ""
    z: float | None = None


class Reading(msgspec.Struct):
    at: Pose
    values: list[int]
    limits: dict[str, float] = {}


class Turn(msgspec.Struct):
    x: str
    by: int


POINTS = numpy.dtype([("xyz", "<f4", 3), ("t", "<u4")])  # as many bytes as POINT, in another order
POINT = numpy.dtype([("t", "<u4"), ("xyz", "<f4", 3)])


def write(journal, topic, kind, *values):
    with penstock.publisher(f"journal:{journal}#{topic}", type=kind) as publisher:
        publisher.publish_many(values)


def load(spark, journal, **options):
    return spark.read.format("penstock").options(decode="auto", **options).load(str(journal))


def test_one_type_is_a_struct(spark, tmp_path):
    write(tmp_path / "j", "pose", Pose, Pose(1.5, "left"), Pose(2.5))
    frame = load(spark, tmp_path / "j")
    assert frame.schema["value"].dataType.simpleString() == "struct<name:string,x:double>"
    assert frame.schema.names == [*columns.DEFAULT, "value", "_corrupt"]
    assert [(row.x, row.name) for row in frame.orderBy("ordinal").select("value.x", "value.name").collect()] == [
        (1.5, "left"),
        (2.5, ""),
    ]
    assert frame.where("value.x > 2").count() == 1
    assert frame.where("_corrupt is not null").count() == 0
    assert frame.count() == 2


@pytest.mark.parametrize(
    ("kind", "value", "want"),
    [
        (Reading, Reading(Pose(1.0), [1, 2], {"low": 0.5}), {"at": {"x": 1.0, "name": ""}, "values": [1, 2], "limits": {"low": 0.5}}),
        (plain(Reading, "msgpack"), Reading(Pose(1.0), []), {"at": {"x": 1.0, "name": ""}, "values": [], "limits": {}}),
        (Timestamp, Timestamp(seconds=7), {"seconds": 7, "nanos": 0}),
        (POINT, numpy.array([(5, (1, 2, 3)), (6, (0, 0, 0))], POINT), [{"t": 5, "xyz": [1, 2, 3]}, {"t": 6, "xyz": [0, 0, 0]}]),
        (numpy.dtype("<u8"), numpy.array([2**64 - 1], "<u8"), [2**64 - 1]),
        (pyarrow.schema([("x", pyarrow.int64())]), pyarrow.record_batch([pyarrow.array([1, None])], names=["x"]), [{"x": 1}, {"x": None}]),
        (str, "häuser", "häuser"),
        (bytes, b"\xff", b"\xff"),
        (int | None, None, None),
        (Turn | None, None, None),
        (dict, {"free": [1, {}]}, '{"free": [1, {}]}'),
        (penstock.Image, penstock.Image(numpy.zeros((1, 2), "u1"), "mono8"), {"encoding": "mono8", "dtype": "|u1", "shape": [1, 2], "data": b"\0\0"}),
    ],
    ids=["struct", "msgpack", "protobuf", "numpy", "unsigned", "arrow", "text", "bytes", "null", "no struct", "dict", "image"],
)  # fmt: skip
def test_every_kind(spark, tmp_path, kind, value, want):
    write(tmp_path / "j", "t", kind, value)
    row = load(spark, tmp_path / "j").first()
    assert row._corrupt is None

    def plainly(one):
        if isinstance(one, list):
            return [plainly(item) for item in one]
        if hasattr(one, "asDict"):
            return {name: plainly(item) for name, item in one.asDict().items()}
        return bytes(one) if isinstance(one, bytearray) else one

    assert plainly(row.value) == want


def test_topics_of_several_types_have_a_field_each(spark, tmp_path):
    journal = tmp_path / "j"
    write(journal, "car.pose", Pose, Pose(1.5))
    write(journal, "note", str, "hello")
    with penstock.publisher(f"journal:{journal}#raw") as publisher:
        publisher.publish(b"\x00")
    frame = load(spark, journal)
    assert frame.schema["value"].dataType.names == ["car.pose", "note"]
    rows = {row.topic: row for row in frame.collect()}
    assert rows["car.pose"].value["car.pose"].x == 1.5 and rows["car.pose"].value.note is None
    assert rows["note"].value.note == "hello"
    assert rows["raw"].value is None and "raw" in rows["raw"]._corrupt
    assert frame.selectExpr("value.`car.pose`.x as x").where("x is not null").collect()[0].x == 1.5
    only = load(spark, journal, topics="car.*")
    assert only.schema["value"].dataType.names == ["name", "x"]
    assert only.select("value.x").collect()[0].x == 1.5


def test_what_does_not_decode_has_a_reason(spark, tmp_path):
    journal = tmp_path / "j"
    write(journal, "pose", Pose, Pose(1.5))
    with penstock.publisher(f"journal:{journal}#pose") as publisher:
        publisher.publish_many([b"nonsense", b'{"x": "far"}', b"null", b'{"x": 2}'])
    rows = load(spark, journal, columns="ordinal,value,_corrupt").orderBy("ordinal").collect()
    assert [row.value and row.value.x for row in rows] == [1.5, None, None, None, 2.0]
    assert [row._corrupt is None for row in rows] == [True, False, False, False, True]


def test_a_type_that_cannot_be_columns_costs_its_topic_alone(spark, tmp_path):
    journal = tmp_path / "j"
    twice = pyarrow.schema([("x", pyarrow.int8()), ("x", pyarrow.int8())])
    write(journal, "pose", Pose, Pose(1.5))
    write(journal, "twice", twice, pyarrow.record_batch([pyarrow.array([1], pyarrow.int8())] * 2, schema=twice))
    rows = {row.topic: row for row in load(spark, journal).collect()}
    assert rows["pose"].value.x == 1.5
    assert "two columns are called 'x'" in rows["twice"]._corrupt


def test_a_field_more_is_null_in_what_was_written_before(spark, tmp_path):
    journal = tmp_path / "j"
    write(journal, "pose", Pose, Pose(1.0))
    old = load(spark, journal)
    write(journal, "pose", Later, Later(2.0, z=3.0))
    assert [row.value.z for row in load(spark, journal).orderBy("ordinal").collect()] == [None, 3.0]
    assert [row.value.x for row in old.collect()] == [1.0]  # a frame keeps its type and its end


def test_in_a_stream(spark, tmp_path):
    journal = tmp_path / "j"
    write(journal, "pose", Pose, Pose(1.0), Pose(2.0))
    stream = spark.readStream.format("penstock").option("decode", "auto").load(str(journal))
    target, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def run():
        made = stream.select("ordinal", "value.x", "_corrupt").writeStream.option("checkpointLocation", checkpoint)
        query = made.trigger(availableNow=True).start(target)
        assert query.awaitTermination(300)

    run()
    write(journal, "pose", Pose, Pose(3.0))
    run()
    rows = sorted((row.ordinal, row.x, row._corrupt) for row in spark.read.parquet(target).collect())
    assert rows == [(1, 1.0, None), (2, 2.0, None), (3, 3.0, None)]


def test_in_sql_and_as_arrow_batches(spark, tmp_path):
    journal = tmp_path / "with blank"
    write(journal, "pose", Pose, Pose(1.0), Pose(2.0))
    spark.sql(f"CREATE TEMPORARY VIEW described_poses USING penstock OPTIONS (path '{journal}', decode 'auto')")
    assert spark.sql("SELECT sum(value.x) AS total FROM described_poses").collect()[0].total == 3.0
    for place in (f"OPTIONS (path '{journal}', decode 'auto')", f"OPTIONS (decode 'auto') LOCATION '{journal}'"):
        spark.sql("DROP TABLE IF EXISTS described_table")
        spark.sql(f"CREATE TABLE described_table USING penstock {place}")
        assert spark.sql("SELECT sum(value.x) AS total FROM described_table").collect()[0].total == 3.0
    spark.sql("DROP TABLE described_table")

    def double(batches):
        for batch in batches:
            found = [2 * value["x"] for value in batch.column("value").to_pylist()]
            yield pyarrow.RecordBatch.from_pydict({"x": found})

    made = arrow_batches(spark, journal, columns="value", decode="auto").mapInArrow(double, "x double")
    assert sorted(row.x for row in made.collect()) == [2.0, 4.0]


def test_through_a_broker(spark, tmp_path):
    with Server(tmp_path / "b", 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}"
        with penstock.publisher(f"{address}/pose", type=Pose) as publisher:
            publisher.publish(Pose(1.5, "far"))
        frame = load(spark, address)
        assert frame.select("value.x", "value.name").collect() == [(1.5, "far")]


def test_what_nobody_described_is_refused(spark, tmp_path):
    with penstock.publisher(f"journal:{tmp_path / 'j'}#raw") as publisher:
        publisher.publish(b"x")
    with pytest.raises(Exception, match=r"no topic .* has a known type"):
        load(spark, tmp_path / "j").collect()
    with pytest.raises(InvalidArgument, match="decode='always' is not a choice; valid: auto, none"):
        described.texts_of({"decode": "always"})
    with pytest.raises(InvalidArgument, match="'value' exists only with the option decode=auto"):
        columns.choose("topic,value")


def test_values_travel_to_executors(tmp_path):
    write(tmp_path / "j", "pose", Pose, Pose(1.5))
    texts = described.texts_of({"path": str(tmp_path / "j"), "decode": "auto"})
    schema = pyarrow.schema([("value", described.value_kind(texts)), ("_corrupt", pyarrow.string())])
    values = pickle.loads(pickle.dumps(described.Values(texts, schema)))
    assert values.inner.names == ["topic", "payload"]
    payloads = pyarrow.array([b'{"x": 1}', None, b'{"x": 3}'], pyarrow.binary())
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array(["pose", "pose", "other"]), payloads], schema=values.inner)
    made = values.extend(next(iter(texts)), batch).to_pylist()
    assert made[0] == {"value": {"x": 1.0, "name": None}, "_corrupt": None}
    assert made[1] == {"value": None, "_corrupt": "payload is null"}
    assert made[2]["value"] is None and "other" in made[2]["_corrupt"]
    assert json.loads(described.fixed({"decode": "auto", "path": str(tmp_path / "j")})["decode"]) == texts


def test_an_archive_keeps_the_types(spark, tmp_path):
    journal, lake = tmp_path / "j", tmp_path / "lake"
    write(journal, "pose", Pose, Pose(1.0, "a"))
    with penstock.publisher(f"journal:{journal}#raw") as publisher:
        publisher.publish(b"?")
    archive(None, str(journal), lake)
    write(journal, "pose", Later, Later(2.0, z=3.0))
    both = read_all(spark, str(journal), lake, decode="auto").where("topic = 'pose'").orderBy("ordinal")
    assert [(row.value.x, row.value.z) for row in both.collect()] == [(1.0, None), (2.0, 3.0)]
    archive(None, str(journal), lake)
    shutil.rmtree(journal)
    frame = table(spark, lake, decode="auto")
    assert frame.schema["value"].dataType.simpleString() == "struct<name:string,x:double,z:double>"
    rows = {(row.topic, row.ordinal): row for row in frame.collect()}
    assert rows["pose", 1].value.asDict() == {"name": "a", "x": 1.0, "z": None}
    assert rows["pose", 2].value.z == 3.0
    assert rows["raw", 1].value is None and "raw" in rows["raw", 1]._corrupt
    assert not verify(lake).problems and not verify(lake).orphans
    assert [len(texts) for topics in types.versions(store(lake)).values() for texts in topics.values()] == [2]
    with pytest.raises(InvalidArgument, match=r"no topic of .* has a known type"):
        table(spark, lake, topics="raw", decode="auto")


def test_each_message_is_read_by_its_version(spark, tmp_path):
    for kind, value in (
        (Pose, Pose(1.0, "a")), (plain(Turn, "msgpack"), Turn("left", 2)), (POINT, numpy.ones(1, POINT)),
        (POINTS, numpy.ones(1, POINTS)),
    ):  # fmt: skip
        with penstock.publisher(f"journal:{tmp_path / 'j'}#pose", type=kind, evolve="any") as publisher:
            publisher.publish(value)
    wanted = [('1.0', "a", None, None), ('"left"', None, 2, None), (None, None, None, 1), (None, None, None, 1)]
    archive(None, str(tmp_path / "j"), tmp_path / "lake")
    for frame in (load(spark, tmp_path / "j"), table(spark, tmp_path / "lake", decode="auto")):
        rows = frame.orderBy("position").collect()
        assert [row._corrupt for row in rows] == [None] * 4
        found = [row.value[0] for row in rows]
        assert [(one.x, one.name, one.by, one.t) for one in found] == wanted
        assert found[3].xyz == [1.0] * 3 and found[2].xyz == [1.0] * 3


def test_a_field_less_keeps_its_column(spark, tmp_path):
    write(tmp_path / "j", "pose", Later, Later(1.0, "a", 3.0))
    write(tmp_path / "j", "pose", Pose, Pose(2.0))
    write(tmp_path / "other", "pose", Pose, Pose(4.0))
    frame = load(spark, tmp_path / "j")
    assert [(row.value.x, row.value.z) for row in frame.orderBy("position").collect()] == [(1.0, 3.0), (2.0, None)]
    both = load(spark, tmp_path / "*")
    assert sorted((row.value.x, row.value.z or 0) for row in both.collect()) == [(1.0, 3.0), (2.0, 0), (4.0, 0)]


def test_a_broker_tells_every_version(spark, tmp_path):
    with Server(tmp_path / "b", 0).start() as server:
        for kind, value in ((Later, Later(1.0, "a", 3.0)), (Pose, Pose(2.0))):
            with penstock.publisher(f"broker://127.0.0.1:{server.port}/pose", type=kind) as publisher:
                publisher.publish(value)
        frame = load(spark, f"broker://127.0.0.1:{server.port}")
        rows = frame.orderBy("position").collect()
        assert [(row.value.x, row.value.z) for row in rows] == [(1.0, 3.0), (2.0, None)]


def test_a_journal_without_types_leaves_no_file(tmp_path):
    with penstock.publisher(f"journal:{tmp_path / 'j'}#raw") as publisher:
        publisher.publish(b"?")
    archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert types.versions(store(tmp_path / "lake")) == {}
    assert not (tmp_path / "lake" / "_penstock").exists()
