"""The sample application runs and says what it should, in under 100 lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "thermostat.py"


def test_thermostat() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "room 1: 21.0 degrees"
    assert lines.index("heater on") < lines.index("heater off")
    assert lines[-1] == f"2 warning(s); display {len(lines) - 1} of {len(lines) - 1}"
    assert len(EXAMPLE.read_text().splitlines()) < 100
