"""Schemas on disk, in recordings, in MCAP files, and shown by the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from google.protobuf import timestamp_pb2

import penstock
from penstock import types
from penstock.broker import Client, Server
from penstock.broker.words import Refusal
from penstock.cli.schema import _of_address
from penstock.journal import Journal
from penstock.journal.schemas import MAX_VERSIONS, Schemas, read_schemas
from penstock.recording.recorder import Plan, Recorder
from penstock.types import Schema
from tests.cli.command import run

LONG = 30.0


class Pose(msgspec.Struct):
    x: float


class PoseAndTime(msgspec.Struct):
    x: float
    time: int | None = None


class Angle(msgspec.Struct):
    x: str


def text(kind: Any) -> str:
    return types.codec_of(kind).described().text


# --- journal


def test_a_journal_keeps_versions_over_segments_and_restarts(tmp_path: Path) -> None:
    address = f"journal:{tmp_path / 'j'}#poses"
    with penstock.publisher(address, type=Pose) as publisher:
        publisher.publish(Pose(1.0))
    with penstock.publisher(address, type=PoseAndTime) as publisher:
        publisher.publish(PoseAndTime(2.0, 5))
        publisher.journal.roll(full=False)
        publisher.publish(PoseAndTime(3.0))
    with penstock.publisher(address, type=Pose) as publisher:  # an older one is no new version
        publisher.publish(Pose(4.0))
        publisher.journal.roll(full=False)
    with Journal(tmp_path / "j") as journal:
        assert journal.schemas.versions("poses") == {1: text(Pose), 2: text(PoseAndTime)}
    assert read_schemas(tmp_path / "j").newest("poses") == (2, text(PoseAndTime))
    with pytest.raises(penstock.RefusedError, match="field 'x' is"):
        penstock.publisher(address, type=Angle)
    with penstock.publisher(address, type=Angle, evolve="any") as publisher:
        publisher.publish(Angle("north"))
    assert read_schemas(tmp_path / "j").newest("poses") == (3, text(Angle))
    with penstock.subscriber(address, type=PoseAndTime, start="first", evolve="any") as subscriber:
        assert [pose.x for pose in subscriber.values(0)] == [1.0, 2.0, 3.0, 4.0]
        assert subscriber.decode_errors == 1
    with pytest.raises(penstock.RefusedError):
        penstock.subscriber(address, type=Pose)
    with pytest.raises(penstock.RefusedError):  # of any topic that it would read
        penstock.subscriber(f"journal:{tmp_path / 'j'}#>", type=Pose)


def test_a_schema_is_seen_before_the_first_message(tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path / 'j'}#t", type=Pose) as publisher:
        assert read_schemas(tmp_path / "j").newest("t") == (1, text(Pose))
        publisher.publish(Pose(1.0))


def test_versions_have_a_bound_and_strange_records_none() -> None:
    schemas = Schemas([b"", b"\xff\xff", b"\x05\x00\x01\x00\x00\x00ab"])
    for number in range(100):
        schemas.add("t", str(number), number)
    assert len(schemas.versions("t")) == MAX_VERSIONS
    assert schemas.newest("t") == (100, "99")
    again = Schemas(schemas.records())
    assert again.versions("t") == schemas.versions("t")
    again.remove_newest("t")
    assert again.newest("t") == (99, "98")
    assert again.newest("none") == (0, "")


# --- broker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "broker", 0).start() as server:
        yield server


def test_a_broker_keeps_schemas_over_a_restart(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server:
        with penstock.publisher(f"broker://127.0.0.1:{server.port}/t?queue=q", type=Pose) as publisher:
            publisher.publish(Pose(1.0))
        with penstock.publisher(f"broker://127.0.0.1:{server.port}/t?queue=q", type=PoseAndTime) as publisher:
            publisher.publish(PoseAndTime(2.0))
    assert read_schemas(tmp_path / "broker").versions("t") == {1: text(Pose), 2: text(PoseAndTime)}
    with Server(tmp_path / "broker", 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t?queue=q"
        with pytest.raises(penstock.RefusedError, match=r"carries PoseAndTime \(json\), not this Angle"):
            penstock.subscriber(address, type=Angle)
        with penstock.subscriber(address, type=PoseAndTime) as subscriber:
            assert [subscriber.receive(30).value.x for _ in range(2)] == [1.0, 2.0]


def test_of_two_who_change_it_one_is_refused(server: Server) -> None:
    with Client(port=server.port) as client:
        assert client.schema("t") == (0, "", [])
        client.declare_schema("t", 1, text(Pose))
        client.declare_schema("t", 1, text(Pose))  # the same again
        with pytest.raises(Refusal, match="version 1"):
            client.declare_schema("t", 1, text(Angle))
        client.declare_schema("t", 2, text(Angle))
        version, newest, digests = client.schema("t")
        assert (version, newest, len(digests)) == (2, text(Angle), 2)


def test_a_brokers_schemas_have_a_bound(tmp_path: Path) -> None:
    from penstock.broker.limits import Limits

    with (
        Server(tmp_path / "b", 0, limits=Limits(max_schema_bytes=1000)).start() as server,
        Client(port=server.port) as client,
    ):
        client.declare_schema("t", 1, text(Pose))
        with pytest.raises(Refusal, match="1000 bytes"):
            for number in range(20):
                client.declare_schema(f"t{number}", 1, text(Pose))


def test_a_large_schema_travels_everywhere(server: Server, tmp_path: Path) -> None:
    large = msgspec.defstruct("Large", [(f"field_with_a_long_name_{n:04d}", int, 0) for n in range(500)])
    assert 30_000 < len(text(large)) < 40_960
    for address in (
        f"broker://127.0.0.1:{server.port}/large", "shm:/types-large", f"journal:{tmp_path / 'j'}#t", "tcp://127.0.0.1:0",
    ):  # fmt: skip
        with penstock.publisher(address, type=large) as publisher:
            if address.startswith("tcp"):
                address = f"tcp://127.0.0.1:{publisher.port}"
            with penstock.subscriber(address, type=large) as subscriber:
                assert publisher.wait_ready(1, timeout=30)
                deadline = time.monotonic() + 30
                while subscriber.schema is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert subscriber.schema == text(large)


# --- recordings and MCAP


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


def record(directory: Path, **kinds: Any) -> None:
    """Three values of each type, recorded from a channel of its own."""
    plan = Plan(directory, {f"shm:/types-rec-{name}": name for name in kinds}, max_messages=3 * len(kinds))
    with Recorder(plan) as recorder:
        for name, (kind, value) in kinds.items():
            with penstock.publisher(f"shm:/types-rec-{name}", type=kind, slots=16) as publisher:
                assert publisher.wait_ready(1, timeout=30)
                for _ in range(3):
                    publisher.publish(value)
                deadline = time.monotonic() + 30
                while recorder.totals()["topics"][name] < 3 and time.monotonic() < deadline:
                    time.sleep(0.01)


def test_recordings_and_mcap_files_have_the_schema(tmp_path: Path) -> None:
    from mcap.reader import make_reader

    dtype = numpy.dtype([("a", "<i4"), ("b", "<f4", (2,))])
    record(
        tmp_path / "run",
        pose=(Pose, Pose(1.0)),
        times=(timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(seconds=3)),
        points=(dtype, numpy.zeros(2, dtype)),
    )
    wanted = {"pose": text(Pose), "times": text(timestamp_pb2.Timestamp), "points": text(dtype)}
    found = read_schemas(tmp_path / "run")
    assert {topic: found.newest(topic)[1] for topic in found.topics} == wanted
    done = command("export", tmp_path / "run", "--to", "mcap", "-o", tmp_path / "run.mcap")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run.mcap").open("rb") as stream:
        summary = make_reader(stream).get_summary()
    assert summary is not None
    told = {
        channel.topic: (channel.message_encoding, summary.schemas.get(channel.schema_id))
        for channel in summary.channels.values()
    }
    encoding, schema = told["pose"]
    assert encoding == "json" and schema is not None and (schema.name, schema.encoding) == ("Pose", "jsonschema")
    assert json.loads(schema.data)["properties"]["x"] == {"type": "number"}
    encoding, schema = told["times"]
    assert encoding == "protobuf" and schema is not None and schema.encoding == "protobuf"
    assert schema.name == "google.protobuf.Timestamp" and b"timestamp.proto" in schema.data
    assert told["points"][0] == "numpy"
    done = command("import", tmp_path / "run.mcap", "-o", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    again = read_schemas(tmp_path / "again")
    assert {topic: again.newest(topic)[1] for topic in again.topics} == wanted
    with penstock.subscriber(f"journal:{tmp_path / 'again'}#pose", type=Pose, start="first") as subscriber:
        assert list(subscriber.values(0)) == [Pose(1.0)] * 3


def test_an_mcap_file_has_the_newest_type_of_each_topic_messages_or_not(tmp_path: Path) -> None:
    run = f"journal:{tmp_path / 'run'}"
    penstock.publisher(f"{run}#empty", type=Angle).close()
    with penstock.publisher(f"{run}#pose", type=Pose) as publisher:
        publisher.publish(Pose(1.0))
    penstock.publisher(f"{run}#pose", type=PoseAndTime).close()
    done = command("export", tmp_path / "run", "--to", "mcap", "-o", tmp_path / "run.mcap")
    assert done.returncode == 0, done.stderr
    done = command("import", tmp_path / "run.mcap", "-o", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    found = read_schemas(tmp_path / "again")
    versions = {topic: list(found.versions(topic).values()) for topic in found.topics}
    assert versions == {"empty": [text(Angle)], "pose": [text(Pose), text(PoseAndTime)]}


def test_what_is_played_says_what_it_is_made_of(tmp_path: Path) -> None:
    record(tmp_path / "run", pose=(Pose, Pose(1.0)))
    with penstock.subscriber("shm:/types-played", type=PoseAndTime, overflow="block") as subscriber:
        done = command("play", tmp_path / "run", "--map", "pose=shm:/types-played?reliable=true&slots=16", "--wait", 1)
        assert done.returncode == 0, done.stderr
        assert [pose.x for pose in subscriber.values(0)] == [1.0] * 3
    with penstock.subscriber("shm:/types-played", type=Angle):
        done = command("play", tmp_path / "run", "--map", "pose=shm:/types-played", "--wait", 1)
        assert done.returncode == 1 and "carries Angle (json), not this Pose (json)" in done.stderr


def test_a_recording_in_parts_says_it_in_each(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "run", {"shm:/types-parts": "pose"}, max_messages=40, split_bytes=200)
    with penstock.publisher("shm:/types-parts", type=Pose, slots=64) as publisher, Recorder(plan) as recorder:
        deadline = time.monotonic() + 30
        for number in range(40):
            publisher.publish(Pose(float(number)))
            while number == 20 and recorder.sources[0].messages < 20 and time.monotonic() < deadline:
                time.sleep(0.01)  # what is read at once is stored in one part
        while recorder.running and time.monotonic() < deadline:
            time.sleep(0.01)
    parts = sorted((tmp_path / "run").iterdir())
    assert len(parts) > 1
    assert all(read_schemas(part).newest("pose")[1] == text(Pose) for part in parts)


def test_a_recording_has_each_version(tmp_path: Path) -> None:
    with penstock.publisher("tcp://127.0.0.1:0") as publisher:
        port = publisher.port
    address = f"tcp://127.0.0.1:{port}"
    with Recorder(Plan(tmp_path / "run", {address: "pose"})) as recorder:
        for kind, value in ((Pose, Pose(1.0)), (PoseAndTime, PoseAndTime(2.0, 3))):
            with penstock.publisher(address, type=kind) as publisher:
                assert publisher.wait_ready(1, timeout=30)
                deadline = time.monotonic() + 30
                while text(kind) not in versions(tmp_path / "run") and time.monotonic() < deadline:
                    publisher.publish(value)
                    time.sleep(0.01)
        assert recorder.running
    assert versions(tmp_path / "run") == [text(Pose), text(PoseAndTime)]


def versions(directory: Path) -> list[str]:
    return list(read_schemas(directory).versions("pose").values())


def test_a_bridge_carries_the_schema(tmp_path: Path) -> None:
    from penstock.bridge import Bridge

    address = f"journal:{tmp_path / 'j'}#pose"
    with (
        penstock.publisher("shm:/types-bridged", type=Pose) as publisher,
        Bridge("shm:/types-bridged", address) as bridge,
    ):
        publisher.publish(Pose(1.0))
        assert bridge.run(count=1) == 1
    assert versions(tmp_path / "j") == [text(Pose)]
    with pytest.raises(penstock.RefusedError, match="field 'x' is"):
        penstock.subscriber(address, type=Angle)


# --- the command


def test_who_looks_at_a_schema_in_shared_memory_is_no_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that waits for its first one would begin."""
    name = f"/types-looked-at-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"shm:{name}", type=Pose), penstock.publisher(f"shm:{name}", type=PoseAndTime):
        monkeypatch.setattr(penstock, "subscriber", lambda *_, **__: pytest.fail("it subscribes"))
        for every, expected in ((False, ["PoseAndTime"]), (True, ["Pose", "PoseAndTime"])):
            said = list(_of_address(f"shm:{name}", every, 1.0))
            assert [Schema.parse(text).name for _, _, text in said] == expected


