"""The disturbed schedule of ``PENSTOCK_JITTER``: it catches who announces something before it is there."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from types import CodeType

import pytest

from tests.jitter import penstock_jitter


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock_jitter, "_passed", Counter())


def chosen(monkeypatch: pytest.MonkeyPatch, seed: int, code: CodeType) -> frozenset[int]:
    monkeypatch.setenv(penstock_jitter.VARIABLE, str(seed))
    monkeypatch.setattr(penstock_jitter, "_chosen", {})
    return penstock_jitter._lines(code)


def test_each_line_is_among_the_chosen_ones_of_some_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = penstock_jitter._pause.__code__
    lines = {line for *_, line in code.co_lines() if line}
    found = [chosen(monkeypatch, seed, code) for seed in range(20 * penstock_jitter.SHARE)]
    assert set().union(*found) == lines and all(one < lines for one in found)
    assert chosen(monkeypatch, 1, code) == found[1], "a seed says it again"


def test_a_thread_pauses_between_what_it_announces_and_what_it_does_later(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    logged: list[str] = []
    seen: list[tuple[int, int]] = []

    def fail() -> None:
        counted.append(1)
        logged.append("why")

    def disturbed() -> None:
        sys.settrace(penstock_jitter._enter)
        fail()

    line = fail.__code__.co_firstlineno + 2
    assert any(line in chosen(monkeypatch, seed, fail.__code__) for seed in itertools.count())
    monkeypatch.setattr(penstock_jitter, "_sleep", lambda _: seen.append((len(counted), len(logged))))
    thread = threading.Thread(target=disturbed)
    thread.start()
    thread.join()
    assert (1, 0) in seen
