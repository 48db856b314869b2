"""The rules of docs/types.md: whoever is let in can read what is written, and a refusal names the field."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import itertools
import uuid
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import msgspec
import numpy
import pyarrow
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import types
from penstock.errors import InvalidArgument, ProtocolError, RefusedError
from penstock.types import Schema, Terms, codec_of, first_difference
from penstock.types.conformity import check_json
from penstock.types.fields import fitted, reader_of
from penstock.types.shape import shape_of

# --- generated schemas

SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-(2**53), 2**53)),
    (float, st.floats(allow_nan=False, allow_infinity=False, width=32)),
    (str, st.text(max_size=5)),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=5)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Literal["a"], st.just("a")),
    (Literal[1, 2], st.sampled_from([1, 2])),
    (Annotated[int, msgspec.Meta(ge=0)], st.integers(0, 9)),
    (Annotated[int, msgspec.Meta(ge=1, le=5)], st.integers(1, 5)),
    (Annotated[int, msgspec.Meta(gt=1, lt=5)], st.integers(2, 4)),
    (Annotated[str, msgspec.Meta(max_length=2)], st.text(max_size=2)),
    (Annotated[str, msgspec.Meta(min_length=1, max_length=3)], st.text(min_size=1, max_size=3)),
]


@st.composite
def kinds(draw: Any, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type, and the values that it has."""
    shape = draw(st.sampled_from(["scalar", "scalar", "optional", "list", "dict", "tuple", "struct", "union"]))
    if depth == 0 or shape == "scalar":
        return draw(st.sampled_from(SCALARS))  # type: ignore[no-any-return]
    kind, values = draw(kinds(depth - 1))
    if shape == "optional":
        return Optional[kind], st.none() | values  # noqa: UP045 - made at run time
    if shape == "list":
        return list[kind], st.lists(values, max_size=3)
    if shape == "dict":
        return dict[str, kind], st.dictionaries(st.text(max_size=2), values, max_size=3)
    if shape == "tuple":
        return tuple[kind, int], st.tuples(values, st.integers(0, 9))
    if shape == "union":
        return int | str, st.integers(0, 9) | st.text(max_size=3)
    return build(draw(fields(depth - 1)))


@st.composite
def fields(draw: Any, depth: int = 2) -> dict[str, tuple[Any, st.SearchStrategy[Any], bool]]:
    """Fields of a struct: type, values, and whether it may be left out."""
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
    return {name: (*draw(kinds(depth)), draw(st.booleans())) for name in names}


_numbers = itertools.count()


def build(parts: dict[str, tuple[Any, st.SearchStrategy[Any], bool]]) -> tuple[Any, st.SearchStrategy[Any]]:
    """A struct of these fields, and its values. What may be left out is sometimes left out."""
    wanted = sorted(parts, key=lambda name: parts[name][2])
    entries = [(name, kind | msgspec.UnsetType, msgspec.UNSET) if optional else (name, kind)
               for name in wanted for kind, _, optional in [parts[name]]]  # fmt: skip
    struct = msgspec.defstruct(f"S{next(_numbers)}", entries)
    given_values = {name: values for name, (_, values, optional) in parts.items() if not optional}
    maybe = {name: values for name, (_, values, optional) in parts.items() if optional}
    made = st.fixed_dictionaries(given_values, optional=maybe).map(lambda found: struct(**found))
    return struct, made


