"""What is installed has no known hole. What is known changes by the day, so this is no test of a change: `make stress` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def test_dependencies_are_audited() -> None:
    pytest.importorskip("pip_audit", reason="pip-audit is not installed; `make build` installs it")
    command = [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    try:
        told = json.loads(done.stdout)["dependencies"]
    except ValueError:
        pytest.skip(f"the index of known holes cannot be reached: {done.stderr.strip()[-300:]}")
    looked_up = [package for package in told if "vulns" in package]
    if not looked_up:
        reasons = sorted({package["skip_reason"].partition(":")[0] for package in told})
        pytest.skip(f"the index of known holes knows none of {len(told)} packages: {'; '.join(reasons)}")
    assert {package["name"]: package["vulns"] for package in looked_up if package["vulns"]} == {}
