"""Which schemas are compatible: the rules of docs/types.md, in one place. ``first_difference(writer, reader)`` says why
a reader cannot read everything that a writer may write, or None if it can. It compares only texts, so it needs none of
the libraries that the types come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.types.schema import Schema

MAX_STEPS = 20_000  # of one comparison: choices within choices multiply
MAX_DEPTH = 64  # of nested types; a recursive type is compared once
# Keywords of JSON Schema that do not affect messages.
_SILENT = {"title", "description", "default", "examples", "deprecated", "$comment", "$defs", "$schema", "readOnly"}
_SILENT |= {"writeOnly", "discriminator", "x-written"}
_STRUCTURE = {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const"}
_STRUCTURE |= {"$ref", "anyOf", "oneOf", "allOf", "x-fields"}
# Bounds: a reader accepts a writer's if its own are not narrower.
_LOWER = {"minimum", "exclusiveMinimum", "minLength", "minProperties"}
_UPPER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_ANYTHING: Mapping[str, Any] = {}
_ZONES = {True: "with a time zone", False: "without a time zone", None: "with or without a time zone"}


def first_difference(writer: Schema, reader: Schema) -> str | None:
    """Why ``reader`` cannot read everything that ``writer`` writes, naming the first such field; None: it can."""
    if writer.encoding != reader.encoding:
        return f"it is written as {writer.encoding} and read as {reader.encoding}"
    mine, theirs = dict(writer.definition), dict(reader.definition)
    if mine == theirs or not mine or not theirs:
        return None if mine or theirs or writer.name == reader.name else "nothing is known but two names"
    if writer.language != reader.language:
        return f"one is described by {writer.language}, the other by {reader.language}"
    compare = _LANGUAGES.get(writer.language)
    if compare is None:
        return f"the two differ, and schemas of {writer.language!r} are compared as a whole"
    try:
        return next(compare(mine[writer.language], theirs[writer.language], writer.encoding), None)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        return f"a schema cannot be understood ({type(error).__name__}: {error})"


def _place(path: str) -> str:
    return f"field {path!r}" if path else "the message"


# --- JSON Schema: msgspec, dataclasses, TypedDict, pydantic, dict


class _Document:
    """A JSON Schema with its named parts."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._names: Mapping[str, Any] = root.get("$defs", {})
        self.root = root

    def follow(self, node: Any) -> Mapping[str, Any]:
        """The node with references resolved."""
        for _ in range(MAX_DEPTH):
            if node is True:
                return _ANYTHING
            if not isinstance(node, Mapping):
                raise ValueError(f"{node!r} is no schema")
            whole = node.get("allOf")
            if isinstance(whole, list) and len(whole) == 1:  # how pydantic writes keywords beside a reference
                node = whole[0]
            elif "$ref" in node:
                node = self._names[str(node["$ref"]).rpartition("/")[2]]
            else:
                return node
        raise ValueError("references that refer to each other")


def _json(writer: Mapping[str, Any], reader: Mapping[str, Any], encoding: str) -> Iterator[str]:
    yield from _Comparison(_Document(writer), _Document(reader), encoding).node(writer, reader, "")


