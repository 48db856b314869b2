"""Decoders of payloads over Arrow arrays: what ``decode`` runs on executors. Needs numpy and pyarrow only, knows no
Spark.

Each takes an array of binary values and gives (values, reasons): a reason is null where the value is good. Where
payloads have one size, as fixed layouts do, a whole batch is decoded by numpy without a loop over messages.
"""

from __future__ import annotations

import io
import struct as structs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pyarrow

from penstock.errors import InvalidArgument

Decoded = tuple[pyarrow.Array, pyarrow.Array]
MAX_PROPERTIES = 65536
_GREATEST_FLOAT32 = float(numpy.finfo(numpy.float32).max)


def each(
    batch: pyarrow.Array,
    function: Callable[..., Any],
    kind: pyarrow.DataType,
    places: Sequence[Any] | None = None,
) -> Decoded:
    """Decode payloads one by one, for formats that allow nothing faster; an exception becomes the row's reason.
    ``places``: one for each, which the function is given too."""
    values: list[Any] = []
    reasons: list[str | None] = []
    check = _number_check(kind)
    for index, data in enumerate(batch.to_pylist()):
        try:
            value = None if data is None else function(data) if places is None else function(data, places[index])
            if check is not None and value is not None:
                check(value)
            values.append(value)
            reasons.append(None if data is not None else "payload is null")
        except Exception as error:  # one bad payload must not fail the whole job
            values.append(None)
            reasons.append(_reason(error))
    return _typed(values, reasons, kind)


def _typed(values: list[Any], reasons: list[str | None], kind: pyarrow.DataType) -> Decoded:
    """The values as an Arrow array: converted together, or one by one if one of them does not fit."""
    errors = (pyarrow.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return pyarrow.array(values, kind), pyarrow.array(reasons, pyarrow.string())
    except errors:
        pass
    for index, value in enumerate(values):
        try:
            pyarrow.array([value], kind)
        except errors as error:
            values[index], reasons[index] = None, _reason(error)
    return pyarrow.array(values, kind), pyarrow.array(reasons, pyarrow.string())


def _number_check(kind: pyarrow.DataType) -> Callable[[Any], None] | None:
    """A check that raises ``ValueError`` for a number the type cannot hold exactly; None if it holds no numbers.

    Arrow itself turns 1.5 into the integer 1 and 1e39 into an infinite float; other misfits it refuses.
    """
    if pyarrow.types.is_integer(kind):
        return _check_integer
    if pyarrow.types.is_float32(kind):
        return _check_float32
    if pyarrow.types.is_list(kind) or pyarrow.types.is_map(kind):
        inner = _number_check(kind.item_type if pyarrow.types.is_map(kind) else kind.value_type)
        return None if inner is None else _check_items(inner)
    if not pyarrow.types.is_struct(kind):
        return None
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inside = [(field.name, inner) for field in fields if (inner := _number_check(field.type)) is not None]
    return _check_fields(inside) if inside else None


def _check_integer(value: Any) -> None:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value!r} is no whole number")


def _check_float32(value: Any) -> None:
    if isinstance(value, float) and abs(value) > _GREATEST_FLOAT32 and abs(value) != float("inf"):
        raise ValueError(f"{value!r} is too great for its column")


def _check_items(inner: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(values: Any) -> None:
        for item in values.values() if isinstance(values, dict) else values:
            value = item[1] if isinstance(item, tuple) else item
            if value is not None:
                inner(value)

    return check


def _check_fields(inside: list[tuple[str, Callable[[Any], None]]]) -> Callable[[Any], None]:
    def check(values: Any) -> None:
        for name, inner in inside:
            value = values.get(name) if isinstance(values, dict) else None
            if value is not None:
                try:
                    inner(value)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    return check


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or 'bytes that this format does not have'}"[:300]


def msgpack(batch: pyarrow.Array, kind: pyarrow.DataType) -> Decoded:
    """MessagePack values of Arrow type ``kind``."""
    import msgpack as codec

    def one(data: bytes) -> Any:
        value = codec.unpackb(data, raw=False, strict_map_key=False, timestamp=3)
        if pyarrow.types.is_struct(kind) and not isinstance(value, dict):
            raise ValueError(f"a map was expected, not {type(value).__name__}")
        return value

    return each(batch, one, kind)


def avro(batch: pyarrow.Array, schema: str, skip: int) -> Decoded:
    """Avro values of a schema, after ``skip`` bytes."""
    from penstock.spark.avro import compiled

    kind, decode = compiled(schema)

    def one(data: bytes) -> Any:
        if len(data) < skip:
            raise ValueError(f"{len(data)} bytes, {skip} stand before the value")
        return decode(data[skip:])

    return each(batch, one, kind)


def protobuf(batch: pyarrow.Array, descriptors: bytes, name: str) -> Decoded:
    """Protobuf messages of the type ``name``."""
    from penstock.spark.protobuf import compiled

    kind, decode = compiled(descriptors, name)
    return each(batch, decode, kind)


