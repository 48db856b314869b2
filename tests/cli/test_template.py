"""Templates of bodies: JSON needs no escapes, values stay in their range, a seed repeats them."""

from __future__ import annotations

import json

import pytest

from penstock import InvalidArgument
from penstock.cli.template import compile_template, is_template


def test_json_needs_no_escape() -> None:
    make = compile_template('{"n": {count}, "in": {"t": {random:20:25}, "k": "{choice:on,off}"}}')
    for number in range(1, 50):
        value = json.loads(make(number))
        assert value["n"] == number
        assert 20 <= value["in"]["t"] <= 25
        assert value["in"]["k"] in ("on", "off")


def test_numbers() -> None:
    assert compile_template("{count:100}")(3) == b"102"
    assert all(1 <= int(compile_template("{integer:1:6}")(n)) <= 6 for n in range(100))
    assert -1 <= float(compile_template("{sine:10}")(1)) <= 1
    assert compile_template("{time}")(1).endswith(b"Z")
    assert int(compile_template("{time_ns}")(1)) > 10**18


def test_a_seed_repeats() -> None:
    text = "{random} {gauss:0:1} {uuid} {integer:0:1000000}"
    first, second = compile_template(text, 5), compile_template(text, 5)
    assert [first(n) for n in range(5)] == [second(n) for n in range(5)]
    assert compile_template(text, 6)(0) != compile_template(text, 5)(0)


def test_what_is_no_template_stays() -> None:
    assert compile_template("{{count}} {unknown} {}")(1) == b"{count} {unknown} {}"
    assert is_template("{count}") and not is_template('{"a": 1}')


@pytest.mark.parametrize(
    "text", ["{integer:6:1}", "{integer:a:b}", "{sine:0}", "{gauss:1}", "{random:x:y}", "{choice}"]
)
def test_wrong_numbers_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="template"):
        compile_template(text)
