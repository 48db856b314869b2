from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from penstock import shm

_numbers = itertools.count(1)


@pytest.fixture
def name() -> Iterator[str]:
    """A channel's name that nobody else uses; its files must be gone when the test is over."""
    chosen = f"/test/{os.getpid()}/{next(_numbers)}"
    yield chosen
    import gc

    gc.collect()
    shm.clean()
    left = [channel for channel in shm.channels() if channel.name.startswith(chosen)]
    assert not left, left
