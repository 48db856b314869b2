"""The algorithm of shared memory, the code itself, under many schedules of a few participants that may die."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.crash.test_shm_steps import ROOT, compiled


@pytest.fixture(scope="module")
def program() -> Path:
    return compiled(ROOT / "build" / "schedules-test" / "shm_schedules", ["tests/schedules/shm_schedules.cpp"], "-O2")


@pytest.mark.parametrize(("deviations", "seconds", "all_of_them"), [(1, 60, True), (2, 1, False)])
def test_no_schedule_breaks_it(program: Path, deviations: int, seconds: int, all_of_them: bool) -> None:
    done = subprocess.run([program, str(deviations), str(seconds)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("shm schedules: ok\n")
    assert not all_of_them or "bounded by time" not in done.stdout
