"""The tests that docs/guarantees.toml names as proofs. Where ``PENSTOCK_NO_SKIPS`` is set (CI sets it), none may be skipped."""

from __future__ import annotations

import os
from functools import cache
from typing import TypeVar

import pytest
from scripts.guarantees import TABLE, cells

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@cache
def promised() -> frozenset[str]:
    """Their places, without parameters."""
    return frozenset(place for cell in cells(TABLE.read_text()) for part in cell.parts for place in part.shown)


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
        report.longrepr = f"{report.nodeid} shows a promise of docs/guarantees.toml and was skipped: {report.longrepr}"
    return report
