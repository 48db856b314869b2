"""Payload decoding: right values, and a reason instead of a failure or a missing row."""

from __future__ import annotations

import io
import json
import struct

import msgpack
import numpy
import pyarrow
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2

from penstock.errors import InvalidArgument
from penstock.spark import avro, decode, payload, protobuf


def frame_of(spark, payloads):
    rows = [(index, bytearray(data) if data is not None else None) for index, data in enumerate(payloads)]
    return spark.createDataFrame(rows, "ordinal long, payload binary")


def decoded(frame):
    return {row.ordinal: (row.value, row._corrupt) for row in frame.collect()}


def test_json_with_schema(spark):
    payloads = [b'{"speed": 1.5, "name": "a"}', b"{broken", b'{"speed": "fast"}', b"", None, b"\xff\xfe", b"{}"]
    got = decoded(decode.json(frame_of(spark, payloads), "speed double, name string"))
    assert len(got) == len(payloads)
    assert got[0][0].speed == 1.5 and got[0][0].name == "a" and got[0][1] is None
    for index in (1, 2, 3, 5):
        assert (got[index][0] is None and "JSON" in got[index][1]) or "UTF-8" in got[index][1]
    assert got[4] == (None, "payload is null")
    assert got[6][0] is not None and got[6][1] is None


@pytest.mark.parametrize(("kind", "least", "greatest"), [("tinyint", -128, 127), ("smallint", -(2**15), 2**15 - 1)])
@pytest.mark.parametrize("shape", ["{}", "array<{}>", "struct<x:{}>"])
def test_a_number_of_json_that_does_not_fit_its_column_is_corrupt(spark, shape, kind, least, greatest):
    values = [least, greatest, greatest + 1, 2 * greatest + 1, least - 1, None]
    given = {"{}": lambda n: n, "array<{}>": lambda n: [n, 0], "struct<x:{}>": lambda n: {"x": n}}[shape]
    frame = spark.createDataFrame([(json.dumps({"v": given(value)}).encode(),) for value in values], "payload binary")
    rows = decode.json(frame, f"v {shape.format(kind)}").collect()
    fits = [value is None or least <= value <= greatest for value in values]
    assert [row["_corrupt"] is None for row in rows] == fits
    found = [row["value"].asDict(recursive=True)["v"] for row, good in zip(rows, fits, strict=True) if good]
    assert found == [given(least), given(greatest), given(None)]
    assert all(row["value"] is None for row, good in zip(rows, fits, strict=True) if not good)


@pytest.mark.parametrize(("kind", "good", "bad"), [
    ("float", ["0.1", "16777216", "-16777216", "3.4e38", "1e-300", "16777217.5", "1e10", "NaN", '"Infinity"', "-INF", "null"],
     ["1e300", "-1e39", "16777217", "123456789", "1e400", '"1"']),
    ("double", ["0.1", "0.12345678901234567890", "9007199254740992", "1152921504606846976", "-9223372036854775808", "1e300",
                "100000000000000000000", "9007199254740993.5"],
     ["1e400", "-1e400", "9007199254740993", "9223372036854775807", "1000000000000000000001", "1" + 400 * "0"]),
    ("decimal(4,1)", ["1.2", "1.20", "12e-1", '"1.2"', "1e2", "-999.9", "null"], ["1.25", "1.999", "12.5e-1", '"1.25"', "1000"]),
    ("decimal(38,18)", ["12345678901234567890.123456789012345678"], ["1.1234567890123456789"]),
    ("map<string,tinyint>", ['{"x": -128}', '{"x": null}', "{}"], ['{"x": 127, "y": 200}']),
    ("array<struct<x:float,y:array<double>>>", ['[{"x": 1}, null, {"y": [1, null]}]', "[]"], ['[{"y": [1, 9007199254740993]}]', '[{"x": 1e39}]']),
])  # fmt: skip
def test_json_gives_the_number_that_was_sent_or_says_so(spark, kind, good, bad):
    """A fraction is rounded to what the column holds, as everywhere; an integer, a decimal and what is too great are not."""
    payloads = [f'{{"note": "12345678901234567890 1e400", "v": {text}}}'.encode() for text in good + bad]
    got = decoded(decode.json(frame_of(spark, payloads), f"v {kind}"))
    reasons = [got[number][1] for number in range(len(payloads))]
    assert [reason is None for reason in reasons] == [True] * len(good) + [False] * len(bad), reasons
    assert all((got[number][0] is None) == (reasons[number] is not None) for number in got)


