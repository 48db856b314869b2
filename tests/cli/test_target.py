"""Options as a user types them."""

from __future__ import annotations

import pytest

from penstock import InvalidArgument
from penstock.cli import target


def test_options_join_the_address() -> None:
    assert target.with_options("shm:/a", None) == "shm:/a"
    assert target.with_options("shm:/a", ["slot-size=64"]) == "shm:/a?slot_size=64"
    assert target.with_options("shm:/a?slots=4", ["a=b c&d"]) == "shm:/a?slots=4&a=b%20c%26d"
    with pytest.raises(InvalidArgument, match="NAME=VALUE"):
        target.with_options("shm:/a", ["slots"])
    with pytest.raises(InvalidArgument, match="did you mean shm"):
        target.with_options("shn:/a", None)
