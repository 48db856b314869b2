"""Shape: the structure of the values of a schema, the same for every language that a schema may be written in.

Tables, viewers and Spark make their columns from a shape; ``penstock.types.fields`` makes the values that go into them.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError
from penstock.types.schema import Schema

__all__ = ["ANY", "Shape", "arrow_type", "dtype_of", "holds_rows", "json_schema", "numeric_paths", "shape_of", "union"]

MAX_DEPTH = 16  # of nested types; anything deeper is ``any``

NUMBERS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of value: a number, a time (``timestamp[ns]``; ``timestamp[ns, UTC]`` where its zone is known) or a
    duration (``duration[ns]``), by its Arrow name,
    ``bool``, ``text``, ``bytes``, ``list``, ``map``, ``struct``, or ``any``, which is JSON in a text where a column
    needs one type."""

    kind: str
    item: Shape | None = None  #: of a list, and of a map by text
    fields: tuple[tuple[str, Shape], ...] = ()  #: of a struct

    @property
    def numeric(self) -> bool:
        """Whether its values are numbers."""
        return self.kind in NUMBERS

    @property
    def unit(self) -> str | None:
        """The unit of a time or duration: s, ms, us or ns."""
        return self.kind.partition("[")[2].rstrip("]").partition(",")[0] or None

    @property
    def zone(self) -> str | None:
        """The zone of a time; None if it has none."""
        return self.kind.partition(", ")[2].rstrip("]") or None


UNITS = ("s", "ms", "us", "ns")
ANY, TEXT, BYTES = Shape("any"), Shape("text"), Shape("bytes")
INTEGER, FLOAT, BOOL = Shape("int64"), Shape("float64"), Shape("bool")
IMAGE = Shape("struct", None, (("encoding", TEXT), ("dtype", TEXT), ("shape", Shape("list", INTEGER)), ("data", BYTES)))


def holds_rows(schema: Schema) -> bool:
    """Whether one message is many rows: an array of items, a batch of records."""
    return schema.encoding in ("numpy", "arrow")


def shape_of(schema: Schema) -> Shape:
    """The shape of a message's value, or of one of its rows. ``ProtocolError`` where the schema is damaged."""
    definition: Any = schema.definition.get(schema.language)
    try:
        if definition is True and schema.language == "jsonschema":
            return ANY  # a JSON Schema that accepts any value
        if schema.language == "jsonschema":
            return _of_json(definition, definition.get("$defs") or definition.get("definitions") or {}, 0)
        if schema.language == "protobuf":
            within = {**definition["messages"], definition["message"]: {"fields": {}}}
            return _of_protobuf(definition["fields"], within, 0)
        if schema.language == "dtype":
            return _of_dtype(dtype_of(definition))
        if schema.language == "arrow":
            return _of_arrow_struct(_arrow_schema(definition), 0)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the schema of {schema.name} cannot be read: {error}") from None
    return {"utf-8": TEXT, "image": IMAGE, "bytes": BYTES}.get(schema.encoding, ANY)


def numeric_paths(shape: Shape, most: int = 100) -> list[str]:
    """The paths of its numbers and booleans, in the form that ``penstock.types.fields.parse_path`` reads; without items
    of lists and maps, which not every value has.
    """
    found: list[str] = []

    def visit(part: Shape, path: str) -> None:
        if part.numeric or part.kind == "bool":
            found.append(path)
        for name, inner in part.fields:
            if '"' in name:
                continue  # a path cannot contain such a name
            plain = name and not set(name) & set(".[]")
            visit(inner, f"{path}.{name}" if path and plain else f'{path}["{name}"]' if not plain else name)

    visit(shape, "")
    return [path for path in found if path][:most]


# --- JSON Schema

_JSON_TYPES = {"integer": INTEGER, "number": FLOAT, "boolean": BOOL}


