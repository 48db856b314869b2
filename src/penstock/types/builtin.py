"""Codecs of the built-in kinds of types. No library is imported here for its types: whoever passes a pydantic model has
imported pydantic already.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import json
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from penstock.errors import InvalidArgument
from penstock.types.codec import ArrayDraft, Codec
from penstock.types.compatibility import spoken
from penstock.types.schema import MAX_NAME_BYTES

T = TypeVar("T")
COPIED_BYTES = 4096


def make(kind: Any) -> Codec[Any] | None:
    """The codec of ``kind``, or None."""
    if kind is bytes:
        return Codec("bytes", "bytes", {"text": "bytes"}, _encode_bytes, bytes)
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
    """The module if the program has imported it already, else None."""
    return sys.modules.get(name)


def _refuse(kind: Any, value: Any) -> TypeError:
    wanted, given = name_of(kind), type(value).__name__
    if wanted == given:
        given = f"an object of another class {type(value).__module__}.{type(value).__qualname__}"
    return TypeError(f"expected {_article(wanted)}, not {given}")


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# What encoders raise for a value that they cannot encode.
_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


# --- bytes, str and dict


def _encode_bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _refuse(bytes, value)
    return value


def _encode_str(value: str) -> bytes:
    if not isinstance(value, str):
        raise _refuse(str, value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise _unwritable(str, str.encode, value, error) from None


def _decode_str(message: Any) -> str:
    return str(message, "utf-8")


def _encode_dict(value: dict[str, Any]) -> bytes:
    if not isinstance(value, dict):
        raise _refuse(dict, value)
    try:
        return _dump(value)
    except _UNWRITABLE as error:
        raise _unwritable(dict, _dump, value, error) from None


def _dump(value: Any) -> bytes:
    text = json.dumps(
        value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False, default=_scalar
    )
    return text.encode()


def _decode_dict(message: Any) -> dict[str, Any]:
    value = json.loads(str(message, "utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"an object is wanted, and this is {_article(type(value).__name__)}")
    return value


# --- msgspec: Struct, dataclass, TypedDict, and what is made of them

_PLAIN = {"builtins": ("int", "float", "bool", "list", "tuple", "set", "frozenset"), "uuid": ("UUID",)}
_PLAIN |= {"datetime": ("datetime", "date", "time", "timedelta"), "decimal": ("Decimal",)}


def _is_plain(kind: Any) -> bool:
    if typing.get_origin(kind) is not None or _is_typed_dict(kind) or kind is Any:
        return True
    if type(kind).__name__ in ("NewType", "TypeAliasType"):
        return True
    if not isinstance(kind, type):
        return False
    return _vouches(kind) or issubclass(kind, enum.Enum) or _is_named_tuple(kind) or (
        kind.__name__ in _PLAIN.get(kind.__module__, ())
    )  # fmt: skip


def _vouches(kind: Any) -> bool:
    """Whether the constructor of the class ensures that its objects have the declared fields."""
    kind = typing.get_origin(kind) or kind
    struct = getattr(_module("msgspec"), "Struct", None)
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
        or (struct is not None and issubclass(kind, struct))
    )  # fmt: skip


def _is_typed_dict(kind: Any) -> bool:
    """Of ``typing`` or ``typing_extensions``."""
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__total__")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


@typing.overload
def plain(kind: type[T], encoding: str = ..., *, check: bool | None = ...) -> Codec[T]: ...
@typing.overload
def plain(kind: Any, encoding: str = ..., *, check: bool | None = ...) -> Codec[Any]: ...
def plain(kind: Any, encoding: str = "json", *, check: bool | None = None) -> Codec[Any]:
    """The codec of what msgspec knows, as ``json`` or ``msgpack``.

    ``check``: every object is decoded again before it is published, so that none goes out that its own type cannot
    read. By default that is so where an object's class does not say which fields it has: TypedDict, list, dict and so
    on, but not Struct and dataclass.
    """
    try:
        import msgspec
    except ImportError:
        raise ImportError(f"type={kind!r} needs msgspec: pip install 'penstock[types]'", name="msgspec") from None

    if encoding not in ("json", "msgpack"):
        raise InvalidArgument(f"encoding={encoding!r} is not a choice; valid: json, msgpack")
    room = msgspec.json if encoding == "json" else msgspec.msgpack
    try:
        found = _Description(kind)
        decode: Callable[[Any], Any] = room.Decoder(kind).decode
    except (TypeError, NameError) as error:
        why = str(error).splitlines()[-1]  # the lines before it are msgspec's own advice
        if any(map(_is_pydantic, _within(kind))):
            if encoding == "json":
                return _pydantic(kind)
            why = "pydantic models are written as JSON alone"
        raise InvalidArgument(f"type={kind!r} cannot be described: {why}") from None
    encode = room.Encoder(enc_hook=_scalar).encode
    choices = typing.get_args(kind) if _is_union(kind) else (kind,)
    wanted = tuple(one for one in map(_class_of, choices) if one is not None)
    anything = len(wanted) < len(choices)
    if check is None:
        check = not all(map(_vouches, choices))
    loses_nan = encoding == "json" and found.has_floats

    # Fast path: where only the class has to be checked, an object of exactly that class is encoded at once.
    simple = wanted[0] if len(wanted) == 1 and isinstance(wanted[0], type) and not check and not loses_nan else None

    def checked(value: Any) -> bytes:
        if type(value) is simple:
            try:
                return encode(value)  # type: ignore[no-any-return]
            except _UNWRITABLE:
                pass  # the error is raised below
        if not anything and not isinstance(value, wanted):
            raise _refuse(kind, value)
        try:
            encoded: bytes = encode(value)
        except _UNWRITABLE as error:
            raise _unwritable(kind, encode, value, error) from None
        # msgspec writes null for NaN and infinity, which JSON cannot represent.
        if loses_nan and b"null" in encoded and (place := _not_finite(msgspec.to_builtins(value, enc_hook=_scalar))):
            raise ValueError(f"{place}, which JSON cannot hold; penstock.types.plain(..., 'msgpack') can")
        if check:
            try:
                decode(encoded)
            except msgspec.ValidationError as error:
                raise TypeError(f"no valid {name_of(kind)}: {error}") from None
        return encoded

    return Codec(name_of(kind), encoding, {"jsonschema": found.schema}, checked, decode)


def name_of(kind: Any) -> str:
    """The type as source code, without module names."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return name_of(args[0])
    if _is_union(kind):
        name = " | ".join(map(name_of, args))
    elif args:
        parts = map(repr if typing.get_origin(kind) is typing.Literal else name_of, args)
        name = f"{name_of(typing.get_origin(kind))}[{', '.join(parts)}]"
    else:
        name = "None" if kind is type(None) else getattr(kind, "__name__", None) or str(kind)
    encoded = name.encode()
    return name if len(encoded) <= MAX_NAME_BYTES else encoded[: MAX_NAME_BYTES - 3].decode("utf-8", "ignore") + "..."


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _within(kind: Any) -> Iterator[Any]:
    """The type itself and those that it is made of, all the way down."""
    yield kind
    waiting, seen = [kind], [kind]
    while waiting:
        one = waiting.pop()
        parts = list(typing.get_args(one))
        if _is_typed_dict(one) or _vouches(one) or (isinstance(one, type) and _is_named_tuple(one)):
            with contextlib.suppress(NameError, TypeError):  # a forward reference that cannot be resolved
                parts += typing.get_type_hints(typing.get_origin(one) or one).values()
        new = [part for part in parts if part not in seen]
        seen += new
        waiting += new
        yield from new


