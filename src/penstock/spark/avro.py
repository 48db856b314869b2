"""Avro's binary form to Arrow, by a schema: what ``decode.avro`` runs on executors. Plain Python, knows no Spark.

A schema becomes an Arrow type and a function that reads one value. Named types may be reused, but not recursively; a
union must be one type and null. The sizes that a payload claims are checked against its length.
"""

from __future__ import annotations

import datetime
import decimal
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow

from penstock.errors import InvalidArgument, nearest

Read = Callable[["Bytes"], Any]
MAX_DEPTH = 50
_PLAIN = {
    "null": pyarrow.null(), "boolean": pyarrow.bool_(), "int": pyarrow.int32(), "long": pyarrow.int64(),
    "float": pyarrow.float32(), "double": pyarrow.float64(), "bytes": pyarrow.binary(), "string": pyarrow.string(),
}  # fmt: skip
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_TIMES = {"timestamp-millis": 1000, "timestamp-micros": 1}


class Bytes:
    """Reads a payload from its beginning."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.items = data, 0, 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError(f"{count} bytes are claimed at {self.at}, where {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        """A zigzag number of variable length."""
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 63:
                raise ValueError(f"the number that ends at {self.at} has more than 64 bits")
        if value >> 64:
            raise ValueError(f"the number that ends at {self.at} has more than 64 bits")
        return (value >> 1) ^ -(value & 1)

    def blocks(self) -> Any:
        """How many items each block of an array or map has."""
        while count := self.number():
            if count < 0:
                count = -count
                self.number()  # the block's size in bytes, for readers that skip it
            self.items += count  # also of nulls: they take no bytes, so the payload's size does not bound them
            if self.items > len(self.data):
                raise ValueError(f"{self.items} items cannot stand in {len(self.data)} bytes")
            yield from range(count)


def compiled(schema: str | Mapping[str, Any]) -> tuple[pyarrow.DataType, Callable[[bytes], Any]]:
    """The Arrow type of a schema and the function that decodes a payload of it."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) and schema.lstrip()[:1] in '{["' else schema
    except ValueError as error:
        raise InvalidArgument(f"the Avro schema is not JSON: {error}") from None
    kind, read = _compile(parsed, {}, 0)

    def decode(data: bytes) -> Any:
        source = Bytes(data)
        value = read(source)
        if source.at != len(data):
            raise ValueError(f"{len(data) - source.at} bytes are left after the value")
        return value

    return kind, decode


def _compile(schema: Any, names: dict[str, Any], depth: int, space: str = "") -> tuple[pyarrow.DataType, Read]:
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"an Avro schema has at most {MAX_DEPTH} levels")
    if isinstance(schema, list):
        return _union(schema, names, depth, space)
    if isinstance(schema, str):
        if schema in _PLAIN:
            return _PLAIN[schema], _PLAIN_READS[schema]
        full = schema if "." in schema or not space else f"{space}.{schema}"
        found = names.get(full, names.get(schema))
        if found is None:
            raise InvalidArgument(f"Avro type {schema!r} is unknown here; {nearest(schema, [*_PLAIN, *names])}")
        return _named_type(found, schema)
    if not isinstance(schema, Mapping) or "type" not in schema:
        raise InvalidArgument(f"{schema!r} is no Avro schema: a name, an object with a type, or a list was expected")
    kind = schema["type"]
    if not isinstance(kind, str) or kind not in _COMPLEX:
        return _logical(schema, *_compile(kind, names, depth + 1, space))
    name = schema.get("name")
    if name is not None:
        space = str(schema.get("namespace", space if "." not in name else name.rpartition(".")[0]))
        name = name if "." in name or not space else f"{space}.{name}"
        names[name] = None  # marks a type whose definition is not complete: recursion is refused
    made = _logical(schema, *_COMPLEX[kind](schema, names, depth + 1, space))
    if name is not None:
        names[name] = made
    return made


def _named_type(found: Any, name: str) -> tuple[pyarrow.DataType, Read]:
    if not isinstance(found, tuple):
        raise InvalidArgument(f"Avro type {name!r} is used inside itself, which no column can be")
    return found