@st.composite
def pairs(draw: Any, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any], Any]:
    """A writer's type with its values, and a reader's of nearly the same shape."""
    shapes = ["scalar", "scalar", "optional", "list", "dict", "tuple", "struct", "record"]
    shape = draw(st.sampled_from(shapes))
    if depth == 0 or shape == "scalar":
        kind, values = draw(st.sampled_from(SCALARS))
        return kind, values, draw(st.sampled_from([kind, kind, *(other for other, _ in SCALARS)]))
    if shape == "struct":
        return draw(structs(depth - 1))  # type: ignore[no-any-return]
    kind, values, other = draw(pairs(depth - 1))
    if shape == "optional":
        if draw(st.booleans()):
            other = Optional[other]  # noqa: UP045 - made at run time
        return Optional[kind], st.none() | values, other  # noqa: UP045
    if shape == "list":
        return list[kind], st.lists(values, max_size=3), draw(st.sampled_from([list[other], tuple[other, ...]]))
    if shape == "dict":
        (key, keys), (other_key, _) = draw(st.sampled_from(KEYS)), draw(st.sampled_from(KEYS))
        return dict[key, kind], st.dictionaries(keys, values, max_size=3), dict[other_key, other]
    if shape == "record":
        return draw(records(kind, values, other))  # type: ignore[no-any-return]
    shorter = tuple[other, int], tuple[other], tuple[other, int, int], list[other]  # type: ignore[valid-type]
    return tuple[kind, int], st.tuples(values, st.integers(0, 9)), draw(st.sampled_from(shorter))


KEYS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.sampled_from("abc")), (str, st.sampled_from("12")), (int, st.integers(0, 3)), (Literal["a", "b"], st.sampled_from("ab")),
    (Annotated[int, msgspec.Meta(ge=2)], st.integers(2, 3)),
]  # fmt: skip


@st.composite
def records(draw: Any, kind: Any, values: st.SearchStrategy[Any], other: Any) -> tuple[Any, st.SearchStrategy[Any], Any]:
    """Records that are written as arrays: the reader's fields in another order, or more, or fewer of them."""
    names = draw(st.permutations(["a", "b", "c"]))
    others = draw(st.permutations(["a", "b", "c"]) | st.just(names) | st.just(names[:2]))
    if draw(st.booleans()):
        writer = msgspec.defstruct(f"W{next(_numbers)}", [(name, kind) for name in names], array_like=True)
        reader = msgspec.defstruct(f"R{next(_numbers)}", [(name, other) for name in others], array_like=True)
    else:
        writer = collections.namedtuple(f"W{next(_numbers)}", names)  # type: ignore[misc]
        reader = collections.namedtuple(f"R{next(_numbers)}", others)  # type: ignore[misc]
        writer.__annotations__, reader.__annotations__ = dict.fromkeys(names, kind), dict.fromkeys(others, other)
    return writer, st.fixed_dictionaries(dict.fromkeys(names, values)).map(lambda found: writer(**found)), reader


def assert_same(written: Any, read: Any) -> None:
    """Every field that both have has the value that was written, under its own name."""
    fields = getattr(read, "__struct_fields__", getattr(read, "_fields", None))
    if fields is not None and not isinstance(written, dict):
        for name in fields:
            if hasattr(written, name) and not isinstance(getattr(written, name), msgspec.UnsetType):
                assert_same(getattr(written, name), getattr(read, name))
    elif isinstance(read, dict):
        assert read.keys() == written.keys()
        for key, value in read.items():
            assert_same(written[key], value)
    elif isinstance(read, list | tuple):
        for one, other in zip(written, read, strict=False):
            assert_same(one, other)
    else:
        assert read == written


@st.composite
def structs(draw: Any, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any], Any]:
    """A writer's struct with its values, and a reader's that has most of its fields, changed or not."""
    before, after = {}, {}
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        kind, values, other = draw(pairs(depth))
        optional = draw(st.booleans())
        before[name] = kind, values, optional
        if draw(st.integers(0, 4)):
            after[name] = other, values, draw(st.sampled_from([optional, optional, True, False]))
    if draw(st.booleans()):
        after["e"] = int, st.integers(), draw(st.booleans())
    writer, made = build(before)
    return writer, made, build(after)[0]


@given(structs(), st.data(), st.sampled_from(["json", "msgpack"]))
@settings(max_examples=300, deadline=None)
def test_who_is_let_in_can_read(change: Any, data: Any, encoding: str) -> None:
    writer, values, reader = change
    mine, theirs = types.plain(writer, encoding), types.plain(reader, encoding)
    if first_difference(mine.described(), theirs.described()) is None:
        value = data.draw(values)
        assert_same(value, theirs.decode(mine.encode(value)))


