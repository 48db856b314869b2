"""Whether a value matches a JSON Schema, as far as the schemas of our own types go. Values are those of
``penstock.types.fields``. Formats, patterns, lengths and ranges are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_json"]

MAX_DEPTH = 64
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (Mapping,), "array": (list, tuple), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


def check_json(value: Any, definition: Any) -> None:
    """``ValueError`` names the first field that is not of the type."""
    names = definition.get("$defs") or definition.get("definitions") or {} if isinstance(definition, dict) else {}
    if said := _misfit(value, definition, names, "", 0):
        raise ValueError(said)


def _misfit(value: Any, node: Any, names: Mapping[str, Any], path: str, depth: int) -> str:
    """What is wrong, as text; empty if nothing is."""
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        return ""
    node = node.get("x-written", node)
    if "$ref" in node:
        return _misfit(value, names.get(str(node["$ref"]).rpartition("/")[2]), names, path, depth + 1)
    for part in node.get("allOf", ()):
        if said := _misfit(value, part, names, path, depth + 1):
            return said
    kind = node.get("type")
    choices = node.get("anyOf") or node.get("oneOf") or (
        [{**node, "type": one} for one in kind] if isinstance(kind, list) else []
    )  # fmt: skip
    if choices:
        misfits = [_misfit(value, one, names, path, depth + 1) for one in choices]
        return misfits[0] if all(misfits) else ""
    if kind is not None and not _is_of(value, kind):
        return f"{_where(path)} is {_shown(value)}, not {kind}"
    if ("const" in node and value != node["const"]) or ("enum" in node and value not in node["enum"]):
        return f"{_where(path)} is {value!r:.60}, which is no choice"
    if isinstance(value, Mapping):
        return _misfit_of_object(value, node, names, path, depth)
    if isinstance(value, list | tuple):
        firsts = node.get("prefixItems", ())
        for place, item in enumerate(value):
            part = firsts[place] if place < len(firsts) else node.get("items")
            if said := _misfit(item, part, names, f"{path}[{place}]", depth + 1):
                return said
    return ""


def _misfit_of_object(
    value: Mapping[str, Any], node: dict[str, Any], names: Mapping[str, Any], path: str, depth: int
) -> str:
    for name in node.get("required", ()):
        if name not in value:
            return f"{_where(f'{path}.{name}')} is missing"
    known = node.get("properties", {})
    for name, item in value.items():
        part = known.get(name, node.get("additionalProperties"))
        if part is False:
            return f"{_where(f'{path}.{name}')} is not known"
        if said := _misfit(item, part, names, f"{path}.{name}", depth + 1):
            return said
    return ""


def _is_of(value: Any, kind: str) -> bool:
    if kind == "string":  # msgpack has types of its own for bytes and times
        return not isinstance(value, bool | int | float | Mapping | list | tuple | type(None))
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _KINDS.get(kind, (object,)))


def _where(path: str) -> str:
    return f"field {path.lstrip('.')!r}" if path else "it"


def _shown(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
