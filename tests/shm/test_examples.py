"""The room's example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_camera() -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, str(EXAMPLES / "camera.py"), "--seconds", "1.5", "--rate", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "frames published" in done.stdout and "median latency" in done.stdout