MORE_THAN_JSON = [
    b'{"a":1}{"a":2}', b'{"a":1}\n{"a":2}', b'{"a":1} garbage \x01', b'{"a":1},{"a":2}', b'{"a":1}]', b'{"a":1}]} x', b'{"a":1},',
    b'{"a":1}}', b'[{"a":1}]', b"null", b"5",
]  # fmt: skip


def test_what_follows_a_value_of_json_is_corrupt(spark):
    good = [b'{"a":1}', b' {"a" : 1}\r\n', b"{'a':1}", b'{"a":2,"a":1}']
    got = decoded(decode.json(frame_of(spark, good + MORE_THAN_JSON), "a bigint"))
    assert [got[number][0] and got[number][0].a for number in range(len(good))] == [1] * len(good)
    assert all(got[number] == (None, "not JSON of the schema") for number in range(len(good), len(got)))


def test_json_to_variant(spark):
    whole = [b"null", b"5", b'[{"a":1}]']
    frame = decode.json(frame_of(spark, [b'{"a": [1, 2]}', b"nope", *whole, *MORE_THAN_JSON[:8]]))
    rows = frame.selectExpr("ordinal", "variant_get(value, '$.a[1]', 'int') as second", "_corrupt").collect()
    assert [(row.second, row._corrupt) for row in sorted(rows)[:2]] == [(2, None), (None, "not JSON")]
    assert [row._corrupt for row in sorted(rows)[2:]] == [None] * len(whole) + ["not JSON"] * 8
    texts = frame.where("_corrupt is null").selectExpr("to_json(value) text").collect()
    assert [row.text.encode() for row in texts[1:]] == whole


def test_msgpack(spark):
    payloads = [msgpack.packb({"x": 1, "tags": ["p"]}), msgpack.packb([1]), msgpack.packb({"x": "no"}), b"\xc1", b""]
    got = decoded(decode.msgpack(frame_of(spark, payloads), "x long, tags array<string>"))
    assert len(got) == len(payloads)
    assert got[0][0].x == 1 and got[0][0].tags == ["p"] and got[0][1] is None
    assert all(got[index][0] is None and got[index][1] for index in range(1, 5))
    assert not any(got[index][1].endswith(": ") for index in range(1, 5)), "each says why"


def test_arrow_streams_become_rows(spark):
    table = pyarrow.table({"x": [1, 2], "y": ["a", "b"]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    frame = decode.arrow(frame_of(spark, [sink.getvalue(), b"junk"]), "x long, y string")
    rows = sorted((row.ordinal, row.value and tuple(row.value), row._corrupt is None) for row in frame.collect())
    assert rows == [(0, (1, "a"), True), (0, (2, "b"), True), (1, None, False)]


def test_struct_layout(spark):
    payloads = [struct.pack("<dIq3s", 2.5, 4294967295, -3, b"ab\0"), b"short", struct.pack("<dIq3s", 1, 2, 3, b"xyz")]
    layout = {"speed": "<f8", "count": "<u4", "delta": "<i8", "tag": "S3"}
    got = decoded(decode.struct(frame_of(spark, payloads), layout))
    assert tuple(got[0][0]) == (2.5, 4294967295, -3, bytearray(b"ab\0")) and got[0][1] is None
    assert got[1] == (None, "5 bytes, the layout has 23")
    assert tuple(got[2][0])[:3] == (1.0, 2, 3)


def test_arrays(spark):
    data = numpy.arange(6, dtype="<i2")
    got = decoded(decode.array(frame_of(spark, [data.tobytes(), b"\1", data[:2].tobytes()]), "<i2"))
    assert got[0][0] == list(range(6)) and got[2][0] == [0, 1] and got[1][0] is None and "not whole" in got[1][1]
    got = decoded(decode.array(frame_of(spark, [data.tobytes(), data[:2].tobytes()]), "<i2", shape=(2, 3)))
    assert got[0][0] == list(range(6)) and got[1][0] is None
    file, evil = io.BytesIO(), io.BytesIO()
    numpy.save(file, data.reshape(2, 3))
    numpy.save(evil, numpy.array([{}], dtype=object), allow_pickle=True)
    got = decoded(decode.array(frame_of(spark, [file.getvalue(), evil.getvalue()])))
    assert got[0][0] == [float(value) for value in range(6)]
    assert got[1][0] is None and "allow_pickle" in got[1][1]


@pytest.mark.parametrize("kind", ["<i8", "<u8"])
def test_integers_that_no_double_holds_are_corrupt(kind):
    exact, lost = [2**53, 2**60, 5], [1, 2**53 + 1]
    files = []
    for values in (exact, lost):
        file = io.BytesIO()
        numpy.save(file, numpy.array(values, kind))
        files.append(file.getvalue())
    values, reasons = payload.npy(pyarrow.array(files))
    assert values.to_pylist() == [[float(value) for value in exact], None]
    assert reasons[0].as_py() is None and "9007199254740993" in reasons[1].as_py()


def test_a_second_decoding_keeps_the_first_reason(spark):
    frame = decode.gateway(frame_of(spark, [b"bad"]), into="message")
    frame = decode.json(frame.withColumn("content", frame["message"]["content"]), column="content")
    assert "fewer than the smallest" in frame.collect()[0]._corrupt


CAR = """{"type": "record", "name": "car", "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": ["null", "string"]},
  {"name": "c", "type": {"type": "array", "items": "long"}}, {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}}]}"""


def test_avro(spark):
    """The bytes are the examples of Avro's specification: 27, "foo", [3, 27]; then a microsecond after 1970."""
    good = bytes.fromhex("36 02 06666f6f 04063600 02")
    payloads = [b"\0\0\0\0\7" + good, b"\0\0\0\0\7" + good[:-1], b"\0\0\0\0\7" + good + b"!", b"\0", None]
    frame = decode.avro(frame_of(spark, payloads), CAR, skip=5)
    got = decoded(frame.selectExpr("ordinal", "_corrupt", "struct(value.a, value.b, value.c, unix_micros(value.at)) value"))
    assert tuple(got[0][0]) == (27, "foo", [3, 27], 1) and got[0][1] is None
    assert all(got[number][1] for number in range(1, 5)) and len(got) == 5


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        ("long", "ff" * 10 + "01"), ('{"type": "array", "items": "null"}', "feffffff0f00"), ("string", "ff01"), ("boolean", "02"),
        ('{"type": "array", "items": {"type": "array", "items": "null"}}', "06" + "06" * 3), ('["null", "long"]', "04"),
        ('{"type": "enum", "name": "e", "symbols": ["x"]}', "02"), ("string", "02ff"), ("int", "808080808040"),
    ],
)  # fmt: skip
def test_avro_that_claims_what_it_has_not(schema, data):
    values, reasons = payload.avro(pyarrow.array([bytes.fromhex(data)]), schema, 0)
    assert values.null_count == 1 and reasons[0].as_py()


