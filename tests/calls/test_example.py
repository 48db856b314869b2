from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "ask_and_answer.py"


def test_the_example_runs() -> None:
    found = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "called: north, then east to the dock"
    assert lines[1] == "failed: ValueError: no goal given"
    assert lines[2:5] == [f"awaited: north, then east to the {goal}" for goal in ("dock", "gate", "shed")]
    assert lines[5] == "calls: 5 answered: 4 lost: 1"
    assert lines[6].startswith("gone: no server answers")
