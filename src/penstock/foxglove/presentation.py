"""How the messages of one schema are shown: in an encoding that the viewer reads, with its schema.

JSON objects and protobuf go as they are, after a check that they match their type. An ``Image`` becomes a
``foxglove.RawImage`` or a ``foxglove.PointCloud``. Everything else becomes a JSON object: a value that is no object
becomes its field ``value``, and the rows of a message with many become ``rows``. A topic whose type has changed has
the fields of every version, and each message is read by the version that it was written with.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import foxglove

from penstock.errors import PenstockError
from penstock.foxglove.pictures import Kind, kind_of, picture_of
from penstock.types import Schema
from penstock.types.conformity import check_json
from penstock.types.fields import Rows, json_text, reader_of
from penstock.types.shape import holds_rows, json_schema, shape_of
from penstock.types.versions import Place, Versions

__all__ = ["Line", "Presentation", "is_image", "presentation_of"]

Line = Sequence[tuple[Place, Schema]]  # the versions of a topic's schema, the oldest first, each with where it begins
Convert = Callable[[Any, Place | None], bytes]


@dataclass(frozen=True, slots=True)
class Presentation:
    """``convert`` makes the bytes that are sent, of a message and its place if it was recorded; ``ValueError`` if the
    message does not match its schema."""

    encoding: str
    schema: foxglove.Schema
    convert: Convert
    kind: Kind | None = None  #: for images: the viewer's type


def presentation_of(line: Line, sample: Any = None) -> Presentation:
    """The presentation for a topic, of images for one of their messages too. Messages without a schema, or with an
    unknown one, are shown as JSON or text if they are that, else as base64."""
    if not line:
        return _UNDESCRIBED
    try:
        newest = line[-1][1]
        if len(line) > 1 and newest.encoding != "image":
            return _several(line)
        return _described(newest, sample)
    except (PenstockError, ModuleNotFoundError):
        return _UNDESCRIBED


def is_image(line: Line) -> bool:
    """Whether the newest version is that of images."""
    return bool(line) and line[-1][1].encoding == "image"


def _several(line: Line) -> Presentation:
    """One presentation for all versions. Protobuf stays as it is: its versions agree on what a field's number means."""
    versions, newest = Versions(line), line[-1][1]

    def as_it_is(message: Any, place: Place | None) -> bytes:
        versions.read(message, place)
        return bytes(message)

    def as_json(message: Any, place: Place | None) -> bytes:
        value = versions.read(message, place)
        return json_text({"rows": value}).encode() if isinstance(value, Rows) else _object(value)

    if all(schema.encoding == "protobuf" for _, schema in line):
        return Presentation("protobuf", _protobuf_schema(newest), as_it_is)
    described = json_schema(versions.record)
    if versions.holds_rows:
        described = {"type": "object", "properties": {"rows": {"type": "array", "items": described}}}
    return _json(newest, described, as_json)


def _protobuf_schema(schema: Schema) -> foxglove.Schema:
    files = base64.b64decode(schema.definition["protobuf"]["files"])
    return foxglove.Schema(name=schema.name, encoding="protobuf", data=files)


def _described(schema: Schema, sample: Any) -> Presentation:
    if schema.encoding == "image":
        return _picture(sample)
    read = reader_of(schema)
    if schema.encoding == "protobuf":
        return Presentation("protobuf", _protobuf_schema(schema), lambda message, _: _as_it_is(message, read))
    shape = shape_of(schema)
    described = json_schema(shape)
    if holds_rows(schema):
        described = {"type": "object", "properties": {"rows": {"type": "array", "items": described}}}
        return _json(schema, described, lambda message, _: json_text({"rows": read(message)}).encode())

    def value_of(message: Any) -> Any:
        value = read(message)
        if schema.language == "jsonschema":
            check_json(value, schema.definition["jsonschema"])
        return value

    if shape.kind not in ("struct", "map") and not _is_object(schema.definition.get("jsonschema")):
        described = {"type": "object", "properties": {"value": described}}
        return _json(schema, described, lambda message, _: json_text({"value": value_of(message)}).encode())
    described = {"type": "object", **described}
    if schema.encoding == "json":
        return _json(schema, described, lambda message, _: _as_json(message, value_of))
    return _json(schema, described, lambda message, _: json_text(value_of(message)).encode())


def _is_object(node: Any) -> bool:
    """Whether every value of a JSON Schema is an object, though its fields are not known."""
    if not isinstance(node, dict):
        return False
    choices = node.get("anyOf") or node.get("oneOf")
    if choices:
        names = node.get("$defs", {})
        return all(_is_object({**_named(one, names), "$defs": names}) for one in choices)
    return node.get("type") == "object"


def _named(node: Any, names: Any) -> Any:
    found = names.get(str(node.get("$ref", "")).rpartition("/")[2], node)
    return found if isinstance(found, dict) else {}


def _as_it_is(message: Any, read: Callable[[Any], Any]) -> bytes:
    read(message)
    return bytes(message)


def _as_json(message: Any, read: Callable[[Any], Any]) -> bytes:
    body, value = bytes(message), read(message)
    # Python reads numbers that JSON does not have.
    return json_text(value).encode() if b"NaN" in body or b"Infinity" in body else body


def _picture(sample: Any) -> Presentation:
    kind = (None if sample is None else kind_of(sample)) or Kind.PICTURE
    return Presentation("protobuf", kind.schema, lambda message, _: picture_of(message, kind)[1], kind)


def _json(schema: Schema, described: Any, convert: Convert) -> Presentation:
    data = json.dumps(described).encode()
    return Presentation("json", foxglove.Schema(name=schema.name, encoding="jsonschema", data=data), convert)


def _object(value: Any) -> bytes:
    return json_text(value if isinstance(value, dict) else {"value": value}).encode()


def _any(message: Any, _place: Place | None) -> bytes:
    body = bytes(message)
    try:
        return _object(json.loads(body))
    except (ValueError, RecursionError):
        pass
    try:
        return _object(body.decode())
    except UnicodeDecodeError:
        return _object(body)


# Without a schema the package makes up a name, and an empty text that is no JSON Schema.
_UNTYPED = foxglove.Schema(name="untyped", encoding="jsonschema", data=b'{"type":"object"}')
_UNDESCRIBED = Presentation("json", _UNTYPED, _any)
