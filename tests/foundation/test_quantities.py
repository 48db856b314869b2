"""Durations, sizes and times as a user types them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidArgument, quantities


def test_durations_and_sizes() -> None:
    assert quantities.duration_s("10", "x") == 10
    assert quantities.duration_s("250ms", "x") == 0.25
    assert quantities.duration_s("5m", "x") == 300
    assert quantities.duration_s("1.5h", "x") == 5400
    assert quantities.size_bytes("64k", "x") == 65536
    assert quantities.size_bytes("10MB", "x") == 10_000_000
    assert quantities.size_bytes("2GiB", "x") == 2 << 30
    for wrong in ("", "x", "5 parsecs", "-3s"):
        with pytest.raises(InvalidArgument, match="--it"):
            quantities.duration_s(wrong, "--it")
        with pytest.raises(InvalidArgument, match="--it"):
            quantities.size_bytes(wrong, "--it")


def test_moments() -> None:
    assert quantities.moment_ns("2026-01-01T00:00:00+00:00", "x") == 1_767_225_600 * 10**9
    assert quantities.moment_ns("2026-01-01T00:00:00.25Z", "x") == 1_767_225_600_250_000_000
    assert quantities.moment_ns("1767225600", "x") == 1_767_225_600 * 10**9
    assert quantities.moment_ns("1767225600000000001", "x") == 1_767_225_600_000_000_001
    ago = quantities.moment_ns("5m", "x")
    assert 0 <= time.time_ns() - 300 * 10**9 - ago < 60 * 10**9
    with pytest.raises(InvalidArgument, match="--since"):
        quantities.moment_ns("yesterday", "--since")


def test_intervals() -> None:
    texts = ("10s", "1 minute", "2 hours", "500 ms")
    assert [quantities.interval_s(text, "x") for text in texts] == [10, 60, 7200, 0.5]
    for text in ("", "10", "0s", "ten seconds", "-1s"):
        with pytest.raises(InvalidArgument, match="--every"):
            quantities.interval_s(text, "--every")


@given(st.integers(0, 2**63 - 1))
def test_a_printed_time_is_read_as_the_same(timestamp_ns: int) -> None:
    assert quantities.moment_ns(quantities.iso_time(timestamp_ns), "x") == timestamp_ns


def test_a_time_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert quantities.moment_ns("2026-01-01T00:00:00", "x") == 1_767_225_600 * 10**9
        assert quantities.moment_ns("2026-01-01T09:00:00+09:00", "x") == 1_767_225_600 * 10**9
    finally:
        monkeypatch.undo()
        time.tzset()
