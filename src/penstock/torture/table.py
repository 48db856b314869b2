"""The reports as a table in a Markdown file, between two marks, with the commit that was tortured. One thread."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import penstock
from penstock.errors import InvalidArgument
from penstock.torture.report import Report

BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"
FLOWED = "messages flowed"  # the promise that every scenario has, with the number of messages


class Table:
    """The part of the file between the marks. The file is read at once: a wrong one is refused before hours of work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commit = commit()  # as it is when the torture begins
        before, begin, rest = path.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise InvalidArgument(f"{path} has no lines {BEGIN} and {END}, between which the table goes")
        self._before, self._after = before, after

    def write(self, reports: list[Report]) -> None:
        """Replace what stands between the marks."""
        lines = [
            f"commit: {self._commit}",
            f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "",
            "| room | faults | seed | seconds | messages | promises |",
            "|---|---|---|---|---|---|",
            *map(_row, reports),
        ]
        text = "\n".join(lines)
        self._path.write_text(f"{self._before}{BEGIN}\n{text}\n{END}{self._after}")


def _row(report: Report) -> str:
    flowed = next((check.counted for check in report.checks if check.promise == FLOWED), "")
    messages = f"{int(flowed):,}" if flowed.isdigit() else flowed
    failed = [f"FAILED: {check.promise} ({check.counted})" for check in report.checks if not check.held]
    verdict = "; ".join(failed) or f"all {len(report.checks)} held"
    cells = report.scenario, f"{report.kills:,}", report.seed, f"{report.seconds:,.0f}", messages, verdict
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def commit() -> str:
    """The commit that the package was installed from, and whether its code has changed since; else its version."""
    root = Path(penstock.__file__).parents[2]
    try:
        found = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "src", "native")
    except (OSError, subprocess.CalledProcessError):
        return f"none, version {penstock.__version__}"
    return f"{found} with changes" if changed else found


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout.strip()
