"""Filter expressions over messages: a small language with its own parser, without ``eval``.

::

    size > 1000 and channel like "sensors.*"
    .temperature >= 21.5 or .unit in ["F", "K"]        a field of the message's value: .a.b[0]
    properties.source == "press 4" and not (payload contains "debug")

================  ======================================================================================
values            numbers, "text" or 'text', true, false, null, lists in brackets
fields            ordinal, timestamp (seconds), age (seconds), size, channel, position, id, vchan_id, payload
paths             ``.name``, ``.list[0].name`` in the value, which is JSON where the caller knows nothing else of it,
                  also written ``value.name``; ``properties.name`` of the message
operators         ``or``, ``and``, ``not``, ``== != < <= > >=``, ``in``, ``contains``, ``startswith``,
                  ``endswith``, ``like`` (``*`` and ``?``), ``+ - * / %``
================  ======================================================================================

A missing field is null. A comparison of different types is false and never an error, so that one odd message does not
end a subscription. An expression has at most ``MAX_TEXT`` characters, ``MAX_WORDS`` tokens and ``MAX_DEPTH`` levels,
which bounds its cost.
"""

from __future__ import annotations

import fnmatch
import json
import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock import clock
from penstock.errors import InvalidArgument, nearest

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["compile_assignment", "compile_filter", "compile_rule", "Filter", "FilterError"]

MAX_TEXT = 4096
MAX_DEPTH = 64
MAX_WORDS = 1000  # a sum of n terms is evaluated n calls deep, so this bounds the stack

Evaluate = Callable[["Subject"], Any]
Read = Callable[[Any], Any]
Steps = list[str | int]  # names and indexes of a path

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r"|(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<path>\.[A-Za-z_][\w-]*|\.\[)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>==|!=|<=|>=|[<>()\[\],+\-*/%]))"
)


_TARGET = re.compile(r"\s*(properties\.[A-Za-z_][\w-]*|(?:\.[A-Za-z_][\w-]*)+)\s*=(?!=)")


class FilterError(InvalidArgument):
    """An expression that cannot be parsed; ``place`` is the index of the character where parsing failed."""

    def __init__(self, text: str, place: int) -> None:
        super().__init__(text)
        self.place = place


class Subject:
    """One message as an expression sees it; the payload is decoded when it is first used."""

    __slots__ = ("_payload", "_read", "_value", "message")

    def __init__(self, message: Message, read: Read | None = None) -> None:
        self.message = message
        self._read = read
        self._payload: str | None = None
        self._value: Any = _UNSET

    @property
    def payload(self) -> str:
        if self._payload is None:
            self._payload = bytes(self.message).decode("utf-8", "replace")
        return self._payload

    @property
    def value(self) -> Any:
        if self._value is _UNSET:
            try:
                self._value = json.loads(self.payload) if self._read is None else self._read(self.message)
            except (ValueError, RecursionError):
                self._value = None
        return self._value


_UNSET = object()

_FIELDS: dict[str, Evaluate] = {
    "ordinal": lambda s: s.message.ordinal,
    "timestamp": lambda s: s.message.timestamp_ns / 1e9,
    # read at each use: the clock in use may have changed since the expression was compiled
    "age": lambda s: (clock.time_ns() - s.message.timestamp_ns) / 1e9,
    "size": lambda s: s.message.size,
    "channel": lambda s: s.message.channel,
    "position": lambda s: s.message.position,
    "id": lambda s: s.message.id,
    "vchan_id": lambda s: s.message.vchan_id,
    "payload": lambda s: s.payload,
}
_CONSTANTS = {"true": True, "false": False, "null": None}


def compile_filter(expression: str) -> Filter:
    """A function that says whether a message passes ``expression``; ``FilterError`` points at a mistake.

    It takes the message and, if known, the function that gives its value (``penstock.types.fields``).
    """
    return Filter(expression)


class Filter:
    """A compiled expression; see ``compile_filter``."""

    def __init__(self, expression: str) -> None:
        parser = _Parser(expression)
        self._evaluate = parser.expression()
        parser.end()
        self.paths = parser.value_paths  #: the fields of the value that it names, as steps

    def __call__(self, message: Message, read: Read | None = None) -> bool:
        return bool(self._evaluate(Subject(message, read)))


