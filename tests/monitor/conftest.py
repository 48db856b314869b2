from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from .handles import Handles


@pytest.fixture
def handles() -> Iterator[Handles]:
    """A process whose counters the test moves."""
    with Handles() as running:
        yield running


@pytest.fixture
def name() -> str:
    """A channel's name that no other test has."""
    return f"/test-monitor-{uuid.uuid4().hex[:8]}"
