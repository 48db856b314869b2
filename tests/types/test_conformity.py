"""Values against the JSON Schemas of our types: what a codec reads fits, what it refuses does not."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any, Literal

import msgspec
import pytest

from penstock.types import codec_of
from penstock.types.conformity import check_json


class Part(msgspec.Struct, tag=True):
    x: float
    n: int | None = None


class Other(msgspec.Struct, tag=True):
    names: list[str] = []
    by_name: dict[str, Part] = {}
    pair: tuple[int, str] | None = None
    word: Literal["on", "off"] = "on"


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: bool = False


VALUES: list[Any] = [
    None, 1, 1.5, True, "on", [], {}, {"type": "Part"}, {"type": "Part", "x": 1}, {"type": "Part", "x": "1"},
    {"type": "Part", "x": None}, {"type": "Part", "x": 1, "n": 1.5}, {"type": "Part", "x": 1, "more": []},
    {"type": "Other"}, {"type": "Other", "names": ["a", 1]}, {"type": "Other", "names": ["a"]},
    {"type": "Other", "by_name": {"q": {"type": "Part"}}}, {"type": "Other", "by_name": {"q": {"type": "Part", "x": 2}}},
    {"type": "Other", "pair": [1, "b"]}, {"type": "Other", "pair": ["a", "b"]}, {"type": "Other", "word": "half"},
    {"type": "Nobody"}, {"a": True}, {"a": 1}, {"b": True}, ["on"], [1],
]  # fmt: skip


KINDS = [Part, Other, Part | Other, Strict, dict, list[str], list[Part], int, float, bool, dict[str, bool]]


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_the_codec_says(kind: Any) -> None:
    codec = codec_of(kind)
    for value in VALUES:
        if kind is Other and isinstance(value, dict) and "type" not in value:
            continue  # msgspec takes it, though its schema says that the tag is required
        try:
            codec.decode(json.dumps(value).encode())
            fits = True
        except ValueError:
            fits = False
        try:
            check_json(value, codec.schema["jsonschema"])
            found = True
        except ValueError:
            found = False
        assert found == fits, value


def test_it_says_where() -> None:
    definition = codec_of(Other).schema["jsonschema"]
    with pytest.raises(ValueError, match=r"field 'by_name.q.x' is a str, not number"):
        check_json({"type": "Other", "by_name": {"q": {"type": "Part", "x": "far"}}}, definition)


def test_it_keeps_nothing_of_what_it_looked_at() -> None:
    """A value that stays in a cycle would keep its channel's memory."""

    class Value(dict[str, Any]):
        pass

    value = Value(type="Part", x=1.0, n=None)
    gc.disable()
    try:
        before = sys.getrefcount(value)
        check_json(value, codec_of(Part).schema["jsonschema"])
        assert sys.getrefcount(value) == before
    finally:
        gc.enable()


def test_a_schema_that_holds_itself_and_one_that_is_damaged_end() -> None:
    check_json({"a": {}}, {"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}})
    for definition in (None, [], {"type": 7}, {"$ref": "nowhere"}):
        check_json({}, definition)