def _class_of(kind: Any) -> Any:
    """The class for ``isinstance``, or None if ``isinstance`` cannot check the type."""
    if _is_typed_dict(kind):
        return dict
    if typing.get_origin(kind) is Annotated:
        return _class_of(typing.get_args(kind)[0])
    kind = typing.get_origin(kind) or kind
    if kind in (int, float, bool):
        return None  # numpy's numbers are accepted too
    return kind if isinstance(kind, type) and kind is not Any else None


def _scalar(value: Any) -> Any:
    """A numpy number as a Python number; anything else unchanged."""
    generic = getattr(_module("numpy"), "generic", None)
    if generic is not None and isinstance(value, generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be encoded")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f".{name}", part) for name, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        names = [one.name for one in getattr(type(value), "__attrs_attrs__", ())]
        yield from ((f".{name}", getattr(value, name)) for name in getattr(value, "__struct_fields__", names))


def _unwritable(kind: Any, encode: Callable[[Any], object], value: Any, error: Exception) -> Exception:
    """The error that names the field that cannot be encoded: ``TypeError`` for its type, ``ValueError`` for its
    value.
    """
    path, going = "", True
    while going and not isinstance(error, RecursionError):
        going = False
        for place, part in _parts(value):
            try:
                encode(part)
            except _UNWRITABLE as inner:
                error = inner.with_traceback(None)  # the traceback would keep this frame and the value alive
                path, value, going = path + place, part, True
                break
    where = f"field {path.lstrip('.')!r}" if path else "it"
    if isinstance(error, TypeError):
        told = f"{where} is {_article(type(value).__name__)}" if path else str(error)
        return TypeError(f"no valid {name_of(kind)}: {told}")
    if isinstance(error, RecursionError):
        return ValueError(f"{where} cannot be written: it holds itself, or too many levels")
    if isinstance(value, float):
        return ValueError(f"{where} is {value}, which JSON cannot hold")
    return ValueError(f"{where} cannot be written: {error}")


def _not_finite(value: Any, path: str = "") -> str | None:
    """A text that names the first number that JSON cannot represent (NaN, infinity); None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{f'field {path!r}' if path else 'it'} is {value}"
    for place, part in _parts(value):
        if said := _not_finite(part, (path + place).lstrip(".")):
            return said
    return None


class _Description:
    """The JSON Schema that msgspec generates, with what it leaves out: times without a zone are marked as times;
    ``x-zone`` says whether a time must or must not have a zone; ``x-keys`` is the type of a map's keys; ``x-fields``
    are the field names of records that are encoded as arrays.
    """

    def __init__(self, kind: Any) -> None:
        from msgspec import inspect, json

        self.has_floats = False
        self._classes: dict[Any, Any] = {}
        whole = inspect.type_info(kind)
        self._collect(whole)
        (self.schema, *references), names = json.schema_components([kind, *self._classes])
        self._mark(whole, self.schema)
        for info, reference in zip(self._classes.values(), references, strict=True):
            self._mark(info, names[reference["$ref"].rpartition("/")[2]])
        if names:
            self.schema["$defs"] = names
        # msgspec finds a field of a dataclass or TypedDict with a non-ASCII name only after the name has been encoded
        # as UTF-8 once, and skips it otherwise.
        json.encode([field.encode_name for info in self._classes.values() for field in getattr(info, "fields", ())])

    def _collect(self, info: Any) -> None:
        """Collect the classes of the type, and note whether it has floats, which may be NaN."""
        kind = type(info).__name__
        self.has_floats = self.has_floats or kind in ("FloatType", "AnyType", "CustomType")
        if hasattr(info, "cls") and kind != "CustomType":
            if info.cls in self._classes:
                return
            self._classes[info.cls] = info
        for part in (
            *(field.type for field in getattr(info, "fields", ())), *getattr(info, "types", ()),
            *getattr(info, "item_types", ()),
            *(getattr(info, word, None) for word in ("type", "item_type", "key_type", "value_type")),
        ):  # fmt: skip
            if part is not None:
                self._collect(part)

    def _mark(self, info: Any, node: Any) -> None:
        if not isinstance(node, dict) or "$ref" in node:
            return  # each class is marked on its own
        kind = type(info).__name__
        if kind == "Metadata":
            self._mark(info.type, node)
        elif kind in _TIMES and node.get("type") == "string":
            node["format"] = _TIMES[kind]
            if info.tz is not None:
                node["x-zone"] = info.tz
        elif kind == "UnionType":
            for one in info.types:
                for choice in node.get("anyOf", ()):
                    self._mark(one, choice)  # a union has at most one type that is encoded as text
        elif kind == "TupleType":
            for one, part in zip(info.item_types, node.get("prefixItems", ()), strict=False):
                self._mark(one, part)
        elif hasattr(info, "fields"):
            before = len(node.get("prefixItems", ())) - len(info.fields)  # a tag may come before the fields
            places = node.get("prefixItems", ())[before:]
            if places:
                node["x-fields"] = [None] * before + [field.encode_name for field in info.fields]
            for place, field in enumerate(info.fields):
                self._mark(field.type, places[place] if places else node.get("properties", {}).get(field.encode_name))
        else:
            self._mark(getattr(info, "item_type", None), node.get("items"))
            self._mark(getattr(info, "value_type", None), node.get("additionalProperties"))
            if kind == "DictType" and (keys := _keys(info.key_type)) is not None:
                node["x-keys"] = keys


def _keys(info: Any) -> str | None:
    """The type of a map's keys as text; None if they are any text, or anything."""
    kind = type(info).__name__
    if kind in ("AnyType", "StrType"):  # JSON Schema has the bounds of a text
        return None
    if kind == "Metadata":
        return _keys(info.type)
    if kind == "UnionType":
        return " or ".join(sorted(_keys(one) or "str" for one in info.types))
    if kind == "EnumType":
        return f"one of {sorted((one.value for one in info.cls), key=repr)}"
    if kind == "LiteralType":
        return f"one of {sorted(info.values, key=repr)}"
    told = [f"{word} {value}" for word in _BOUNDS if (value := getattr(info, word, None)) is not None]
    return " ".join([kind.removesuffix("Type").lower(), *told])


_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of")
_TIMES = {"DateTimeType": "date-time", "TimeType": "time"}


# --- pydantic: by the models' own methods


def _is_pydantic(kind: Any) -> bool:
    model = getattr(_module("pydantic"), "BaseModel", None)
    return model is not None and isinstance(kind, type) and issubclass(kind, model)


def _pydantic(kind: Any) -> Codec[Any]:
    """Uses the methods of a model, or an adapter for types that contain models."""
    import pydantic

    by_alias = True
    dump: Callable[[Any], Any]
    builtins_of: Callable[[Any], Any]
    try:
        if _is_pydantic(kind):
            # encode with the aliases that decoding expects
            by_alias = kind.model_config.get("validate_by_alias") is not False
            describe, load = kind.model_json_schema, kind.model_validate_json
            builtins_of = operator.methodcaller("model_dump", by_alias=by_alias, warnings=False)
            dump = operator.methodcaller("model_dump_json", by_alias=by_alias)
        else:
            adapter = pydantic.TypeAdapter(kind)
            describe, load = adapter.json_schema, adapter.validate_json
            builtins_of, dump = (
                functools.partial(function, by_alias=True, warnings=False)
                for function in (adapter.dump_python, adapter.dump_json)
            )
        read, written = (
            describe(by_alias=by_alias, schema_generator=_pydantic_generator(), mode=mode)
            for mode in ("validation", "serialization")
        )
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation, AttributeError) as error:
        raise InvalidArgument(f"type={kind!r} cannot be described: {str(error).splitlines()[0]}") from None
    _check_round_trip(name_of(kind), written, read)
    _mark_written(written, read)
    has_secrets = '"format": "password"' in json.dumps(written)

    def check(value: Any) -> None:
        if _is_pydantic(kind):
            if not isinstance(value, kind):
                raise _refuse(kind, value)
            return
        try:
            adapter.validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            raise TypeError(f"no valid {name_of(kind)}: {_first_error(error)}") from None

    def encode(value: Any) -> bytes:
        check(value)
        try:
            text = dump(value)
        except ValueError as error:
            raise ValueError(f"{_unwritable_field(value, by_alias)} cannot be written: {error}") from None
        encoded: bytes = text.encode() if isinstance(text, str) else text
        if has_secrets and b'"**********"' in encoded:
            raise ValueError("a secret is written as asterisks, which nobody can read: its field needs a serializer")
        # pydantic writes null for NaN and infinity, unless the model says otherwise.
        if b"null" in encoded and (place := _not_finite(builtins_of(value))):
            raise ValueError(f"{place}, which JSON cannot hold; ser_json_inf_nan of the model's config can")
        return encoded

    def decode(message: Any) -> Any:
        try:
            return load(bytes(message))
        except pydantic.ValidationError as error:
            raise ValueError(_first_error(error)) from error

    return Codec(name_of(kind), "json", {"jsonschema": read}, encode, decode)


