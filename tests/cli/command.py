"""Runs ``penstock`` as a user does: a process of its own, with its own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = [sys.executable, "-m", "penstock"]


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PENSTOCK_") or name in ("PENSTOCK_SHM_DIR", "PENSTOCK_JITTER")
    }
    return {**kept, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb", "HOME": "/nonexistent", **more}


def run(
    *arguments: str, stdin: str | None = None, cwd: Path | None = None, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The finished command; never raises for its exit code."""
    return subprocess.run(
        [*HERE, *arguments], input=stdin, text=True, capture_output=True, timeout=timeout, cwd=cwd,
        env=environment(**variables), check=False,
    )  # fmt: skip


def start(
    *arguments: str,
    stdin: int | None = None,
    cwd: Path | None = None,
    start_new_session: bool = False,
    **variables: str,
) -> subprocess.Popen[str]:
    """The running command; the caller ends it."""
    return subprocess.Popen(
        [*HERE, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env=environment(**variables), start_new_session=start_new_session,
    )  # fmt: skip
