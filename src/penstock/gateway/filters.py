"""Filters on links: which messages a link lets through.

A filter is a conjunction; its parts run in the order cheapest first, and the two that count (``one_in``, then
``rate_per_s``) see only what the others let through. Filters run where the message is published, before the sink's
queue, so that a slow sink with a strict filter blocks nobody. A predicate that raises counts as false, and as an error
of that link.

A filter is called by any thread that publishes from the link's source. The GIL makes each step atomic, so the counts
are off by at most the number of threads that publish at the same moment.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock._core import Message
from penstock.errors import InvalidArgument, PenstockError
from penstock.filter import compile_filter
from penstock.gateway.module import PublishedValues
from penstock.gateway.place import Checks, Place, check_options
from penstock.types import Schema, codec_of
from penstock.types.fields import Reader, Step, check_paths, reader_of

Predicate = Callable[[Message], object]
MAX_RATE_PER_S = 1_000_000
log = logging.getLogger("penstock.gateway")


def _property_rules(place: Place) -> dict[str, str | tuple[str, ...] | None]:
    wanted: dict[str, str | tuple[str, ...] | None] = {}
    for name, value in place.mapping().items():
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            wanted[name] = tuple(value)
        elif value is None or isinstance(value, str):
            wanted[name] = value
        else:
            place[name].fail(f"must be a text, a list of texts or null, not {value!r}")
    return wanted


CHECKS: Checks = {
    "properties": _property_rules,
    "min_bytes": lambda place: place.integer(0, optional=True),
    "max_bytes": lambda place: place.integer(0, optional=True),
    "one_in": lambda place: place.integer(1, optional=True),
    "rate_per_s": lambda place: place.number(optional=True),  # above 0: checked when the filter is made
    "where": lambda place: None if place.value is None else place.text(),
}


@dataclass(frozen=True)
class Filter:
    """What a link lets through; a field left at its default lets everything through.

    ``properties`` maps a name to the value it must have, to a list of allowed values, or to a pattern when the value
    holds ``*`` or ``?``; the value None only requires that the property exists. ``where`` is an expression over the
    message (``penstock.filter``), such as ``.celsius > 20``; fields are those of JSON, or of what ``type`` is encoded
    as.
    """

    properties: Mapping[str, str | Sequence[str] | None] = field(default_factory=dict)
    min_bytes: int | None = None
    max_bytes: int | None = None
    one_in: int | None = None
    rate_per_s: float | None = None
    predicate: Predicate | None = None
    where: str | None = None
    type: Any = None

    def __post_init__(self) -> None:
        check_options(self, CHECKS)
        if self.min_bytes is not None and self.max_bytes is not None and self.min_bytes > self.max_bytes:
            raise InvalidArgument(f"min_bytes={self.min_bytes} is above max_bytes={self.max_bytes}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise InvalidArgument(f"rate_per_s={self.rate_per_s} must be above 0 and at most {MAX_RATE_PER_S}")
        if self.predicate is not None and not callable(self.predicate):
            raise InvalidArgument(f"predicate={self.predicate!r} cannot be called")
        if self.where is not None:
            self._fields()
        elif self.type is not None:
            raise InvalidArgument("type= says how fields are read: give where= too")

    @property
    def empty(self) -> bool:
        """Whether it lets everything through."""
        return not self.properties and all(
            getattr(self, name) is None
            for name in ("min_bytes", "max_bytes", "one_in", "rate_per_s", "predicate", "where")
        )

    def check(self, schema: Schema) -> None:
        """``InvalidArgument`` where messages of this schema have no field that ``where`` names."""
        if self.where is not None and self.type is None:
            check_paths([schema], compile_filter(self.where).paths)

    def compile(self, clock: Callable[[], float] = time.monotonic, read: Reader | None = None) -> Predicate:
        """A function of a message, with counts of its own. ``read`` decodes a message if no ``type`` was given; without
        either it is decoded as JSON.
        """
        parts: list[Predicate] = []
        if self.min_bytes is not None or self.max_bytes is not None:
            parts.append(_size(self.min_bytes or 0, self.max_bytes))
        parts += [_property(name, wanted) for name, wanted in self.properties.items()]
        if self.where is not None:
            parts.append(self._fields(read))
        if self.predicate is not None:
            parts.append(self.predicate)
        if self.one_in is not None:
            parts.append(_sample(self.one_in))
        if self.rate_per_s is not None:
            parts.append(_rate(self.rate_per_s, clock))
        return parts[0] if len(parts) == 1 else lambda message: all(part(message) for part in parts)

    def _fields(self, read: Reader | None = None) -> Predicate:
        """A predicate for ``where``; a message that does not match the type has no fields."""
        passes = compile_filter(self.where or "")
        if self.type is not None:
            schema = codec_of(self.type).described()
            check_paths([schema], passes.paths)
            read = reader_of(schema)
        value_of = read or (lambda message: json.loads(bytes(message)))
        told = checked = False

        def value_or_tell(message: Message) -> Any:
            nonlocal told, checked
            try:
                value = value_of(message)
                if not checked:
                    checked = True
                    self._tell_unknown(read, passes.paths)
                return value
            except ValueError as error:
                if not told:
                    said = "filter %r: a message cannot be read and has no fields: %s (reported once)"
                    log.warning(said, self.where, error)
                told = True
                raise

        return lambda message: passes(message, value_or_tell)


    def _tell_unknown(self, read: Reader | None, paths: Sequence[Sequence[Step]]) -> None:
        """Warn once about fields that the source's schema does not have, as far as it is known at the first message."""
        try:
            if isinstance(read, PublishedValues):
                read.check(paths)
        except InvalidArgument as error:
            log.warning("filter %r: %s (reported once)", self.where, error)
        except PenstockError:
            pass  # the broker does not tell the schema


def any_of(predicates: Sequence[Predicate]) -> Predicate:
    """The filter of several links between the same modules: all see the message, and one of them has to accept it."""
    if len(predicates) == 1:
        return predicates[0]

    def accepts(message: Message) -> bool:
        yes = False
        for part in predicates:
            yes = bool(part(message)) or yes
        return yes

    return accepts


def _size(least: int, most: int | None) -> Predicate:
    ceiling = math.inf if most is None else most
    return lambda message: least <= message.size <= ceiling


def _property(name: str, wanted: str | Sequence[str] | None) -> Predicate:
    if wanted is None:
        return lambda message: name in message.properties
    if isinstance(wanted, str) and not any(sign in wanted for sign in "*?["):
        return lambda message: message.properties.get(name) == wanted
    if isinstance(wanted, str):
        matches = re.compile(fnmatch.translate(wanted)).match
        return lambda message: (value := message.properties.get(name)) is not None and matches(value)
    allowed = frozenset(wanted)
    return lambda message: message.properties.get(name) in allowed


def _sample(one_in: int) -> Predicate:
    """The first of every ``one_in`` messages."""
    count = -1

    def accepts(_: Message) -> bool:
        nonlocal count
        count += 1
        return count % one_in == 0

    return accepts


def _rate(rate_per_s: float, clock: Callable[[], float]) -> Predicate:
    """At most ``rate_per_s`` in any second: the last ones' times are kept, and the oldest must be a second old."""
    most = math.ceil(rate_per_s)
    window_s = most / rate_per_s
    times: deque[float] = deque(maxlen=most)

    def accepts(_: Message) -> bool:
        now = clock()
        if len(times) == most and now - times[0] < window_s:
            return False
        times.append(now)
        return True

    return accepts