class _Comparison:
    def __init__(self, writer: _Document, reader: _Document, encoding: str) -> None:
        self._encoding = encoding
        self._writer = writer
        self._reader = reader
        self._open: set[tuple[int, int]] = set()  # pairs that are being compared: types may be recursive
        self._steps = 0

    def node(self, writer: Any, reader: Any, path: str) -> Iterator[str]:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ValueError(f"more than {MAX_STEPS} steps to compare them")
        mine, theirs = self._writer.follow(_written(writer, reader)), self._reader.follow(reader)
        pair = (id(mine), id(theirs))
        if pair in self._open or spoken(theirs) == {}:
            return
        if len(self._open) >= MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} types within types")
        self._open.add(pair)
        try:
            yield from self._compare(mine, theirs, path)
        finally:
            self._open.discard(pair)

    def _compare(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[str]:
        written, readable = _choices(mine), _choices(theirs)
        if len(written) > 1 or len(readable) > 1:
            for one in written:
                if not any(next(self.node(one, other, path), None) is None for other in readable):
                    yield f"{_place(path)} may be {_describe(one)}, which is read as {_describe(theirs)}"
            return
        mine, theirs = self._writer.follow(written[0]), self._reader.follow(readable[0])
        yield from _values(mine, theirs, path)
        kind = theirs.get("type")
        if kind is not None and kind != mine.get("type") and (mine.get("type"), kind) != ("integer", "number"):
            yield f"{_place(path)} is {_describe(mine)}, and is read as {_describe(theirs)}"
            return
        yield from _constraints(mine, theirs, path, self._encoding)
        if kind == "object":
            yield from self._object(mine, theirs, path)
        elif kind == "array":
            yield from self._array(mine, theirs, path)

    def _object(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[str]:
        written, readable = mine.get("properties", {}), theirs.get("properties", {})
        sure, needed = set(mine.get("required", ())), theirs.get("required", ())
        rest = theirs.get("additionalProperties", True)
        # A writer that lists its fields writes no others, even if its schema allows others for reading.
        others = mine.get("additionalProperties", "properties" not in mine)
        for name in needed:
            where = f"{path}.{name}".lstrip(".")
            if name not in written:
                yield f"field {where!r} is required by the reader, but not written"
            elif name not in sure:
                yield f"field {where!r} is required by the reader, but may be left out"
        for name, node in written.items():
            where = f"{path}.{name}".lstrip(".")
            if name in readable:
                yield from self.node(node, readable[name], where)
            elif rest is False:
                yield f"field {where!r} is written, and other fields than its own are not read"
            elif isinstance(rest, Mapping):
                yield from self.node(node, rest, where)
        if isinstance(rest, Mapping) and others is not False:
            yield from self.node(others, rest, f"{path}.*".lstrip("."))
        for name, node in readable.items() if others is not False else ():  # a mapping may contain any name
            if name not in written:
                yield from self.node(others, node, f"{path}.{name}".lstrip("."))

    def _array(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[str]:
        written, readable = mine.get("prefixItems", []), theirs.get("prefixItems", [])
        rest, others = theirs.get("items", True), mine.get("items", "prefixItems" not in mine)
        for index, (name, other) in enumerate(zip(mine.get("x-fields", ()), theirs.get("x-fields", ()), strict=False)):
            if name != other:
                yield f"{_place(path)} has field {name!r} at place {index}, and {other!r} is read there"
                return
        least = theirs.get("minItems", 0)
        if least > mine.get("minItems", 0):
            yield f"{_place(path)} may have {mine.get('minItems', 0)} parts, and {least} are needed"
        for index, node in enumerate(written):
            where = f"{path}[{index}]"
            other = readable[index] if index < len(readable) else rest
            if other is False:
                yield f"field {where!r} is written and not read"
            else:
                yield from self.node(node, other, where)
        if others is not False:
            for index, node in enumerate(readable[len(written) :], len(written)):
                yield from self.node(others, node, f"{path}[{index}]")
            if rest is not False:
                yield from self.node(others, rest, f"{path}[]")


def _written(writer: Any, reader: Any) -> Any:
    """The form in which a field is written. A reader that writes the same form can read it."""
    form = writer.get("x-written") if isinstance(writer, Mapping) else None
    same = form is None or (isinstance(reader, Mapping) and reader.get("x-written") == form)
    return writer if same else form


def spoken(node: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the node that messages depend on."""
    return {word: value for word, value in node.items() if word not in _SILENT}


def _choices(node: Mapping[str, Any]) -> list[Any]:
    for word in ("anyOf", "oneOf"):
        if isinstance(node.get(word), list):
            return list(node[word])
    kinds = node.get("type")
    if isinstance(kinds, list):
        return [{**node, "type": kind} for kind in kinds]
    return [node]


def _values(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[str]:
    """If the reader accepts only some values, the writer must write only those."""
    readable = _listed(theirs)
    if readable is None:
        return
    written = _listed(mine)
    if written is None:
        yield f"{_place(path)} may be any {_describe(mine)}, and only {readable} are read"
        return
    for value in written:
        if not any(value == other and type(value) is type(other) for other in readable):
            yield f"{_place(path)} may be {value!r}, and only {readable} are read"


def _listed(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _constraints(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str, encoding: str) -> Iterator[str]:
    """Bounds and formats: the reader must not require more than the writer guarantees."""
    # In msgpack, bytes, times and keys that are no text have types of their own, so a reader that expects text cannot
    # read them. In JSON such keys are text, which any reader of objects accepts.
    for word, forms in (("contentEncoding", None), ("format", {"date-time"}), ("x-keys", None)):
        if word == "x-keys" and encoding == "json" and _is_any_object(theirs):
            continue
        if word in mine and word not in theirs and (forms is None or mine[word] in forms):
            yield f"{_place(path)} is written with {word} {mine[word]!r}, and read without"
    for word, value in theirs.items():
        if word in _SILENT or word in _STRUCTURE or word == "minItems" or mine.get(word) == value:
            continue
        if word in mine and ((word in _UPPER and mine[word] <= value) or (word in _LOWER and mine[word] >= value)):
            continue
        if word == "x-zone":
            yield f"{_place(path)} is read {_ZONES[value]}, and written {_ZONES[mine.get(word)]}"
            continue
        yield f"{_place(path)} is read with {word} {value!r}, and written with {mine.get(word, 'none')!r}"


def _is_any_object(node: Mapping[str, Any]) -> bool:
    return {"additionalProperties": True, **spoken(node)} == {"additionalProperties": True, "type": "object"}


def _describe(node: Mapping[str, Any]) -> str:
    """A few words for people."""
    if "$ref" in node:
        return str(node["$ref"]).rpartition("/")[2]
    choices = _choices(node)
    if len(choices) > 1:
        return " or ".join(dict.fromkeys(_describe(one) for one in choices))
    listed = _listed(node)
    kind = str(node.get("type") or (f"one of {listed}" if listed else node.get("title") or "anything"))
    return f"{kind} ({node['format']})" if "format" in node else kind


# --- protobuf: fields by number


def _protobuf(writer: Mapping[str, Any], reader: Mapping[str, Any], _encoding: str) -> Iterator[str]:
    # Names matter: a message with the same fields and another name is another message.
    if writer["message"] != reader["message"]:
        yield f"it is written as {writer['message']} and read as {reader['message']}"
    yield from _protobuf_fields(writer, reader)


def _protobuf_fields(
    writer: Mapping[str, Any], reader: Mapping[str, Any], path: str = "", depth: int = 0
) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} messages within messages")
    mine, theirs = writer["fields"], reader["fields"]
    for number, field in theirs.items():
        where = f"{path}.{field['name']}".lstrip(".")
        other = mine.get(number)
        if other is None:
            if field["label"] == "required":
                yield f"field {where!r} ({number}) is required by the reader, but not written"
            continue
        if field["label"] == "required" != other["label"]:
            yield f"field {where!r} ({number}) is required by the reader, but may be left out"
        if (other["type"], other["label"] == "repeated") != (field["type"], field["label"] == "repeated"):
            told, wanted = (f"{one['label']} {one['type']}" for one in (other, field))
            yield f"field {where!r} ({number}) is {told}, and is read as {wanted}"
        elif "message" in field:
            if other["message"] != field["message"]:
                yield f"field {where!r} ({number}) is {other['message']}, and is read as {field['message']}"
            inner, outer = _message(writer, other), _message(reader, field)
            if inner is not None and outer is not None:
                yield from _protobuf_fields({**writer, **inner}, {**reader, **outer}, where, depth + 1)


def _message(schema: Mapping[str, Any], field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message type of a field; None if it is being compared already (it is recursive)."""
    found: Mapping[str, Any] | None = schema.get("messages", {}).get(field["message"])
    seen = schema.get("seen", ())
    if found is None or field["message"] in seen:
        return None
    return {"fields": found["fields"], "seen": (*seen, field["message"])}


# --- Arrow: columns by name; numpy: bytes by place


def _arrow(writer: Mapping[str, Any], reader: Mapping[str, Any], _encoding: str) -> Iterator[str]:
    written = {name: (kind, nullable) for name, kind, nullable in writer["fields"]}
    for name, kind, nullable in reader["fields"]:
        found = written.get(name)
        if found is None:
            if not nullable:
                yield f"field {name!r} is required by the reader, but not written"
        elif found[0] != kind:
            yield f"field {name!r} is {found[0]}, and is read as {kind}"
        elif found[1] and not nullable:
            yield f"field {name!r} is required by the reader, but may be null"


def _dtype(writer: Any, reader: Any, _encoding: str) -> Iterator[str]:
    if isinstance(writer, str) or isinstance(reader, str):
        yield f"its items are {_describe_dtype(writer)}, and are read as {_describe_dtype(reader)}"
        return
    for mine, theirs in zip(writer, reader, strict=False):
        if mine != theirs:
            told, wanted = _describe_dtype(mine[1:]), _describe_dtype(theirs[1:])
            yield f"field {mine[0]!r} is {told}, and field {theirs[0]!r} {wanted} is read there"
    longer = writer if len(writer) > len(reader) else reader
    for field in longer[min(len(writer), len(reader)) :]:
        yield f"field {field[0]!r} is {'written and not read' if longer is writer else 'read and not written'}"


def _describe_dtype(parts: Any) -> str:
    if isinstance(parts, list) and len(parts) == 1:
        parts = parts[0]
    return parts if isinstance(parts, str) else str(parts)


def _text(writer: Any, reader: Any, _encoding: str) -> Iterator[str]:
    if writer != reader:
        yield f"it is written as {writer}, and is read as {reader}"


_LANGUAGES = {"jsonschema": _json, "protobuf": _protobuf, "arrow": _arrow, "dtype": _dtype, "text": _text}
