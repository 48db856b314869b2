"""Codecs of the types that are known by themselves. Nothing is imported for a type that the program does not have:
who gives a pydantic model has pydantic."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
import typing
from typing import Any

from penstock.errors import InvalidArgument
from penstock.types.codec import ArrayDraft, Codec


def make(kind: Any) -> Codec[Any] | None:
    """The codec of ``kind``, or None."""
    if kind is str:
        return Codec("str", "utf-8", {"text": "utf-8"}, _encode_str, _decode_str)
    if getattr(kind, "__module__", "") == "penstock.types.image" and getattr(kind, "__name__", "") == "Image":
        from penstock.types.image import CODEC

        return CODEC
    if kind is dict:
        return Codec("dict", "json", {"jsonschema": {"type": "object"}}, _encode_dict, _decode_dict)
    for test, maker in _OTHERS:
        if test(kind):
            return maker(kind)
    return None


def _module(name: str) -> Any:
    """The module where somebody has imported it already, else None."""
    return sys.modules.get(name)


def _refuse(kind: type, value: Any) -> TypeError:
    return TypeError(f"publish takes {_article(kind.__name__)} here, not {type(value).__name__}")


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# --- str and dict


def _encode_str(value: str) -> bytes:
    if not isinstance(value, str):
        raise _refuse(str, value)
    return value.encode()


def _decode_str(message: Any) -> str:
    return str(message, "utf-8")


def _encode_dict(value: dict[str, Any]) -> bytes:
    if not isinstance(value, dict):
        raise _refuse(dict, value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _decode_dict(message: Any) -> dict[str, Any]:
    value = json.loads(bytes(message))
    if not isinstance(value, dict):
        raise ValueError(f"an object is wanted, and this is {_article(type(value).__name__)}")
    return value


# --- msgspec: Struct, dataclass, TypedDict


def _is_plain(kind: Any) -> bool:
    struct = getattr(_module("msgspec"), "Struct", None)
    if struct is not None and isinstance(kind, type) and issubclass(kind, struct):
        return True
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return True
    return typing.is_typeddict(kind) or typing.get_origin(kind) in (dict, list)


def plain(kind: Any, encoding: str = "json") -> Codec[Any]:
    """The codec of what msgspec knows, as ``json`` or ``msgpack``."""
    try:
        import msgspec
    except ImportError:
        raise ImportError(f"type={kind!r} needs msgspec: pip install 'penstock[types]'", name="msgspec") from None

    if encoding not in ("json", "msgpack"):
        raise InvalidArgument(f"encoding={encoding!r} is not a choice; valid: json, msgpack")
    room = msgspec.json if encoding == "json" else msgspec.msgpack
    try:
        schema = msgspec.json.schema(kind)
        _mark_times(msgspec.inspect.type_info(kind), schema, schema.get("$defs", {}), set())
        decode = room.Decoder(kind).decode
    except TypeError as error:
        raise InvalidArgument(f"type={kind!r} cannot be described: {error}") from None
    encode = room.Encoder().encode
    name = getattr(kind, "__name__", None) if typing.get_origin(kind) is None else None
    if typing.is_typeddict(kind) or typing.get_origin(kind) is not None:
        wanted = typing.get_origin(kind) or dict
    else:
        wanted = kind

    def checked(value: Any) -> bytes:
        if not isinstance(value, wanted):
            raise _refuse(wanted, value)
        encoded: bytes = encode(value)
        return encoded

    return Codec(name or str(kind), encoding, {"jsonschema": schema}, checked, decode)


_TIMES = {"DateTimeType": "date-time", "TimeType": "time"}


def _mark_times(info: Any, node: Any, names: dict[str, Any], seen: set[str]) -> None:
    """msgspec describes times without a zone as mere text: say what they are."""
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name in seen or not name.endswith(getattr(getattr(info, "cls", None), "__name__", "")):
            return  # looked at already, or another choice of a union
        seen.add(name)
        node = names[name]
    kind = type(info).__name__
    if kind in _TIMES and node.get("type") == "string":
        node.setdefault("format", _TIMES[kind])
    elif kind == "UnionType":
        for one in info.types:
            for choice in node.get("anyOf", ()):
                if type(one).__name__ not in _TIMES or "format" not in choice:
                    _mark_times(one, choice, names, seen)
    elif kind == "TupleType":
        for one, part in zip(info.item_types, node.get("prefixItems", ()), strict=False):
            _mark_times(one, part, names, seen)
    elif hasattr(info, "fields"):
        for place, one in enumerate(info.fields):
            parts = node.get("properties", {}).get(one.encode_name)
            if parts is None and place < len(node.get("prefixItems", ())):
                parts = node["prefixItems"][place]
            _mark_times(one.type, parts, names, seen)
    else:
        _mark_times(getattr(info, "item_type", None), node.get("items"), names, seen)
        _mark_times(getattr(info, "value_type", None), node.get("additionalProperties"), names, seen)


# --- pydantic: by the models' own methods


def _is_pydantic(kind: Any) -> bool:
    model = getattr(_module("pydantic"), "BaseModel", None)
    return model is not None and isinstance(kind, type) and issubclass(kind, model)


def _pydantic(kind: Any) -> Codec[Any]:
    def encode(value: Any) -> bytes:
        if not isinstance(value, kind):
            raise _refuse(kind, value)
        text: str = value.model_dump_json()
        return text.encode()

    def decode(message: Any) -> Any:
        return kind.model_validate_json(bytes(message))

    return Codec(kind.__name__, "json", {"jsonschema": kind.model_json_schema()}, encode, decode)


# --- protobuf


def _is_protobuf(kind: Any) -> bool:
    base = getattr(_module("google.protobuf.message"), "Message", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def _protobuf(kind: Any) -> Codec[Any]:
    descriptor = kind.DESCRIPTOR

    def encode(value: Any) -> bytes:
        if not isinstance(value, kind):
            raise _refuse(kind, value)
        encoded: bytes = value.SerializeToString()
        return encoded

    def decode(message: Any) -> Any:
        return kind.FromString(bytes(message))

    messages: dict[str, Any] = {}
    fields = _fields(descriptor, messages)
    files = base64.b64encode(_descriptor_set(descriptor.file)).decode()
    definition = {"message": descriptor.full_name, "fields": fields, "messages": messages, "files": files}
    return Codec(descriptor.full_name, "protobuf", {"protobuf": definition}, encode, decode)


_LABELS = {1: "optional", 2: "required", 3: "repeated"}


def _fields(descriptor: Any, messages: dict[str, Any]) -> dict[str, Any]:
    """The fields by number, and beside them the messages that they hold."""
    fields: dict[str, Any] = {}
    for field in descriptor.fields:
        label = "repeated" if field.is_repeated else "required" if field.is_required else "optional"
        found = {"name": field.name, "type": _type_name(field), "label": label}
        held = field.message_type
        if held is not None:
            found["message"] = held.full_name
            if held.full_name not in messages:
                messages[held.full_name] = {}  # before it is looked into: it may hold itself
                messages[held.full_name] = {"fields": _fields(held, messages)}
        fields[str(field.number)] = found
    return fields


def _type_name(field: Any) -> str:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    name: str = FieldDescriptorProto.Type.Name(field.type)
    return name.removeprefix("TYPE_").lower()


def _descriptor_set(file: Any) -> bytes:
    """The file and all that it imports, those first: what other programs need to read the messages."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    files: dict[str, Any] = {}

    def visit(one: Any) -> None:
        if one.name in files:
            return
        for needed in one.dependencies:
            visit(needed)
        files[one.name] = one

    visit(file)
    whole = FileDescriptorSet()
    for one in files.values():
        one.CopyToProto(whole.file.add())
    encoded: bytes = whole.SerializeToString()
    return encoded


