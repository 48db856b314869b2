"""A streaming query killed with SIGKILL, driver, JVM and workers: started again it loses nothing and writes nothing twice.

The scenario is ``penstock torture spark``; ``make stress`` runs it with three kills.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from penstock import torture


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.torture
@pytest.mark.timeout(0)
def test_killed_again_and_again(tmp_path: Path, kills: int | None, seed: int) -> None:
    report = torture.run("spark", kills or 1, seed, tmp_path)
    print(report.text())
    assert report.passed, report.text()
