"""Bodies for people: nothing a message carries may steer the terminal or end the listening."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidArgument, Message
from penstock.observe import decode


def test_times_keep_all_nanoseconds() -> None:
    assert decode.iso_time(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456789Z"
    assert decode.iso_time(0) == "1970-01-01T00:00:00.000000000Z"


def test_text_cannot_steer_a_terminal() -> None:
    assert decode.body_text(b"\x1b[2Jgone\x07") == "\\x1b[2Jgone\\x07"
    assert decode.body_text("grün\tline\n".encode()) == "grün\tline\n"
    assert decode.body_text(b"\xff") == "\ufffd"


@given(st.binary(max_size=200))
def test_any_body_has_a_text_and_a_value(body: bytes) -> None:
    assert "\x1b" not in decode.body_text(body)
    json.dumps(decode.body_value(body), allow_nan=False)
    json.dumps(decode.record(Message(body)), allow_nan=False)


def test_value_is_json_then_text_then_hexadecimal() -> None:
    assert decode.body_value(b'{"a": [1]}') == {"a": [1]}
    assert decode.body_value(b"plain") == "plain"
    assert decode.body_value(b"\xff\x01") == {"hex": "ff01"}
    assert decode.body_value(b"[" * 100_000) == "[" * 100_000


@pytest.mark.parametrize(
    "body", ['{"celsius": NaN}', "[Infinity]", "-Infinity", "1e400", "[-1e400]", '{"a": [1, 2.5e999]}']
)
def test_what_only_looks_like_json_is_text(body: str) -> None:
    """Every reader of JSON must be able to read it again; these would come out as NaN or Infinity."""
    assert decode.body_value(body.encode()) == body


def test_binary_bodies_are_not_guessed_to_be_wide_characters() -> None:
    assert decode.body_value(b"1\x00") == "1\x00"  # two bytes of a number, not the digit 1 in UTF-16
    assert decode.body_value(b'"\xed\xa0\x80"') == {"hex": "22eda08022"}


def test_text_with_half_a_character_can_be_printed() -> None:
    value = decode.body_value(rb'"\ud800 and \u001b[2J"')
    assert decode.printable(value).encode() == rb"\ud800 and \x1b[2J"


def test_hexadecimal_lines() -> None:
    lines = decode.hexadecimal(bytes(range(20))).splitlines()
    assert lines[0].startswith("00000000  00 01 02 03 04 05 06 07  08 09")
    assert lines[1].startswith("00000010  10 11 12 13")
    assert decode.hexadecimal(b"a" * (decode.MAX_SHOWN_BYTES + 5)).endswith("... 5 bytes more")


def test_record_tells_what_the_message_carries() -> None:
    message = Message(b"1", ordinal=3, timestamp_ns=5, channel="c", id=9, properties={"k": "v"})
    record = decode.record(message)
    assert record["ordinal"] == 3 and record["id"] == 9 and record["payload"] == 1
    assert record["properties"] == {"k": "v"} and "position" not in record


def test_template_fields() -> None:
    message = Message(b"hi", ordinal=3, timestamp_ns=0, channel="c")
    assert decode.formatter("{ordinal}:{channel}:{payload} {{x}} {size}")(message) == "3:c:hi {x} 2"
    with pytest.raises(InvalidArgument, match="did you mean ordinal"):
        decode.formatter("{ordinl}")
