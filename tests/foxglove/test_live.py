"""Live channels in a viewer: what is advertised, what comes, who is read when."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy
import pyarrow
import pytest
from foxglove.messages import PointCloud, RawImage
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

import penstock
from penstock import types
from penstock.foxglove.server import Server
from penstock.observe.snapshot import live

from .viewer import Viewer


class Point(msgspec.Struct):
    x: float
    y: float | None = None


class Tagged(msgspec.Struct, tag=True):
    x: float


class Named(msgspec.Struct, tag=True):
    name: str


class Pose(msgspec.Struct):
    at: Point
    name: str = ""


@contextlib.contextmanager
def serving(*addresses: str, **options: Any) -> Iterator[Server]:
    with Server(addresses, port=0, **options) as server:
        ended = threading.Event()

        def tend() -> None:
            while not ended.is_set():
                server.run(0.1)

        thread = threading.Thread(target=tend)
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            thread.join()


@pytest.fixture
def name() -> str:
    return f"fox-{uuid.uuid4().hex[:8]}"


def publish_until(publisher: Any, value: Any, viewer: Viewer, topic: str) -> list[bytes]:
    """A viewer's channel is read from a moment on that nobody outside knows: publish until one has come."""

    def came() -> list[bytes]:
        publisher.publish(value)
        return viewer.bodies(topic)

    found: list[bytes] = viewer.until(came)
    return found


def readers(name: str) -> int:
    return sum(block.address == f"shm:/{name}" and block.kind == "subscriber" for block in live())


def read(name: str) -> int:
    return sum(block.delivered for block in live() if block.address == f"shm:/{name}" and block.kind == "subscriber")


def test_a_struct_is_shown_with_a_schema_without_references(name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}/pose", type=Pose) as publisher,
        serving(f"shm:/{name}/pose") as server,
        Viewer(server.port) as viewer,
    ):
        channel = viewer.watch(f"/{name}/pose")
        assert (channel["encoding"], channel["schemaName"], channel["schemaEncoding"]) == ("json", "Pose", "jsonschema")
        at = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
        described = {"type": "object", "properties": {"at": at, "name": {"type": "string"}}}
        assert json.loads(channel["schema"]) == described
        body = publish_until(publisher, Pose(Point(1.5), "left"), viewer, f"/{name}/pose")[0]
        assert json.loads(body) == {"at": {"x": 1.5, "y": None}, "name": "left"}


def cases() -> dict[str, tuple[Any, Any, Any]]:
    record = numpy.dtype([("t", "<i8"), ("xyz", "<f4", 3)])
    rows = numpy.zeros(2, record)
    rows["t"], rows["xyz"] = (1, 2), 0.5
    columns = types.codec_of(pyarrow.schema([("n", pyarrow.int64())]))
    batch = pyarrow.record_batch([pyarrow.array([3, 4])], names=["n"])
    return {
        "msgpack": (types.plain(Point, "msgpack"), Point(1.0, 2.0), {"x": 1.0, "y": 2.0}),
        "numpy": (record, rows, {"rows": [{"t": 1, "xyz": [0.5] * 3}, {"t": 2, "xyz": [0.5] * 3}]}),
        "arrow": (columns, batch, {"rows": [{"n": 3}, {"n": 4}]}),
        "str": (str, "hello", {"value": "hello"}),
        "list": (list[Point], [Point(1.0)], {"value": [{"x": 1.0, "y": None}]}),
        "dict": (dict, {"a": [1]}, {"a": [1]}),
        "union": (Tagged | Named, Named("x"), {"type": "Named", "name": "x"}),
        "mixed": (int | dict[str, int], {"a": 1}, {"value": {"a": 1}}),
        "bytes": (None, b"\xff\x00", {"value": "/wA="}),
        "text": (None, b"plain", {"value": "plain"}),
        "json": (None, b'{"a": NaN}', {"a": None}),
    }


