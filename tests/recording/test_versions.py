"""A topic whose type has changed: whatever is made of a recording has every field of every version, and reads each
message by the version that it was written with."""

from __future__ import annotations

import contextlib
import csv
import json
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pyarrow.parquet
import pytest

import penstock
from penstock import types
from penstock.broker import Server
from penstock.journal.schemas import read_schemas
from penstock.recording import Recording
from penstock.recording.recorder import Plan, Recorder
from tests.cli.command import run

BEFORE = numpy.dtype([("a", "<i4")])
AFTER = numpy.dtype([("b", "<f4")])  # as many bytes: nothing but its place tells one from the other


class Wide(msgspec.Struct):
    x: float
    old: int = 0


class Narrow(msgspec.Struct):
    x: float


class First(msgspec.Struct):
    x: int


class Second(msgspec.Struct):
    x: str
    more: list[int] = []


def write(folder: Path, *steps: tuple[Any, Any]) -> Path:
    for kind, value in steps:
        with penstock.publisher(f"journal:{folder}#topic", type=kind, evolve="any") as publisher:
            publisher.publish(value)
    return folder


@pytest.fixture
def narrowed(tmp_path: Path) -> Path:
    with penstock.publisher(f"journal:{tmp_path / 'run'}#topic", type=Wide) as publisher:
        publisher.publish(Wide(1.0, 7))
    with penstock.publisher(f"journal:{tmp_path / 'run'}#topic", type=Narrow) as publisher:
        publisher.publish(Narrow(2.0))
    return tmp_path / "run"


@pytest.fixture
def replaced(tmp_path: Path) -> Path:
    packed = types.plain(Second, "msgpack")
    return write(tmp_path / "run", (First, First(1)), (packed, Second("two", [2])), (BEFORE, numpy.ones(2, BEFORE)))


def test_a_table_has_the_fields_of_every_version(narrowed: Path) -> None:
    with Recording(narrowed) as recording:
        table = recording.to_arrow("topic")
    assert table.column("x").to_pylist() == [1.0, 2.0]
    assert table.column("old").to_pylist() == [7, None]


def test_files_have_the_fields_of_every_version(narrowed: Path, tmp_path: Path) -> None:
    assert run("export", str(narrowed), "--to", "csv", "-o", str(tmp_path / "a.csv")).returncode == 0
    with (tmp_path / "a.csv").open() as stream:
        assert [(row["x"], row["old"], row["payload"]) for row in csv.DictReader(stream)] == [
            ("1.0", "7", ""), ("2.0", "", ""),
        ]  # fmt: skip
    assert run("export", str(narrowed), "--to", "parquet", "-o", str(tmp_path / "a.parquet")).returncode == 0
    rows = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [(row["x"], row["old"], row["payload"]) for row in rows] == [(1.0, 7, None), (2.0, None, None)]