def _first_error(errors: Any) -> str:
    """The first error of a ``pydantic.ValidationError``, with its field."""
    first, *others = errors.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(map(str, first["loc"]))
    more = f" (and {len(others)} more)" if others else ""
    return f"{f'field {where!r}: ' if where else ''}{first['msg']}{more}"


def _unwritable_field(value: Any, by_alias: bool) -> str:
    """A text that names the first field that a model cannot encode; nested fields are not checked."""
    for name in getattr(type(value), "model_fields", ()):
        try:
            value.model_dump_json(include={name}, by_alias=by_alias)
        except ValueError:
            return f"field {name!r}"
    return "it"


def _pydantic_generator() -> Any:
    """pydantic's generator of JSON Schema, extended by the type of a map's keys and by whether a time must have a
    zone.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def dict_schema(self, schema: Any) -> Any:
            keys = schema.get("keys_schema", {"type": "any"})
            told = [f"{word} {keys[word]}" for word in _BOUNDS if word in keys]
            listed = keys.get("expected") or [one.value for one in keys.get("members", ())]
            said = f"one of {sorted(listed, key=repr)}" if listed else " ".join([keys["type"], *told])
            more = {} if keys["type"] in ("any", "str") else {"x-keys": said}
            return {**super().dict_schema(schema), **more}

        def datetime_schema(self, schema: Any) -> Any:
            return {**super().datetime_schema(schema), **_zone(schema)}

        def time_schema(self, schema: Any) -> Any:
            return {**super().time_schema(schema), **_zone(schema)}

    return Generator


def _zone(schema: Any) -> dict[str, bool]:
    zone = schema.get("tz_constraint")
    return {} if zone is None else {"x-zone": zone != "naive"}


def _check_round_trip(name: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Refuse a model that cannot decode its own output: because an alias differs, a field is left out, or its encoded
    form cannot be read.
    """
    for mine, theirs in _records(written, read):
        fields = mine.get("properties", {})
        known = theirs.get("properties", {})
        # the output of a custom serializer is not known
        needed = theirs.get("required", ()) if "properties" in mine else ()
        missing = [one for one in needed if one not in fields]
        strange = [one for one in fields if one not in known] if theirs.get("additionalProperties") is False else []
        for field in (*missing, *strange):
            what = "needs and does not write" if field in missing else "writes and does not read"
            raise InvalidArgument(f"type={name} cannot read its own messages: it {what} field {field!r}")
        for field, node in fields.items():
            if "contentSchema" in known.get(field, {}) and "contentSchema" not in node:
                what = f"reads field {field!r} as a text of JSON and writes what is in it"
                raise InvalidArgument(f"type={name} cannot read its own messages: it {what}")


