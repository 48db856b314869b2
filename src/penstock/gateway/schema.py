"""The JSON Schema of a gateway's file, for editors: completion, and errors while one types."""

from __future__ import annotations

from typing import Any

from penstock.channel import Overflow
from penstock.gateway.configuration import KINDS
from penstock.gateway.links import Delivery
from penstock.gateway.supervision import Policy

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
REFERENCE: dict[str, Any] = {"type": "string", "pattern": r"^\$\{.*\}$"}  # filled in from the environment


def schema() -> dict[str, Any]:
    """The schema as plain data."""
    top = {
        "$schema": {"type": "string", "description": "Where this schema is, for editors."},
        "include": {"type": "array", "items": TEXT, "description": "Files whose entries come first."},
        "defaults": _object({"module": {"type": "object"}, "link": {"type": "object"}}),
        "loaders": {"type": "array", "items": _object(_loader(), "name", "type")},
        "modules": {"type": "array", "items": _object(_module(), "name")},
        "links": {"type": "array", "items": _object(_link(), "source", "sink")},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A gateway: modules joined by links",
        **_object(top),
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _number(kind: str = "number", least: float = 0, *, null: bool = False) -> dict[str, Any]:
    plain = {"type": kind, "minimum": least}
    return {"anyOf": [plain, REFERENCE, *([{"type": "null"}] if null else [])]}


def _choice(*values: str) -> dict[str, Any]:
    return {"anyOf": [{"enum": [*values]}, REFERENCE]}


def _loader() -> dict[str, Any]:
    return {"name": TEXT, "type": _choice(*KINDS), "configuration": {"type": "object"}}


def _module() -> dict[str, Any]:
    figures = {
        "policy": _choice(*Policy),
        "backoff_s": _number(),
        "max_backoff_s": _number(),
        "limit": _number("integer", 1, null=True),
    }
    queue = {
        "depth": _number("integer", 1),
        "overflow": _choice(*Overflow),
        "timeout_s": _number(null=True),
        "priority": {**_number("integer"), "description": "Who has less gets a message first."},
    }
    entrypoint = {"anyOf": [TEXT, {"type": "object"}], "description": "package.module:Class, or what the loader takes."}
    loader = _object({"name": TEXT, "entrypoint": entrypoint}, "entrypoint")
    return {
        "name": {**TEXT, "not": {"const": "*"}},
        "loader": loader,
        "args": {"description": "Handed to the module's parse."},
        "queue": _object(queue),
        "restart": {"anyOf": [_choice(*Policy), _object(figures, "policy")]},
        "stuck_after_s": _number(null=True),
    }


def _link() -> dict[str, Any]:
    filters = {
        "properties": {"type": "object"},
        "min_bytes": _number("integer"),
        "max_bytes": _number("integer"),
        "one_in": _number("integer", 1),
        "rate_per_s": _number(),
        "predicate": TEXT,
        "where": TEXT,
        "type": TEXT,
    }
    return {
        "source": {**TEXT, "description": "A module, MODULE.OUTPUT, an address, or * for every other module."},
        "sink": {**TEXT, "description": "A module or an address."},
        "filter": _object(filters),
        "delivery": _choice(*Delivery),
        "max_tries": _number("integer", 1, null=True),
        "backoff_s": _number(),
        "max_backoff_s": _number(),
        "ordered": {"anyOf": [{"type": "boolean"}, REFERENCE]},
        "ttl_s": _number(null=True),
        "max_messages": _number("integer", 1, null=True),
        "max_bytes": _number("integer", 1, null=True),
        "overflow": _choice("block", "drop_newest"),
        "buffer": {**TEXT, "pattern": r"^(journal:|\$\{)", "description": "journal:DIRECTORY: stores what waits."},
        "error": {**TEXT, "description": "Gets what the sink fails at for good."},
    }
