"""Values in a gateway's file that come from elsewhere: the environment, secret files, other files, defaults.

In any text ``${NAME}`` stands for an environment variable, ``${NAME:-text}`` for one with a default, and
``${file:PATH}`` for the content of a file, without the line's end: a secret that is not in the configuration.
``${int:NAME}``, ``${float:NAME}`` and ``${bool:NAME}``, alone in a text, give a number or a boolean; nothing else does,
so that a token made of digits stays a text. ``$${`` stands for ``${``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.gateway.place import Place

MAX_SECRET_BYTES = 1 << 16
MAX_DEPTH = 64
_REFERENCE = re.compile(r"(\$\$\{)|\$\{([^{}]*)\}")
_TYPES = {"int": int, "float": float}
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def resolved(place: Place, depth: int = 0) -> Any:
    """The value with all references resolved; errors name the place."""
    if depth > MAX_DEPTH:
        place.fail("is nested too deep")
    value = place.value
    if isinstance(value, str) and "${" in value:
        return _text(place, value)
    if isinstance(value, Mapping):
        return {key: resolved(place[key], depth + 1) for key in value}
    if isinstance(value, list):
        return [resolved(place[index], depth + 1) for index in range(len(value))]
    return value


def secret_files(value: Any, base: Path) -> Iterator[Path]:
    """The secret files that the texts of a file in ``base`` refer to."""
    if isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            if match[2] is not None and match[2].startswith("file:"):
                yield base / match[2].removeprefix("file:")
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from secret_files(one, base)


def _text(place: Place, text: str) -> Any:
    kind, colon, name = text[2:-1].partition(":")
    if colon and kind in (*_TYPES, "bool") and _REFERENCE.fullmatch(text):
        return _typed(place, kind, _variable(place, name))
    if "${" in _REFERENCE.sub("", text):
        place.fail(f"{text!r} has a ${{ without its }}; $${{ stands for ${{ itself")
    return _REFERENCE.sub(lambda match: _filled(place, match), text)


def _filled(place: Place, match: re.Match[str]) -> str:
    if match[1]:
        return "${"
    kind, colon, rest = match[2].partition(":")
    if colon and kind == "file":
        return _secret(place, rest)
    if colon and kind in (*_TYPES, "bool"):
        place.fail(f"${{{match[2]}}} gives a value of its own kind and must stand alone")
    return _variable(place, match[2])


def _variable(place: Place, name: str) -> str:
    name, default, text = name.partition(":-")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        place.fail(f"{name!r} is no name of an environment variable")
    value = os.environ.get(name)
    if value is None and not default:
        place.fail(f"the environment variable {name} is not set; ${{{name}:-text}} gives a default")
    return text if value is None else value


def _typed(place: Place, kind: str, text: str) -> Any:
    try:
        return _TRUTH[text.lower()] if kind == "bool" else _TYPES[kind](text)
    except (KeyError, ValueError):
        place.fail(f"{text!r} is not of the kind {kind}")


def _secret(place: Place, path: str) -> str:
    base = Path(place.file).parent if place.file else Path()
    try:
        with (base / path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        if len(data) > MAX_SECRET_BYTES:
            place.fail(f"{path} is larger than {MAX_SECRET_BYTES} bytes")
        return data.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        place.fail(f"{path} cannot be read: {error}", error)


def with_defaults(top: Place) -> Any:
    """Add ``defaults`` (for ``module`` and ``link``) to every entry that does not override them."""
    if not isinstance(top.value, Mapping) or "defaults" not in top.value:
        return top.value
    data, defaults = dict(top.value), top["defaults"].mapping()
    del data["defaults"]
    for key, name in (("modules", "module"), ("links", "link")):
        given, entries = defaults.get(name), data.get(key)
        if isinstance(given, Mapping) and isinstance(entries, list):
            data[key] = [{**given, **entry} if isinstance(entry, Mapping) else entry for entry in entries]
    return data