def compile_rule(expression: str) -> Callable[..., bool | None]:
    """A function that says whether a message keeps to ``expression``; None where a field that it names is missing."""
    parser = _Parser(expression)
    evaluate = parser.expression()
    parser.end()

    def judge(message: Message, read: Read | None = None) -> bool | None:
        subject = Subject(message, read)
        if any(path(subject) is None for path in parser.paths):
            return None
        return bool(evaluate(subject))

    return judge


def compile_assignment(text: str) -> tuple[tuple[str, ...], Evaluate]:
    """``.a.b = EXPRESSION`` or ``properties.NAME = EXPRESSION``: the path that is assigned to, which begins with ""
    for a field of the value and with "properties" else, and the expression as a function of a ``Subject``."""
    target = _TARGET.match(text)
    if target is None:
        raise FilterError(f"filter: {text!r} is no assignment; one is .NAME = ... or properties.NAME = ...", 0)
    parser = _Parser(text[target.end() :])
    evaluate = parser.expression()
    parser.end()
    return tuple(target[1].split(".")), evaluate


class _Parser:
    """Recursive descent over the tokens; each method returns a function that evaluates its part for a message."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEXT:
            raise FilterError(f"a filter has at most {MAX_TEXT} characters, not {len(source)}", MAX_TEXT)
        self.source = source
        self.tokens = list(self._scan())
        if len(self.tokens) > MAX_WORDS:
            raise FilterError(f"a filter has at most {MAX_WORDS} words and signs, not {len(self.tokens)}", MAX_WORDS)
        self.at = 0
        self.depth = 0
        self.paths: list[Evaluate] = []  # every field and path that the expression names
        self.value_paths: list[Steps] = []

    def _scan(self) -> list[tuple[str, str, int]]:
        tokens, at = [], 0
        source = self.source.rstrip()
        while at < len(source):
            match = _TOKEN.match(source, at)
            if match is None:
                raise self.error_at("cannot be read", at)
            kind = match.lastgroup or ""
            tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        return tokens

    def error_at(self, what: str, place: int, length: int = 20) -> FilterError:
        rest = self.source[place : place + length] or "the end"
        return FilterError(f"filter: {rest!r} {what} (character {place + 1} of {self.source!r})", place)

    def peek(self) -> tuple[str, str, int]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "", len(self.source))

    def take(self, *texts: str) -> str | None:
        kind, text, _ = self.peek()
        if kind in ("name", "sign", "path") and text in texts:
            self.at += 1
            return text
        return None

    def expect(self, text: str) -> None:
        if self.take(text) is None:
            raise self.error_at(f"where {text!r} was expected", self.peek()[2])

    def end(self) -> None:
        kind, _, place = self.peek()
        if kind != "end":
            raise self.error_at("was not expected", place)

    def expression(self) -> Evaluate:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error_at(f"stands deeper than {MAX_DEPTH} levels", self.peek()[2])
        left = self.conjunction()
        while self.take("or"):
            left = _or(left, self.conjunction())
        self.depth -= 1
        return left

    def conjunction(self) -> Evaluate:
        left = self.negation()
        while self.take("and"):
            left = _and(left, self.negation())
        return left

    def negation(self) -> Evaluate:
        negative = False
        while self.take("not"):  # a loop: recursion would make a long row of "not" a stack overflow
            negative = not negative
        inner = self.comparison()
        return (lambda s: not inner(s)) if negative else inner

    def comparison(self) -> Evaluate:
        left = self.sum()
        sign = self.take(*_COMPARISONS)
        if sign is None:
            return left
        return _compare(_COMPARISONS[sign], left, self.sum())

    def sum(self) -> Evaluate:
        left = self.product()
        while sign := self.take("+", "-"):
            left = _calculate(_ARITHMETIC[sign], left, self.product())
        return left

    def product(self) -> Evaluate:
        left = self.unary()
        while sign := self.take("*", "/", "%"):
            left = _calculate(_ARITHMETIC[sign], left, self.unary())
        return left

    def unary(self) -> Evaluate:
        negative = False
        while self.take("-"):
            negative = not negative
        value = self.value()
        return _calculate(operator.sub, lambda s: 0, value) if negative else value

    def value(self) -> Evaluate:
        kind, text, place = self.peek()
        self.at += 1
        if kind == "number":
            return _constant(float(text) if re.search(r"[.eE]", text) else int(text))
        if kind == "text":
            return _constant(re.sub(r"\\(.)", _unescape, text[1:-1]))
        if kind == "path":
            self.at -= 1
            return self.value_path()
        if kind == "sign" and text == "(":
            inner = self.expression()
            self.expect(")")
            return inner
        if kind == "sign" and text == "[":
            return self.list()
        if kind == "name":
            return self.name(text, place)
        if kind == "end":
            said = f"a value is missing at the end (character {place + 1} of {self.source!r})"
            raise FilterError(f"filter: {said}", place)
        raise self.error_at("where a value was expected", place)

    def name(self, text: str, place: int) -> Evaluate:
        if text in _CONSTANTS:
            return _constant(_CONSTANTS[text])
        if text == "properties":
            return self.path(lambda s: s.message.properties, [])
        if text == "value":
            return self.value_path()
        if text not in _FIELDS:
            known = nearest(text, [*_FIELDS, "properties", "value"])
            what = f"is no field; {known} (a field of the message's value is written .{text})"
            raise self.error_at(what, place, len(text))
        self.paths.append(_FIELDS[text])
        return _FIELDS[text]

    def list(self) -> Evaluate:
        items: list[Evaluate] = []
        while not self.take("]"):
            if items:
                self.expect(",")
            items.append(self.expression())
        return lambda s: [item(s) for item in items]

    def value_path(self) -> Evaluate:
        steps: Steps = []
        self.value_paths.append(steps)
        return self.path(lambda s: s.value, steps)

    def path(self, root: Evaluate, steps: Steps) -> Evaluate:
        while True:
            kind, text, place = self.peek()
            if kind == "path" and text != ".[":
                self.at += 1
                steps.append(text[1:])
            elif text in ("[", ".[") and (steps or text == ".["):
                self.at += 1
                steps.append(self.index(place))
            else:
                found = _walk(root, steps)
                self.paths.append(found)
                return found

    def index(self, place: int) -> int | str:
        kind, text, _ = self.peek()
        self.at += 1
        self.expect("]")
        if kind == "number" and text.isdigit():
            return int(text)
        if kind == "text":
            return text[1:-1]
        raise self.error_at("needs a whole number or a text in brackets", place)


def _unescape(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t"}.get(match[1], match[1])


def _constant(value: Any) -> Evaluate:
    return lambda s: value


def _or(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda s: bool(left(s)) or bool(right(s))


def _and(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda s: bool(left(s)) and bool(right(s))


def _compare(function: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(subject: Subject) -> bool:
        try:
            return bool(function(left(subject), right(subject)))
        except TypeError:
            return False

    return evaluate


def _calculate(function: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    """Arithmetic on numbers only: a text times a number could use up the memory."""

    def evaluate(subject: Subject) -> Any:
        a, b = left(subject), right(subject)
        if not (isinstance(a, int | float) and isinstance(b, int | float)):
            return None
        try:
            result = function(a, b)
        except (ZeroDivisionError, OverflowError):
            return None
        return None if isinstance(result, float) and math.isnan(result) else result

    return evaluate


def _walk(root: Evaluate, steps: list[str | int]) -> Evaluate:
    def evaluate(subject: Subject) -> Any:
        value = root(subject)
        for step in steps:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    return evaluate


def _contains(a: Any, b: Any) -> bool:
    return (isinstance(a, str) and isinstance(b, str) and b in a) or (isinstance(a, list | dict) and b in a)


def _like(a: Any, b: Any) -> bool:
    return isinstance(a, str) and isinstance(b, str) and fnmatch.fnmatchcase(a, b)


_ARITHMETIC = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: _contains(b, a),
    "contains": _contains,
    "startswith": lambda a, b: isinstance(a, str) and isinstance(b, str) and a.startswith(b),
    "endswith": lambda a, b: isinstance(a, str) and isinstance(b, str) and a.endswith(b),
    "like": _like,
}