@pytest.mark.parametrize("kind", list(cases()))
def test_every_encoding_becomes_json(kind: str, name: str) -> None:
    made, value, wanted = cases()[kind]
    options = {} if made is None else {"type": made}
    with (
        penstock.publisher(f"shm:/{name}", **options) as publisher,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        channel = viewer.watch(f"/{name}")
        assert channel["encoding"] == "json"
        if made is not None:
            described = json.loads(channel["schema"])
            assert described["type"] == "object"
            assert described.get("properties", {}).keys() == (set() if kind in ("dict", "union") else wanted.keys())
        body = publish_until(publisher, value, viewer, f"/{name}")[0]
        assert json.loads(body, parse_constant=pytest.fail) == wanted


def test_protobuf_goes_as_it_is_with_its_descriptors(name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}", type=timestamp_pb2.Timestamp) as publisher,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        channel = viewer.watch(f"/{name}")
        assert (channel["encoding"], channel["schemaName"]) == ("protobuf", "google.protobuf.Timestamp")
        body = publish_until(publisher, timestamp_pb2.Timestamp(seconds=9), viewer, f"/{name}")[0]
        assert timestamp_pb2.Timestamp.FromString(body).seconds == 9


def read_as(kind: Any, body: bytes) -> Any:
    schema = kind.get_schema()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(schema.data).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(schema.name)).FromString(body)


@pytest.mark.parametrize(
    ("array", "encoding", "shown"),
    [
        (numpy.full((2, 3, 3), 7, "u1"), "bgr8", "bgr8"),
        (numpy.full((2, 3), 7, "u1"), "", "mono8"),
        (numpy.full((2, 3), 7, ">u2"), "depth16", "16UC1"),
        (numpy.full((2, 3), 0.5, "<f4"), "", "32FC1"),
    ],
)
def test_an_image_is_a_raw_image(array: Any, encoding: str, shown: str, name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}", type=penstock.Image) as publisher,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        channel = viewer.watch(f"/{name}")
        assert (channel["encoding"], channel["schemaName"]) == ("protobuf", "foxglove.RawImage")
        image = read_as(RawImage, publish_until(publisher, penstock.Image(array, encoding), viewer, f"/{name}")[0])
        assert (image.width, image.height, image.encoding) == (3, 2, shown)
        assert image.step == 3 * array.itemsize * (array.shape[2] if array.ndim == 3 else 1)
        assert image.data == array.astype(array.dtype.newbyteorder("<")).tobytes()
        assert image.timestamp.seconds * 10**9 + image.timestamp.nanos == viewer.times(f"/{name}")[0]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("kind", "names"), [("xyz32", "x y z"), ("xyzi32", "x y z intensity")])
def test_a_cloud_is_a_point_cloud(kind: str, names: str, before: bool, name: str) -> None:
    """Also where the first message comes after the channel was advertised."""
    fields = names.split()
    array = numpy.arange(5 * len(fields), dtype="<f4").reshape(5, len(fields))
    with penstock.publisher(f"shm:/{name}", type=penstock.Image) as publisher:
        if before:
            publisher.publish(penstock.Image(array, kind))
        with serving(f"shm:/{name}") as server, Viewer(server.port) as viewer:
            channel = viewer.watch(f"/{name}")
            if not before:
                assert channel["schemaName"] == "foxglove.RawImage"

            def advertised() -> Any:
                publisher.publish(penstock.Image(array, kind))
                return viewer.channels.get(f"/{name}", {}).get("schemaName") == "foxglove.PointCloud"

            viewer.until(advertised)
            viewer.watch(f"/{name}")
            cloud = read_as(PointCloud, publish_until(publisher, penstock.Image(array, kind), viewer, f"/{name}")[-1])
            assert [(field.name, field.offset, field.type) for field in cloud.fields] == [
                (field, 4 * place, 7) for place, field in enumerate(fields)
            ]
            assert (cloud.point_stride, cloud.data) == (4 * len(fields), array.tobytes())
            assert cloud.pose.orientation.w == 1


def test_what_is_no_picture_is_passed_over(name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}", type=penstock.Image) as publisher,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        viewer.watch(f"/{name}")
        picture, line, cloud = numpy.zeros((1, 1), "u1"), numpy.zeros(4, "f4"), numpy.zeros((4, 3), "f4")
        publish_until(publisher, picture, viewer, f"/{name}")
        publisher.publish(line)
        publisher.publish(penstock.Image(cloud, "xyz32"))
        publisher.publish(penstock.Image(picture, "rgb8"))
        publisher.publish(penstock.Image(picture.astype("f8"), "mono8"))
        viewer.until(lambda: server.board.topics[f"shm:/{name}"].failures == 4)
        before = len(viewer.bodies(f"/{name}"))
        viewer.until(lambda: publisher.publish(picture) and len(viewer.bodies(f"/{name}")) > before)
        assert server.board.topics[f"shm:/{name}"].failures == 4


