from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .reaches import REACHES, Reach, capabilities


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "reach" in metafunc.fixturenames:
        metafunc.parametrize("reach", sorted(capabilities()), indirect=True)


@pytest.fixture
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reach]:
    name = request.param
    can = capabilities()[name]
    for marker in request.node.iter_markers("needs"):
        for capability in marker.args:
            if can[capability] == "no":
                pytest.skip(f"docs/reaches.md: {name} does not declare {capability}")
    opened = REACHES[name](can, tmp_path)
    try:
        yield opened
    finally:
        opened.close()
