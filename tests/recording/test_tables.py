"""A recording's topics as tables, and as files of columns."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy
import pyarrow
import pyarrow.parquet
import pydantic
import pytest
from google.protobuf import timestamp_pb2

import penstock
from penstock import types
from penstock.errors import DecodeError, InvalidArgument, ProtocolError
from penstock.recording import Recording
from tests.cli.command import run


class Point(msgspec.Struct):
    x: float
    y: int | None = None


class Pose(msgspec.Struct):
    at: Point
    timestamp: int = 0
    name: str = ""


RECORD = numpy.dtype([("t", "<i8"), ("xyz", "<f4", 3)])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    where = f"journal:{tmp_path / 'run'}"
    with penstock.publisher(f"{where}#pose", type=Pose) as pose:
        pose.publish(Pose(Point(1.5), 7, "left"))
        pose.publish(Pose(Point(2.5, 4)))
    with penstock.publisher(f"{where}#packed", type=types.plain(Point, "msgpack")) as packed:
        packed.publish(Point(0.5, 1))
    with penstock.publisher(f"{where}#points", type=RECORD) as points:
        with points.reserve(3) as array:
            array["t"], array["xyz"] = (1, 2, 3), 0.25
        points.publish(numpy.zeros(1, RECORD))
    with penstock.publisher(f"{where}#time", type=timestamp_pb2.Timestamp) as time:
        time.publish(timestamp_pb2.Timestamp(seconds=1 << 40))
    with penstock.publisher(f"{where}#text", type=str) as text:
        text.publish("hello")
    with penstock.publisher(f"{where}#raw") as raw:
        raw.publish(b"\xff", properties={"a": "b"})
    return tmp_path / "run"


def test_a_topic_as_a_table(recording: Path) -> None:
    with Recording(recording) as opened:
        assert opened.topics == ["packed", "points", "pose", "raw", "text", "time"]
        pose = opened.schema("pose")
        assert pose is not None and pose.name == "Pose" and opened.schema("raw") is None
        table = opened.to_arrow("pose")
        assert table.schema.names == ["position", "ordinal", "timestamp", "properties", "at", "name", "value.timestamp"]
        assert table.column("at").to_pylist() == [{"x": 1.5, "y": None}, {"x": 2.5, "y": 4}]
        assert table.column("value.timestamp").to_pylist() == [7, 0]
        assert table.column("timestamp").type == pyarrow.timestamp("ns", "UTC")
        assert opened.to_arrow("packed").column("x").to_pylist() == [0.5]
        assert opened.to_arrow("time").column("seconds").to_pylist() == [1 << 40]
        assert opened.to_arrow("text").column("value").to_pylist() == ["hello"]
        raw = opened.to_arrow("raw").to_pylist()[0]
        assert (raw["payload"], raw["properties"]) == (b"\xff", [("a", "b")])


def test_a_row_for_each_of_a_messages_rows(recording: Path) -> None:
    with Recording(recording) as opened:
        table = opened.to_arrow("points")
    assert table.column("t").to_pylist() == [1, 2, 3, 0]
    assert table.column("xyz").type == pyarrow.list_(pyarrow.float32())
    assert len(set(table.column("position").to_pylist())) == 2
    assert table.column("ordinal").to_pylist()[:3] == table.column("ordinal").to_pylist()[:1] * 3


def test_frames_of_pandas_and_polars(recording: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    with Recording(recording) as opened:
        assert list(opened.to_pandas("packed")["x"]) == [0.5]
        frame = opened.to_polars("pose")
    assert frame["at"].struct.field("x").to_list() == [1.5, 2.5]


def test_a_part_of_it_and_nothing(recording: Path) -> None:
    with Recording(recording) as opened:
        with pytest.raises(InvalidArgument, match=r"^start 1h is after the end"):
            opened.to_arrow("pose", start="1h")
        assert opened.to_arrow("pose", length="1h").num_rows == 2
        with pytest.raises(InvalidArgument, match="did you mean pose"):
            opened.to_arrow("poes")
        with pytest.raises(InvalidArgument, match="errors="):
            opened.to_arrow("pose", errors="never")


def test_what_is_not_of_its_type(recording: Path, tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{recording}#pose") as untyped:
        untyped.publish(b"not a pose")
        untyped.publish(b'{"at": 7}')
        untyped.publish(b"null")
    with Recording(recording) as opened:
        with pytest.raises(DecodeError, match=r"position .* of pose, 10 bytes"):
            opened.to_arrow("pose")
        assert opened.to_arrow("pose", errors="skip").num_rows == 2
    done = run("export", str(recording), "--to", "parquet", "-o", "p.parquet", "-t", "pose", cwd=tmp_path)
    assert done.returncode == 0 and "pose: 3 messages not of the topic's type" in done.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["payload"] for row in rows] == [None, None, b"not a pose", b'{"at": 7}', b"null"]


def test_parquet_has_columns(recording: Path, tmp_path: Path) -> None:
    done = run("export", str(recording), "--to", "parquet", "-o", "one.parquet", "-t", "pose", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "wrote 2 messages to one.parquet\n")
    one = pyarrow.parquet.read_table(tmp_path / "one.parquet")
    assert one.column("at").to_pylist()[1] == {"x": 2.5, "y": 4} and "value.timestamp" in one.schema.names
    done = run("export", str(recording), "--to", "parquet", "-o", "all.parquet", cwd=tmp_path)
    assert done.returncode == 0 and "wrote 8 messages" in done.stderr
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert table.num_rows == 9 + 1  # the three points of one message are rows
    assert [x for x in table.column("points.t").to_pylist() if x is not None] == [1, 2, 3, 0]
    assert [b for b in table.column("payload").to_pylist() if b is not None] == [b"\xff"]


def test_csv_has_columns(recording: Path, tmp_path: Path) -> None:
    done = run("export", str(recording), "--to", "csv", "-o", "-", "-t", "pose", cwd=tmp_path)
    first, second = csv.DictReader(done.stdout.splitlines())
    assert (first["at.x"], first["at.y"], first["name"], first["timestamp"]) == ("1.5", "", "left", "7")
    assert second["at.y"] == "4" and second["payload"] == ""
    done = run("export", str(recording), "--to", "csv", "-o", "-", cwd=tmp_path)
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert next(row["points.xyz"] for row in rows if row["topic"] == "points") == "[0.25, 0.25, 0.25]"
    assert [row["payload"] for row in rows if row["topic"] == "raw"] == ['{"hex": "ff"}']
    assert [row["text.value"] for row in rows if row["topic"] == "text"] == ["hello"]


def test_json_lines_have_fields(recording: Path, tmp_path: Path) -> None:
    done = run("export", str(recording), "--to", "jsonl", "-o", "-", cwd=tmp_path)
    found: dict[str, Any] = {line["channel"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found["packed"]["payload"] == {"x": 0.5, "y": 1}
    assert found["points"]["payload"] == [{"t": 0, "xyz": [0.0, 0.0, 0.0]}] and found["points"]["size"] == 20
    assert found["time"]["payload"] == {"seconds": 1 << 40, "nanos": 0}


def test_what_a_recorder_records_keeps_its_type(tmp_path: Path) -> None:
    """From a live channel to a table."""
    from penstock.recording.recorder import Plan, Recorder

    with (
        penstock.publisher("shm:/tables-pose", type=Pose) as publisher,
        Recorder(Plan(tmp_path / "run", {"shm:/tables-pose": "pose"}, max_messages=2)) as recorder,
    ):
        publisher.publish_many([Pose(Point(1.0)), Pose(Point(2.0))])
        while recorder.running:
            recorder._stop.wait(0.01)
    with Recording(tmp_path / "run") as opened:
        assert [at["x"] for at in opened.to_arrow("pose").column("at").to_pylist()] == [1.0, 2.0]


def test_importing_loads_no_arrow() -> None:
    code = "import sys, penstock.recording as r; r.Recording; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_times_are_times(tmp_path: Path) -> None:
    kind = numpy.dtype([("at", "<M8[ns]"), ("took", "<m8[ms]"), ("day", "<M8[D]")])
    row = (numpy.datetime64("2020-01-02T03:04:05.000000006", "ns"), numpy.timedelta64(7, "ms"), "NaT")
    batches = pyarrow.schema([("at", pyarrow.timestamp("us", "Europe/Berlin"))])
    with penstock.publisher(f"journal:{tmp_path / 'run'}#numpy", type=kind) as publisher:
        publisher.publish(numpy.array([row], kind))
    with penstock.publisher(f"journal:{tmp_path / 'run'}#arrow", type=batches) as publisher:
        publisher.publish(pyarrow.record_batch([pyarrow.array([5], batches[0].type)], schema=batches))
    with Recording(tmp_path / "run") as recording:
        table = recording.to_arrow("numpy")
        assert table.schema.field("at").type == pyarrow.timestamp("ns")
        assert table.schema.field("took").type == pyarrow.duration("ms")
        assert table.column("at").cast(pyarrow.int64()).to_pylist() == [row[0].astype("i8")]
        assert table.column("took").cast(pyarrow.int64()).to_pylist() == [7]
        assert table.column("day").to_pylist() == [None]
        at = recording.to_arrow("arrow").column("at")
        assert at.cast(pyarrow.int64()).to_pylist() == [5] and at.type == batches[0].type, "with its zone"
    done = run("export", str(tmp_path / "run"), "--to", "csv", "-o", "-", "--topic", "numpy")
    found = next(csv.DictReader(done.stdout.splitlines()))
    assert (found["at"], found["took"], found["day"]) == ("2020-01-02T03:04:05.000000006", "7", "")


def test_csv_has_numbers_that_json_has_not(tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path / 'run'}#n", type=numpy.dtype("f8")) as publisher:
        publisher.publish(numpy.array([numpy.inf, -numpy.inf, numpy.nan, 1.5]))
    done = run("export", str(tmp_path / "run"), "--to", "csv", "-o", "-")
    assert [row["value"] for row in csv.DictReader(done.stdout.splitlines())] == ["inf", "-inf", "nan", "1.5"]


def test_maps_times_and_odd_names_look_the_same_in_every_form(tmp_path: Path) -> None:
    class Odd(msgspec.Struct):
        counts: dict[str, int]
        rows: list[dict[str, int]]
        name: int = msgspec.field(name="a, b")
        mixed: list[int | str] = []

    where = f"journal:{tmp_path / 'run'}"
    batches = pyarrow.schema([("at", pyarrow.timestamp("us", "UTC")), ("all", pyarrow.list_(pyarrow.timestamp("us")))])
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
    with penstock.publisher(f"{where}#odd", type=Odd) as publisher:
        publisher.publish(Odd({"k": 1}, [{"l": 2}], 3, [1, "a"]))
    with penstock.publisher(f"{where}#times", type=types.codec_of(batches)) as publisher:
        publisher.publish(pyarrow.record_batch([[moment], [[moment.replace(tzinfo=None)]]], schema=batches))
    rows = list(csv.DictReader(run("export", str(tmp_path / "run"), "--to", "csv", "-o", "-").stdout.splitlines()))
    assert (rows[0]["odd.counts"], rows[0]["odd.rows"], rows[0]["odd.a, b"]) == ('{"k": 1}', '[{"l": 2}]', "3")
    assert rows[0]["odd.mixed"] == '[1, "a"]'
    assert (rows[1]["times.at"], rows[1]["times.all"]) == ("2026-01-02T03:04:05.000006Z", '["2026-01-02T03:04:05.000006"]')
    lines = run("export", str(tmp_path / "run"), "--to", "jsonl", "-o", "-").stdout.splitlines()
    assert json.loads(lines[1])["payload"][0] == {
        "at": "2026-01-02T03:04:05.000006Z", "all": ["2026-01-02T03:04:05.000006"],
    }  # fmt: skip
    for field in ('["a, b"]', ".['a, b']", 'counts.k,["a, b"]'):
        shown = run("sub", f"{where}#odd", "--from", "start", "--exit-at-end", "--fields", field)
        assert shown.stdout.split()[-1] == "3", shown.stderr
    passed = run("sub", f"{where}#odd", "--from", "start", "--exit-at-end", "--filter", '.["a, b"] == 3')
    assert len(passed.stdout.splitlines()) == 1


class Counted(pydantic.BaseModel):
    number: Annotated[int, pydantic.Field(ge=0, le=2**64 - 1)]
    plain: int = 0


def test_integers_beyond_a_column(tmp_path: Path) -> None:
    """A type that says how large they are has room for them; else the place is told, and the others are there."""
    with penstock.publisher(f"journal:{tmp_path / 'run'}#numbers", type=Counted) as publisher:
        publisher.publish_many([Counted(number=2**64 - 1), Counted(number=1, plain=2**63), Counted(number=2)])
    with Recording(tmp_path / "run") as recording:
        with pytest.raises(DecodeError, match=r"position 2 of numbers, .*: 9223372036854775808 is beyond int64"):
            recording.to_arrow("numbers")
        table = recording.to_arrow("numbers", errors="skip")
    assert table.schema.field("number").type == pyarrow.uint64()
    assert table.column("number").to_pylist() == [2**64 - 1, 2]


UTC = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
TWICE = pyarrow.schema([("x", pyarrow.int8()), ("x", pyarrow.int8())])


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (bytes, [b"", b"\xff"], [b"", b"\xff"]),
        (int | None, [None, 4], [None, 4]),
        (types.plain(datetime.datetime, "msgpack"), [UTC], ["2026-01-02T03:04:05Z"]),
        (datetime.datetime, [UTC], ["2026-01-02T03:04:05Z"]),
        (numpy.dtype("c16"), [numpy.array([2j])], ["2j"]),
        (numpy.dtype("g"), [numpy.array([0.5], "g")], ["0.5"]),
    ],
    ids=["bytes", "null", "msgpack time", "json time", "complex", "long double"],
)
def test_a_value_that_is_no_record(tmp_path: Path, kind: Any, values: list[Any], wanted: list[Any]) -> None:
    with penstock.publisher(f"journal:{tmp_path / 'run'}#t", type=kind) as publisher:
        publisher.publish_many(values)
    with Recording(tmp_path / "run") as opened:
        assert opened.to_arrow("t").column("value").to_pylist() == wanted


def test_null_is_a_value_where_the_type_says_so_alone(tmp_path: Path) -> None:
    where = f"journal:{tmp_path / 'run'}"
    for topic, kind in (("may", Point | None), ("never", Point), ("number", int)):
        with penstock.publisher(f"{where}#{topic}", type=kind) as publisher:
            publisher.inner.publish(b"null")
    with Recording(tmp_path / "run") as opened:
        assert opened.to_arrow("may").select(["x", "y"]).to_pylist() == [{"x": None, "y": None}]
        for topic in ("never", "number"):
            with pytest.raises(DecodeError, match="it is null, not"):
                opened.to_arrow(topic)


def test_arrow_columns_of_every_kind_of_text(tmp_path: Path) -> None:
    columns = {
        "view": pyarrow.array(["a"], pyarrow.string_view()), "blob": pyarrow.array([b"b"], pyarrow.binary_view()),
        "day": pyarrow.array([UTC.date()]), "clock": pyarrow.array([UTC.time()]), "cost": pyarrow.array([decimal.Decimal("1.50")]),
    }  # fmt: skip
    batch = pyarrow.record_batch(columns)
    with penstock.publisher(f"journal:{tmp_path / 'run'}#t", type=batch.schema) as publisher:
        publisher.publish(batch)
    with Recording(tmp_path / "run") as opened:
        row = opened.to_arrow("t").select(list(columns)).to_pylist()[0]
        assert row == {"view": "a", "blob": b"b", "day": "2026-01-02", "clock": "03:04:05", "cost": "1.50"}


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    where = f"journal:{tmp_path / 'run'}"
    with penstock.publisher(f"{where}#twice", type=TWICE) as publisher:
        publisher.publish(pyarrow.record_batch([pyarrow.array([1], pyarrow.int8())] * 2, schema=TWICE))
    with Recording(tmp_path / "run") as opened, pytest.raises(ProtocolError, match="two columns are called 'x'"):
        opened.to_arrow("twice")
    done = run("export", str(tmp_path / "run"), "--to", "csv", "-o", str(tmp_path / "a.csv"))
    assert done.returncode == 0 and "two columns are called 'x'" in done.stderr
