"""A package that is not installed: one sentence that names the extra, and code 69."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.commands import EXTRAS
from penstock.journal import Journal

from .command import environment

WITHOUT = "import sys; sys.modules[sys.argv[1]] = None; from penstock.cli import main; main(sys.argv[2:])"


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("starlette", "monitor", ["monitor"]),
        ("uvicorn", "monitor", ["monitor"]),
        ("foxglove", "foxglove", ["foxglove", "shm:/x"]),
        ("mcap", "mcap", ["import", "some.mcap", "-o", "out"]),
        ("mcap", "mcap", ["export", "kept", "--to", "mcap", "-o", "out.mcap"]),
        ("pyarrow", "spark", ["export", "kept", "--to", "parquet", "-o", "out.parquet"]),
        ("pyspark", "spark", ["pipeline", "archive", "--from", "kept", "--to", "lake"]),
    ],
)
def test_what_is_missing_is_named(package: str, extra: str, arguments: list[str], tmp_path: Path) -> None:
    with Journal(tmp_path / "kept") as journal:
        journal.append("t", b"x")
    (tmp_path / "some.mcap").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *arguments], cwd=tmp_path, env=environment(), text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 69, done.stderr
    (line,) = done.stderr.splitlines()
    assert package in line.lower() and f"pip install 'penstock[{extra}]'" in line and EXTRAS[package] == extra
