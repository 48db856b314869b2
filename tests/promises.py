"""The tests that docs/guarantees.md names as proofs. Where ``PENSTOCK_NO_SKIPS`` is set (CI sets it), none may be skipped."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
PLACED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


@cache
def promised() -> frozenset[str]:
    """Their places, without parameters."""
    return frozenset(PLACED.findall(PAGE.read_text()))


def checked(report: Report) -> Report:
    """The report. A proof that is skipped, alone or with its file, is a failure: the promise was not shown in this run.

    On a reach that does not declare what is promised there is nothing to show.
    """
    if not report.skipped or hasattr(report, "wasxfail") or not os.environ.get("PENSTOCK_NO_SKIPS"):
        return report
    if "docs/reaches.md" in str(report.longrepr):
        return report
    place = report.nodeid.partition("[")[0]
    if any(name == place or name.startswith(f"{place}::") for name in promised()):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} shows a promise of docs/guarantees.md and was skipped: {report.longrepr}"
    return report