def test_schemas_that_no_column_can_be():
    inside = '{"type": "record", "name": "r", "fields": [{"name": "next", "type": ["null", "r"]}]}'
    for schema in (inside, '["long", "string"]', "lung", "{}", "{broken"):
        with pytest.raises(InvalidArgument):
            avro.compiled(schema)
    with pytest.raises(InvalidArgument, match="inside itself"):
        protobuf.compiled(*protobuf.descriptor_bytes(struct_pb2.Value, None))
    with pytest.raises(InvalidArgument, match="Timestamp"):
        protobuf.compiled(protobuf.descriptor_bytes(timestamp_pb2.Timestamp, None)[0], "google.protobuf.Timestmp")
    with pytest.raises(InvalidArgument):
        protobuf.compiled(b"junk", "a")


def make_car():
    """A message of every kind of field, made as protoc would."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="car.proto", package="t", syntax="proto3")
    file.enum_type.add(name="Side").value.add(name="LEFT", number=0)
    car = file.message_type.add(name="Car")
    entry = car.nested_type.add(name="SeatsEntry", options={"map_entry": True})
    for number, (name, kind) in enumerate([("key", field.TYPE_STRING), ("value", field.TYPE_INT32)], 1):
        entry.field.add(name=name, number=number, type=kind, label=1)
    car.nested_type.add(name="Part").field.add(name="id", number=1, type=field.TYPE_UINT64, label=1)
    car.oneof_decl.add(name="_maybe")
    car.field.add(name="speed", number=1, type=field.TYPE_DOUBLE, label=1)
    car.field.add(name="count", number=2, type=field.TYPE_UINT32, label=1)
    car.field.add(name="side", number=3, type=field.TYPE_ENUM, type_name=".t.Side", label=1)
    car.field.add(name="parts", number=4, type=field.TYPE_MESSAGE, type_name=".t.Car.Part", label=3)
    car.field.add(name="seats", number=5, type=field.TYPE_MESSAGE, type_name=".t.Car.SeatsEntry", label=3)
    car.field.add(name="maybe", number=6, type=field.TYPE_BYTES, label=1, oneof_index=0, proto3_optional=True)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Car"))


@pytest.mark.parametrize("by", ["class", "file"])
def test_protobuf(spark, tmp_path, by):
    car = make_car()
    full = car(speed=1.5, count=4294967295, parts=[{"id": 2**64 - 1}, {}], seats={"a": -1}, maybe=b"")
    payloads = [full.SerializeToString(), b"", full.SerializeToString()[:-1], b"\x18\x07", None]
    given = [car]
    if by == "file":
        (tmp_path / "set").write_bytes(protobuf.descriptor_bytes(car, None)[0])
        given = ["t.Car", tmp_path / "set"]
    got = decoded(decode.protobuf(frame_of(spark, payloads), *given))
    value = got[0][0].asDict(recursive=True)
    assert [int(part["id"]) for part in value.pop("parts")] == [2**64 - 1, 0] and got[0][1] is None
    assert value == {"speed": 1.5, "count": 4294967295, "side": "LEFT", "seats": {"a": -1}, "maybe": bytearray(b"")}
    assert tuple(got[1][0]) == (0.0, 0, "LEFT", [], {}, None) and got[3][0].side == "7", "no field is the default's"
    assert got[2][0] is None and got[2][1] and got[4] == (None, "payload is null")


def test_a_number_that_does_not_fit_is_corrupt_not_cut():
    kind = pyarrow.struct([("x", pyarrow.int64()), ("y", pyarrow.list_(pyarrow.float64())), ("z", pyarrow.float32())])
    good = [{"x": 2.0}, {"x": -(2**63)}, {"y": [1, 2**53]}, {"z": 0.1}, {"y": [None]}]
    bad = [{"x": 1.5}, {"x": float("nan")}, {"x": 2**63}, {"y": [2**60 + 1]}, {"z": 1e39}, {"z": 2**24 + 1}, {"x": "1"}]
    values, reasons = payload.msgpack(pyarrow.array([msgpack.packb(item) for item in good + bad]), kind)
    assert reasons.is_null().to_pylist() == [True] * len(good) + [False] * len(bad), reasons.to_pylist()
    assert values.is_null().to_pylist() == [False] * len(good) + [True] * len(bad)


GATEWAY_GOOD = bytes.fromhex("a160000000170000000 27a003100610000000000026869".replace(" ", ""))
GATEWAY_BAD = {
    "short": GATEWAY_GOOD[:13],
    "magic": b"\xa1\x61" + GATEWAY_GOOD[2:],
    "total": GATEWAY_GOOD + b"!",
    "count": GATEWAY_GOOD[:6] + b"\xff\xff\xff\xff" + GATEWAY_GOOD[10:],
    "unterminated": bytes.fromhex("a1600000000e00000001") + b"abcd",
    "content": GATEWAY_GOOD[:-3] + b"\x03hi",
    "duplicate": bytes.fromhex("a160000000140000000261003100") + bytes.fromhex("6100") + b"\0\0\0\0",
}


def test_gateway_form():
    values, reasons = payload.gateway(pyarrow.array([GATEWAY_GOOD, bytes.fromhex("a1600000000e0000000000000000")]))
    assert values.to_pylist()[0] == {"properties": [("z", "1"), ("a", "")], "content": b"hi"}
    assert values.to_pylist()[1] == {"properties": [], "content": b""}
    assert reasons.null_count == 2


@pytest.mark.parametrize("case", sorted(GATEWAY_BAD))
def test_gateway_form_refuses(case):
    values, reasons = payload.gateway(pyarrow.array([GATEWAY_BAD[case]], pyarrow.binary()))
    assert values.null_count == 1 and reasons[0].as_py()


def test_random_bytes_never_raise():
    random = numpy.random.default_rng(7)
    batch = pyarrow.array([random.bytes(int(random.integers(0, 60))) for _ in range(500)], pyarrow.binary())
    dtype = payload.check_layout({"a": "<f8", "b": "u1"})
    kind = pyarrow.struct([("a", pyarrow.int64())])
    for values, reasons in (
        payload.gateway(batch), payload.msgpack(batch, kind), payload.arrow(batch, kind), payload.npy(batch),
        payload.struct(batch, dtype), payload.array(batch, numpy.dtype("<i4"), None),
        payload.array(batch[3:77], numpy.dtype("<i4"), 3),
    ):  # fmt: skip
        assert len(values) == len(reasons)
        assert values.is_null().to_pylist() == reasons.is_valid().to_pylist()


def test_layouts_are_checked():
    for layout in ({}, {"a": "O"}, {"a": "nonsense"}, {"a": "<c16"}):
        with pytest.raises(InvalidArgument):
            payload.check_layout(layout)


def test_a_missing_column_is_named(spark):
    with pytest.raises(InvalidArgument, match="no column 'body'"):
        decode.json(frame_of(spark, [b"{}"]), column="body")