def _union(branches: list[Any], names: dict[str, Any], depth: int, space: str) -> tuple[pyarrow.DataType, Read]:
    made = [None if branch == "null" else _compile(branch, names, depth + 1, space) for branch in branches]
    kinds = [item[0] for item in made if item is not None]
    if len(kinds) != 1:
        raise InvalidArgument(f"the union {json.dumps(branches)[:200]} is not of null and one other type")

    def read(source: Bytes) -> Any:
        branch = source.number()
        if not 0 <= branch < len(made):
            raise ValueError(f"branch {branch} of a union that has {len(made)}")
        chosen = made[branch]
        return None if chosen is None else chosen[1](source)

    return kinds[0], read


def _record(schema: Mapping[str, Any], names: dict[str, Any], depth: int, space: str) -> tuple[pyarrow.DataType, Read]:
    fields = [(str(field["name"]), *_compile(field["type"], names, depth, space)) for field in schema["fields"]]
    kind = pyarrow.struct([(name, kind) for name, kind, _ in fields])
    return kind, lambda source: {name: read(source) for name, _, read in fields}


def _enum(schema: Mapping[str, Any], *_: Any) -> tuple[pyarrow.DataType, Read]:
    symbols = list(map(str, schema["symbols"]))

    def read(source: Bytes) -> str:
        number = source.number()
        if not 0 <= number < len(symbols):
            raise ValueError(f"symbol {number} of {len(symbols)}")
        return symbols[number]

    return pyarrow.string(), read


def _array(schema: Mapping[str, Any], names: dict[str, Any], depth: int, space: str) -> tuple[pyarrow.DataType, Read]:
    kind, item = _compile(schema["items"], names, depth, space)
    return pyarrow.list_(kind), lambda source: [item(source) for _ in source.blocks()]


def _map(schema: Mapping[str, Any], names: dict[str, Any], depth: int, space: str) -> tuple[pyarrow.DataType, Read]:
    kind, item = _compile(schema["values"], names, depth, space)

    def read(source: Bytes) -> Any:
        return list({_string(source): item(source) for _ in source.blocks()}.items())

    return pyarrow.map_(pyarrow.string(), kind), read


def _fixed(schema: Mapping[str, Any], *_: Any) -> tuple[pyarrow.DataType, Read]:
    size = int(schema["size"])
    return pyarrow.binary(), lambda source: source.take(size)


def _logical(schema: Mapping[str, Any], kind: pyarrow.DataType, read: Read) -> tuple[pyarrow.DataType, Read]:
    """Times, dates and decimals; other logical types are read as their underlying type."""
    name = schema.get("logicalType")
    if name in _TIMES and kind == pyarrow.int64():
        factor = _TIMES[name] * _MICROSECOND
        return pyarrow.timestamp("us", tz="UTC"), lambda source: _EPOCH + read(source) * factor
    if name == "date" and kind == pyarrow.int32():
        return pyarrow.date32(), lambda source: _EPOCH.date() + datetime.timedelta(days=read(source))
    if name == "decimal" and kind == pyarrow.binary():
        digits, scale = int(schema["precision"]), int(schema.get("scale", 0))
        exact = decimal.Context(prec=76)

        def amount(source: Bytes) -> decimal.Decimal:
            return decimal.Decimal(int.from_bytes(read(source), "big", signed=True)).scaleb(-scale, exact)

        return pyarrow.decimal128(digits, scale), amount
    return kind, read


def _boolean(source: Bytes) -> bool:
    byte = source.take(1)[0]
    if byte > 1:
        raise ValueError(f"byte {byte} is no boolean")
    return bool(byte)


def _string(source: Bytes) -> str:
    return source.take(source.number()).decode()


_PLAIN_READS: dict[str, Read] = {
    "null": lambda source: None,
    "boolean": _boolean,
    "int": Bytes.number,
    "long": Bytes.number,
    "float": lambda source: struct.unpack("<f", source.take(4))[0],
    "double": lambda source: struct.unpack("<d", source.take(8))[0],
    "bytes": lambda source: source.take(source.number()),
    "string": _string,
}
_COMPLEX: dict[str, Callable[..., tuple[pyarrow.DataType, Read]]] = {
    "record": _record, "enum": _enum, "array": _array, "map": _map, "fixed": _fixed,
}  # fmt: skip
