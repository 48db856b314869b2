"""The frame of the command: help, completion, exit codes, configuration, broken pipes, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import COMMANDS

from .command import environment, run

INSTALLED = [entry.name for entry in COMMANDS if entry.installed]


def test_help_lists_every_command_and_loads_none() -> None:
    code = (
        "import sys\nfrom penstock.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'penstock._core', 'numpy', 'pyarrow', 'pyspark', 'starlette', 'uvicorn', 'penstock.cli.sub'}\n"
        "print('LOADED', heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=environment(), timeout=60)
    assert done.stdout.strip().endswith("LOADED set()"), done.stdout + done.stderr
    for name in INSTALLED:
        assert f" {name} " in done.stdout


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("penstock ")


@pytest.mark.parametrize("name", INSTALLED)
def test_each_command_has_help_with_an_example(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    if "Commands" in text:  # a group: its commands carry the examples
        return
    assert "penstock " + name in text.replace("\n", " ").split("Usage", 1)[1].split("\n", 2)[0] + text
    assert "xample" in text, f"{name} has no example"


def test_unknown_command_names_the_nearest() -> None:
    done = run("subb")
    assert done.returncode == 2 and "sub" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["sub"],
        ["sub", "shm:/x", "--count", "0"],
        ["sub", "shm:/x", "--format", "xml"],
        ["sub", "nothing"],
        ["sub", "shm:/x", "--filter", "size >"],
    ],
)
def test_wrong_usage_is_code_2_without_a_trace(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip()


def test_completion_gives_commands() -> None:
    done = run(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS="penstock s", COMP_CWORD="1")
    assert "sub" in done.stdout.split()


def test_a_misspelt_setting_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[sub]\nfromat = "json"\n')
    done = run("sub", "shm:/x", "--timeout", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "penstock.toml" in done.stderr and "format" in done.stderr


def test_a_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[sub\n")
    done = run("sub", "shm:/x", "--timeout", "0", cwd=tmp_path)
    assert done.returncode == 2 and "penstock.toml" in done.stderr and "line 1" in done.stderr
    assert run("--help", cwd=tmp_path).returncode == 0


def test_a_variable_sets_a_default() -> None:
    done = run("sub", "shm:/x", PENSTOCK_SUB_FORMAT="nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr
