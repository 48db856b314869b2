"""Values by the schema that travels: every encoding, fields by name, columns of a shape."""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import json
from typing import Any

import msgspec
import numpy
import pyarrow
import pydantic
import pytest
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2

import penstock
from penstock import types
from penstock.errors import InvalidArgument, ProtocolError
from penstock.types import Schema
from penstock.types.conformity import check_json
from penstock.types.fields import Rows, Values, at, check_path, fitted, json_text, parse_path, reader_of
from penstock.types.shape import ANY, Shape, arrow_type, json_schema, numeric_paths, shape_of


class Color(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: float
    y: int | None = None


class Pose(msgspec.Struct):
    at: Point
    tags: dict[str, int]
    path: list[Point]
    raw: bytes = b""
    color: Color = Color.RED
    either: int | str = 0
    when: datetime.datetime | None = None
    pair: tuple[int, int] = (0, 0)


class Tree(msgspec.Struct):
    children: list[Tree] = []


class Order(pydantic.BaseModel):
    number: int
    note: str | None = None


POSE = Pose(Point(1.5), {"a": 1}, [Point(2.0, 3)], b"\x00\xff", either="text")


def travelled(kind: Any) -> Schema:
    """What another program gets to see of it."""
    return Schema.parse(types.codec_of(kind).described().text)


def read(kind: Any, value: Any) -> Any:
    codec = types.codec_of(kind)
    return reader_of(travelled(kind))(bytes(codec.encode(value)))


RECORD = numpy.dtype([("t", "<i8"), ("xyz", "<f4", 3), ("in", [("a", "u1"), ("b", "S2")])])


def records(count: int) -> Any:
    made = numpy.zeros(count, RECORD)
    made["t"] = range(count)
    made["in"]["b"] = b"hi"
    return made


ROW = {"t": 0, "xyz": [0.0, 0.0, 0.0], "in": {"a": 0, "b": b"hi"}}
ARROW = pyarrow.schema([("n", pyarrow.int32()), ("words", pyarrow.list_(pyarrow.string()))])


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (Point, Point(1.5), {"x": 1.5, "y": None}),
        (types.plain(Point, "msgpack"), Point(1.5, 2), {"x": 1.5, "y": 2}),
        (types.plain(Pose, "msgpack"), POSE, {"either": "text", "raw": b"\x00\xff"}),
        (Order, Order(number=3), {"number": 3, "note": None}),
        (timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(seconds=1 << 40), {"seconds": 1 << 40, "nanos": 0}),
        (str, "hé", "hé"),
        (dict, {"a": 1}, {"a": 1}),
        (numpy.dtype("<f4"), numpy.array([0.5, 1.5], "<f4"), [0.5, 1.5]),
        (RECORD, records(1), [ROW]),
        (ARROW, pyarrow.record_batch([[1, 2], [["a"], []]], schema=ARROW), [{"n": 1, "words": ["a"]}, {"n": 2, "words": []}]),
        (penstock.Image, penstock.Image(numpy.zeros((1, 2), "u1"), "mono8"), {"shape": [1, 2], "dtype": "|u1", "data": b"\0\0"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_every_encoding(kind: Any, value: Any, wanted: Any) -> None:
    found = read(kind, value)
    assert {name: found[name] for name in wanted} == wanted if isinstance(wanted, dict) else found == wanted


def test_protobuf_in_all_its_parts() -> None:
    field = descriptor_pb2.FieldDescriptorProto
    value = field(name="n", number=7, type=field.TYPE_ENUM, label=field.LABEL_REPEATED)
    found = read(field, value)
    assert (found["name"], found["number"], found["type"], found["label"]) == ("n", 7, "TYPE_ENUM", "LABEL_REPEATED")
    assert found["options"] is None and found["json_name"] is None
    whole = struct_pb2.Struct()
    whole.update({"a": 1.5, "b": [True]})
    assert read(struct_pb2.Struct, whole)["fields"]["a"]["number_value"] == 1.5
    shape = shape_of(travelled(struct_pb2.Struct))
    assert dict(shape.fields)["fields"].kind == "map"
    assert fitted(read(struct_pb2.Struct, whole), shape)["fields"]


@pytest.mark.parametrize("kind", [Pose, types.plain(Pose, "msgpack"), Tree, Order, RECORD, ARROW, timestamp_pb2.Timestamp, penstock.Image, str, dict], ids=str)
def test_a_shape_is_a_type_of_columns_and_a_plain_json_schema(kind: Any) -> None:
    shape = shape_of(travelled(kind))
    assert isinstance(arrow_type(shape), pyarrow.DataType)
    assert "$ref" not in json.dumps(json_schema(shape))


def test_the_columns_of_a_struct() -> None:
    kinds = {name: str(arrow_type(part)) for name, part in shape_of(travelled(Pose)).fields}
    point = "struct<x: double, y: int64>"
    assert kinds == {
        "at": point, "tags": "map<string, int64>", "path": f"list<item: {point}>", "raw": "binary", "color": "string",
        "either": "string", "when": "string", "pair": "list<item: int64>",
    }  # fmt: skip
    for kind in (Pose, types.plain(Pose, "msgpack")):
        row = fitted(read(kind, POSE), shape_of(travelled(kind)))
        assert row["raw"] == b"\x00\xff" and row["tags"] == [("a", 1)] and row["either"] == '"text"'
        assert pyarrow.array([row], arrow_type(shape_of(travelled(kind)))).to_pylist()[0]["at"] == {"x": 1.5, "y": None}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1 << 63, "int64"), (-1, "uint8"), (256, "uint8"), (1.5, "int32"), (float("inf"), "int64"), ("1", "int64"),
     (True, "int64"), (1, "bool"), (1, "text"), ("%", "bytes"), ([], "struct"), ({}, "list"), ([], "map")],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        fitted(value, Shape(kind))


def test_fields_by_name() -> None:
    value = {"a": {"b c": [{"d": 1}]}}
    assert at(value, parse_path('a["b c"][0].d')) == 1
    assert at(value, parse_path("a.x[3]")) is None
    rows = read(RECORD, records(3))
    assert at(rows, parse_path("t")) == [0, 1, 2]
    assert at(rows, parse_path("[2].t")) == 2
    assert at(read(RECORD, records(1)), parse_path("in.b")) == b"hi"
    assert at(Rows([1.5, 2.5]), ["t"]) is None
    for wrong in ("", ".", "a..b", "a[", "a[x]", "a]b", "[0]b"):
        with pytest.raises(InvalidArgument):
            parse_path(wrong)


def test_a_field_that_is_not_there_is_told_with_those_that_are() -> None:
    check_path(travelled(Pose), "at.x")
    check_path(travelled(Pose), "path[3].y")
    check_path(travelled(Pose), "tags.anything")
    check_path(travelled(Pose), "either.whatever")
    for wrong in ("at.z", "att", "at.x.deeper", "path.x"):
        with pytest.raises(InvalidArgument, match="Pose has no field"):
            check_path(travelled(Pose), wrong)


def test_a_name_with_a_dot_is_told_how_it_is_written() -> None:
    dotted = travelled(msgspec.defstruct("Dots", [("x", int)], rename={"x": "a.b"}))
    check_path(dotted, '["a.b"]')
    with pytest.raises(InvalidArgument, match=r"""did you mean \["a\.b"\]\?"""):
        check_path(dotted, "a.b")


class Branches(msgspec.Struct):
    n: int
    a: list[Branches] = []
    b: dict[str, Branches] = {}
    c: Branches | None = None


def test_what_holds_itself_is_json_within() -> None:
    kinds = {name: str(arrow_type(part)) for name, part in shape_of(travelled(Branches)).fields}
    assert kinds == {"n": "int64", "a": "list<item: string>", "b": "map<string, string>", "c": "string"}
    row = fitted(read(Branches, Branches(1, [Branches(2)])), shape_of(travelled(Branches)))
    assert row["n"] == 1 and json.loads(row["a"][0])["n"] == 2
    held = dict(shape_of(travelled(struct_pb2.ListValue)).fields)["values"].item
    assert held is not None and dict(held.fields)["list_value"] == ANY and dict(held.fields)["bool_value"].kind == "bool"


def test_a_column_has_what_a_model_writes() -> None:
    class Price(pydantic.BaseModel):
        total: decimal.Decimal
        lines: list[decimal.Decimal] = []

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> float:
            return 2 * float(self.total)

    value = Price(total=decimal.Decimal("1.50"), lines=[decimal.Decimal(2)])
    shape = shape_of(travelled(Price))
    assert fitted(read(Price, value), shape) == {"total": "1.50", "lines": ["2"], "twice": 3.0}
    check_json(read(Price, value), travelled(Price).definition["jsonschema"])
    with pytest.raises(ValueError, match="'twice'"):
        check_json({"total": "1", "twice": "x"}, travelled(Price).definition["jsonschema"])

    class Whole(pydantic.BaseModel):
        x: int

        @pydantic.model_serializer
        def _whole(self) -> dict[str, Any]:
            return {"x": self.x, "more": "a"}

    class Holds(pydantic.BaseModel):
        inner: Whole

    for kind, model in ((Whole, Whole(x=1)), (Holds, Holds(inner=Whole(x=1)))):
        codec = types.codec_of(kind)
        assert codec.decode(codec.encode(model)) == model
        check_json(read(kind, model), travelled(kind).definition["jsonschema"])
        fitted(read(kind, model), shape_of(travelled(kind)))
    root = pydantic.RootModel[decimal.Decimal]
    assert fitted(read(root, root(decimal.Decimal("1.5"))), shape_of(travelled(root))) == "1.5"


def test_json_of_any_value() -> None:
    value = {"a": b"\xff", "b": float("nan"), "c": [float("inf")], "d": datetime.date(2026, 1, 2), "e": b"x" * 9}
    found = json.loads(json_text(value, 8), parse_constant=pytest.fail)
    assert found == {"a": base64.b64encode(b"\xff").decode(), "b": None, "c": [None], "d": "2026-01-02", "e": "9 bytes"}


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"n","encoding":"numpy","definition":{"dtype":"|O"}}',
        '{"name":"n","encoding":"numpy","definition":{"dtype":[["a"]]}}',
        '{"name":"n","encoding":"numpy","definition":{}}',
        '{"name":"n","encoding":"protobuf","definition":{"protobuf":{"message":"x","files":"AAAA","fields":{},"messages":{}}}}',
        '{"name":"n","encoding":"protobuf","definition":{"protobuf":[]}}',
        '{"name":"n","encoding":"arrow","definition":{"arrow":{"ipc":"AAAA","fields":[]}}}',
        '{"name":"n","encoding":"json","definition":{"jsonschema":{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}}}',
        '{"name":"n","encoding":"json","definition":{"jsonschema":{"anyOf":7}}}',
        '{"name":"n","encoding":"json","definition":{"jsonschema":3}}',
        '{"name":"n","encoding":"nobody knows","definition":{}}',
    ],
)  # fmt: skip
def test_a_damaged_schema_is_a_protocol_error_or_harmless(text: str) -> None:
    schema = Schema.parse(text)
    for make in (shape_of, reader_of):
        try:
            made = make(schema)
        except ProtocolError:
            continue
        if make is reader_of:
            with pytest.raises(ValueError, match=r"."):
                made(b"\x01\x02\x03")  # type: ignore[operator]


