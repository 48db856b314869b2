"""``penstock bench``: measures Penstock and the installed peers side by side in one run.

The scripts are in ``benchmarks/`` of the source tree, one per question (some compile C), so the command exists only
there and not in an installed wheel. It runs the scripts of a group one after the other (never two at once), collects
their results and compares them with the goals. With ``--html`` it writes one self-contained page with plots.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import show
from penstock.cli.bench_page import page, verdict
from penstock.cli.commands import benchmarks_folder

GROUPS: dict[str, tuple[str, ...]] = {
    "in-process": ("bus",),
    "shm": ("shm",),
    "tcp": ("tcp",),
    "durable": ("journal", "broker"),
    "gateway": ("gateway",),
    "spark": ("spark",),
    "monitor": ("monitor",),
}


def bench(
    groups: Annotated[
        list[str] | None, typer.Argument(help=f"Any of: {', '.join(GROUPS)}. All when none is named.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work, for a first look.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run only measurements whose name contains this.")] = None,
    html_page: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep the results here, a JSON object a line.")
    ] = None,
) -> None:
    """Measure penstock beside its peers, interleaved in one run.

    Example: penstock bench in-process shm --quick --html report.html
    """
    unknown = [group for group in groups or [] if group not in GROUPS]
    if unknown:
        raise typer.BadParameter(f"no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    folder = benchmarks_folder()
    assert folder is not None  # otherwise the command does not exist
    prefixes = [prefix for group in groups or GROUPS for prefix in GROUPS[group]]
    with tempfile.TemporaryDirectory() as temporary:
        results = json_file or Path(temporary) / "results.jsonl"
        failed = run(folder, prefixes, results, quick, only or [])
        records = read(results)
    wishes(records)
    if html_page:
        html_page.write_text(page(records))
        typer.echo(f"page written to {html_page}")
    if failed:
        typer.echo(f"did not run to the end: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def run(folder: Path, prefixes: Iterable[str], results: Path, quick: bool, only: list[str]) -> list[str]:
    """Every script of the prefixes, one after the other; gives those that failed."""
    failed = []
    for prefix in prefixes:
        for script in sorted(folder.glob(f"{prefix}_*.py")):
            command = [sys.executable, str(script), "--json", str(results.resolve())]
            command += ["--quick"] if quick else []
            for part in only:
                command += ["--only", part]
            if subprocess.run(command, cwd=folder, check=False).returncode:
                failed.append(script.name)
    return failed


def read(results: Path) -> list[dict[str, Any]]:
    """The records of a results file."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines() if line]


def wishes(records: list[dict[str, Any]]) -> None:
    """The table of goals and results."""
    rows = [
        (record["question"], result["name"], wish["wanted"], wish["got"], verdict(wish))
        for record in records
        for result in record["results"]
        for wish in result["wishes"]
    ]
    if rows:
        columns = ("question", "candidate", "wanted", "got", "")
        show.console().print(show.table(columns, rows, title="Wanted and got"))