def _of_json(node: Any, names: Mapping[str, Any], depth: int) -> Shape:
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        return ANY
    node = node.get("x-written", node)
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        return _of_json(names.get(name), {**names, name: None}, depth + 1)  # recursive: JSON inside itself
    for word in ("anyOf", "oneOf", "allOf"):
        if word in node:
            return _one_of([_of_json(one, names, depth + 1) for one in node[word] if not _is_null(one)])
    kind = node.get("type")
    if isinstance(kind, list):
        return _one_of([_of_json({**node, "type": one}, names, depth + 1) for one in kind if one != "null"])
    if "enum" in node or "const" in node:
        return _one_of([_of_value(value) for value in node.get("enum", [node.get("const")]) if value is not None])
    if kind == "integer" and node.get("minimum", -1) >= 0 and node.get("maximum", 0) >= 1 << 63:
        return Shape("uint64")
    if kind in _JSON_TYPES:
        return _JSON_TYPES[kind]
    if kind == "string":
        return BYTES if node.get("contentEncoding") == "base64" else TEXT
    if kind == "array":
        items = node.get("prefixItems")
        if items:  # a tuple whose items have one type is a list
            item = _one_of([_of_json(one, names, depth + 1) for one in items])
        else:
            item = _of_json(node.get("items"), names, depth + 1)
        return Shape("list", item)
    if kind == "object" and node.get("properties"):
        parts = sorted(node["properties"].items())
        return Shape("struct", None, tuple((name, _of_json(part, names, depth + 1)) for name, part in parts))
    if kind == "object" and isinstance(node.get("additionalProperties"), dict):
        return Shape("map", _of_json(node["additionalProperties"], names, depth + 1))
    return ANY


def _is_null(node: Any) -> bool:
    return isinstance(node, dict) and node.get("type") == "null"


def _of_value(value: Any) -> Shape:
    for kind, shape in ((bool, BOOL), (int, INTEGER), (float, FLOAT), (str, TEXT)):
        if isinstance(value, kind):
            return shape
    return ANY


def _one_of(choices: list[Shape]) -> Shape:
    """One shape for all choices."""
    distinct = set(choices)
    if len(distinct) == 1:
        return choices[0]
    return FLOAT if distinct == {INTEGER, FLOAT} else ANY


def union(shapes: Sequence[Shape]) -> Shape:
    """One shape that can hold the values of all of them: every field of every record, numbers in the wider type, and
    JSON (``any``) where two have nothing in common.
    """
    return functools.reduce(_united, shapes)


def _united(one: Shape, other: Shape) -> Shape:
    if one == other:
        return one
    if one.kind == other.kind == "struct":
        mine, theirs = dict(one.fields), dict(other.fields)
        both = {name: _united(part, theirs[name]) if name in theirs else part for name, part in mine.items()}
        return Shape("struct", None, (*both.items(), *((name, theirs[name]) for name in theirs if name not in mine)))
    if one.kind == other.kind and one.item is not None and other.item is not None:  # lists, maps
        return Shape(one.kind, _united(one.item, other.item))
    if one.numeric and other.numeric and "uint64" not in (one.kind, other.kind):
        return FLOAT if "float" in one.kind + other.kind else INTEGER
    return ANY


# --- protobuf

_PROTOBUF_TYPES = {
    "double": FLOAT, "float": Shape("float32"), "bool": BOOL, "string": TEXT, "enum": TEXT, "bytes": BYTES,
    "int64": INTEGER, "sint64": INTEGER, "sfixed64": INTEGER, "uint64": Shape("uint64"), "fixed64": Shape("uint64"),
    "int32": Shape("int32"), "sint32": Shape("int32"), "sfixed32": Shape("int32"), "uint32": Shape("uint32"),
    "fixed32": Shape("uint32"),
}  # fmt: skip


def _of_protobuf(fields: Mapping[str, Any], messages: Mapping[str, Any], depth: int) -> Shape:
    if depth > MAX_DEPTH or not fields:
        return ANY
    found = []
    for number in sorted(fields, key=int):
        field = fields[number]
        held = field.get("message")
        parts = messages[held]["fields"] if held else {}
        within = {**messages, held: {"fields": {}}}  # recursive: JSON inside itself
        one = _of_protobuf(parts, within, depth + 1) if held else _PROTOBUF_TYPES.get(field["type"], ANY)
        if field["label"] == "repeated":
            # a map is a repeated message of a key and a value, whose name has this ending
            is_map = held and held.endswith("Entry") and [parts[n]["name"] for n in sorted(parts)] == ["key", "value"]
            one = Shape("map", dict(one.fields)["value"]) if is_map and one.fields else Shape("list", one)
        found.append((field["name"], one))
    return Shape("struct", None, tuple(found))


# --- numpy


def dtype_of(definition: Any) -> Any:
    from numpy.lib.format import descr_to_dtype

    try:
        return descr_to_dtype(_tuples(definition))
    except SyntaxError:  # numpy reads some texts as Python does
        raise ValueError(f"numpy has no type {definition!r}") from None


def _tuples(part: Any) -> Any:
    """Lists as numpy wants them: JSON has no tuples."""
    if not isinstance(part, list):
        return part
    if part and all(isinstance(one, list) for one in part):
        return [tuple(_shape_or_parts(one)) for one in part]
    return tuple(_tuples(one) for one in part)


