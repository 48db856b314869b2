"""Torture tests: real processes under load are killed at random; then every guarantee is checked by counting.

A scenario starts workers (``penstock.torture.worker``) that publish and consume numbered, checksummed messages and
write what was confirmed and what was received to files that survive them. ``run`` kills as often as asked for
and gives a ``Report``. The seed decides who is killed when; the same seed replays the same choices.
"""

from __future__ import annotations

import importlib
import random
import shutil
import tempfile
import time
from pathlib import Path

from penstock.errors import InvalidArgument, nearest
from penstock.torture.report import Check, Report

__all__ = ["SCENARIOS", "Check", "Report", "run", "runnable"]

SCENARIOS = ("shm", "tcp", "journal", "disk", "broker", "replica", "takeover", "gateway", "spark")
#: How much fewer kills than the others these get when all are run: each of theirs takes seconds.
SHARES = {"replica": 4, "takeover": 40, "spark": 100}


def runnable() -> list[str]:
    """All of them, but for what is not installed: the replicated broker needs a server that an extra brings."""
    from penstock.replica.cluster import server_program

    try:
        server_program()
    except InvalidArgument:
        return [name for name in SCENARIOS if name not in ("replica", "takeover")]
    return list(SCENARIOS)


def run(scenario: str, kills: int, seed: int, directory: Path | None = None) -> Report:
    """Run one scenario. ``directory`` (a temporary one by default) keeps what the workers wrote when a check fails."""
    if scenario not in SCENARIOS:
        raise InvalidArgument(f"no scenario {scenario!r}; {nearest(scenario, SCENARIOS)}")
    module = importlib.import_module(f"penstock.torture.{scenario}")
    place = Path(tempfile.mkdtemp(prefix=f"penstock-torture-{scenario}-")) if directory is None else directory
    report = Report(scenario, kills, seed, place)
    began = time.monotonic()
    module.run(report, random.Random(seed))
    report.seconds = time.monotonic() - began
    if report.passed and directory is None:
        shutil.rmtree(place)
    return report