def test_the_command_shows_schemas(tmp_path: Path) -> None:
    with (
        penstock.publisher(f"journal:{tmp_path / 'j'}#pose", type=Pose),
        penstock.publisher(f"journal:{tmp_path / 'j'}#pose", type=PoseAndTime),
    ):
        pass
    done = command("schema", tmp_path / "j")
    assert (
        done.returncode == 0 and "PoseAndTime as json, version 2" in done.stdout and '"type": "number"' in done.stdout
    )
    assert command("schema", f"journal:{tmp_path / 'j'}").stdout == done.stdout
    assert "PoseAndTime as json" in command("schema", f"journal:{tmp_path / 'j'}#pose").stdout
    lines = command("schema", tmp_path / "j", "--all", "--json").stdout.splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2]
    lines = command("schema", f"journal:{tmp_path / 'j'}#pose", "--all", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["Pose", "PoseAndTime"], "of an address too"
    with penstock.publisher("shm:/types-shown", type=timestamp_pb2.Timestamp):
        done = command("schema", "shm:/types-shown")
        assert "optional int64 seconds = 1;" in done.stdout, done.stderr
    with penstock.publisher("tcp://127.0.0.1:0", type=numpy.dtype([("a", "<i4"), ("b", "<f4", (2,))])) as publisher:
        done = command("schema", f"tcp://127.0.0.1:{publisher.port}", "--timeout", 60)
        assert "a: <i4" in done.stdout and "b: <f4 (2,)" in done.stdout, done.stderr
    with penstock.publisher("shm:/types-untold"):
        done = command("schema", "shm:/types-untold")
        assert done.returncode == 1 and "no publisher has declared a type" in done.stderr
    with socket.socket() as taken:  # bound and not listening: nobody can be there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for nobody, said in {
            "shm:/types-nobody": "nobody publishes it on this machine",
            f"tcp://127.0.0.1:{port}": "Connection refused",
            f"broker://127.0.0.1:{port}/t": "nobody listens there",
        }.items():
            done = command("schema", nobody, "--timeout", 1)
            assert done.returncode == 1 and f"{nobody}: " in done.stderr and said in done.stderr, done.stderr
    assert command("schema", "bus:x").returncode == 2