def _shape_or_parts(field: list[Any]) -> list[Any]:
    name, kind, *shape = field
    name = tuple(name) if isinstance(name, list) else name
    return [name, _tuples(kind), *(tuple(one) if isinstance(one, list) else one for one in shape)]


def _of_dtype(dtype: Any) -> Shape:
    if dtype.subdtype is not None:
        item, sizes = dtype.subdtype
        shape = _of_dtype(item)
        for _ in sizes:
            shape = Shape("list", shape)
        return shape
    if dtype.names is not None:
        return Shape("struct", None, tuple((name, _of_dtype(dtype[name])) for name in dtype.names))
    if dtype.kind in "SV":
        return BYTES
    if dtype.kind in "mM":
        return _of_unit("timestamp" if dtype.kind == "M" else "duration", dtype)
    # numbers that Arrow does not have (complex, more than 64 bits) are text
    return {"b": BOOL}.get(dtype.kind) or (Shape(dtype.name) if dtype.name in NUMBERS else TEXT)


def _of_unit(word: str, dtype: Any) -> Shape:
    from numpy import datetime_data

    unit, number = datetime_data(dtype)
    if word == "duration" and (number != 1 or unit not in UNITS):
        return INTEGER  # a count of some other unit
    return Shape(f"{word}[{unit if unit in UNITS else 's'}]") if unit != "generic" else ANY


# --- Arrow


def _arrow_schema(definition: Any) -> Any:
    import pyarrow
    from pyarrow import ipc

    return ipc.read_schema(pyarrow.py_buffer(base64.b64decode(definition["ipc"])))


def _of_arrow_struct(fields: Any, depth: int) -> Shape:
    names = [field.name for field in fields]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two columns are called {twice!r}")
    return Shape("struct", None, tuple((field.name, _of_arrow(field.type, depth + 1)) for field in fields))


def _of_arrow(kind: Any, depth: int) -> Shape:
    from pyarrow import types

    if depth > MAX_DEPTH:
        return ANY
    if types.is_struct(kind):
        return _of_arrow_struct(kind, depth)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_list_view(kind):
        return Shape("list", _of_arrow(kind.value_type, depth + 1))
    if types.is_dictionary(kind):
        return _of_arrow(kind.value_type, depth + 1)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return BYTES
    if types.is_binary_view(kind):
        return BYTES
    if types.is_timestamp(kind):
        return Shape(f"timestamp[{kind.unit}, {kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]")
    if types.is_duration(kind):
        return Shape(f"duration[{kind.unit}]")
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    if types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind):
        return TEXT
    return BOOL if name == "bool" else Shape(name) if name in NUMBERS else ANY


# --- what is made of a shape


def arrow_type(shape: Shape) -> Any:
    """The Arrow type of a column of such values."""
    import pyarrow

    if shape.kind == "struct":
        return pyarrow.struct([(name, arrow_type(part)) for name, part in shape.fields])
    if shape.kind == "list":
        return pyarrow.list_(arrow_type(shape.item or ANY))
    if shape.kind == "map":
        return pyarrow.map_(pyarrow.string(), arrow_type(shape.item or ANY))
    if shape.kind == "bytes":
        return pyarrow.binary()
    if shape.kind == "bool":
        return pyarrow.bool_()
    if shape.zone is not None:
        return pyarrow.timestamp(shape.unit, shape.zone)
    return pyarrow.string() if shape.kind in ("text", "any") else pyarrow.type_for_alias(shape.kind)


def json_schema(shape: Shape) -> dict[str, Any]:
    """A JSON Schema without references, as viewers read it; bytes are base64 in a text."""
    if shape.kind == "struct":
        return {"type": "object", "properties": {name: json_schema(part) for name, part in shape.fields}}
    if shape.kind == "list":
        return {"type": "array", "items": json_schema(shape.item or ANY)}
    if shape.kind == "map":
        return {"type": "object", "additionalProperties": json_schema(shape.item or ANY)}
    if shape.kind == "bytes":
        return {"type": "string", "contentEncoding": "base64"}
    if shape.unit is not None:
        return {"type": "string", "format": "date-time"} if shape.kind[0] == "t" else {"type": "integer"}
    if shape.numeric:
        return {"type": "number" if shape.kind.startswith("float") else "integer"}
    return {"bool": {"type": "boolean"}, "text": {"type": "string"}}.get(shape.kind, {})
