"""``sub`` of several addresses: how many there may be, and where they begin."""

from __future__ import annotations

import fcntl
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.sources import Reader
from penstock.cli.start import start_options
from penstock.errors import InvalidArgument


def test_more_sources_than_select_can_wait_for() -> None:
    high = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= high:
        pytest.skip("this machine allows no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, high + 10) if soft >= 0 else soft, hard))
    low, write = os.pipe()
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD, high)
        try:
            quiet = SimpleNamespace(fileno=lambda: descriptor, read_many=lambda most, wait_s: [])
            sources: Any = [SimpleNamespace(subscriber=quiet, losses=SimpleNamespace(look=lambda: None), seen=0)] * 2
            reader = Reader(sources, lambda message, values: b"", None, "")
            assert reader._round(None, 0.0) == 0
        finally:
            os.close(descriptor)
    finally:
        os.close(low)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("topic", ["work.*", "work.>"])
def test_an_ordinal_of_several_topics_is_refused_by_the_name_of_the_option(topic: str) -> None:
    address = f"broker://127.0.0.1:1/{topic}"
    with pytest.raises(InvalidArgument, match=r"^--from: broker://127\.0\.0\.1:1/work\.. names several topics"):
        start_options(address, None, "start")
    assert start_options("broker://127.0.0.1:1/work.a", None, "start") == {"from_ordinal": 1}
