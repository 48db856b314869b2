"""The room's example runs."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.parametrize("example", ["channels.c", "channels.cpp"])
def test_an_example_is_built_as_its_comment_says(example: str, tmp_path: Path) -> None:
    compiler = "cc" if example.endswith(".c") else "c++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    shutil.copy(EXAMPLES / example, tmp_path)
    lines = [line.lstrip(" */") for line in (EXAMPLES / example).read_text().splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("include="))
    end = next(i for i in range(begin, len(lines)) if lines[i].endswith("./channels"))
    script = "set -e\n" + "\n".join(lines[begin : end + 1])
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("LD_LIBRARY_PATH", None)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "hello from C" in done.stdout, done
