"""Codecs: the kinds that are known, those that users add, and what is said of values that are not right."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import msgspec
import numpy
import pyarrow
import pytest
from google.protobuf import timestamp_pb2, wrappers_pb2

import penstock
from penstock import types
from penstock.types import codec as codecs


class Temperature:
    def __init__(self, kelvin: float) -> None:
        self.kelvin = kelvin


def make(kind: Any) -> types.Codec[Any] | None:
    if kind is not Temperature:
        return None
    return types.Codec(
        name="Temperature", encoding="ascii", schema={}, encode=lambda value: b"%g" % value.kelvin,
        decode=lambda message: Temperature(float(bytes(message))),
    )  # fmt: skip


def test_a_codec_that_is_added(request: pytest.FixtureRequest) -> None:
    with pytest.raises(penstock.InvalidArgument, match="has no codec"):
        types.codec_of(Temperature)
    types.add(make)
    request.addfinalizer(lambda: types.remove(make))
    with (
        penstock.subscriber("bus:added", type=Temperature) as subscriber,
        penstock.publisher("bus:added", type=Temperature) as publisher,
    ):
        publisher.publish(Temperature(273.5))
        assert subscriber.receive(10).value.kelvin == 273.5
    with pytest.raises(TypeError, match="function from a type"):
        types.add(7)  # type: ignore[arg-type]


def test_a_codec_of_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def load(self) -> Any:
            return make

    asked: list[str] = []

    def entry_points(group: str) -> list[Any]:
        asked.append(group)
        return [Entry()]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(codecs, "_loaded", None)
    assert types.codec_of(Temperature).name == "Temperature"
    assert types.codec_of(Temperature).name == "Temperature"
    assert asked == ["penstock.codecs"]


def test_a_codec_may_be_given_itself() -> None:
    class Pose(msgspec.Struct):
        x: int

    codec: types.Codec[Any] = types.plain(Pose, "msgpack")
    assert types.codec_of(codec) is codec
    assert codec.encode(Pose(1)) == msgspec.msgpack.encode(Pose(1))
    with pytest.raises(penstock.InvalidArgument, match="valid: json, msgpack"):
        types.plain(Pose, "xml")


def test_protobuf() -> None:
    with (
        penstock.subscriber("bus:proto", type=timestamp_pb2.Timestamp) as subscriber,
        penstock.publisher("bus:proto", type=timestamp_pb2.Timestamp) as publisher,
    ):
        publisher.publish(timestamp_pb2.Timestamp(seconds=5, nanos=7))
        assert subscriber.receive(10).value == timestamp_pb2.Timestamp(seconds=5, nanos=7)
        with pytest.raises(TypeError, match="publish takes a Timestamp here, not Int64Value"):
            publisher.publish(wrappers_pb2.Int64Value(value=1))
        schema = types.Schema.parse(subscriber.schema or "")
    assert schema.name == "google.protobuf.Timestamp" and schema.language == "protobuf"
    assert schema.definition["protobuf"]["fields"]["2"] == {"name": "nanos", "type": "int32", "label": "optional"}
    with pytest.raises(penstock.RefusedError), penstock.publisher("bus:proto2", type=timestamp_pb2.Timestamp):
        penstock.subscriber("bus:proto2", type=wrappers_pb2.StringValue)


def test_arrow() -> None:
    schema = pyarrow.schema([("a", pyarrow.int64())])
    codec = types.codec_of(schema)
    batch = pyarrow.record_batch([pyarrow.array([1, 2, 3])], schema=schema)
    with (
        penstock.subscriber("bus:arrow", type=codec) as subscriber,
        penstock.publisher("bus:arrow", type=codec) as publisher,
    ):
        publisher.publish(batch)
        assert subscriber.receive(10).value.equals(batch)
        with pytest.raises(TypeError, match="the batch has columns"):
            publisher.publish(pyarrow.record_batch([pyarrow.array(["x"])], names=["b"]))
        with pytest.raises(TypeError, match="publish takes a RecordBatch"):
            publisher.publish(b"x")


def test_numpy() -> None:
    codec = types.codec_of(numpy.float64)
    assert codec.decode(b"").shape == (0,)
    assert numpy.array_equal(codec.decode(bytes(codec.encode(numpy.arange(6.0)[::2]))), [0.0, 2.0, 4.0])
    with pytest.raises(TypeError, match="publish takes an array of float64 here, not int64"):
        codec.encode(numpy.arange(3))
    with pytest.raises(TypeError, match="not list"):
        codec.encode([1.0])
    with pytest.raises(penstock.InvalidArgument, match="without Python objects"):
        types.codec_of(numpy.dtype(object))
    padded = numpy.dtype([("a", "u1"), ("b", "<f8")], align=True)
    again = types.codec_of(numpy.dtype([("a", "u1"), ("b", "<f8")], align=True))
    assert types.codec_of(padded).described() == again.described()
    assert types.first_difference(
        again.described(), types.codec_of(numpy.dtype([("a", "u1"), ("b", "<f8")])).described()
    )


def test_a_reserved_array_is_published_or_cancelled() -> None:
    with (
        penstock.publisher("shm:/types-reserve", type=numpy.dtype("i4")) as publisher,
        penstock.subscriber("shm:/types-reserve", type=numpy.dtype("i4")) as subscriber,
    ):
        with pytest.raises(RuntimeError), publisher.reserve(4):
            raise RuntimeError
        assert subscriber.read(0) is None
        draft = publisher.reserve(2)
        draft.array[:] = [1, 2]
        assert draft.publish() == 1
        assert subscriber.receive(10).value.tolist() == [1, 2]
        for size in (0, -1, True, "3"):
            with pytest.raises(penstock.InvalidArgument, match="1 or more items"):
                publisher.reserve(size)


def test_a_typed_draft_of_bytes_is_the_reachs_own() -> None:
    with (
        penstock.publisher("bus:types-draft", type=str) as publisher,
        penstock.subscriber("bus:types-draft", type=str) as subscriber,
    ):
        with publisher.reserve(2) as draft:
            draft.write(b"hi")
        assert subscriber.receive(10).value == "hi"


def test_a_name_stays_the_opaque_type_of_shared_memory() -> None:
    class Pose(msgspec.Struct):
        x: int

    with penstock.publisher("shm:/types-name", type="Pose") as plain:
        assert plain.publish(b"x") == 1
        with penstock.publisher("shm:/types-name", type=Pose), penstock.subscriber("shm:/types-name", type="Pose"):
            pass  # the same name
        with pytest.raises(
            penstock.RefusedError, match=r"carries Pose \(json\), not this str \(utf-8\): it is written as json"
        ):
            penstock.subscriber("shm:/types-name", type=str)
    with (
        penstock.publisher("shm:/types-name2", type="Pose"),
        pytest.raises(penstock.RefusedError, match="carries type 'Pose', not 'str'"),
    ):
        penstock.subscriber("shm:/types-name2", type=str)
    with pytest.raises(penstock.InvalidArgument, match="has no option 'type'"):
        penstock.publisher("bus:types-name", type="Pose")


def test_importing_types_imports_nothing_else() -> None:
    code = (
        "import sys, penstock, penstock.types as t\n"
        "t.codec_of(str); t.codec_of(dict)\n"
        "heavy = {'msgspec', 'numpy', 'pydantic', 'pyarrow', 'google.protobuf', 'penstock._core'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_msgspec_the_extra_is_named() -> None:
    code = (
        "import sys, dataclasses, penstock.types as t\n"
        "sys.modules['msgspec'] = None\n"
        "@dataclasses.dataclass\n"
        "class P:\n    x: int\n"
        "try:\n    t.codec_of(P)\n"
        'except ImportError as error:\n    assert "penstock[types]" in str(error), error\n'
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