# --- bridges


def test_a_bridge_says_at_the_sink_what_the_source_has(tmp_path: Path) -> None:
    from penstock.bridge import Bridge

    sink = f"journal:{tmp_path / 'j'}#poses"
    with penstock.publisher("shm:/types-bridge", type=Pose) as publisher, Bridge("shm:/types-bridge", sink).start():
        publisher.publish(Pose(1.5))
        with penstock.subscriber(sink, start="first") as subscriber:
            subscriber.receive(60)
            assert subscriber.schema == text(Pose)


def test_a_bridge_carries_on_where_the_sink_has_another_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.bridge import Bridge

    sink = f"journal:{tmp_path / 'j'}#poses"
    with penstock.publisher(sink, type=Angle):
        pass
    with penstock.publisher("shm:/types-bridge", type=Pose) as publisher, Bridge("shm:/types-bridge", sink).start():
        publisher.publish(Pose(1.5))
        with penstock.subscriber(sink, start="first") as subscriber:
            assert bytes(subscriber.receive(60)) == b'{"x":1.5}'
            assert subscriber.schema == text(Angle)
    assert "without their type" in caplog.text


@pytest.mark.parametrize("reads", ["read", "on_message"])
def test_a_tcp_subscriber_goes_on_when_a_publisher_of_its_type_comes_back(reads: str) -> None:
    came: list[Any] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    options: dict[str, Any] = {"on_message": came.append} if reads == "on_message" else {}
    quick = f"{where}?reconnect_delay=0.01&reconnect_delay_max=0.05"
    with penstock.subscriber(quick, type=Angle, **options) as subscriber:
        for _ in range(2):
            with penstock.publisher(where, type=PoseAndTime):
                deadline = time.monotonic() + 60
                while subscriber.inner.refusal is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                if reads == "read":
                    with pytest.raises(penstock.RefusedError, match="not this Angle"):
                        subscriber.read(60)
            with penstock.publisher(where, type=Angle) as publisher:
                deadline = time.monotonic() + 60
                while subscriber.inner.refusal is not None:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                publisher.wait_ready(1, 60)
                publisher.publish(Angle("half"))
                if reads == "read":
                    assert subscriber.receive(60).value == Angle("half")
                else:
                    while not came:
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    came.clear()