@pytest.mark.parametrize("kind", [Point, types.plain(Point, "msgpack"), timestamp_pb2.Timestamp, RECORD, ARROW, penstock.Image, str], ids=str)
def test_bytes_that_are_no_message_of_it(kind: Any) -> None:
    value_of = reader_of(travelled(kind))
    for body in (b"\xff\xff\xff", b"\x81\xa1", bytes(range(200, 256))):
        with pytest.raises(ValueError, match=r"."):
            value_of(body)


def test_the_values_of_a_subscriber_by_topic(tmp_path: Any) -> None:
    where = f"journal:{tmp_path / 'j'}"
    with penstock.publisher(f"{where}#a", type=types.plain(Point, "msgpack")) as publisher:
        publisher.publish(Point(1.0))
    with penstock.publisher(f"{where}#b", type=RECORD) as publisher:
        publisher.publish(records(1))
    with penstock.publisher(f"{where}#c") as publisher:
        publisher.publish(b'{"plain": 1}')
        publisher.publish(b"none")
    with penstock.subscriber(f"{where}#>", start="first") as subscriber:
        values = Values(subscriber)
        a, b, c, d = subscriber.read_many(10, 10)
        assert (values(a), values(b), values(c)) == ({"x": 1.0, "y": None}, [ROW], {"plain": 1})
        with pytest.raises(ValueError, match=r"."):
            values(d)
        assert values.schema("a") is not None and values.schema("c") is None


def test_numeric_paths_lead_to_the_numbers() -> None:
    number, text = Shape("float64"), Shape("text")
    inner = Shape("struct", None, (("x", number), ("odd name", Shape("bool")), ("a.b", Shape("int8")), ('"', number)))
    shape = Shape("struct", None, (("n", Shape("uint8")), ("t", text), ("at", inner), ("l", Shape("list", number))))
    paths = numeric_paths(shape)
    assert paths == ["n", "at.x", "at.odd name", 'at["a.b"]']
    value = {"n": 1, "at": {"x": 2.0, "odd name": True, "a.b": 3}}
    assert [at(value, parse_path(path)) for path in paths] == [1, 2.0, True, 3]
    assert numeric_paths(shape, 2) == paths[:2] and numeric_paths(number) == []
