"""Durations, sizes, times and options as a user types them."""

from __future__ import annotations

import time

import pytest

from penstock import InvalidArgument
from penstock.cli import target


def test_durations_and_sizes() -> None:
    assert target.duration_s("10", "x") == 10
    assert target.duration_s("250ms", "x") == 0.25
    assert target.duration_s("5m", "x") == 300
    assert target.duration_s("1.5h", "x") == 5400
    assert target.size_bytes("64k", "x") == 65536
    assert target.size_bytes("10MB", "x") == 10_000_000
    assert target.size_bytes("2GiB", "x") == 2 << 30
    for wrong in ("", "x", "5 parsecs", "-3s"):
        with pytest.raises(InvalidArgument, match="--it"):
            target.duration_s(wrong, "--it")
        with pytest.raises(InvalidArgument, match="--it"):
            target.size_bytes(wrong, "--it")


def test_moments() -> None:
    assert target.moment_ns("2026-01-01T00:00:00+00:00", "x") == 1_767_225_600 * 10**9
    assert target.moment_ns("2026-01-01T00:00:00.25Z", "x") == 1_767_225_600_250_000_000
    assert target.moment_ns("1767225600", "x") == 1_767_225_600 * 10**9
    assert target.moment_ns("1767225600000000001", "x") == 1_767_225_600_000_000_001
    ago = target.moment_ns("5m", "x")
    assert 0 <= time.time_ns() - 300 * 10**9 - ago < 60 * 10**9
    with pytest.raises(InvalidArgument, match="--since"):
        target.moment_ns("yesterday", "--since")


def test_options_join_the_address() -> None:
    assert target.with_options("shm:/a", None) == "shm:/a"
    assert target.with_options("shm:/a", ["slot-size=64"]) == "shm:/a?slot_size=64"
    assert target.with_options("shm:/a?slots=4", ["a=b c&d"]) == "shm:/a?slots=4&a=b%20c%26d"
    with pytest.raises(InvalidArgument, match="NAME=VALUE"):
        target.with_options("shm:/a", ["slots"])
    with pytest.raises(InvalidArgument, match="did you mean shm"):
        target.with_options("shn:/a", None)