def arrow(batch: pyarrow.Array, kind: pyarrow.StructType) -> Decoded:
    """Arrow IPC streams as lists of structs; columns are found by name and cast to ``kind``."""
    names = [kind.field(index).name for index in range(kind.num_fields)]
    schema = pyarrow.schema([kind.field(index) for index in range(kind.num_fields)])

    def one(data: bytes) -> Any:
        table = pyarrow.ipc.open_stream(data).read_all()
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise ValueError(f"column {missing[0]!r} is missing; the stream has {', '.join(table.column_names)}")
        return table.select(names).cast(schema).to_pylist()

    return each(batch, one, pyarrow.list_(kind))


def gateway(batch: pyarrow.Array) -> Decoded:
    """The gateway's byte form (docs/formats.md): properties in insertion order, and the content."""
    properties = pyarrow.map_(pyarrow.string(), pyarrow.string())
    kind = pyarrow.struct([("properties", properties), ("content", pyarrow.binary())])
    return each(batch, _gateway, kind)


def _gateway(data: bytes) -> dict[str, Any]:
    if len(data) < 14:
        raise ValueError(f"{len(data)} bytes are fewer than the smallest message (14)")
    if data[:2] != b"\xa1\x60":
        raise ValueError(f"magic {data[:2].hex()} is not a160")
    total, count = structs.unpack_from(">II", data, 2)
    if total != len(data):
        raise ValueError(f"total size {total} is not the payload's {len(data)}")
    if count > min(MAX_PROPERTIES, len(data) // 2):
        raise ValueError(f"{count} properties cannot stand in {len(data)} bytes")
    pairs, place = _pairs(data, count)
    if len(data) - place < 4:
        raise ValueError("no room for the content's size")
    (size,) = structs.unpack_from(">I", data, place)
    if size != len(data) - place - 4:
        raise ValueError(f"content size {size} does not fill the rest ({len(data) - place - 4})")
    return {"properties": list(pairs.items()), "content": data[place + 4 :]}


def _pairs(data: bytes, count: int) -> tuple[dict[str, str], int]:
    pairs: dict[str, str] = {}
    place = 10
    for _ in range(count):
        key_end = data.find(b"\0", place)
        value_end = data.find(b"\0", key_end + 1) if key_end >= 0 else -1
        if value_end < 0:
            raise ValueError("a key or value without its NUL")
        key = data[place:key_end].decode()
        if key in pairs:
            raise ValueError(f"key {key!r} stands twice")
        pairs[key] = data[key_end + 1 : value_end].decode()
        place = value_end + 1
    return pairs, place


def check_layout(layout: Mapping[str, str]) -> numpy.dtype[Any]:
    """``layout`` as a packed numpy type of numbers, booleans and byte strings."""
    if not layout:
        raise InvalidArgument("a layout needs at least one field, as in {'speed': '<f8'}")
    try:
        dtype = numpy.dtype(list(layout.items()))
    except TypeError as error:
        raise InvalidArgument(f"layout {dict(layout)!r} is not of numpy types such as '<f8' or 'u1': {error}") from None
    for name in dtype.names or ():
        if dtype[name].kind != "S":
            check_number(dtype[name], name)
    return dtype


def check_number(dtype: numpy.dtype[Any], name: str) -> numpy.dtype[Any]:
    """``dtype`` when it is a number or boolean that Spark can hold."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InvalidArgument(f"{name}: {dtype.str!r} is not a boolean, integer or float of up to 8 bytes")
    return dtype


def widened(dtype: numpy.dtype[Any]) -> pyarrow.DataType:
    """The signed Arrow type that holds every value of ``dtype`` (64-bit unsigned: a decimal)."""
    if dtype.kind == "b":
        return pyarrow.bool_()
    if dtype.kind == "u":
        return {1: pyarrow.int16(), 2: pyarrow.int32(), 4: pyarrow.int64(), 8: pyarrow.decimal128(20, 0)}[
            dtype.itemsize
        ]
    if dtype.kind == "i":
        return {1: pyarrow.int8(), 2: pyarrow.int16(), 4: pyarrow.int32(), 8: pyarrow.int64()}[dtype.itemsize]
    return pyarrow.float64() if dtype.itemsize == 8 else pyarrow.float32()


def to_arrow(values: numpy.ndarray[Any, Any]) -> pyarrow.Array:
    """A numpy column as Arrow, in native byte order and widened."""
    native = numpy.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    if native.dtype.kind == "S":
        return _fixed_bytes(native)
    if native.dtype == numpy.float16:
        native = native.astype(numpy.float32)
    return pyarrow.array(native).cast(widened(native.dtype))


def _fixed_bytes(values: numpy.ndarray[Any, Any]) -> pyarrow.Array:
    """Byte strings with their full length: numpy itself would drop trailing NULs."""
    width = values.dtype.itemsize
    offsets = numpy.arange(len(values) + 1, dtype=numpy.int32) * width
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(numpy.ascontiguousarray(values).tobytes())]
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(values), buffers)


def extents(batch: pyarrow.Array) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """The buffer of a binary array, and the begin and length of each value (length -1 for null)."""
    wide = pyarrow.types.is_large_binary(batch.type)
    offset_type = numpy.int64 if wide else numpy.int32
    _, offsets, values = batch.buffers()
    ends = numpy.frombuffer(offsets, offset_type)[batch.offset : batch.offset + len(batch) + 1].astype(numpy.int64)
    data = numpy.frombuffer(values, numpy.uint8) if values is not None else numpy.empty(0, numpy.uint8)
    sizes = numpy.diff(ends)
    if batch.null_count:
        sizes[batch.is_null().to_numpy(zero_copy_only=False)] = -1
    return data, ends[:-1], sizes


def _gather(data: numpy.ndarray[Any, Any], begins: numpy.ndarray[Any, Any], size: int) -> numpy.ndarray[Any, Any]:
    """The values that begin at ``begins``, ``size`` bytes each, as one matrix; no copy when they are neighbours."""
    count = len(begins)
    if count == 0 or size == 0:
        return numpy.empty((count, size), numpy.uint8)
    if int(begins[-1]) - int(begins[0]) == (count - 1) * size and bool((numpy.diff(begins) == size).all()):
        first = int(begins[0])
        return data[first : first + count * size].reshape(count, size)
    return data[begins[:, None] + numpy.arange(size)]


def spread(values: pyarrow.Array, good: numpy.ndarray[Any, Any]) -> pyarrow.Array:
    """``values`` at the places where ``good`` holds, null elsewhere."""
    if good.all():
        return values
    places = numpy.cumsum(good) - 1
    return values.take(pyarrow.array(places, mask=~good))


def _size_reasons(sizes: numpy.ndarray[Any, Any], good: numpy.ndarray[Any, Any], wanted: str) -> pyarrow.Array:
    if good.all():
        return pyarrow.nulls(len(sizes), pyarrow.string())
    texts = [
        None if fine else "payload is null" if size < 0 else f"{size} bytes, {wanted}"
        for size, fine in zip(sizes.tolist(), good.tolist(), strict=True)
    ]
    return pyarrow.array(texts, pyarrow.string())


def struct(batch: pyarrow.Array, dtype: numpy.dtype[Any]) -> Decoded:
    """Payloads that are one packed record of ``dtype`` each."""
    data, begins, sizes = extents(batch)
    good = sizes == dtype.itemsize
    records = numpy.ascontiguousarray(_gather(data, begins[good], dtype.itemsize)).reshape(-1).view(dtype)
    names = list(dtype.names or ())
    columns = pyarrow.StructArray.from_arrays([to_arrow(records[name]) for name in names], names=names)
    return spread(columns, good), _size_reasons(sizes, good, f"the layout has {dtype.itemsize}")


def array(batch: pyarrow.Array, dtype: numpy.dtype[Any], count: int | None) -> Decoded:
    """Raw arrays of ``dtype``, of ``count`` items when it is given, as lists."""
    data, begins, sizes = extents(batch)
    good = sizes == count * dtype.itemsize if count is not None else (sizes >= 0) & (sizes % dtype.itemsize == 0)
    begins, lengths = begins[good], sizes[good] // dtype.itemsize
    offsets = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32)
    flat = to_arrow(_join(data, begins, sizes[good]).view(dtype))
    wanted = (
        f"{count} items of {dtype.str} are {count * dtype.itemsize}" if count is not None else f"not whole {dtype.str}"
    )
    return spread(pyarrow.ListArray.from_arrays(offsets, flat), good), _size_reasons(sizes, good, wanted)


def _join(
    data: numpy.ndarray[Any, Any], begins: numpy.ndarray[Any, Any], sizes: numpy.ndarray[Any, Any]
) -> numpy.ndarray[Any, Any]:
    """The given ranges of ``data``, concatenated."""
    if len(begins) == 0:
        return numpy.empty(0, numpy.uint8)
    first, last = int(begins[0]), int(begins[-1] + sizes[-1])
    if last - first == int(sizes.sum()):
        return numpy.ascontiguousarray(data[first:last])
    ends = numpy.cumsum(sizes)
    places = numpy.arange(int(ends[-1])) + numpy.repeat(begins - (ends - sizes), sizes)
    joined: numpy.ndarray[Any, Any] = data[places]
    return joined


def npy(batch: pyarrow.Array) -> Decoded:
    """``.npy`` files as flat lists of doubles; files that hold pickled objects are refused."""

    def one(data: bytes) -> Any:
        values = numpy.load(io.BytesIO(data), allow_pickle=False)
        check_number(values.dtype, "dtype")
        if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
            _check_doubles(values.reshape(-1))
        return values.astype(numpy.float64).reshape(-1)

    return each(batch, one, pyarrow.list_(pyarrow.float64()))


def _check_doubles(values: numpy.ndarray[Any, Any]) -> None:
    """Raise ``ValueError`` for an integer that a double cannot hold."""
    great = values[(values > 2**53) | (values < -(2**53) if values.dtype.kind == "i" else False)]
    for value in great.tolist():
        if int(float(value)) != value:
            raise ValueError(f"{value} has more digits than a double can hold")
