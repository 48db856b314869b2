"""Protocol buffers to Arrow, by a descriptor: what ``decode.protobuf`` runs on executors. Knows no Spark.

Descriptors travel to executors as bytes (a ``FileDescriptorSet``), so that no generated module is needed there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow

from penstock.errors import InvalidArgument, nearest

MAX_DEPTH = 50


def descriptor_bytes(message: Any, descriptors: str | os.PathLike[str] | bytes | None) -> tuple[bytes, str]:
    """The descriptors that a message needs, as bytes, and its full name.

    ``message`` is a generated class, or a name in ``descriptors``: a file of ``protoc --include_imports
    --descriptor_set_out``, or what is in it.
    """
    if isinstance(message, str):
        if descriptors is None:
            raise InvalidArgument(f"protobuf message {message!r} needs descriptors=FILE (protoc --descriptor_set_out)")
        data = descriptors if isinstance(descriptors, bytes) else Path(descriptors).read_bytes()
        return data, message
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    descriptor = getattr(message, "DESCRIPTOR", None)
    if descriptor is None:
        raise InvalidArgument(f"{message!r} is neither a protobuf message class nor a message's name")
    found = FileDescriptorSet()
    known: set[str] = set()

    def add(file: Any) -> None:
        if file.name not in known:
            known.add(file.name)
            for needed in file.dependencies:
                add(needed)
            file.CopyToProto(found.file.add())

    add(descriptor.file)
    return found.SerializeToString(), str(descriptor.full_name)


def compiled(data: bytes, name: str) -> tuple[pyarrow.DataType, Callable[[bytes], Any]]:
    """The Arrow type of a message and the function that decodes a payload of it."""
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    pool = descriptor_pool.DescriptorPool()
    try:
        files = FileDescriptorSet.FromString(data).file
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
        descriptor = pool.FindMessageTypeByName(name)
    except (DecodeError, TypeError) as error:
        raise InvalidArgument(f"the descriptors are no whole FileDescriptorSet (--include_imports?): {error}") from None
    except KeyError:
        there = [f"{file.package}.{item.name}".lstrip(".") for file in files for item in file.message_type]
        raise InvalidArgument(f"the descriptors have no message {name!r}; {nearest(name, there)}") from None
    made = message_factory.GetMessageClass(descriptor)

    def decode(payload: bytes) -> Any:
        message = made.FromString(payload)
        if not message.IsInitialized():
            raise ValueError(f"required fields are missing: {', '.join(message.FindInitializationErrors())}")
        return _value(message)

    return _struct(descriptor, ()), decode


def _struct(descriptor: Any, inside: tuple[str, ...]) -> pyarrow.DataType:
    if descriptor.full_name in inside or len(inside) > MAX_DEPTH:
        raise InvalidArgument(f"protobuf message {descriptor.full_name!r} is inside itself, which no column can be")
    return pyarrow.struct([(field.name, _kind(field, (*inside, descriptor.full_name))) for field in descriptor.fields])


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_repeated(field: Any) -> bool:
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)  # protobuf 5 has the label only


def _kind(field: Any, inside: tuple[str, ...]) -> pyarrow.DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return pyarrow.map_(_single(key, inside), _single(value, inside))
    return pyarrow.list_(_single(field, inside)) if _is_repeated(field) else _single(field, inside)


def _single(field: Any, inside: tuple[str, ...]) -> pyarrow.DataType:
    if field.message_type is not None:
        return _struct(field.message_type, inside)
    if field.type == field.TYPE_BYTES:
        return pyarrow.binary()
    return {
        field.CPPTYPE_INT32: pyarrow.int32(), field.CPPTYPE_INT64: pyarrow.int64(),
        field.CPPTYPE_UINT32: pyarrow.int64(), field.CPPTYPE_UINT64: pyarrow.decimal128(20, 0),
        field.CPPTYPE_DOUBLE: pyarrow.float64(), field.CPPTYPE_FLOAT: pyarrow.float32(),
        field.CPPTYPE_BOOL: pyarrow.bool_(), field.CPPTYPE_ENUM: pyarrow.string(),
        field.CPPTYPE_STRING: pyarrow.string(),
    }[field.cpp_type]  # fmt: skip


def _value(message: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            values[field.name] = None
            continue
        found = getattr(message, field.name)
        if _is_map(field):
            inner = field.message_type.fields_by_name["value"]
            values[field.name] = [(key, _plain(inner, found[key])) for key in found]
        elif _is_repeated(field):
            values[field.name] = [_plain(field, item) for item in found]
        else:
            values[field.name] = _plain(field, found)
    return values


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _value(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    return value
