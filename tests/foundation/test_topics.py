"""Names and patterns of topics: one rule, held by Python and the native reader alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidArgument, topics
from penstock._core.journal import TopicFilter

PARTS = st.sampled_from(["a", "b", "ab", "*", ">", "é"])
PATTERNS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
NAMES = st.lists(st.sampled_from(["a", "b", "ab", "é"]), min_size=1, max_size=4).map(".".join)


def is_valid(pattern: str) -> bool:
    try:
        topics.check_pattern(pattern)
    except InvalidArgument:
        return False
    return True


@given(PATTERNS.filter(is_valid), NAMES)
def test_the_native_filter_holds_the_same_rule(pattern: str, name: str) -> None:
    assert TopicFilter([pattern]).matches(name) == topics.matches(pattern, name)


@given(PATTERNS.filter(is_valid), PATTERNS.filter(is_valid), NAMES)
def test_what_covers_a_pattern_matches_all_of_it(allowed: str, pattern: str, name: str) -> None:
    if topics.covers(allowed, pattern) and topics.matches(pattern, name):
        assert topics.matches(allowed, name)


@given(PATTERNS.filter(is_valid), PATTERNS.filter(is_valid), NAMES)
def test_patterns_that_match_one_name_overlap(one: str, other: str, name: str) -> None:
    if topics.matches(one, name) and topics.matches(other, name):
        assert topics.overlap(one, other) and topics.overlap(other, one)
    assert topics.overlap(one, name) == topics.matches(one, name)


@pytest.mark.parametrize("wrong", ["", "a b", "a\n", "a..b", ".a", "*", "a.>", "x" * 256, "\ud800"])
def test_names_that_no_topic_has(wrong: str) -> None:
    with pytest.raises(InvalidArgument):
        topics.check_topic(wrong)


@pytest.mark.parametrize("wrong", ["", ">.a", "a..*", "a b"])
def test_patterns_that_choose_nothing(wrong: str) -> None:
    with pytest.raises(InvalidArgument):
        topics.check_pattern(wrong)


def test_names_from_elsewhere() -> None:
    assert topics.topic_for("/camera/front") == "camera.front"
    assert topics.topic_for("//a  b/*") == "a.b"
    assert topics.topic_for("/") == "default"
