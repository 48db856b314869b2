"""Message bodies in readable form: text, hexadecimal, JSON, or a template that names fields. Pure functions."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument, nearest
from penstock.printable import printable
from penstock.quantities import iso_time
from penstock.types.fields import Values, json_text

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = [
    "Format", "body_text", "body_value", "described", "example", "formatter", "hexadecimal", "iso_time", "json_value",
    "printable", "record",
]  # fmt: skip

MAX_SHOWN_BYTES = 64 << 10
MAX_SHOWN_FIELD_BYTES = 4096
READABLE = ("json", "utf-8")  # encodings that are text


class Format(enum.StrEnum):
    """How a message's body is printed."""

    TEXT = "text"
    HEX = "hex"
    JSON = "json"
    RAW = "raw"


def body_text(body: bytes) -> str:
    """The body as text; bytes that are not UTF-8 become U+FFFD, control characters are escaped.

    A message must not be able to control the terminal that it is printed on.
    """
    return printable(body.decode("utf-8", "replace"))


def body_value(body: bytes) -> Any:
    """The body parsed as JSON, else as UTF-8 text, else ``{"hex": ...}``; the result can always be written as JSON."""
    try:
        return json_value(body)
    except ValueError:
        pass
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": body.hex()}


def json_value(body: bytes) -> Any:
    """The body parsed as strict JSON (RFC 8259: UTF-8, no NaN, no number beyond the floats); else ``ValueError``."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(digits: str) -> float:
    value = float(digits)  # 1e999 would become inf, which cannot be written as JSON
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large for a float")
    return value


def hexadecimal(body: bytes) -> str:
    """Lines of an offset, sixteen bytes and their printable characters; a long body is cut, and a last line says so."""
    lines = []
    shown = body[:MAX_SHOWN_BYTES]
    for at in range(0, len(shown), 16):
        row = shown[at : at + 16]
        signs = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  {signs}")
    if len(body) > len(shown):
        lines.append(f"... {len(body) - len(shown)} bytes more")
    return "\n".join(lines)


def record(message: Message, body: bytes | None = None) -> dict[str, Any]:
    """A message as one JSON object: its header fields, and the body as ``body_value`` gives it."""
    body = bytes(message) if body is None else body
    out: dict[str, Any] = {
        "ordinal": message.ordinal,
        "timestamp_ns": message.timestamp_ns,
        "time": iso_time(message.timestamp_ns),
        "channel": message.channel,
        "size": len(body),
    }
    for name in ("position", "id", "vchan_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    if message.properties:
        out["properties"] = dict(message.properties)
    out["payload"] = body_value(body)
    return out


def described(message: Message, values: Values) -> str | None:
    """The value of a binary message as JSON; None if its bytes are readable text, it has no schema, or it does not
    match.
    """
    schema = values.schema(message.channel)
    if schema is None or schema.encoding in READABLE:
        return None
    try:
        return json_text(values(message), MAX_SHOWN_FIELD_BYTES)
    except ValueError:
        return None


def example(message: Message, values: Values, most: int = 80) -> str:
    """The beginning of a message in readable form: decoded by its type, else as text in quotes."""
    shown = described(message, values)
    if shown is None:
        return repr(body_text(bytes(memoryview(message)[:most])))
    return shown if len(shown) <= most else f"{shown[:most]}..."


_FIELDS: dict[str, Callable[[Message], str]] = {
    "ordinal": lambda m: str(m.ordinal),
    "time": lambda m: iso_time(m.timestamp_ns),
    "timestamp_ns": lambda m: str(m.timestamp_ns),
    "channel": lambda m: printable(str(m.channel or ""), keep=""),
    "size": lambda m: str(m.size),
    "position": lambda m: "" if m.position is None else str(m.position),
    "id": lambda m: "" if m.id is None else str(m.id),
    "vchan_id": lambda m: "" if m.vchan_id is None else str(m.vchan_id),
    "properties": lambda m: json.dumps(dict(m.properties)),
    "payload": lambda m: body_text(bytes(m)),
    "hex": lambda m: bytes(m).hex(),
}


def formatter(template: str) -> Callable[[Message], str]:
    """A function that fills ``{ordinal} {time} {payload}`` ... from a message; ``{{`` and ``}}`` stand for braces."""
    parts: list[str | Callable[[Message], str]] = []
    for token in re.findall(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+|[{}]", template):
        if token in ("{{", "}}"):
            parts.append(token[0])
        elif token.startswith("{") and token.endswith("}") and len(token) > 1:
            parts.append(_field(token[1:-1]))
        else:
            parts.append(token)
    return lambda message: "".join(part if isinstance(part, str) else part(message) for part in parts)


def _field(name: str) -> Callable[[Message], str]:
    if name not in _FIELDS:
        raise InvalidArgument(f"template has no field {{{name}}}; {nearest(name, _FIELDS)}")
    return _FIELDS[name]
