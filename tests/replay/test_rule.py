"""Rules: which messages they judge, the first that breaks one, and the least inputs for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from penstock._core.gateway import GatewayMessage
from penstock.filter import FilterError, compile_filter, compile_rule
from penstock.gateway import Module
from penstock.replay import Break, GatewayTarget, Rule, Script, first_break, shrink
from penstock.replay.rule import Shown, minimal
from tests.replay.test_gateway import gateway_file, link, module, plain, recording

HERE = "tests.replay.test_rule:"


class Both(Module):
    """Says 99 when it has seen ``a`` and then ``b``, else 1."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.seen = ""

    def receive(self, message: GatewayMessage) -> None:
        content = bytes(message).decode()
        if content in ("a", "b"):
            self.seen += content
        self.publish(b'{"speed": 99}' if "ab" in self.seen else b'{"speed": 1}')


def message(data: bytes, **properties: str) -> GatewayMessage:
    return GatewayMessage(data, properties)


def test_value_names_a_field_as_a_dot_does() -> None:
    assert compile_filter("value.speed < 80")(message(b'{"speed": 3}'))
    assert not compile_filter("value.speed < 80")(message(b'{"speed": 90}'))
    with pytest.raises(FilterError, match="value"):
        compile_filter("valu.speed < 80")


def test_a_rule_judges_messages_that_have_the_fields_it_names() -> None:
    judge = compile_rule("value.speed < 80 or properties.test == 'yes'")
    assert judge(message(b'{"speed": 3}', test="no")) is True
    assert judge(message(b'{"speed": 90}', test="no")) is False
    assert judge(message(b'{"speed": 90}', test="yes")) is True
    assert judge(message(b'{"speed": 90}')) is None
    assert judge(message(b"no json", test="no")) is None
    assert compile_rule("size < 3")(message(b"long")) is False


def test_a_rule_is_about_the_topics_that_it_names() -> None:
    rule = Rule("value.speed < 80", ["to.>"])
    assert rule.breaks("to.engine", message(b'{"speed": 90}'))
    assert not rule.breaks("engine", message(b'{"speed": 90}'))


@pytest.fixture
def case(tmp_path: Path) -> tuple[GatewayTarget, Path]:
    contents = [random.Random(3).choice("abxyz") for _ in range(40)]
    script = recording(tmp_path / "rec", plain("x", "b", "x", "a", *("x" * 10), "b", *contents))
    target = GatewayTarget(gateway_file(tmp_path, [module("both", HERE + "Both")], [link("shm:/in", "both")]))
    return target, script


def test_the_first_break_is_shown_with_those_around_it(case: tuple[GatewayTarget, Path]) -> None:
    target, script = case
    with Script(script) as opened:
        found = first_break(target, opened.inputs({"in": "shm:/in"}), opened.times_ns(["in"]), Rule("value.speed < 80"))
    assert found is not None
    assert (found.number, found.inputs, found.shown.payload) == (15, 15, b'{"speed": 99}')
    assert [len(found.before), len(found.after)] == [3, 3]
    assert {shown.payload for shown in found.before} == {b'{"speed": 1}'}


def test_a_rule_that_holds_is_said_to_hold(case: tuple[GatewayTarget, Path]) -> None:
    target, script = case
    with Script(script) as opened:
        assert (
            first_break(target, opened.inputs({"in": "shm:/in"}), opened.times_ns(["in"]), Rule("value.speed < 100"))
            is None
        )


def test_only_the_inputs_that_are_needed_are_left(case: tuple[GatewayTarget, Path]) -> None:
    target, script = case
    rule = Rule("value.speed < 80")
    with Script(script) as opened:
        inputs = list(opened.inputs({"in": "shm:/in"}))
        found = first_break(target, inputs, opened.times_ns(["in"]), rule)
        assert found is not None
        needed, least, _ = shrink(target, inputs, opened.times_ns(["in"]), rule, found)
        assert [(bytes(one.message), one.message.ordinal) for one in needed] == [(b"a", 4), (b"b", 15)] and least
        assert shrink(target, inputs, opened.times_ns(["in"]), rule, found, max_runs=1)[1:] == (False, 1)


def test_what_modules_publish_when_they_are_stopped_early_is_no_break(tmp_path: Path) -> None:
    script = recording(tmp_path / "rec", plain(*("x" * 20), every_s=0.25))
    modules = [module("window", "penstock.gateway.modules:Window", {"window_s": 1.0})]
    target = GatewayTarget(gateway_file(tmp_path, modules, [link("shm:/in", "window")]))
    rule = Rule("not (properties.count == '4')")
    with Script(script) as opened:
        inputs = list(opened.inputs({"in": "shm:/in"}))
        found = first_break(target, inputs, opened.times_ns(["in"]), rule)
        assert found is not None and not found.at_end
        needed, _, _ = shrink(target, inputs, opened.times_ns(["in"]), rule, found)
    assert len(needed) == 4


@given(size=some.integers(0, 60), wanted=some.sets(some.integers(0, 59), max_size=6))
def test_minimal_leaves_what_is_needed_and_nothing_else(size: int, wanted: set[int]) -> None:
    wanted &= set(range(size))
    found, least, runs = minimal(list(range(size)), lambda some: wanted <= set(some), 10_000)
    assert (set(found), least) == (wanted, True) and runs <= 10_000


def test_a_break_says_whether_it_came_at_the_end() -> None:
    assert not Break(Shown("t", 1, {}, b""), 1, 1, []).at_end
