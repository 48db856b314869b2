"""The example: replayed twice, equal; the defect is found with the three inputs that it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_finds_its_defect() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples/replay/drive.py")], text=True, capture_output=True,
                          timeout=120, check=True)  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].removeprefix("out1") == lines[1].removeprefix("out2")
    assert lines[2].startswith("equal in ")
    assert lines[3].startswith("broken by ")
    assert [line.split()[3] for line in lines[4:]] == ["wanted", "boost", "gear"] or sorted(
        line.split()[3] for line in lines[4:]
    ) == ["boost", "gear", "wanted"]