@pytest.mark.parametrize("kind", [Pose, dict, types.plain(Pose, "msgpack"), timestamp_pb2.Timestamp])
def test_what_is_not_of_its_type_is_counted_told_and_not_shown(
    kind: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    name_of_kind = getattr(kind, "__name__", "")
    good = {"Pose": b'{"at":{"x":1.0}}', "dict": b"{}", "Timestamp": b"\x08\x09"}.get(name_of_kind, b"\x81\xa2at\x81\xa1x\x01")
    wrong = [b"junk", b"\xff", b"[1]", b'"text"']
    if kind is Pose:
        wrong += [b"{}", b'{"at":{"x":"far"}}', b'{"at":{"x":null}}', b'{"at":[]}', b'{"at":{"x":1},"name":7}']
    elif kind is timestamp_pb2.Timestamp:
        wrong = [b"\xff"]
    with (
        penstock.publisher(f"shm:/{name}", type=kind) as publisher,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        viewer.watch(f"/{name}")
        raw = publisher.inner  # type: ignore[attr-defined]
        publish_until(raw, good, viewer, f"/{name}")
        for body in wrong:
            raw.publish(body)
        viewer.until(lambda: server.board.topics[f"shm:/{name}"].failures == len(wrong))
        before = len(viewer.bodies(f"/{name}"))
        viewer.until(lambda: raw.publish(good) and len(viewer.bodies(f"/{name}")) > before)
        assert server.board.topics[f"shm:/{name}"].failures == len(wrong)
    assert len(set(viewer.bodies(f"/{name}"))) == 1
    told = [record.getMessage() for record in caplog.records if "is not shown" in record.getMessage()]
    assert told and told[0].startswith(f"shm:/{name}: a message is not shown: "), "told, and not for each"
    assert len(told) < len(wrong) or len(wrong) == 1


def test_a_time_that_no_viewer_can_show_costs_one_message(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with penstock.shm.publisher(f"shm:/{name}") as publisher, serving(f"shm:/{name}") as server, Viewer(server.port) as viewer:
        viewer.watch(f"/{name}")
        publish_until(publisher, b'{"n":1}', viewer, f"/{name}")
        server.board.topics[f"shm:/{name}"].log(penstock.Message(b'{"n":2}', timestamp_ns=-1))
        assert server.board.topics[f"shm:/{name}"].failures == 1
        before = len(viewer.bodies(f"/{name}"))
        viewer.until(lambda: publisher.publish(b'{"n":1}') and len(viewer.bodies(f"/{name}")) > before)
    assert any("before 1970" in record.getMessage() for record in caplog.records)


def test_what_is_not_of_its_type_is_let_go_when_it_was_told(name: str) -> None:
    gc.disable()  # an error that refers to itself would keep the message, and with it the reader, until a collection
    try:
        with penstock.publisher(f"shm:/{name}", type=Pose) as publisher, serving(f"shm:/{name}") as server:
            with Viewer(server.port) as viewer:
                viewer.watch(f"/{name}")
                publish_until(publisher.inner, b'{"at":{"x":1.0}}', viewer, f"/{name}")  # type: ignore[attr-defined]
                publisher.inner.publish(b"junk")  # type: ignore[attr-defined]
                viewer.until(lambda: server.board.topics[f"shm:/{name}"].failures == 1)
            deadline = time.monotonic() + 60
            while readers(name):
                assert time.monotonic() < deadline, "nobody looks, and it is read"
                time.sleep(0.01)
    finally:
        gc.enable()


def test_all_that_is_published_is_shown_as_it_comes_and_goes(name: str) -> None:
    with serving() as server, Viewer(server.port) as viewer:
        with penstock.publisher(f"shm:/{name}/a", type=Point), penstock.publisher("tcp://127.0.0.1:0", type=Pose) as far:
            a = viewer.until(lambda: viewer.channels.get(f"/{name}/a"))
            assert a["schemaName"] == "Point"
            assert viewer.until(lambda: viewer.channels.get(f"/tcp/127/0/0/1/{far.port}"))["schemaName"] == "Pose"
        viewer.until(lambda: a["id"] in viewer.gone)


def test_nobody_is_read_before_somebody_looks(name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}", type=Point) as publisher,
        serving() as server,
        Viewer(server.port) as viewer,
    ):
        viewer.until(lambda: viewer.channels.get(f"/{name}"))
        viewer.until(lambda: readers(name) == 0)
        viewer.watch(f"/{name}")
        publish_until(publisher, Point(1.0), viewer, f"/{name}")
        assert readers(name) == 1
        viewer.unwatch(f"/{name}")
        viewer.until(lambda: readers(name) == 0)
        viewer.watch(f"/{name}")
        viewer.until(lambda: readers(name) == 1)
    assert readers(name) == 0


def test_a_type_that_comes_later_is_advertised_anew(name: str) -> None:
    with serving(f"shm:/{name}") as server, Viewer(server.port) as viewer:
        first = viewer.watch(f"/{name}")
        assert first["schemaName"] != "Point"
        with penstock.publisher(f"shm:/{name}", type=Point) as publisher:
            viewer.until(lambda: viewer.channels.get(f"/{name}", {}).get("schemaName") == "Point")
            viewer.watch(f"/{name}")
            assert json.loads(publish_until(publisher, Point(2.0), viewer, f"/{name}")[0])["x"] == 2.0


class Moved(msgspec.Struct):
    metres: float


def test_a_type_that_changes_is_advertised_anew_and_every_message_is_shown_once(name: str) -> None:
    """A viewer that subscribes again at once, as the real one does, sees all of both types, in order."""
    with (
        penstock.publisher(f"shm:/{name}", type=Point) as old,
        serving(f"shm:/{name}") as server,
        Viewer(server.port) as viewer,
    ):
        viewer.watch(f"/{name}")
        viewer.until(lambda: readers(name) == 1)
        for n in range(10):
            old.publish(Point(float(n)))
        viewer.until(lambda: len(viewer.bodies(f"/{name}")) == 10)
        with penstock.publisher(f"shm:/{name}", type=Moved, evolve="any") as new:
            for n in range(10, 20):
                new.publish(Moved(float(n)))
            viewer.until(lambda: viewer.channels.get(f"/{name}", {}).get("schemaName") == "Moved")
            viewer.watch(f"/{name}")
            viewer.until(lambda: len(viewer.bodies(f"/{name}")) >= 20)
            old.publish(Point(20.0))
            viewer.until(lambda: len(viewer.bodies(f"/{name}")) >= 21)
        shown = [json.loads(body) for body in viewer.bodies(f"/{name}")]
        assert [one.get("x", one.get("metres")) for one in shown] == [float(n) for n in range(21)]
        assert server.board.topics[f"shm:/{name}"].failures == 0


def test_a_viewer_pauses_by_parameter(name: str) -> None:
    with (
        penstock.publisher(f"shm:/{name}", type=Point) as publisher,
        serving(f"shm:/{name}", paused=True) as server,
        Viewer(server.port) as viewer,
    ):
        viewer.get()
        viewer.until(lambda: viewer.parameters == {"paused": True})
        viewer.watch(f"/{name}")
        viewer.until(lambda: readers(name) == 1)
        for number in (1, 2):  # when the second has been read, the first has been passed over
            publisher.publish(Point(float(number)))
            viewer.until(lambda number=number: read(name) == number)
        viewer.set(paused="maybe")  # of another kind: nothing
        viewer.set(unknown=True)
        viewer.set(paused=False)
        viewer.until(lambda: viewer.parameters["paused"] is False)
        publish_until(publisher, Point(3.0), viewer, f"/{name}")
        assert json.loads(viewer.bodies(f"/{name}")[0])["x"] != 1.0


def test_a_port_that_is_taken_is_told(name: str) -> None:
    with (
        serving(f"shm:/{name}") as server,
        pytest.raises(penstock.RefusedError, match=f"127.0.0.1:{server.port}.*--port"),
        Server([f"shm:/{name}"], port=server.port),
    ):
        pass