SAMPLES: list[tuple[Any, list[Any]]] = [
    (int, [-1, 0, 2**60]), (float, [0.5, -1.0]), (str, ["", "abc", "?"]), (bool, [True, False]), (bytes, [b"", b"\xff\x00"]),
    (Literal["a", "b"], ["a", "b"]), (Literal["a"], ["a"]), (Literal[1, 2], [1, 2]), (None, [None]),
    (Annotated[int, msgspec.Meta(ge=0)], [0, 9]), (Annotated[int, msgspec.Meta(ge=5)], [5, 9]),
    (Annotated[str, msgspec.Meta(max_length=2)], ["", "ab"]), (datetime.datetime, [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)]),
    (datetime.date, [datetime.date(2020, 1, 2)]), (uuid.UUID, [uuid.UUID(int=5)]), (decimal.Decimal, [decimal.Decimal("1.5")]),
    (list[int], [[], [1]]), (list[str], [["a"]]), (tuple[int, int], [(1, 2)]), (tuple[int, ...], [(), (1, 2, 3)]), (dict[str, int], [{"a": 1}]),
    (dict[str, str], [{"a": "b"}]), (int | str, [1, "a"]), (int | None, [1, None]), (Any, [1, "a", None, [1]]),
]  # fmt: skip


def test_every_pair_of_simple_types() -> None:
    """Whatever is let in decodes; and what every reader must take is let in."""
    let_in = 0
    for (kind, values), (other, _) in itertools.product(SAMPLES, SAMPLES):
        writer, reader = msgspec.defstruct("S", [("f", kind)]), msgspec.defstruct("S", [("f", other)])
        for encoding in ("json", "msgpack"):
            mine, theirs = types.plain(writer, encoding), types.plain(reader, encoding)
            if first_difference(mine.described(), theirs.described()) is None:
                let_in += 1
                for value in values:
                    theirs.decode(mine.encode(writer(value)))
            else:
                assert kind is not other and other is not Any, (kind, other)
    assert let_in > 2 * 2 * len(SAMPLES)


@given(fields())
@settings(max_examples=40, deadline=None)
def test_a_field_that_may_be_left_out_may_come_and_go(parts: Any) -> None:
    before = types.plain(build(parts)[0]).described()
    more = {**parts, "new": (int, st.integers(), True)}
    after = types.plain(build(more)[0]).described()
    assert first_difference(before, after) is None
    assert first_difference(after, before) is None
    needed = types.plain(build({**parts, "new": (int, st.integers(), False)})[0]).described()
    assert "'new' is required by the reader, but not written" in str(first_difference(before, needed))
    assert first_difference(needed, before) is None


# --- the table


class Base(msgspec.Struct):
    a: int
    b: str = ""


