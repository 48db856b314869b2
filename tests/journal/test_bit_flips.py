"""Every flipped bit in any file of a journal is harmless or told, by every reader. ``make stress`` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.journal import flips


@pytest.mark.parametrize("seed", range(2))
def test_a_sample_of_flipped_bits(tmp_path: Path, seed: int) -> None:
    flips.make(tmp_path / "made")
    assert flips.wrong_answers(tmp_path / "made", tmp_path / "work", seed, 30) == []
