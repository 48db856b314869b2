"""Codecs: the kinds that are known, those that users add, and what is said of values that are not right."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import enum
import importlib.metadata
import math
import re
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import numpy
import pyarrow
import pydantic
import pytest
import typing_extensions
from google.protobuf import timestamp_pb2, wrappers_pb2

import penstock
from penstock import types
from penstock.types import codec as codecs
from penstock.types import first_difference


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


@pytest.mark.parametrize("given", ["text", None, 5])
def test_a_codec_that_gives_no_bytes_is_told(given: Any) -> None:
    wrong: types.Codec[Any] = types.Codec("Own", "own", {}, lambda value: given, lambda message: None)
    with penstock.publisher("bus:types-own", type=wrong) as publisher:
        for publish in (
            lambda: publisher.publish(1), lambda: publisher.publish_many([1]),
            lambda: asyncio.run(publisher.publish_async(1)),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=f"encode of Own gives {type(given).__name__}, and bytes are wanted"):
                publish()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schema": None}, "has a name, an encoding and a dict as"), ({"schema": "float"}, "has a name, an encoding"),
        ({"name": 5}, "has a name, an encoding"), ({"encoding": 5}, "has a name, an encoding"),
        ({"schema": {"type": "object", "properties": {}}}, "one entry, its language, such as {'jsonschema': ...}"),
        ({"schema": {"jsonschema": {"enum": {1, 2}}}}, "is no JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_a_codec_whose_schema_cannot_travel_is_refused(given: dict[str, Any], told: str) -> None:
    parts: dict[str, Any] = {"name": "Own", "encoding": "own", "schema": {}, **given}
    with pytest.raises(penstock.InvalidArgument, match=re.escape(told)):
        types.Codec(encode=bytes, decode=bytes, **parts).described()


def test_what_is_no_type_is_told_what_is() -> None:
    for kind, told in (
        (Pose(1.0), "give the class itself: type=Pose"), (timestamp_pb2.Timestamp(), "give the class itself"),
        (numpy.ndarray, "give the dtype"), (pyarrow.RecordBatch, "pyarrow.schema"), (pyarrow.Table, "pyarrow.schema"),
        (pydantic.BaseModel, "cannot be described"), (Lost, "cannot be described: name 'Nowhere'"),
        (pydantic.create_model("Held", f=(Callable[[int], int], ...)), "cannot be described: Cannot generate"),
        (object, "has no codec"), (numpy.dtype(("f4", 3)), "no array has items of the shape"), ("Pose", "is a name"),
    ):  # fmt: skip
        with pytest.raises(penstock.InvalidArgument, match=told):
            types.codec_of(kind)


@dataclasses.dataclass
class Lost:
    at: Nowhere  # type: ignore[name-defined]  # noqa: F821


def test_protobuf() -> None:
    with (
        penstock.subscriber("bus:proto", type=timestamp_pb2.Timestamp) as subscriber,
        penstock.publisher("bus:proto", type=timestamp_pb2.Timestamp) as publisher,
    ):
        publisher.publish(timestamp_pb2.Timestamp(seconds=5, nanos=7))
        assert subscriber.receive(10).value == timestamp_pb2.Timestamp(seconds=5, nanos=7)
        with pytest.raises(TypeError, match="expected a Timestamp, not Int64Value"):
            publisher.publish(wrappers_pb2.Int64Value(value=1))
        schema = types.Schema.parse(subscriber.schema or "")
    assert schema.name == "google.protobuf.Timestamp" and schema.language == "protobuf"
    assert schema.definition["protobuf"]["fields"]["2"] == {"name": "nanos", "type": "int32", "label": "optional"}
    with pytest.raises(penstock.RefusedError), penstock.publisher("bus:proto2", type=timestamp_pb2.Timestamp):
        penstock.subscriber("bus:proto2", type=wrappers_pb2.StringValue)


def test_an_arrow_batch_that_differs_in_null_alone_is_told() -> None:
    codec = types.codec_of(pyarrow.schema([pyarrow.field("x", pyarrow.int64(), nullable=False)]))
    with pytest.raises(TypeError, match="columns x int64, and not x int64 not null"):
        codec.encode(pyarrow.record_batch({"x": [1]}))


def test_publish_without_an_object_is_told_by_its_name() -> None:
    with (
        penstock.publisher("bus:types-none", type=Pose) as publisher,
        pytest.raises(TypeError, match=r"^publish\(\) missing"),
    ):
        publisher.publish()  # type: ignore[call-arg]


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
        with pytest.raises(TypeError, match="expected a RecordBatch"):
            publisher.publish(b"x")


def test_numpy() -> None:
    codec = types.codec_of(numpy.float64)
    assert codec.decode(b"").shape == (0,)
    assert numpy.array_equal(codec.decode(bytes(codec.encode(numpy.arange(6.0)[::2]))), [0.0, 2.0, 4.0])
    with pytest.raises(TypeError, match="expected an array of float64, not int64"):
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
        draft = publisher.reserve(numpy.int64(2))
        draft.array[:] = [1, 2]
        assert draft.publish() == 1
        assert subscriber.receive(10).value.tolist() == [1, 2]
        with publisher.reserve(0) as nothing:
            assert nothing.shape == (0,)
        assert subscriber.receive(10).value.shape == (0,)
        for size in (-1, True, "3", 2.0):
            with pytest.raises(penstock.InvalidArgument, match="0 or more items"):
                publisher.reserve(size)


def test_attrs_and_new_types() -> None:
    attrs = pytest.importorskip("attrs")
    point = attrs.make_class("Point", {"x": attrs.field(type=int)})
    for kind, value in ((point, point(1)), (NewType("Metres", int), 3), (list[point], [point(1)])):
        codec = types.codec_of(kind)
        assert codec.decode(codec.encode(value)) == value
    with pytest.raises(TypeError, match="field 'x' is an object"):
        types.codec_of(point).encode(point(object()))


class Order(pydantic.BaseModel):
    number: int


@dataclasses.dataclass
class Delivery:
    order: Order
    at: datetime.datetime | None = None


class Shelf(typing_extensions.TypedDict):
    orders: list[Order]


@pytest.mark.parametrize(
    ("kind", "value", "wrong", "place"),
    [
        (list[Order], [Order(number=1)], [Order(number=1), {"number": "2"}], "field '1.number': "),
        (Order | None, Order(number=1), 5, ""),
        (dict[str, list[Order]], {"a": [Order(number=1)]}, {"a": [5]}, "field 'a.0': "),
        (Delivery, Delivery(Order(number=1)), Order(number=1), ""),
        (Shelf, {"orders": [Order(number=1)]}, {"orders": [], "numbr": []}, None),
        (pydantic.RootModel[list[Order]], pydantic.RootModel[list[Order]]([Order(number=1)]), [Order(number=1)], None),
    ],
    ids=str,
)
def test_what_holds_pydantic_models(kind: Any, value: Any, wrong: Any, place: str | None) -> None:
    codec = types.codec_of(kind)
    assert codec.decode(codec.encode(value)) == value
    assert first_difference(codec.described(), codec.described()) is None and codec.described().checked()
    if place is not None:
        with pytest.raises(TypeError, match=rf"no valid .*: {place}Input should be "):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="Input should be"):
        codec.decode(b'"x"')


def test_pydantic_models_are_json_alone() -> None:
    with pytest.raises(penstock.InvalidArgument, match="pydantic models are written as JSON alone"):
        types.plain(list[Order], "msgpack")


class Count(msgspec.Struct):
    n: int
    more: list[int] = []


class Bytes(pydantic.BaseModel):
    name: str = ""
    body: list[bytes] = []


def test_a_value_that_cannot_be_written_is_told_by_its_field() -> None:
    packed = types.plain(Count, "msgpack")
    text, half = types.codec_of(str), "\ud800"
    itself: dict[str, Any] = {}
    itself["a"] = [itself]
    for codec, value, told in (
        (packed, Count(1 << 70), r"field 'n' cannot be written: .*2\*\*64"),
        (packed, Count(1, [3, -1 << 70]), r"field 'more\[1\]' cannot be written: .*2\*\*64"),
        (types.codec_of(Bytes), Bytes(body=[b"\xff"]), "field 'body' cannot be written: .*utf-8"),
        (types.codec_of(list[Bytes]), [Bytes(body=[b"\xff"])], "it cannot be written: .*utf-8"),
        (types.codec_of(dict), {"a": {"b": half}}, "field 'a.b' cannot be written: .*surrogates"),
        (types.codec_of(dict[str, str]), {"a": half}, "field 'a' cannot be written: .*surrogates"),
        (text, half, "it cannot be written: .*surrogates"),
        (types.codec_of(dict), itself, "it cannot be written: it holds itself"),
        (types.codec_of(dict[str, Any]), itself, "it cannot be written: it holds itself"),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            codec.encode(value)


def test_a_value_that_cannot_be_written_is_not_held() -> None:
    class Held(list[int]):
        pass

    value = Held([1 << 70])
    gone = weakref.ref(value)
    with contextlib.suppress(ValueError):
        types.plain(list[int], "msgpack").encode(value)
    del value
    assert gone() is None


def test_a_dtype_whose_fields_overlap_is_refused() -> None:
    both = numpy.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]})
    with pytest.raises(penstock.InvalidArgument, match="overlapping"):
        types.codec_of(both)


def test_a_dict_is_json_in_utf_8() -> None:
    with pytest.raises(UnicodeDecodeError):
        types.codec_of(dict).decode('{"a": 1}'.encode("utf-16"))


def test_bytes_are_not_reserved_as_objects() -> None:
    with (
        penstock.publisher("bus:types-draft", type=str) as publisher,
        penstock.subscriber("bus:types-draft", type=str) as subscriber,
    ):
        with pytest.raises(penstock.InvalidArgument, match="reserve is for numpy dtypes and Image, not str"):
            publisher.reserve(2)
        with publisher.inner.reserve(2) as draft:
            draft.write(b"hi")
        assert subscriber.receive(10).value == "hi"


def test_an_array_is_reserved_in_an_event_loop() -> None:
    async def talk(publisher: Any) -> None:
        async with publisher.reserve_async(2) as array:
            array[:] = [1, 2]
        with pytest.raises(RuntimeError):
            async with publisher.reserve_async(2):
                raise RuntimeError
        array = (await publisher.reserve_async(1)).array
        assert array.shape == (1,)

    with (
        penstock.publisher("bus:types-async", type=numpy.dtype("i4")) as publisher,
        penstock.subscriber("bus:types-async", type=numpy.dtype("i4")) as subscriber,
    ):
        asyncio.run(talk(publisher))
        assert subscriber.receive(10).value.tolist() == [1, 2]
        assert subscriber.read(0) is None


# --- what its own type cannot read is not published


class Pose(msgspec.Struct):
    x: float
    y: float | None = None


@dataclasses.dataclass
class Path:
    poses: list[Pose]
    name: Any = ""


class Reading(TypedDict):
    value: float


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_refused(number: float) -> None:
    for kind, value, place in (
        (Pose, Pose(number), "field 'x'"),
        (Pose, Pose(1.0, number), "field 'y'"),
        (Path, Path([Pose(1.0), Pose(number)]), r"field 'poses\[1\].x'"),
        (Reading, {"value": number}, "field 'value'"),
        (float, number, "it"),
        (dict[str, float], {"a": number}, "field 'a'"),
    ):
        with pytest.raises(ValueError, match=f"^{place} is -?(nan|inf), which JSON cannot hold"):
            types.codec_of(kind).encode(value)
        packed: types.Codec[Any] = types.plain(kind, "msgpack")
        assert str(packed.decode(packed.encode(value))) == str(value)
    whole = Pose(1.0, None)
    assert types.codec_of(Pose).decode(types.codec_of(Pose).encode(whole)) == whole
    assert types.codec_of(Path).encode(Path([], "null")) == b'{"poses":[],"name":"null"}'


def test_pydantic_refuses_it_too_unless_its_model_holds_it() -> None:
    class Model(pydantic.BaseModel):
        x: float | None = None
        deep: dict[str, list[float]] = {}

    class Constants(Model):
        model_config = pydantic.ConfigDict(ser_json_inf_nan="constants")

    codec = types.codec_of(Model)
    with pytest.raises(ValueError, match=r"field 'deep.a\[1\]' is inf"):
        codec.encode(Model(deep={"a": [1.0, math.inf]}))
    with pytest.raises(ValueError, match="field 'x' is nan"):
        codec.encode(Model(x=math.nan))
    assert codec.decode(codec.encode(Model())) == Model()
    constants = types.codec_of(Constants)
    assert math.isnan(constants.decode(constants.encode(Constants(x=math.nan))).x)


def test_pydantic_reads_what_it_writes_or_is_refused() -> None:
    class Alias(pydantic.BaseModel):
        x: float = pydantic.Field(alias="xPos")

    codec = types.codec_of(Alias)
    assert codec.decode(codec.encode(Alias(xPos=1.5))).x == 1.5
    assert codec.schema["jsonschema"]["required"] == ["xPos"]

    class ByName(Alias):
        model_config = pydantic.ConfigDict(validate_by_alias=False, validate_by_name=True)

    codec = types.codec_of(ByName)
    assert codec.decode(codec.encode(ByName(x=2.5))).x == 2.5

    class Other(pydantic.BaseModel):
        x: float = pydantic.Field(validation_alias="a", serialization_alias="b")

    class LeftOut(pydantic.BaseModel):
        x: float = pydantic.Field(exclude=True)

    class Computed(pydantic.BaseModel, extra="forbid"):
        x: float

        @pydantic.computed_field
        def double(self) -> float:
            return 2 * self.x

    class Holds(pydantic.BaseModel):
        inner: list[Other]

    class Secret(pydantic.BaseModel):
        key: pydantic.SecretStr

    class Told(Secret):
        @pydantic.field_serializer("key")
        def _told(self, key: pydantic.SecretStr) -> str:
            return key.get_secret_value()

    class Text(pydantic.BaseModel):
        inner: pydantic.Json[Any]

    told = types.codec_of(Told)
    for kind, value in ((Secret, Secret(key=pydantic.SecretStr("a"))), (list[Secret], [Secret(key=pydantic.SecretStr("a"))])):
        with pytest.raises(ValueError, match="a secret is written as asterisks"):
            types.codec_of(kind).encode(value)
    assert told.decode(told.encode(Told(key=pydantic.SecretStr("a")))).key.get_secret_value() == "a"
    for kind, field in (
        (Other, "a"), (LeftOut, "x"), (Computed, "double"), (Holds, "a"), (Text, "inner"),
    ):  # fmt: skip
        with pytest.raises(penstock.InvalidArgument, match=f"cannot read its own messages: it .* field '{field}'"):
            types.codec_of(kind)


def test_pydantic_says_which_field() -> None:
    class Model(pydantic.BaseModel):
        x: float
        inner: dict[str, int] = {}

    with pytest.raises(ValueError, match=r"field 'inner.a': Input should be a valid integer.* \(and 1 more\)"):
        types.codec_of(Model).decode(b'{"x":1.0,"inner":{"a":"b","c":"d"}}')


def test_objects_whose_class_says_little_are_checked() -> None:
    for kind, value, told in (
        (Reading, {"value": "high"}, r"no valid Reading: Expected `float`, got `str` - at `\$.value`"),
        (Reading, {}, "missing required field `value`"),
        (Reading, {"value": None}, "Expected `float`, got `null`"),
        (list[Pose], [1], r"no valid list\[Pose\]: Expected `object`, got `int`"),
        (tuple[int, str], (1, 2), "Expected `str`, got `int`"),
        (int, True, "Expected `int`, got `bool`"),
    ):
        with pytest.raises(TypeError, match=told):
            types.codec_of(kind).encode(value)
    wrong = Pose("abc")  # type: ignore[arg-type]
    assert types.codec_of(Pose).encode(wrong)  # its class vouches for it, unless asked
    with pytest.raises(TypeError, match="Expected `float`, got `str`"):
        types.plain(Pose, check=True).encode(wrong)


def test_numpys_numbers_are_numbers_and_strange_objects_are_named() -> None:
    codec = types.codec_of(Path)
    value = Path([Pose(numpy.float64(0.5)), Pose(numpy.float32(2.0))], numpy.int64(7))
    assert codec.decode(codec.encode(value)) == Path([Pose(0.5), Pose(2.0)], 7)
    for kind, number in ((float, numpy.float32(0.5)), (int, numpy.int16(7)), (bool, numpy.bool_(True)), (float, 7)):
        assert types.codec_of(kind).decode(types.codec_of(kind).encode(number)) == number
    with pytest.raises(TypeError, match=r"no valid Path: field 'poses\[1\].x' is an object"):
        codec.encode(Path([Pose(1.0), Pose(object())]))  # type: ignore[arg-type]


# --- what msgspec can


class Move(msgspec.Struct, tag=True):
    x: float


class Stop(msgspec.Struct, tag=True):
    pass


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    at: datetime.datetime


T = TypeVar("T")


class Box(msgspec.Struct, Generic[T]):
    value: T
    at: datetime.datetime


NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
KINDS: list[tuple[Any, Any, str]] = [
    (Move | Stop, Stop(), "Move | Stop"),
    (Move | Stop | None, None, "Move | Stop | None"),
    (list[Move | Stop], [Stop(), Move(1.0)], "list[Move | Stop]"),
    (Color, Color.RED, "Color"),
    (Pair, Pair(1, NOW), "Pair"),
    (Box[int], Box(1, NOW), "Box[int]"),
    (tuple[int, str], (1, "a"), "tuple[int, str]"),
    (datetime.datetime, NOW, "datetime"),
    (int, 3, "int"),
    (float, 2, "float"),
    (bool, True, "bool"),
    (Any, [1, {"a": None}], "Any"),
    (Literal["a", "b"], "a", "Literal['a', 'b']"),
    (Annotated[int, msgspec.Meta(ge=0)], 4, "int"),
    (bytes, b"\0raw", "bytes"),
]


@pytest.mark.parametrize(("kind", "value", "name"), KINDS, ids=[name for *_, name in KINDS])
def test_unions_numbers_times_and_tuples(kind: Any, value: Any, name: str) -> None:
    address = f"bus:types-kind-{name}"
    with penstock.subscriber(address, type=kind) as subscriber, penstock.publisher(address, type=kind) as publisher:
        publisher.publish(value)
        assert subscriber.receive(10).value == value
        assert types.Schema.parse(publisher.schema or "").name == name
        with pytest.raises(TypeError) if kind is not Any else contextlib.nullcontext():
            publisher.publish(Pose(1.0))
        assert kind is Any or subscriber.read(0) is None


def test_a_union_that_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(penstock.InvalidArgument, match=r"cannot be described: .*more than one"):
        types.codec_of(Pose | Path)


def test_long_names_are_cut() -> None:
    kind: Any = dict[str, Pose]
    for _ in range(20):
        kind = dict[str, kind]
    assert len(types.codec_of(kind).described().name.encode()) == 112


def test_names_of_any_letters_keep_their_times() -> None:
    for name in ("Size", "Größe"):
        written = dataclasses.make_dataclass(name, [("when", str)])
        read = dataclasses.make_dataclass(name, [("when", datetime.datetime)])
        difference = types.first_difference(types.codec_of(written).described(), types.codec_of(read).described())
        assert difference is not None and "'when'" in difference
    text = types.codec_of(dataclasses.make_dataclass("Out", [("box", Box[int]), ("also", list[Pair | None])])).schema
    assert [
        node["properties" if "properties" in node else "prefixItems"] for node in text["jsonschema"]["$defs"].values()
    ] == [
        {
            "box": {"$ref": "#/$defs/Box_int_"},
            "also": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Pair"}, {"type": "null"}]}},
        },
        {"value": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}},
        [{"type": "integer"}, {"type": "string", "format": "date-time"}],
    ]


def test_field_names_of_any_letters_are_read_by_a_process_that_only_reads() -> None:
    code = (
        "import dataclasses, typing, penstock.types as t\n"
        "@dataclasses.dataclass\n"
        "class Inner:\n    größe: int = 0\n"
        "@dataclasses.dataclass\n"
        "class Size:\n    länge: float = 0.0\n    innen: list[Inner] = dataclasses.field(default_factory=list)\n"
        "class Words(typing.TypedDict, total=False):\n    über: str\n"
        'found = t.codec_of(Size).decode(\'{"länge":1.5,"innen":[{"größe":7}]}\'.encode())\n'
        "assert found == Size(1.5, [Inner(7)]), found\n"
        "assert t.codec_of(Words).decode('{\"über\":\"a\"}'.encode()) == {'über': 'a'}\n"
        "@dataclasses.dataclass\n"
        "class Packed:\n    öl: float = 0.0\n"
        "assert t.plain(Packed, 'msgpack').decode(b'\\x81\\xa3\\xc3\\xb6l\\x05').öl == 5\n"
    )
    subprocess.run([sys.executable, "-X", "utf8", "-c", code], check=True, timeout=60)


def test_damaged_arrow_bytes_are_no_value() -> None:
    batch = pyarrow.record_batch([pyarrow.array(["a", "b"])], names=["s"])
    codec = types.codec_of(batch.schema)
    good = bytes(codec.encode(batch))
    at = good.rindex(struct.pack("<3i", 0, 1, 2))
    with pytest.raises(pyarrow.ArrowInvalid):
        codec.decode(good[:at] + struct.pack("<3i", 0, 1, 2_000_000_000) + good[at + 12 :])
    assert codec.decode(good).equals(batch)
    with pytest.raises(TypeError, match="the batch has columns s int64, and not s string"):
        codec.encode(pyarrow.record_batch([pyarrow.array([1])], names=["s"]))


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
    with pytest.raises(penstock.InvalidArgument, match="type='Pose' is a name, which shm alone compares"):
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


def test_a_dict_that_json_cannot_hold_names_the_field() -> None:
    encode = types.codec_of(dict).encode
    with pytest.raises(TypeError, match=r"field 'a\.b\[1\]' is a set"):
        encode({"a": {"b": [1, {2}]}})
    with pytest.raises(ValueError, match=r"field 'a\.b\[0\]' is nan, which JSON cannot hold"):
        encode({"a": {"b": [float("nan")]}})
    assert encode({"n": numpy.float32(1.5)}) == b'{"n":1.5}'