def _mark_written(written: dict[str, Any], read: dict[str, Any]) -> None:
    """Add ``x-written`` to fields whose encoded form differs from what decoding accepts: a Decimal is read as a number
    or a text and written as text; a computed field is written and never read.
    """
    for mine, theirs in _records(written, read):
        known = theirs.get("properties", {})
        for name, node in mine.get("properties", {}).items():
            if node != known.get(name) and spoken(node):
                known[name] = {**known.get(name, {}), "x-written": node}
        if "properties" not in mine and (form := spoken(mine)) not in ({}, spoken(theirs)):
            theirs["x-written"] = form
    for name, node in written.get("$defs", {}).items():
        read.setdefault("$defs", {}).setdefault(name, node)


def _records(written: dict[str, Any], read: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The pairs (schema for writing, schema for reading) of each class of a model."""
    names = read.get("$defs", {})
    return [(written, read), *((node, names[key]) for key, node in written.get("$defs", {}).items() if key in names)]


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
    """The fields by number; ``messages`` is filled with the nested messages."""
    fields: dict[str, Any] = {}
    for field in descriptor.fields:
        label = "repeated" if field.is_repeated else "required" if field.is_required else "optional"
        found = {"name": field.name, "type": _type_name(field), "label": label}
        held = field.message_type
        if held is not None:
            found["message"] = held.full_name
            if held.full_name not in messages:
                messages[held.full_name] = {}  # entered first, because the message may contain itself
                messages[held.full_name] = {"fields": _fields(held, messages)}
        fields[str(field.number)] = found
    return fields


def _type_name(field: Any) -> str:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    name: str = FieldDescriptorProto.Type.Name(field.type)
    return name.removeprefix("TYPE_").lower()


def _descriptor_set(file: Any) -> bytes:
    """The file and everything that it imports, imports first: what other programs need to read the messages."""
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
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        told = f"give {base!r}, a record with such a field, or Image, which keeps a shape"
        raise InvalidArgument(f"type={dtype!r}: no array has items of the shape {shape}; {told}")
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidArgument(f"type={dtype!r}: items of a fixed size without Python objects are wanted")
    try:
        described = describe_dtype(dtype)
    except ValueError as error:  # fields that overlap
        raise InvalidArgument(f"type={dtype!r}: {error}") from None
    from_buffer, item_bytes = numpy.frombuffer, dtype.itemsize
    arrays = (numpy.ndarray, numpy.generic)

    def encode(value: Any) -> Any:
        if not isinstance(value, arrays) or value.dtype != dtype:
            given = value.dtype if isinstance(value, arrays) else type(value).__name__
            raise TypeError(f"expected an array of {dtype}, not {given}")
        # numpy describes the fields of a record at each export of its buffer: for few bytes a copy costs less.
        return value.tobytes() if value.nbytes <= COPIED_BYTES else numpy.ascontiguousarray(value)

    def decode(message: Any) -> Any:
        count, rest = divmod(len(message), item_bytes)
        if rest:
            raise ValueError(f"its bytes are no whole number of items of {item_bytes} bytes")
        # frombuffer holds a view, so the memory stays valid after the message was released; numpy.ndarray(buffer=...)
        # would hold only the message object.
        return from_buffer(message, dtype, count) if count else numpy.empty(0, dtype)

    def draft(take: Any, size: int = 1, **options: Any) -> ArrayDraft:
        try:
            count = operator.index(size)
        except TypeError:
            count = -1
        if isinstance(size, bool) or count < 0:
            raise InvalidArgument(f"size={size!r} must be 0 or more items")
        taken = take(count * dtype.itemsize, **options)
        return ArrayDraft(taken, taken.array(count, dtype))

    name = "numpy." + (dtype.name if dtype.names is None else "record")
    fast = functools.partial(from_buffer, dtype=dtype)
    return Codec(name, "numpy", {"dtype": described}, encode, decode, draft=draft, fast=fast)


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
            told, wanted = (
                ", ".join(f"{one.name} {one.type}{'' if one.nullable else ' not null'}" for one in schema)
                for schema in (value.schema, kind)
            )
            raise TypeError(f"the batch has columns {told}, and not {wanted}")
        sink = pyarrow.BufferOutputStream()
        with ipc.new_stream(sink, kind) as writer:
            writer.write_batch(value)
        return sink.getvalue()

    def decode(message: Any) -> Any:
        with ipc.open_stream(pyarrow.py_buffer(message)) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)  # check offsets and texts too: another program may have written them
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


_OTHERS: list[tuple[Callable[[Any], bool], Callable[[Any], Codec[Any]]]] = [
    (_is_pydantic, _pydantic), (_is_protobuf, _protobuf), (_is_numpy, _numpy), (_is_arrow, _arrow), (_is_plain, plain),
]  # fmt: skip
