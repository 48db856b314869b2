"""The filter language: what it accepts, what it refuses, and that nothing in it can run code or hang."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import InvalidArgument, Message
from penstock.filter import MAX_DEPTH, MAX_TEXT, FilterError, compile_filter

BODY = json.dumps({"celsius": 21.5, "unit": "C", "tags": ["hot", "wet"], "deep": {"list": [{"x": 3}]}, "n": None})


@pytest.fixture
def message() -> Message:
    return Message(
        BODY.encode(), ordinal=7, timestamp_ns=1_700_000_000_500_000_000, channel="sensors.hall.temp",
        properties={"source": "press 4"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ordinal == 7", True),
        ("ordinal > 7", False),
        ("timestamp >= 1700000000.5 and timestamp < 1700000001", True),
        ("age > 1000", True),
        ("size > 10 and size < 1000", True),
        ('channel like "sensors.*.temp"', True),
        ('channel startswith "sensors" and channel endswith "temp"', True),
        ('channel == "other" or ordinal == 7', True),
        ("not ordinal == 7", False),
        ("not not ordinal == 7", True),
        (".celsius >= 21.5", True),
        (".celsius - 1 > 20.6", False),
        ("-.celsius < 0", True),
        (".celsius * 2 == 43", True),
        (".celsius / 0 == 1", False),
        ('.unit in ["C", "K"]', True),
        ('.tags contains "hot"', True),
        ('"wet" in .tags', True),
        (".deep.list[0].x == 3", True),
        ('.deep["list"][0].x % 2 == 1', True),
        (".missing.path[3] == null", True),
        (".n == null", True),
        (".unit > 3", False),
        ('properties.source == "press 4"', True),
        ("properties.missing == null", True),
        ('payload contains "celsius"', True),
        ("(ordinal == 1 or ordinal == 7) and true", True),
        ("false or null", False),
        ("id == null and vchan_id == null and position == null", True),
    ],
)
def test_value(message: Message, expression: str, expected: bool) -> None:
    assert compile_filter(expression)(message) is expected


def test_and_binds_tighter_than_or(message: Message) -> None:
    assert compile_filter("true or false and false")(message)


def test_body_that_is_no_json_has_null_fields() -> None:
    passes = compile_filter(".a == 1")
    assert not passes(Message(b"\xff\x00 no json"))
    assert compile_filter(".a == null")(Message(b""))


@pytest.mark.parametrize(
    ("expression", "place"),
    [
        ("", 0),
        ("size >", 6),
        ("size > > 1", 7),
        ("(size > 1", 9),
        ("size > 1)", 8),
        ("siez > 1", 0),
        ("size @ 1", 4),
        ("__import__('os')", 0),
        ("payload.__class__", 7),
        ("[1, 2", 5),
        (".a[x]", 2),
    ],
)
def test_refused_with_the_place(expression: str, place: int) -> None:
    with pytest.raises(FilterError) as caught:
        compile_filter(expression)
    assert caught.value.place == place
    assert isinstance(caught.value, InvalidArgument)


def test_a_field_of_the_value_without_its_dot_is_told_how_to_write_it() -> None:
    with pytest.raises(FilterError, match=r"written \.pose\)"):
        compile_filter("pose.x > 27")


def test_an_unknown_field_is_named_without_what_follows_it() -> None:
    with pytest.raises(FilterError, match="'open' is no field"):
        compile_filter("open <= 1.1")


def test_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(FilterError, match="did you mean ordinal"):
        compile_filter("ordnal == 1")


def test_bounds() -> None:
    with pytest.raises(FilterError, match="characters"):
        compile_filter("1" * (MAX_TEXT + 1))
    deep = MAX_DEPTH + 1
    with pytest.raises(FilterError, match="deeper"):
        compile_filter("(" * deep + "1" + ")" * deep)
    with pytest.raises(FilterError, match="deeper"):
        compile_filter("[" * deep + "1" + "]" * deep)


def test_text_cannot_be_multiplied(message: Message) -> None:
    assert not compile_filter('"aaaa" * 1000000000 == "a"')(message)


@settings(max_examples=500)
@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_is_a_filter_or_a_filter_error(text: str) -> None:
    try:
        passes = compile_filter(text)
    except FilterError:
        return
    assert passes(Message(BODY.encode())) in (True, False)


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            ["size", ".a", "1", "2.5", '"x"', "and", "or", "not", "==", "<", "in", "+", "*", "(", ")", "[", "]", ","]
        ),
        max_size=12,
    ),
    st.binary(max_size=20),
)
def test_any_tokens_over_any_body(tokens: list[str], body: bytes) -> None:
    try:
        passes = compile_filter(" ".join(tokens))
    except FilterError:
        return
    assert passes(Message(body)) in (True, False)
