"""examples/journal.py does what it says, and goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "journal.py"


def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for stored in (102, 204):
        arguments = [sys.executable, str(EXAMPLE), str(tmp_path / "j")]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert f"102 worked through, {stored} stored, next position {stored + 1}" in done.stdout