def test_types_that_have_nothing_in_common_stand_side_by_side(replaced: Path, tmp_path: Path) -> None:
    with Recording(replaced) as recording:
        rows = recording.to_arrow("topic").to_pylist()
    assert [(row["x"], row["more"], row["a"]) for row in rows] == [
        ("1", None, None), ('"two"', [2], None), (None, None, 1), (None, None, 1),
    ]  # fmt: skip
    done = run("export", str(replaced), "--to", "csv", "-o", str(tmp_path / "a.csv"))
    assert done.returncode == 0 and "not of the topic's type" not in done.stderr
    with (tmp_path / "a.csv").open() as stream:
        assert [(row["x"], row["a"], row["payload"]) for row in csv.DictReader(stream)] == [
            ("1", "", ""), ('"two"', "", ""), ("", "1", ""), ("", "1", ""),
        ]  # fmt: skip
    assert run("export", str(replaced), "--to", "jsonl", "-o", str(tmp_path / "a.jsonl")).returncode == 0
    values = [json.loads(line)["payload"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert values == [{"x": 1}, {"x": "two", "more": [2]}, [{"a": 1}, {"a": 1}]]


def test_what_only_its_place_tells_apart_is_read_by_its_place(tmp_path: Path) -> None:
    steps = [(BEFORE, numpy.array([(1,)], BEFORE)), (AFTER, numpy.array([(2.5,)], AFTER))] * 2
    with Recording(write(tmp_path / "run", *steps)) as recording:
        rows = recording.to_arrow("topic").to_pylist()
    assert [(row["a"], row["b"]) for row in rows] == [(1, None), (None, 2.5)] * 2


def test_the_place_of_a_version_outlives_its_segment(tmp_path: Path) -> None:
    write(tmp_path / "run", (BEFORE, numpy.array([(1,)], BEFORE)), (AFTER, numpy.array([(2.5,)], AFTER)))
    with penstock.journal.Journal(tmp_path / "run") as journal:
        journal.roll()
    with Recording(tmp_path / "run") as recording:
        rows = recording.to_arrow("topic").to_pylist()
    assert [(row["a"], row["b"]) for row in rows] == [(1, None), (None, 2.5)]


def test_a_version_that_cannot_be_read_here_leaves_the_others(tmp_path: Path) -> None:
    own = types.Codec("Own", "own", {}, lambda value: b'{"x": 2}', bytes)
    folder = write(tmp_path / "run", (First, First(1)), (own, b""))
    assert run("export", str(folder), "--to", "csv", "-o", str(tmp_path / "a.csv")).returncode == 0
    with (tmp_path / "a.csv").open() as stream:
        assert [(row["x"], row["payload"]) for row in csv.DictReader(stream)] == [("1", ""), ("", '{"x": 2}')]


def test_mcap_keeps_each_version_and_brings_it_back(replaced: Path, tmp_path: Path) -> None:
    from mcap.reader import make_reader

    assert run("export", str(replaced), "--to", "mcap", "-o", str(tmp_path / "a.mcap")).returncode == 0
    with (tmp_path / "a.mcap").open("rb") as stream:
        found = [(schema.name, channel.message_encoding) for schema, channel, _ in make_reader(stream).iter_messages()]
    assert found == [("First", "json"), ("Second", "msgpack"), ("numpy.record", "numpy")]
    assert run("import", str(tmp_path / "a.mcap"), "-o", str(tmp_path / "back")).returncode == 0
    assert_same_versions(replaced, tmp_path / "back")


@pytest.mark.parametrize("speed", ["0", "1000"])
def test_play_says_each_version_where_it_plays(replaced: Path, tmp_path: Path, speed: str) -> None:
    to = f"topic=journal:{tmp_path / 'again'}#topic"
    for _ in range(2):  # a second time over what the first has left: the newest version stands there
        done = run("play", str(replaced), "--map", to, "--speed", speed)
        assert done.returncode == 0, done.stderr
    with Recording(replaced) as one, Recording(tmp_path / "again") as other:
        names = ["x", "more", "a"]
        assert other.to_arrow("topic").select(names).to_pylist() == one.to_arrow("topic").select(names).to_pylist() * 2


def assert_same_versions(one: Path, other: Path) -> None:
    mine, theirs = (list(read_schemas(folder).versions("topic").values()) for folder in (one, other))
    assert mine == theirs
    with Recording(one) as first, Recording(other) as second:
        names = ["x", "more", "a"]
        assert first.to_arrow("topic").select(names).equals(second.to_arrow("topic").select(names))


@pytest.mark.parametrize("reach", ["shm", "bus", "tcp", "journal", "broker"])
def test_the_type_of_a_channel_that_has_published_nothing_is_kept(tmp_path: Path, reach: str) -> None:
    name = uuid.uuid4().hex[:8]
    with contextlib.ExitStack() as stack:
        place = {"shm": f"shm:/{name}", "bus": f"bus:{name}", "tcp": "tcp://127.0.0.1:0"}
        place["journal"] = f"journal:{tmp_path}/j#t"
        if reach == "broker":
            port = stack.enter_context(Server(tmp_path / "broker", 0).start()).port
            place = {reach: f"broker://127.0.0.1:{port}/t"}
        publisher = stack.enter_context(penstock.publisher(place[reach], type=First))
        address = f"tcp://127.0.0.1:{publisher.port}" if reach == "tcp" else place[reach]
        stack.enter_context(Recorder(Plan(tmp_path / "run", {address: "topic"})))
        deadline = time.monotonic() + 60
        while not (found := list(read_schemas(tmp_path / "run").versions("topic").values())):
            assert time.monotonic() < deadline, "its type was not recorded"
            time.sleep(0.01)
    assert [types.Schema.parse(text).name for text in found] == ["First"]


def test_what_is_of_no_version_is_under_no_schema_and_told_the_same_in_every_form(tmp_path: Path) -> None:
    """An old publisher that goes on is of the old version, junk and a number that no column holds of none."""
    where = f"journal:{tmp_path / 'run'}#topic"
    write(tmp_path / "run", (First, First(1)), (Second, Second("two")))
    with penstock.publisher(where) as plain:
        plain.publish_many([b'{"x": 3}', b"junk", b'{"more": []}', b'{"x": ["4"]}', b'{"x": %d}' % 2**70])
    for kind in ("csv", "jsonl", "parquet", "mcap"):
        done = run("export", str(tmp_path / "run"), "--to", kind, "-o", str(tmp_path / f"a.{kind}"))
        assert done.returncode == 0, done.stderr
        assert "topic: 4 messages not of the topic's type" in done.stderr, (kind, done.stderr)
        assert "position 4" in done.stderr
    reading = pytest.importorskip("mcap.reader")
    with (tmp_path / "a.mcap").open("rb") as stream:
        found = [(s and s.name, m.data) for s, _, m in reading.make_reader(stream).iter_messages()]
    assert [name for name, _ in found] == ["First", "Second", "First", None, None, None, None]
    assert run("import", str(tmp_path / "a.mcap"), "-o", str(tmp_path / "back")).returncode == 0
    with Recording(tmp_path / "back") as back:
        assert back.to_arrow("topic", errors="skip").column("x").to_pylist() == ["1", '"two"', "3"]


@pytest.mark.parametrize("reach", ["shm", "journal", "broker"])
def test_a_recording_has_every_version_that_its_source_keeps(reach: str, tmp_path: Path) -> None:
    """A publisher may go on with a type that another has replaced before the recording began."""
    with contextlib.ExitStack() as stack:
        if reach == "broker":
            broker = stack.enter_context(Server(tmp_path / "broker", 0).start())
            where = f"broker://127.0.0.1:{broker.port}/topic"
        else:
            where = f"shm:/versions-{uuid.uuid4().hex[:8]}" if reach == "shm" else f"journal:{tmp_path / 'from'}#topic"
        record_two_types(where, tmp_path / "run")
    with Recording(tmp_path / "run") as recording:
        found = recording.to_arrow("topic").column("x").to_pylist()
    assert {"2", '"three"'} <= set(found)


def record_two_types(where: str, run: Path) -> None:
    packed = types.plain(Second, "msgpack")
    with penstock.publisher(where, type=First) as old, penstock.publisher(where, type=packed, evolve="any") as new:
        new.publish(Second("one"))
        with Recorder(Plan(run, {where: "topic"})) as recorder:
            deadline = time.monotonic() + 60
            while recorder.totals()["topics"]["topic"] < 3:
                assert time.monotonic() < deadline
                old.publish(First(2))
                new.publish(Second("three"))
                time.sleep(0.02)


def test_a_tcp_subscriber_has_every_type_that_it_met() -> None:
    """The messages of a publisher that has gone are still to be read when the next one says its type."""
    with penstock.tcp.publisher("tcp://127.0.0.1:0", type=First) as old:
        address = old.address
        subscriber = penstock.tcp.subscriber(address)
        old.wait_ready(subscribers=1, timeout=60)
        old.publish(First(1))
    with subscriber, penstock.tcp.publisher(address, type=Second) as new:
        new.wait_ready(subscribers=1, timeout=60)
        new.publish(Second("two"))
        assert [bytes(subscriber.receive(60)) for _ in range(2)] == [b'{"x":1}', b'{"x":"two","more":[]}']
        assert [types.Schema.parse(text).name for text in subscriber.schemas_of(None)] == ["First", "Second"]
        assert subscriber.schemas_of(None)[-1] == subscriber.schema
