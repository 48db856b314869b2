"""Topics: rules for their names, and patterns that match them. Pure functions; loads no native code.

A name is 1 to 255 bytes of UTF-8 without blanks or control characters. Dots separate the parts of a topic. In a pattern
``*`` matches exactly one part, and ``>`` at the end matches one part or more. The native reader implements the same
rule (``_core.journal.TopicFilter``); a test compares the two.
"""

from __future__ import annotations

import itertools
import re

from penstock.errors import InvalidArgument

__all__ = [
    "MAX_NAME_BYTES", "check_name", "check_pattern", "check_topic", "check_wildcards", "covers", "is_pattern",
    "matches", "overlap", "topic_for",
]  # fmt: skip

MAX_NAME_BYTES = 255


def check_name(name: str, what: str = "topic") -> str:
    """Return ``name`` if a topic, a queue or the like can have it; else ``InvalidArgument``."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is a str, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"a {what} name must be UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidArgument(f"a {what} name has 1 to {MAX_NAME_BYTES} bytes, not {size}")
    if not name.isprintable() or " " in name:
        raise InvalidArgument(f"a {what} name has no blanks or control characters: {name!r}")
    return name


def check_topic(name: str, what: str = "topic") -> str:
    """Return ``name`` if messages can be stored under it: no wildcards and no empty parts."""
    if any(part in ("", "*", ">") for part in check_name(name, what).split(".")):
        raise InvalidArgument(f"a {what} name has no empty parts and no wildcards: {name!r}")
    return name


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` if it is a valid pattern."""
    parts = check_name(pattern, "topic").split(".")
    if "" in parts or ">" in parts[:-1]:
        raise InvalidArgument(f"a pattern has no empty parts, and > only at its end: {pattern!r}")
    return pattern


def check_wildcards(pattern: str) -> str:
    """Return ``pattern`` if each wildcard in it is a whole part: ``a*`` would match the topic of that name alone."""
    if any(len(part) > 1 and ("*" in part or ">" in part) for part in check_pattern(pattern).split(".")):
        raise InvalidArgument(f"a wildcard is a whole part between dots, as in sensors.* and sensors.>: {pattern!r}")
    return pattern


def is_pattern(text: str) -> bool:
    """Whether ``text`` contains a wildcard, and so may match several topics."""
    return any(part in ("*", ">") for part in text.split("."))


def matches(pattern: str, topic: str) -> bool:
    """Whether the pattern matches the topic."""
    wanted, parts = pattern.split("."), topic.split(".")
    if wanted[-1] == ">":
        return len(parts) >= len(wanted) and _parts_match(wanted[:-1], parts)
    return len(parts) == len(wanted) and _parts_match(wanted, parts)


def _parts_match(wanted: list[str], parts: list[str]) -> bool:
    return all(want in ("*", part) for want, part in zip(wanted, parts, strict=False))


def covers(allowed: str, pattern: str) -> bool:
    """Whether ``allowed`` matches every topic that ``pattern`` matches."""
    if allowed in (">", pattern):
        return True
    left, right = allowed.split("."), pattern.split(".")
    for index, want in enumerate(left):
        if want == ">":
            return len(right) > index
        if index >= len(right) or right[index] == ">" or want not in ("*", right[index]):
            return False
    return len(left) == len(right)


def overlap(one: str, other: str) -> bool:
    """Whether there may be a topic that both patterns match."""
    left, right = one.split("."), other.split(".")
    for first, second in itertools.zip_longest(left, right, fillvalue=""):
        if ">" in (first, second):
            return first != "" and second != ""
        if first != second and ("*" not in (first, second) or "" in (first, second)):
            return False
    return True


def topic_for(name: str, otherwise: str = "default") -> str:
    """A topic for a foreign name (a path, a channel of another system): ``/camera/front`` becomes ``camera.front``."""
    plain = re.sub(r"[\s*>/]+", ".", name)
    return check_topic(re.sub(r"\.{2,}", ".", plain).strip(".") or otherwise)