def changed(**other: Any) -> Any:
    given_fields = {"a": int, "b": (str, ""), **other}
    ordered = sorted(given_fields.items(), key=lambda item: isinstance(item[1], tuple))
    entries = [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in ordered if kind]
    return msgspec.defstruct("Base", entries)


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        (changed(), None),
        (changed(c=(int, 0)), None),
        (changed(b=None), None),
        (changed(a=float), None),
        (changed(a=(int | None, None)), None),
        (changed(a=int | str), None),
        (changed(c=int), "field 'c' is required by the reader, but not written"),
        (changed(a=str), "field 'a' is integer, and is read as string"),
        (changed(b=str), "field 'b' is required by the reader, but may be left out"),
        (changed(b=(Literal["x"], "x")), "only ['x'] are read"),
        (changed(a=list[int]), "field 'a' is integer, and is read as array"),
        (msgspec.defstruct("Base", [("a", int)], forbid_unknown_fields=True), "field 'b' is written"),
    ],
)
def test_the_table_of_structs(reader: Any, told: str | None) -> None:
    found = first_difference(codec_of(Base).described(), codec_of(reader).described())
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (Annotated[int, msgspec.Meta(ge=0, le=5)], Annotated[int, msgspec.Meta(ge=-1, le=9)]),
        (Annotated[float, msgspec.Meta(gt=0, lt=5)], Annotated[float, msgspec.Meta(gt=-1, lt=9)]),
        (Annotated[int, msgspec.Meta(ge=0)], int),
        (Annotated[str, msgspec.Meta(min_length=2, max_length=3)], Annotated[str, msgspec.Meta(min_length=1, max_length=4)]),
        (Annotated[list[int], msgspec.Meta(max_length=3)], Annotated[list[int], msgspec.Meta(max_length=4)]),
        (Annotated[dict[str, int], msgspec.Meta(max_length=3)], Annotated[dict[str, int], msgspec.Meta(max_length=4)]),
        (Literal["x"], Literal["x", "y"]),
    ],
)
def test_wider_bounds_and_more_values_read_what_was_written(narrow: Any, wide: Any) -> None:
    before, after = (codec_of(changed(a=kind)).described() for kind in (narrow, wide))
    assert first_difference(before, after) is None
    assert "field 'a'" in str(first_difference(after, before))


class Node(msgspec.Struct):
    value: int
    next: Optional[Node] = None  # noqa: UP045 - looked up at run time


class OtherNode(msgspec.Struct):
    value: str
    next: Optional[OtherNode] = None  # noqa: UP045 - looked up at run time


def test_a_type_that_holds_itself() -> None:
    assert first_difference(codec_of(Node).described(), codec_of(Node).described()) is None
    assert "'value'" in str(first_difference(codec_of(Node).described(), codec_of(OtherNode).described()))


def test_the_same_fields_go_together_whatever_describes_them() -> None:
    @dataclasses.dataclass
    class Plain:
        a: int
        b: str = ""

    class Model(pydantic.BaseModel):
        a: int
        b: str = ""

    class Typed(TypedDict):
        a: int
        b: NotRequired[str]

    schemas = [codec_of(kind).described() for kind in (Base, Plain, Model, Typed)]
    for writer, reader in itertools.permutations(schemas, 2):
        assert first_difference(writer, reader) is None


def test_keys_of_maps_are_compared() -> None:
    for encoding in ("json", "msgpack"):
        texts, numbers = (types.plain(kind, encoding).described() for kind in (dict[str, int], dict[int, int]))
        assert first_difference(texts, numbers) == "the message is read with x-keys 'int', and written with 'none'"
        assert first_difference(numbers, texts) == "the message is written with x-keys 'int', and read without"
    assert first_difference(types.plain(dict[int, int]).described(), codec_of(dict).described()) is None


def test_keys_of_maps_are_compared_whoever_describes_them() -> None:
    kinds = [str, int, uuid.UUID, datetime.date, Literal["a", "b"], Annotated[int, pydantic.Field(ge=0)], Any]
    models = [
        codec_of(pydantic.create_model("Model", f=(dict[key, int], ...))).described()  # type: ignore[valid-type]
        for key in kinds
    ]
    for (mine, writer), (theirs, reader) in itertools.product(zip(kinds, models, strict=True), repeat=2):
        texts = {str, Any}
        told = first_difference(writer, reader)
        assert (told is None) == (mine == theirs or {mine, theirs} <= texts), (mine, theirs, told)
    struct = codec_of(msgspec.defstruct("Model", [("f", dict[int, int])])).described()
    assert first_difference(struct, models[1]) is None and first_difference(models[1], struct) is None
    anything = codec_of(pydantic.create_model("Model", f=(dict, ...))).described()
    assert first_difference(models[1], anything) is None


@pytest.mark.parametrize("kind", [datetime.datetime, datetime.time])
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("optional", [False, True])
def test_zones_of_times_are_compared(kind: Any, encoding: str, optional: bool) -> None:
    def described(zone: bool | None) -> Schema:
        marked = kind if zone is None else Annotated[kind, msgspec.Meta(tz=zone)]
        field = marked | None if optional else marked
        return types.plain(msgspec.defstruct("At", [("at", field)]), encoding).described()

    for writer, reader in itertools.product((None, True, False), repeat=2):
        told = first_difference(described(writer), described(reader))
        assert (told is None) == (reader is None or reader == writer), (writer, reader, told)