# --- numpy


def _is_numpy(kind: Any) -> bool:
    numpy = _module("numpy")
    if numpy is None:
        return False
    return isinstance(kind, numpy.dtype) or (isinstance(kind, type) and issubclass(kind, numpy.generic))


def _numpy(kind: Any) -> Codec[Any]:
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidArgument(f"type={dtype!r}: items of a fixed size without Python objects are wanted")
    view, item_bytes = numpy.ndarray, dtype.itemsize
    arrays = (numpy.ndarray, numpy.generic)

    def encode(value: Any) -> Any:
        if not isinstance(value, arrays) or value.dtype != dtype:
            given = value.dtype if isinstance(value, arrays) else type(value).__name__
            raise TypeError(f"publish takes an array of {dtype} here, not {given}")
        return numpy.ascontiguousarray(value)

    def decode(message: Any) -> Any:
        count, rest = divmod(len(message), item_bytes)
        if rest:
            raise ValueError(f"its bytes are no whole number of items of {item_bytes} bytes")
        return view(count, dtype, message)

    def draft(take: Any, size: int = 1, **options: Any) -> ArrayDraft:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"size={size!r} must be 1 or more items")
        taken = take(size * dtype.itemsize, **options)
        return ArrayDraft(taken, taken.array(size, dtype))

    name = "numpy." + (dtype.name if dtype.names is None else "record")
    return Codec(name, "numpy", {"dtype": describe_dtype(dtype)}, encode, decode, draft=draft)


def describe_dtype(dtype: Any) -> Any:
    """As JSON: a text, or a list of fields, padding included."""
    from numpy.lib.format import dtype_to_descr

    return json.loads(json.dumps(dtype_to_descr(dtype)))


# --- Arrow


def _is_arrow(kind: Any) -> bool:
    schema = getattr(_module("pyarrow"), "Schema", None)
    return schema is not None and isinstance(kind, schema)


def _arrow(kind: Any) -> Codec[Any]:
    import pyarrow
    from pyarrow import ipc

    def encode(value: Any) -> Any:
        if not isinstance(value, pyarrow.RecordBatch):
            raise _refuse(pyarrow.RecordBatch, value)
        if value.schema != kind:
            raise TypeError(f"the batch has columns {value.schema.names} or their types, and not {kind.names}")
        sink = pyarrow.BufferOutputStream()
        with ipc.new_stream(sink, kind) as writer:
            writer.write_batch(value)
        return sink.getvalue()

    def decode(message: Any) -> Any:
        with ipc.open_stream(pyarrow.py_buffer(message)) as reader:
            batch = reader.read_next_batch()
        if batch.schema == kind:
            return batch
        columns = []
        for field in kind:
            at = batch.schema.get_field_index(field.name)
            if at < 0 and not field.nullable:
                raise ValueError(f"column {field.name!r} is missing")
            columns.append(pyarrow.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at).cast(field.type))
        return pyarrow.record_batch(columns, schema=kind)

    fields = [[field.name, str(field.type), field.nullable] for field in kind]
    ipc_text = base64.b64encode(kind.serialize().to_pybytes()).decode()
    return Codec("arrow", "arrow", {"arrow": {"fields": fields, "ipc": ipc_text}}, encode, decode)


_OTHERS = [
    (_is_pydantic, _pydantic), (_is_protobuf, _protobuf), (_is_numpy, _numpy), (_is_arrow, _arrow), (_is_plain, plain),
]  # fmt: skip
