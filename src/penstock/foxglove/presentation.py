"""How the messages of one schema are shown: in an encoding that the viewer reads, with its schema.

JSON objects and protobuf go as they are. An ``Image`` becomes a ``foxglove.RawImage``. Everything else becomes a JSON
object: a value that is no object becomes its field ``value``, and the rows of a message with many become ``rows``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import foxglove
import numpy
from foxglove.messages import RawImage, Timestamp

from penstock.errors import PenstockError
from penstock.types import Schema
from penstock.types.fields import json_text, reader_of
from penstock.types.image import decode
from penstock.types.shape import holds_rows, json_schema, shape_of

__all__ = ["Presentation", "presentation_of"]

SECOND_NS = 1_000_000_000
#: The encoding of an image that names none, by its number of channels and its type.
UNNAMED = {
    (1, "|u1"): "mono8", (3, "|u1"): "rgb8", (4, "|u1"): "rgba8", (1, "<u2"): "16UC1", (1, "<f4"): "32FC1",
}  # fmt: skip
#: Encodings that the viewer knows under another name.
RENAMED = {"depth16": "16UC1", "depth32": "32FC1"}


@dataclass(frozen=True, slots=True)
class Presentation:
    """``convert`` makes the bytes that are sent; ``ValueError`` if the message does not match its schema."""

    encoding: str
    schema: foxglove.Schema | None
    convert: Callable[[Any], bytes]


def presentation_of(text: str | None) -> Presentation:
    """The presentation for a schema. Messages without a schema, or with an unknown one, are shown as JSON or text if
    they are that, else as base64."""
    if not text:
        return _UNDESCRIBED
    try:
        schema = Schema.parse(text)
        return _described(schema)
    except (PenstockError, ModuleNotFoundError):
        return _UNDESCRIBED


def _described(schema: Schema) -> Presentation:
    if schema.encoding == "image":
        return Presentation("protobuf", RawImage.get_schema(), _raw_image)
    if schema.encoding == "protobuf":
        files = base64.b64decode(schema.definition["protobuf"]["files"])
        return Presentation("protobuf", foxglove.Schema(name=schema.name, encoding="protobuf", data=files), bytes)
    shape = shape_of(schema)
    described = json_schema(shape)
    read = reader_of(schema)
    if holds_rows(schema):
        described = {"type": "object", "properties": {"rows": {"type": "array", "items": described}}}
        return _json(schema, described, lambda message: json_text({"rows": read(message)}).encode())
    if shape.kind not in ("struct", "map"):
        described = {"type": "object", "properties": {"value": described}}
        return _json(schema, described, lambda message: _object(read(message)))
    if schema.encoding == "json":
        return _json(schema, described, bytes)
    return _json(schema, described, lambda message: json_text(read(message)).encode())


def _json(schema: Schema, described: Any, convert: Callable[[Any], bytes]) -> Presentation:
    data = json.dumps(described).encode()
    return Presentation("json", foxglove.Schema(name=schema.name, encoding="jsonschema", data=data), convert)


def _object(value: Any) -> bytes:
    return json_text(value if isinstance(value, dict) else {"value": value}).encode()


def _any(message: Any) -> bytes:
    body = bytes(message)
    try:
        return _object(json.loads(body))
    except (ValueError, RecursionError):
        pass
    try:
        return _object(body.decode())
    except UnicodeDecodeError:
        return _object(body)


_UNDESCRIBED = Presentation("json", None, _any)


def _raw_image(message: Any) -> bytes:
    image: Any = decode(message)
    if not 2 <= image.ndim <= 3:
        raise ValueError(f"an image of {image.ndim} dimensions is no picture")
    if image.dtype.byteorder == ">":
        image = image.astype(image.dtype.newbyteorder("<"))
    height, width = image.shape[:2]
    channels = image.shape[2] if image.ndim == 3 else 1
    encoding = RENAMED.get(image.encoding, image.encoding) or UNNAMED.get((channels, image.dtype.str), "")
    if not encoding:
        raise ValueError(f"an image of {channels} channels of {image.dtype} has no name of its encoding")
    raw = RawImage(
        timestamp=Timestamp(*divmod(message.timestamp_ns, SECOND_NS)),
        frame_id="",
        width=width,
        height=height,
        encoding=encoding,
        step=width * channels * image.dtype.itemsize,
        data=numpy.ascontiguousarray(image).tobytes(),
    )
    encoded: bytes = raw.encode()
    return encoded
