"""``penstock torture``: kill real processes under load, then check every promise by count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock import torture as scenarios
from penstock.torture.table import Table


def torture(
    rooms: Annotated[
        list[str] | None, typer.Argument(help=f"Any of: {', '.join(scenarios.SCENARIOS)}. All when none is named.")
    ] = None,
    kills: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many kills each room gets. With none named: replica a quarter, takeover a 40th, Spark a 100th.",
        ),
    ] = 20,
    seed: Annotated[
        int | None, typer.Option(help="The seed of a run to repeat; by default a new one is chosen and printed.")
    ] = None,
    soak: Annotated[float, typer.Option(help="Instead: run every reach at once for so many minutes.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep what the workers wrote in this folder.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Write the results as a table into this Markdown file, between its marks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Kill processes at random and check what they promised.

    Example: penstock torture shm broker --kills 200
    """
    chosen = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    if soak and table is not None:
        raise typer.BadParameter("--table goes with kills, not with --soak")
    if soak:
        from penstock.torture.soak import run_soak

        reports = [run_soak(soak, chosen)]
    else:
        names = rooms or scenarios.runnable()
        unknown = [name for name in names if name not in scenarios.SCENARIOS]
        if unknown:
            raise typer.BadParameter(f"no room {unknown[0]!r}; there are {', '.join(scenarios.SCENARIOS)}")
        reports = []
        kept = Table(table) if table is not None else None
        for name in names:
            if not as_json:
                typer.echo(f"{name}: seed {chosen} ...", err=True)
            # A room that is named gets all of them, so that the command that a report prints repeats it.
            count = kills if rooms else max(1, kills // scenarios.SHARES.get(name, 1))
            place = None
            if keep is not None:
                place = keep / name
                place.mkdir(parents=True)
            reports.append(scenarios.run(name, count, chosen, place))
            if not as_json:
                typer.echo(reports[-1].text())
            if kept is not None:
                kept.write(reports)  # after each room: it may take hours, and be broken off
    if as_json:
        typer.echo(
            json.dumps(
                [{**vars(r), "directory": str(r.directory), "checks": [vars(c) for c in r.checks]} for r in reports]
            )
        )
    elif soak:
        typer.echo(reports[0].text())
    if not all(report.passed for report in reports):
        raise typer.Exit(1)
