"""The tutorial, line by line, as a reader would type it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command import environment

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


@dataclass(frozen=True)
class Block:
    language: str
    words: tuple[str, ...]
    text: str


def blocks() -> Iterator[Block]:
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        yield Block(match[1], tuple(match[2].split()), match[3])


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """``penstock`` is the one under test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (folder / "penstock").chmod(0o755)
    return environment(PATH=f"{folder}:{os.environ['PATH']}", HOME=str(tmp_path))


def walk(spark: bool, place: Path, variables: dict[str, str]) -> None:
    background: list[subprocess.Popen[str]] = []
    try:
        for block in blocks():
            if "spark" in block.words and not spark:
                continue
            if "join" in block.words:
                _join(background)
            command = ["bash", "-ec", block.text] if block.language == "sh" else [sys.executable, "-c", block.text]
            if "background" in block.words:
                background.append(
                    subprocess.Popen(command, cwd=place, env=variables, text=True, stdout=subprocess.PIPE)
                )
                continue
            code = next((int(word.removeprefix("code=")) for word in block.words if word.startswith("code=")), 0)
            done = subprocess.run(command, cwd=place, env=variables, text=True, capture_output=True, timeout=500)
            assert done.returncode == code, f"{block.text}\n{done.stdout}\n{done.stderr}"
        _join(background)
    finally:
        for process in background:
            process.kill()
            process.communicate()


def _join(background: list[subprocess.Popen[str]]) -> None:
    while background:
        out, _ = background[0].communicate(timeout=60)
        assert background.pop(0).returncode == 0, out


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_every_line_works(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    place = tmp_path / "work"
    place.mkdir()
    walk(importlib.util.find_spec("pyspark") is not None, place, shell_environment)
    assert (place / "run1.csv").read_text().count("\n") == 101


@pytest.mark.parametrize("page", sorted((PAGE.parent).glob("**/*.md")), ids=lambda path: path.name)
def test_pages_name_only_commands_that_exist(page: Path) -> None:
    from penstock.cli.commands import COMMANDS

    known = {entry.name for entry in COMMANDS if entry.installed}
    named = set(re.findall(r"`penstock ([a-z]+)\b", page.read_text()))
    assert named <= known, named - known
