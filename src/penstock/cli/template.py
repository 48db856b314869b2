"""Bodies made from templates: ``'{"n": {count}, "t": {random:20:25}}'``.

Only the names below are replaced, so that the braces of JSON need no escape; ``{{count}}`` prints ``{count}``.

==========================  ==================================================================
``{count}``                 1, 2, 3 ... (``{count:100}`` begins at 100)
``{time}``                  now as UTC text; ``{time_ns}`` as nanoseconds, ``{time_s}`` as seconds
``{random}``                a number from 0 to 1; ``{random:20:25}`` from 20 to 25
``{integer:1:6}``           a whole number from 1 to 6, both included
``{gauss:20:0.5}``          around 20 with a deviation of 0.5
``{sine:10}``               a sine with a period of 10 seconds, from -1 to 1
``{choice:on,off}``         one of the texts
``{uuid}``, ``{pid}``       a random UUID, this process
==========================  ==================================================================
"""

from __future__ import annotations

import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable

from penstock.errors import InvalidArgument
from penstock.quantities import iso_time

__all__ = ["compile_template", "is_template"]

_PART = re.compile(r"\{\{(\w+)(:[^{}]*)?\}\}|\{(\w+)((?::[^{}]*)?)\}")

Maker = Callable[[int], str]


def is_template(text: str) -> bool:
    """Whether a message made of ``text`` differs from one count to the next."""
    return any(match[3] in _MAKERS for match in _PART.finditer(text))


def compile_template(text: str, seed: int | None = None) -> Callable[[int], bytes]:
    """A function from the count (from 1) to the body. ``seed`` makes the random numbers the same each time."""
    chance = random.Random(seed)  # noqa: S311 - values for tests, no secrets
    parts: list[bytes | Maker] = []
    end = 0
    for match in _PART.finditer(text):
        parts.append(text[end : match.start()].encode())
        end = match.end()
        if match[1]:
            parts.append(match[0][1:-1].encode())
        elif match[3] in _MAKERS:
            parts.append(_maker(match[3], match[4], chance))
        else:
            parts.append(match[0].encode())
    parts.append(text[end:].encode())
    return lambda count: b"".join(part if isinstance(part, bytes) else part(count).encode() for part in parts)


def _maker(name: str, arguments: str, chance: random.Random) -> Maker:
    given = arguments[1:].split(":") if arguments else []
    try:
        return _MAKERS[name](given, chance)
    except (ValueError, IndexError, TypeError) as error:
        form = f"{{{name}{arguments}}}"
        why = str(error) if isinstance(error, InvalidArgument) else "its numbers cannot be used"
        raise InvalidArgument(f"template {form}: {why}; see 'penstock pub --help'") from None


def _count(given: list[str], _: random.Random) -> Maker:
    first = int(given[0]) if given else 1
    return lambda count: str(first + count - 1)


def _random(given: list[str], chance: random.Random) -> Maker:
    low, high = (float(given[0]), float(given[1])) if given else (0.0, 1.0)
    return lambda count: f"{chance.uniform(low, high):.6g}"


def _integer(given: list[str], chance: random.Random) -> Maker:
    low, high = int(given[0]), int(given[1])
    if low > high:
        raise InvalidArgument(f"LOW ({low}) must not be greater than HIGH ({high})")
    return lambda count: str(chance.randint(low, high))


def _gauss(given: list[str], chance: random.Random) -> Maker:
    middle, deviation = float(given[0]), float(given[1])
    return lambda count: f"{chance.gauss(middle, deviation):.6g}"


def _sine(given: list[str], _: random.Random) -> Maker:
    period_s = float(given[0])
    if period_s <= 0:
        raise ValueError
    return lambda count: f"{math.sin(2 * math.pi * time.time() / period_s):.6g}"


def _choice(given: list[str], chance: random.Random) -> Maker:
    texts = given[0].split(",")
    return lambda count: chance.choice(texts)


_MAKERS: dict[str, Callable[[list[str], random.Random], Maker]] = {
    "count": _count,
    "time": lambda given, chance: lambda count: iso_time(time.time_ns()),
    "time_ns": lambda given, chance: lambda count: str(time.time_ns()),
    "time_s": lambda given, chance: lambda count: f"{time.time():.6f}",
    "random": _random,
    "integer": _integer,
    "gauss": _gauss,
    "sine": _sine,
    "choice": _choice,
    "uuid": lambda given, chance: lambda count: str(uuid.UUID(int=chance.getrandbits(128), version=4)),
    "pid": lambda given, chance: lambda count: str(os.getpid()),
}