def test_zones_of_times_are_compared_whoever_describes_them() -> None:
    class Any_(pydantic.BaseModel):
        at: datetime.datetime

    class Aware(pydantic.BaseModel):
        at: pydantic.AwareDatetime

    class Naive(pydantic.BaseModel):
        at: pydantic.NaiveDatetime

    class Struct(msgspec.Struct):
        at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]

    schemas = [(codec_of(kind).described(), zone) for kind, zone in ((Any_, None), (Aware, True), (Naive, False), (Struct, True))]
    for (writer, mine), (reader, theirs) in itertools.product(schemas, repeat=2):
        told = first_difference(writer, reader)
        assert (told is None) == (theirs is None or theirs == mine), (writer, reader, told)
        assert told is None or "time zone" in told


def test_a_field_is_compared_in_the_form_that_it_is_written_in() -> None:
    def number(value: decimal.Decimal) -> float:
        return float(value)

    as_number = Annotated[decimal.Decimal, pydantic.PlainSerializer(number)]

    class Price(pydantic.BaseModel):
        total: decimal.Decimal
        lines: list[decimal.Decimal] = []

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> float:
            return 2 * float(self.total)

    class Later(Price):
        paid: bool = False

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> str:  # type: ignore[override]
            return str(2 * self.total)

    text = pydantic.create_model("Text", total=(str, ...))
    plain = pydantic.create_model("Plain", total=(float, ...))
    numbered = pydantic.create_model("Numbered", total=(as_number, ...))
    read_twice = pydantic.create_model("Twice", twice=(float, 0.0))
    pairs = {
        (Price, Later): None, (Later, Price): None,  # what is computed is not read
        (Price, text): None, (Price, plain): "'total'",  # written as a text
        (numbered, plain): None, (numbered, text): "'total'", (numbered, Price): None, (plain, numbered): None,
        (Price, read_twice): None, (Later, read_twice): "'twice'",
    }  # fmt: skip
    for (writer, reader), told in pairs.items():
        found = first_difference(codec_of(writer).described(), codec_of(reader).described())
        assert found is None if told is None else told in str(found), (writer, reader, found)


def test_records_as_arrays_are_compared_by_name() -> None:
    class Pose(msgspec.Struct, array_like=True, tag=True):
        x: float
        y: float

    class Swapped(msgspec.Struct, array_like=True, tag="Pose"):
        y: float
        x: float

    class Longer(msgspec.Struct, array_like=True, tag="Pose"):
        x: float
        y: float
        z: float = 0.0

    told = first_difference(codec_of(Pose).described(), codec_of(Swapped).described())
    assert told == "the message has field 'x' at place 1, and 'y' is read there"
    for writer, reader in itertools.permutations((Pose, Longer), 2):
        assert first_difference(codec_of(writer).described(), codec_of(reader).described()) is None


def test_messages_of_protobuf_are_compared_by_name() -> None:
    told = first_difference(codec_of(Timestamp).described(), codec_of(Duration).described())
    assert told == "it is written as google.protobuf.Timestamp and read as google.protobuf.Duration"


def test_classes_of_the_same_fields_are_told_apart_by_a_tag() -> None:
    class Pose(msgspec.Struct, tag=True):
        x: float

    class Twist(msgspec.Struct, tag=True):
        x: float

    told = first_difference(codec_of(Pose).described(), codec_of(Twist).described())
    assert told == "field 'type' may be 'Pose', and only ['Twist'] are read"


def test_encodings_and_languages_differ() -> None:
    told = first_difference(types.plain(Base).described(), types.plain(Base, "msgpack").described())
    assert told == "it is written as json and read as msgpack"
    told = first_difference(codec_of(str).described(), codec_of(dict).described())
    assert told == "it is written as utf-8 and read as json"