def test_a_damaged_schema_costs_its_own_topic_alone(tmp_path: Path) -> None:
    """Somebody's own codec may say anything of its messages; ``true`` is a whole JSON Schema."""
    where = f"journal:{tmp_path / 'run'}"
    odd: dict[str, tuple[str, Any]] = {
        "true": ("json", {"jsonschema": True}), "text": ("json", {"jsonschema": "nonsense"}),
        "proto": ("protobuf", {"protobuf": "AAAA"}), "arrow": ("arrow", {"arrow": "AAAA"}), "np": ("numpy", {"dtype": 5}),
    }  # fmt: skip
    for topic, (encoding, definition) in odd.items():
        codec = types.Codec(topic, encoding, definition, bytes, bytes)
        with penstock.publisher(f"{where}#{topic}", type=codec) as publisher:
            publisher.publish(b'{"x":1}')
    shown = run("schema", str(tmp_path / "run"))
    assert shown.returncode == 0 and all(f"#{topic}: {topic} as" in shown.stdout for topic in odd), shown
    for topic in ("true", "text"):
        one = run("sub", f"{where}#{topic}", "--from", "1", "--count", "1", "--fields", "x")
        assert (one.returncode, one.stdout) == (0, "1\n"), one
    out = tmp_path / "a.mcap"
    assert run("export", str(tmp_path / "run"), "--to", "mcap", "-o", str(out)).returncode == 0
    assert run("import", str(out), "-o", str(tmp_path / "back")).returncode == 0
    again = run("schema", str(tmp_path / "back"))
    assert again.stdout.replace(str(tmp_path / "back"), str(tmp_path / "run")) == shown.stdout
