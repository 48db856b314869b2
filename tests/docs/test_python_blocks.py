"""The Python blocks of README and docs: each runs as it stands, and a user's mypy accepts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: Path
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"

    @property
    def module(self) -> str:
        return re.sub(r"\W", "_", self.name)


BLOCKS = [
    Block(page, number, match[1])
    for page in PAGES
    for number, match in enumerate(re.finditer(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S), 1)
]


def cases() -> list[Any]:
    """All but the tutorial's, which belong together and are walked by ``test_tutorial.py``."""
    spark = (pytest.mark.spark, pytest.mark.jvm, pytest.mark.timeout(600))
    return [
        pytest.param(block, id=block.name, marks=spark if "penstock.spark" in block.text else ())
        for block in BLOCKS
        if block.page.name != "tutorial.md"
    ]


def test_there_are_blocks() -> None:
    assert len({block.page for block in BLOCKS}) >= 10


@pytest.mark.parametrize("block", cases())
def test_it_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, input="\n", capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
    assert "Traceback" not in done.stderr, done.stderr
    assert not done.stderr or "penstock.spark" in block.text, done.stderr  # a JVM says what it likes


@pytest.fixture(scope="session")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each block, with the settings that somebody who has none gets."""
    place = tmp_path_factory.mktemp("blocks")
    for block in BLOCKS:
        (place / f"{block.module}.py").write_text(block.text)
    cache = ROOT / ".mypy_cache" / "blocks"
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}", "."]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(line.partition(".py:")[0], []).append(line)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_mypy_accepts_it(block: Block, complaints: dict[str, list[str]]) -> None:
    errors = [line for line in complaints.get(block.module, []) if ": error:" in line]
    assert not errors, "\n".join(errors)