def proto(name: str, *members: tuple[str, int, int, int]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="p", syntax="proto2")
    message = file.message_type.add(name=name)
    for field, number, kind, label in members:
        message.field.add(name=field, number=number, type=kind, label=label)  # type: ignore[arg-type]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))


INT64, STRING, OPTIONAL, REQUIRED, REPEATED = 3, 9, 1, 2, 3


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([("x", 1, INT64, OPTIONAL)], None),
        ([("renamed", 1, INT64, OPTIONAL), ("more", 2, STRING, OPTIONAL)], None),
        ([("more", 2, STRING, OPTIONAL)], None),
        ([("x", 1, STRING, OPTIONAL)], "field 'x' (1) is optional int64, and is read as optional string"),
        ([("x", 1, INT64, REPEATED)], "is read as repeated int64"),
        ([("x", 1, INT64, REQUIRED)], "field 'x' (1) is required by the reader, but may be left out"),
        ([("y", 2, INT64, REQUIRED)], "field 'y' (2) is required by the reader, but not written"),
    ],
)
def test_the_table_of_protobuf(members: Any, told: str | None) -> None:
    writer = codec_of(proto("M", ("x", 1, INT64, OPTIONAL))).described()
    found = first_difference(writer, codec_of(proto("M", *members)).described())
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        ([("a", pyarrow.int64()), ("b", pyarrow.string())], None),
        ([("a", pyarrow.int64()), ("c", pyarrow.string())], None),
        ([("a", pyarrow.int32())], "field 'a' is int64, and is read as int32"),
        ([pyarrow.field("c", pyarrow.int64(), nullable=False)], "field 'c' is required by the reader, but not written"),
        ([pyarrow.field("a", pyarrow.int64(), nullable=False)], "field 'a' is required by the reader, but may be null"),
    ],
)
def test_the_table_of_arrow(reader: Any, told: str | None) -> None:
    schema = pyarrow.schema([("a", pyarrow.int64()), ("b", pyarrow.string())])
    writer, wanted = codec_of(schema), codec_of(pyarrow.schema(reader))
    found = first_difference(writer.described(), wanted.described())
    assert found is None if told is None else told in str(found)
    if told is None:
        batch = pyarrow.record_batch([pyarrow.array([1, 2]), pyarrow.array(["x", None])], schema=schema)
        assert wanted.decode(writer.encode(batch)).column("a").to_pylist() == [1, 2]


def test_bytes_of_records_are_the_same_or_refused() -> None:
    base = codec_of(numpy.dtype([("t", "<i8"), ("x", "<f4")])).described()

    def against(other: Any) -> str | None:
        return first_difference(base, codec_of(numpy.dtype(other)).described())

    assert against([("t", "<i8"), ("x", "<f4")]) is None
    assert against([("t", "<i8"), ("x", "<f8")]) == "field 'x' is <f4, and field 'x' <f8 is read there"
    assert against([("t", "<i8")]) == "field 'x' is written and not read"
    assert against([("t", "<i8"), ("x", "<f4"), ("y", "<f4")]) == "field 'y' is read and not written"
    assert "are read as <f8" in str(against("f8"))


# --- terms


def test_terms_name_both_types_and_the_field() -> None:
    class Other(msgspec.Struct):
        a: str

    mine, other = codec_of(Base).described(), codec_of(Other).described()
    for writes in (True, False):
        with pytest.raises(RefusedError, match=r"here carries Other \(json\), not this Base \(json\): field 'a' is"):
            Terms(mine, writes).check(other.text, "here")
    assert Terms(mine, True).check(mine.text, "here")
    assert not Terms(mine, True, lenient=True).check(other.text, "here")
    with pytest.raises(RefusedError, match="carries type 'X', not 'Base'"):
        Terms(mine, True).check_name("X", "here")


