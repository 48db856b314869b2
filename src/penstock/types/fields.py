"""Values of messages whose Python type this program does not have, decoded by the schema that was announced with them.

A value is made of dict, list, str, bytes, numbers, bool and None. A message that holds rows (a numpy array, an Arrow
batch) is a ``Rows``.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.channel import Subscriber
from penstock.errors import InvalidArgument, PenstockError, ProtocolError, nearest
from penstock.types.schema import Schema
from penstock.types.shape import Shape, dtype_of, shape_of

__all__ = [
    "Reader", "Rows", "Step", "Values", "at", "check_items", "check_path", "check_paths", "fitted", "iso_text",
    "json_text", "parse_path", "reader_of", "split_paths",
]  # fmt: skip

Reader = Callable[[Any], Any]
Step = str | int
MAX_SHOWN_BYTES = 4096
MAX_TOPICS = 10_000
LOOK_AGAIN_S = 1.0
logger = logging.getLogger("penstock")


class Rows(list[Any]):
    """The rows of one message. Indexing by name gives that field of every row, or of the only row."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = [row[key] for row in self]
        return found[0] if len(found) == 1 else Rows(found)


def reader_of(schema: Schema) -> Reader:
    """A function from a message to its value; ``ValueError`` where a message is not of the schema.

    ``ProtocolError`` where the schema is damaged, ``ModuleNotFoundError`` where the package that reads it is missing.
    """
    maker = _MAKERS.get(schema.encoding)
    if maker is None:
        raise ProtocolError(f"{schema.name} is encoded as {schema.encoding!r}, which cannot be decoded here")
    try:
        read = maker(schema)
    except (PenstockError, ModuleNotFoundError):
        raise
    except Exception as error:  # each library raises its own errors
        raise ProtocolError(f"the schema of {schema.name} cannot be read: {error}") from None

    def value_of(message: Any) -> Any:
        try:
            return read(message)
        except ValueError:
            raise
        except Exception as error:  # each library raises its own errors
            raise ValueError(f"not {schema.name} as {schema.encoding}: {error}") from None

    return value_of


class Values:
    """Decodes the messages of one subscriber by the schemas of their topics, or as JSON without a schema. Used by one
    thread. A schema that is missing, or that a message does not match, is looked up again now and then.
    """

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._readers: dict[str | None, tuple[float, Schema | None, Reader]] = {}

    def schema(self, topic: str | None) -> Schema | None:
        """The schema of the topic, if this program can decode it."""
        return self._reader_of(topic)[1]

    def __call__(self, message: Any) -> Any:
        """The value; ``ValueError`` if the message does not match its schema."""
        return self.read(message, message.channel)

    def read(self, message: Any, topic: str | None) -> Any:
        """The same for a message of that topic."""
        known = self._reader_of(topic)
        try:
            return known[2](message)
        except ValueError:
            again = self._reader_of(topic, misfit=True)  # its type may have changed
            if again is known:
                raise
            return again[2](message)

    def check(self, topic: str | None, paths: Iterable[Sequence[Step]]) -> None:
        """``InvalidArgument`` where the type of the topic is known and has no such field."""
        check_paths(self.schemas(topic), paths)

    def schemas(self, topic: str | None) -> list[Schema]:
        """Every stored version of the topic's schema, the newest last."""
        found = []
        for text in self._subscriber.schemas_of(topic):
            with contextlib.suppress(PenstockError):
                found.append(Schema.parse(text))
        return found

    def _reader_of(self, topic: str | None, misfit: bool = False) -> tuple[float, Schema | None, Reader]:
        found = self._readers.get(topic)
        now = time.monotonic()
        if found is None or ((misfit or found[1] is None) and now - found[0] > LOOK_AGAIN_S):
            if len(self._readers) >= MAX_TOPICS:
                self._readers.clear()
            found = self._readers[topic] = (now, *self._read(topic))
        return found

    def _read(self, topic: str | None) -> tuple[Schema | None, Reader]:
        from penstock.types.versions import SEEN, Versions

        try:
            schemas = self.schemas(topic)
            if len(schemas) > 1:  # it is not known which version a message has
                return schemas[-1], Versions((SEEN, schema) for schema in schemas).read
            return (schemas[0], reader_of(schemas[0])) if schemas else (None, _plain_json)
        except (PenstockError, ModuleNotFoundError) as error:
            logger.warning("%s: its fields are not read: %s", topic, error)
            return None, _plain_json


def _plain_json(message: Any) -> Any:
    try:
        # decoded here, because json.loads would accept UTF-16 too, which no typed reader does
        return json.loads(str(message, "utf-8"))
    except RecursionError:
        raise ValueError("nested too deep") from None


def _json(schema: Schema) -> Reader:
    return _plain_json


