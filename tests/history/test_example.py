from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "late_joiner.py"


def test_the_example_runs() -> None:
    found = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "the door is closed",
        "the last three: ['1007 rpm', '1008 rpm', '1009 rpm']",
        "past: ['0 m', '1 m', '2 m', '3 m', '4 m'] live: 5 m",
        "the next publisher goes on with 7",
    ]
