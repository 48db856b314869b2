"""Ten thousand bits of a journal's files turned over (``--flips N`` for another number), every reader asked each time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.journal import flips


@pytest.mark.timeout(0)
def test_flipped_bits(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    flips.make(tmp_path / "made")
    count = request.config.getoption("--flips") or 10_000
    assert flips.wrong_answers(tmp_path / "made", tmp_path / "work", seed, count) == []