def test_a_reader_may_know_less_and_a_writer_must_suit_both() -> None:
    wide = codec_of(changed(a=float)).described()
    narrow = codec_of(Base).described()
    assert not Terms(wide, writes=False).check(narrow.text, "here")
    with pytest.raises(RefusedError, match="field 'a' is number, and is read as integer"):
        Terms(wide, writes=True).check(narrow.text, "here")


WORDS = [
    "type",
    "$ref",
    "anyOf",
    "properties",
    "required",
    "items",
    "prefixItems",
    "enum",
    "$defs",
    "additionalProperties",
]
NONSENSE = st.recursive(
    st.none() | st.integers() | st.sampled_from(["object", "array", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
)


@given(st.text() | NONSENSE.map(lambda found: Schema("Base", "json", {"jsonschema": found}).text))
@settings(max_examples=150, deadline=None)
def test_a_hostile_text_is_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(RefusedError, ProtocolError):
        Terms(codec_of(Base).described(), True).check(text, "here")


def test_choices_within_choices_do_not_multiply_for_ever() -> None:
    names = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 4} for i in range(60)}
    names["n60"] = {"type": "integer"}
    other = {**names, "n60": {"type": "string"}}
    writer, reader = (
        Schema("S", "json", {"jsonschema": {"$ref": "#/$defs/n0", "$defs": one}}) for one in (names, other)
    )
    assert "cannot be understood" in str(first_difference(writer, reader))


def test_schemas_have_bounds() -> None:
    with pytest.raises(InvalidArgument, match="are allowed"):
        Schema("X", "json", {"jsonschema": {"description": "x" * 100_000}}).checked()
    with pytest.raises(InvalidArgument, match="printable"):
        Schema("X\n", "json", {}).checked()
    with pytest.raises(ProtocolError, match="too many"):
        Schema.parse("x" * 100_000)
    text = codec_of(Base).described().text
    assert Schema.parse(text).text == text
    assert Schema.parse(text).digest == codec_of(Base).described().digest


class Counted(pydantic.BaseModel):
    price: decimal.Decimal = decimal.Decimal(1)
    took: datetime.timedelta = datetime.timedelta(1)

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def parts(self) -> list[Counted] | None:
        return None


def _as_number(value: datetime.datetime) -> int:
    return int(value.timestamp())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (decimal.Decimal, "1.5"), (decimal.Decimal | None, None), (list[decimal.Decimal], ["1.5"]),
        (dict[str, decimal.Decimal], {"a": "1"}), (datetime.timedelta, 5), (pydantic.AwareDatetime, "2020-01-01T00:00:00Z"),
        (uuid.UUID, uuid.UUID(int=1)), (pydantic.Base64Bytes, b"aGk="), (set[int], {1}), (tuple[int, str], (1, "a")),
        (Counted, Counted()), (list[Counted], [Counted()]), (Counted | None, Counted()), (dict[int, Counted], {1: Counted()}),
        (int | str, 1), (Literal["a", 1], "a"), (Any, {"a": 1}), (complex, 1j), (pydantic.ByteSize, "1kb"),
        (Annotated[datetime.datetime, pydantic.PlainSerializer(_as_number)], "2020-01-01T00:00:00Z"),
        (Annotated[int, pydantic.PlainSerializer(lambda value: value)], 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_goes_with_itself_and_a_field_more_whatever_it_holds(kind: Any, value: Any) -> None:
    one = pydantic.create_model("One", f=(kind, ...))
    more = pydantic.create_model("One", f=(kind, ...), more=(int, 0))
    within, within_more = (pydantic.create_model("Holds", a=(model, ...)) for model in (one, more))
    for mine, theirs in ((one, more), (within, within_more)):
        writer, reader = codec_of(mine).described(), codec_of(theirs).described()
        assert first_difference(writer, reader) is None and first_difference(reader, writer) is None
    codec, model = codec_of(one), one(f=value)
    assert codec.decode(codec.encode(model)) == model
    found = reader_of(codec.described())(codec.encode(model))
    check_json(found, codec.described().definition["jsonschema"])
    fitted(found, shape_of(codec.described()))
