"""The page about an edge device: its file and its commands, as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "edge.md"


def printed(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_commands_before_the_last_run_as_printed(tmp_path: Path) -> None:
    """The last one runs the device until it is stopped, and needs its MQTT server."""
    pytest.importorskip("paho.mqtt")
    *commands, last = printed("sh").splitlines()
    assert last.startswith("penstock run device.toml --health")
    (tmp_path / "device.toml").write_text(printed("toml"))
    (tmp_path / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (tmp_path / "penstock").chmod(0o755)
    variables = environment()
    variables.pop("UPLINK", None)
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd=tmp_path, env=variables, text=True, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "sensors -> uplink" in done.stdout and "[Service]" in done.stdout
    assert f"EnvironmentFile=-{tmp_path}/device.env" in done.stdout