def _msgpack(schema: Schema) -> Reader:
    import msgspec

    return msgspec.msgpack.Decoder().decode


def _bytes(schema: Schema) -> Reader:
    return bytes


def _text(schema: Schema) -> Reader:
    return lambda message: str(message, "utf-8")


def check_items(message: Any, item_bytes: int) -> None:
    """``ValueError`` where a message is no array of items of that size."""
    if len(memoryview(message)) % item_bytes:
        raise ValueError(f"its bytes are no whole number of items of {item_bytes} bytes")


def _numpy(schema: Schema) -> Reader:
    import numpy

    dtype = dtype_of(schema.definition["dtype"])

    def read(message: Any) -> Rows:
        check_items(message, dtype.itemsize)
        items = numpy.frombuffer(bytes(message), dtype)
        if dtype.names is None:
            return Rows(_leaf(items))
        return Rows(_record(item) for item in items)

    return read


def _record(item: Any) -> Any:
    """A record as a dict, nested ones too, with Python's own numbers."""
    if getattr(item.dtype, "names", None) is None:
        return _leaf(item)
    if item.shape:  # several records in one field
        return [_record(one) for one in item]
    return {name: _record(item[name]) for name in item.dtype.names}


def _leaf(item: Any) -> Any:
    """A number or an array of them as Python has it: times as ISO text, durations as a count of their unit."""
    if item.dtype.kind not in "mM":
        return item.tolist()
    import numpy

    if item.shape:
        return [_leaf(one) for one in item]
    if numpy.isnat(item):
        return None
    return str(numpy.datetime_as_string(item)) if item.dtype.kind == "M" else int(item.astype("i8"))


def _image(schema: Schema) -> Reader:
    from penstock.types.image import decode

    def read(message: Any) -> dict[str, Any]:
        image = decode(message)
        found = {"encoding": image.encoding, "dtype": image.dtype.str, "shape": list(image.shape)}
        return {**found, "data": image.tobytes()}

    return read


def _arrow(schema: Schema) -> Reader:
    import pyarrow
    from pyarrow import ipc

    def read(message: Any) -> Rows:
        with ipc.open_stream(pyarrow.py_buffer(bytes(message))) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)  # any program may have sent it
        return Rows(batch.to_pylist())

    return read


def _protobuf(schema: Schema) -> Reader:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    definition = schema.definition["protobuf"]
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(definition["files"])).file:
        pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(definition["message"]))
    return lambda message: _of_message(kind.FromString(bytes(message)))


def _of_message(message: Any) -> dict[str, Any]:
    return {field.name: _of_field(message, field) for field in message.DESCRIPTOR.fields}


def _of_field(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _plain(value[key], inner) for key in value}
    if field.is_repeated:
        return [_plain(one, field) for one in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value, field)


def _plain(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _of_message(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    return value


_MAKERS: dict[str, Callable[[Schema], Reader]] = {
    "json": _json, "msgpack": _msgpack, "utf-8": _text, "bytes": _bytes, "numpy": _numpy, "image": _image,
    "arrow": _arrow, "protobuf": _protobuf,
}  # fmt: skip


# --- fields by name

_STEP = re.compile(r"""\.?([^.\[\]]+)|\.?\[(\d+)\]|\.?\[("[^"]*"|'[^']*')\]""")
_COMMA = re.compile(r"""((?:[^,"']|"[^"]*"|'[^']*'|["'])+)""")


def parse_path(text: str) -> list[Step]:
    """``pose.x``, ``joints[3].angle``, ``["odd name"]`` as steps; written as in filters (``.pose["odd name"]``) too."""
    steps: list[Step] = []
    place = 0
    while place < len(text):
        match = _STEP.match(text, place)
        if match is None or (match[1] is not None and place and text[place] != "."):
            raise InvalidArgument(f"{text!r} is no field: write a.b, a[0].b or [\"a b\"]")
        steps.append(int(match[2]) if match[2] is not None else match[1] if match[1] is not None else match[3][1:-1])
        place = match.end()
    if not steps:
        raise InvalidArgument("a field has a name")
    return steps


def split_paths(text: str) -> list[str]:
    """``a,b["c,d"]`` as paths: a comma in quotes is part of a name."""
    return [path.strip() for path in _COMMA.findall(text)] or [""]


def at(value: Any, steps: Iterable[Step]) -> Any:
    """The value at the path; None if there is none."""
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def check_path(schema: Schema, path: str | Sequence[Step]) -> None:
    """``InvalidArgument`` names what there is, where the schema has no such field."""
    try:
        shape = shape_of(schema)
    except ProtocolError:
        shape = Shape("any")  # the fields of a damaged schema are not known
    steps = parse_path(path) if isinstance(path, str) else path
    for at, step in enumerate(steps):
        if shape.item is not None and isinstance(step, int) == (shape.kind == "list"):
            shape = shape.item
        elif isinstance(step, str) and shape.kind == "struct":
            known = dict(shape.fields)
            if step not in known:
                dotted = next((name for name in known if name.startswith(f"{step}.")), None)
                hint = f'did you mean ["{dotted}"]? Its name has a dot' if dotted else nearest(step, list(known))
                raise InvalidArgument(f"{schema.name} has no field {step!r}; {hint}")
            shape = known[step]
        elif shape.kind == "any" or isinstance(step, int):
            return  # a message may have any field here
        else:
            where = ".".join(map(str, steps[:at])) or "the message"
            raise InvalidArgument(f"{schema.name} has no field {step!r}: {where} is {shape.kind}, which has no fields")


def check_paths(schemas: Sequence[Schema], paths: Iterable[str | Sequence[Step]]) -> None:
    """``InvalidArgument`` where there are schemas and none of them has one of the fields."""
    for path in paths:
        failures = []
        for schema in reversed(schemas):
            try:
                check_path(schema, path)
            except (InvalidArgument, ProtocolError) as error:
                failures.append(error)
        if failures and len(failures) == len(schemas):
            raise failures[0]


# --- values for columns and for JSON


def fitted(value: Any, shape: Shape) -> Any:
    """``value`` converted for a column of ``shape``; ``ValueError`` if it has another type."""
    if value is None:
        return None
    kind = shape.kind
    if kind == "any":
        return json_text(value)
    if kind == "struct":
        if not isinstance(value, Mapping):
            raise _mismatch(value, shape)
        return {name: fitted(value.get(name), part) for name, part in shape.fields}
    if kind == "list" and isinstance(value, list | tuple):
        item = shape.item
        return value if item is None else [fitted(one, item) for one in value]
    if kind == "map" and isinstance(value, Mapping):
        item = shape.item
        return [(str(key), one if item is None else fitted(one, item)) for key, one in value.items()]
    if kind == "bytes" and isinstance(value, bytes | str):
        return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "text" and not isinstance(value, dict | list | bytes | int | float):
        return _leaf_text(value)  # a time, for which msgpack has a type of its own
    if shape.unit is not None:
        return _count(value, shape)
    if kind == "bool" and isinstance(value, bool):
        return value
    if shape.numeric and isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, shape)
    raise _mismatch(value, shape)


def _count(value: Any, shape: Shape) -> int:
    """A time as the number of units since 1970, or the length of a duration in units."""
    import numpy

    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    try:
        if shape.kind.startswith("duration"):
            return int(numpy.timedelta64(value).astype(f"m8[{shape.unit}]").astype("i8"))
        return int(numpy.datetime64(value).astype(f"M8[{shape.unit}]").astype("i8"))
    except (ValueError, TypeError):
        raise _mismatch(value, shape) from None


def iso_text(count: int, shape: Shape) -> str:
    """A time of ``shape`` as ISO text, in UTC where it has a zone."""
    import numpy

    kind: Any = numpy.dtype(f"M8[{shape.unit}]")
    return str(numpy.datetime_as_string(numpy.array(count, "i8").view(kind))) + ("Z" if shape.zone else "")


def _number(value: int | float, shape: Shape) -> int | float:
    if shape.kind.startswith("float"):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"an integer is beyond {shape.kind}") from None
    if isinstance(value, float) and not value.is_integer():
        raise _mismatch(value, shape)
    bits = int(shape.kind.lstrip("uint"))
    least, end = (0, 1 << bits) if shape.kind[0] == "u" else (-(1 << (bits - 1)), 1 << (bits - 1))
    if not least <= value < end:
        raise ValueError(f"{value} is beyond {shape.kind}")
    return int(value)


def _mismatch(value: Any, shape: Shape) -> ValueError:
    return ValueError(f"{type(value).__name__} where {shape.kind} is wanted")


def json_text(value: Any, most_bytes: int | None = None) -> str:
    """``value`` as JSON (RFC 8259): bytes as base64, or as their count if there are more than ``most_bytes``; NaN and
    infinity as null.
    """

    def shown(one: Any) -> Any:
        if isinstance(one, bytes | bytearray | memoryview):
            if most_bytes is not None and len(one) > most_bytes:
                return f"{len(one)} bytes"
            return base64.b64encode(one).decode()
        return _leaf_text(one)

    try:
        return json.dumps(value, default=shown, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=shown)


def _leaf_text(value: Any) -> str:
    """A value that JSON has no type for, as text; times as typed publishers write them in JSON."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat().replace("+00:00", "Z")
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [_finite(one) for one in value]
    return value
