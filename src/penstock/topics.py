"""Topics: how they are named, and the patterns that choose among them. Pure functions; loads no native code.

A name is 1 to 255 bytes of UTF-8 without blanks or control characters. A topic's parts stand between dots; in a pattern
``*`` is any one part, and ``>`` as the last is one part or more. The native reader holds the same rule
(``_core.journal.TopicFilter``); one test holds both to each other.
"""

from __future__ import annotations

import re

from penstock.errors import InvalidArgument

__all__ = [
    "MAX_NAME_BYTES", "check_name", "check_pattern", "check_topic", "covers", "is_pattern", "matches",
    "topic_for",
]  # fmt: skip

MAX_NAME_BYTES = 255


def check_name(name: str, what: str = "topic") -> str:
    """``name`` if a topic, a queue or the like can have it."""
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
    """``name`` if messages can be stored under it: no wildcards and no empty parts."""
    if any(part in ("", "*", ">") for part in check_name(name, what).split(".")):
        raise InvalidArgument(f"a {what} name has no empty parts and no wildcards: {name!r}")
    return name


def check_pattern(pattern: str) -> str:
    """``pattern`` if it can choose topics."""
    parts = check_name(pattern, "topic").split(".")
    if "" in parts or ">" in parts[:-1]:
        raise InvalidArgument(f"a pattern has no empty parts, and > only at its end: {pattern!r}")
    return pattern


def is_pattern(text: str) -> bool:
    """Whether ``text`` has a wildcard in it, and so may stand for several topics."""
    return any(part in ("*", ">") for part in text.split("."))


def matches(pattern: str, topic: str) -> bool:
    """Whether the pattern chooses the topic."""
    wanted, parts = pattern.split("."), topic.split(".")
    if wanted[-1] == ">":
        return len(parts) >= len(wanted) and _same(wanted[:-1], parts)
    return len(parts) == len(wanted) and _same(wanted, parts)


def _same(wanted: list[str], parts: list[str]) -> bool:
    return all(want in ("*", part) for want, part in zip(wanted, parts, strict=False))


def covers(allowed: str, pattern: str) -> bool:
    """Whether every topic of ``pattern`` is one of ``allowed``'s."""
    if allowed in (">", pattern):
        return True
    left, right = allowed.split("."), pattern.split(".")
    for index, want in enumerate(left):
        if want == ">":
            return len(right) > index
        if index >= len(right) or right[index] == ">" or want not in ("*", right[index]):
            return False
    return len(left) == len(right)


def topic_for(name: str, otherwise: str = "default") -> str:
    """A name from elsewhere (a path, a channel of another system) as a topic: ``/camera/front`` is ``camera.front``."""
    plain = re.sub(r"[\s*>/]+", ".", name)
    return check_topic(re.sub(r"\.{2,}", ".", plain).strip(".") or otherwise)
