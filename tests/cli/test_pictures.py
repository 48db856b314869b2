"""Images in MCAP files: in the viewer's own schemas, and the very same when they are imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from foxglove.messages import PointCloud, RawImage
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import penstock
from penstock.foxglove.original import DATA_FIELD, original
from penstock.journal import Journal
from penstock.types.image import Image
from tests.cli.command import run

IMAGES = [
    Image(numpy.arange(18, dtype="u1").reshape(2, 3, 3), "bgr8"),
    Image(numpy.arange(6, dtype="u1").reshape(2, 3, 1), "mono8"),
    Image(numpy.arange(6, dtype=">u2").reshape(2, 3), "depth16"),
    Image(numpy.zeros((0, 3), "u1")),
    Image(numpy.arange(12, dtype="<f4").reshape(4, 3), "xyz32"),
    Image(numpy.arange(24, dtype="<f8").reshape(2, 3, 4), "xyzi64"),
    Image(numpy.arange(5, dtype="<i8")),  # neither a picture nor a cloud
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with penstock.publisher(f"journal:{tmp_path}/run#camera", type=Image) as publisher:
        for image in IMAGES:
            publisher.publish(image)
        publisher.inner.publish(b"no image at all")  # type: ignore[attr-defined]
    return tmp_path / "run"


def channels(file: Path) -> list[tuple[Any, Any, bytes]]:
    reading = pytest.importorskip("mcap.reader")
    with file.open("rb") as stream:
        return [(s, c, m.data) for s, c, m in reading.make_reader(stream).iter_messages(log_time_order=False)]


def test_images_and_clouds_have_the_schemas_that_viewers_know(recording: Path, tmp_path: Path) -> None:
    done = run("export", str(recording), "--to", "mcap", "-o", str(tmp_path / "x.mcap"))
    assert done.returncode == 0, done.stderr
    found = channels(tmp_path / "x.mcap")
    raw, cloud, own = (RawImage.get_schema(), "protobuf"), (PointCloud.get_schema(), "protobuf"), (None, "image")
    schema, channel, _ = found.pop()  # what is no image at all
    assert schema is None and channel.message_encoding == "application/octet-stream"
    for (schema, channel, body), (wanted, encoding) in zip(found, [raw] * 4 + [cloud] * 2 + [own], strict=True):
        assert channel.message_encoding == encoding
        if wanted is None:
            assert schema.encoding == "x-penstock"
            continue
        assert (schema.name, schema.encoding, schema.data) == (wanted.name, wanted.encoding, wanted.data)
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(schema.data).file:
            pool.Add(file)
        kind = pool.FindMessageTypeByName(schema.name)
        assert kind.fields_by_name["data"].number == DATA_FIELD
        message = message_factory.GetMessageClass(kind).FromString(body)
        image = IMAGES[[one[2] for one in found].index(body)]
        assert message.data == image.astype(image.dtype.newbyteorder("<")).tobytes()


def test_an_import_gives_the_same_images(recording: Path, tmp_path: Path) -> None:
    assert run("export", str(recording), "--to", "mcap", "-o", str(tmp_path / "x.mcap")).returncode == 0
    done = run("import", str(tmp_path / "x.mcap"), "-o", str(tmp_path / "back"))
    assert done.returncode == 0, done.stderr
    with penstock.subscriber(f"journal:{tmp_path}/back#camera?start=first", type=Image) as subscriber:
        for image in IMAGES:
            found = subscriber.receive(60).value
            assert (found.shape, found.encoding) == (image.shape, image.encoding)
            assert numpy.array_equal(found, image)
    with Journal(tmp_path / "back", mode="read") as journal:
        assert b"no image at all" in [bytes(message) for message in journal.read_many(1, 100)]


def test_what_is_none_of_ours_is_refused() -> None:
    body = RawImage(width=1, height=1, encoding="mono8", step=1, data=b"x").encode()
    for damaged in (body, b"\xff", b"\x0a\xff", b"\x0b", b"junk", b""):
        with pytest.raises(ValueError):
            original(damaged)
