"""``penstock lake``: archive journals to a Delta table without Spark; inspect, verify, compact and clean it."""

from __future__ import annotations

import threading
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from penstock.cli import exits, show

app = typer.Typer(no_args_is_help=True, help="Archive journals to a Delta table; inspect, verify and compact it.")
Lake = Annotated[str, typer.Argument(help="A directory, or s3://BUCKET/PATH and the like.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines.")]


@app.command()
def archive(
    source: Annotated[list[str], typer.Option("--from", help="A journal's directory, a glob, or broker://HOST:PORT.")],
    target: Annotated[str, typer.Option("--to", help="The lake.")],
    topics: Annotated[str | None, typer.Option(help="Topic patterns, separated by commas.")] = None,
    trim: Annotated[
        bool, typer.Option("--trim", help="Delete segments from the journal that are in the lake.")
    ] = False,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on without positions that are gone, and name them.")
    ] = False,
    every: Annotated[
        str | None, typer.Option("--every", help="Run repeatedly at this interval: 10s or '1 minute'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Archive in this process, without Spark. Messages that are already in the lake are skipped.

    Example: [green]penstock lake archive --from /var/lib/measurements --to /data/lake[/]
    """
    from penstock.quantities import interval_s
    from penstock.spark import lake

    settings: dict[str, Any] = {
        "trim": trim,
        "fail_on_data_loss": not skip_lost,
        "options": {} if topics is None else {"topics": topics},
    }
    if every is None:
        done = lake.archive(None, source, target, **settings)
    else:
        pause = interval_s(every, "--every")
        done = lake.follow(
            None, source, target, every_s=pause, stop=threading.Event(), on_progress=_print_progress, **settings
        )
    if as_json:
        show.print_json(asdict(done))
        return
    console = show.console()
    console.print(f"{show.count_text(done.rows)} rows in {done.files} files, {done.lag} positions behind", markup=False)
    if trim:
        console.print(f"{done.segments} segments went from the journal")


def _print_progress(done: Any) -> None:
    show.console(stderr=True).print(f"{show.count_text(done.rows)} rows, {show.count_text(done.lag)} behind")


@app.command()
def info(
    lake: Lake,
    version: Annotated[int | None, typer.Option(help="An older version.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """What is in it: rows, files, days, and how far each journal is archived.

    Example: [green]penstock lake info /data/lake[/]
    """
    from penstock.spark.lake import info as look

    found = look(lake, version=version)
    if as_json:
        show.print_json(asdict(found))
        return
    console = show.console()
    console.print(
        f"{found.uri}  version {found.version}  {show.count_text(found.rows)} rows in {found.files} files, "
        f"{show.bytes_text(found.bytes)}",
        markup=False,
    )
    if found.filters:
        console.print(" ".join(f"only {name}={value}" for name, value in found.filters.items()), markup=False)
    console.print(show.table(("day", "rows"), [(day, str(rows)) for day, rows in found.days.items()], ("rows",)))
    reached = [(journal, str(position - 1)) for journal, position in found.reached.items()]
    console.print(show.table(("journal", "archived up to"), reached, ("archived up to",)))


@app.command()
def history(
    lake: Lake,
    most: Annotated[int, typer.Option("--most", "-n", help="How many of the newest.", min=1, max=1_000_000_000)] = 20,
    as_json: Json = False,
) -> None:
    """Its versions, the newest first; each can be read.

    Example: [green]penstock lake history /data/lake[/]
    """
    from penstock.spark.lake import versions

    found = versions(lake, most=most)
    if as_json:
        show.print_json(found)
        return
    rows = [
        (
            str(item.get("version", "")),
            datetime.fromtimestamp(item["timestamp"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
            str(item.get("operation", "")),
            str(item.get("penstock", "")),
        )
        for item in found
    ]
    show.console().print(show.table(("version", "when", "operation", "note"), rows, ("version",)))


@app.command()
def compact(
    lake: Lake,
    files: Annotated[int, typer.Option(help="Days with more small files than this.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Put small files of a day together; readers see the old files or the new ones, never both.

    Example: [green]penstock lake compact /data/lake[/]
    """
    from penstock.spark.lake import compact as put_together

    written = put_together(None, lake, files)
    if as_json:
        show.print_json({"written": written})
        return
    show.console().print(f"{written} files written" if written else "nothing to put together")


@app.command()
def vacuum(
    lake: Lake,
    hours: Annotated[
        int, typer.Option(help="Keep files that a version of the last hours needs.", min=1, max=1_000_000)
    ] = 168,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name the files, delete none.")] = False,
    as_json: Json = False,
) -> None:
    """Delete files that no recent version names, and leftovers of rounds that died.

    Example: [green]penstock lake vacuum /data/lake --hours 48[/]
    """
    from penstock.spark.lake import vacuum as clean

    taken = clean(lake, hours=hours, dry_run=dry_run)
    if as_json:
        show.print_json({"files": taken, "deleted": not dry_run})
        return
    for name in taken:
        show.console().print(name, markup=False)
    show.console().print(f"{len(taken)} files {'would go' if dry_run else 'deleted'}")


@app.command()
def verify(
    lake: Lake,
    deep: Annotated[bool, typer.Option("--deep", help="Read every row too: pages intact, no position twice.")] = False,
    as_json: Json = False,
) -> None:
    """Check the log, and each file against it. Code 4 when something is wrong.

    Example: [green]penstock lake verify /data/lake --deep[/]
    """
    from penstock.spark.lake import verify as check

    found = check(lake, deep=deep)
    if as_json:
        show.print_json(asdict(found))
    else:
        console = show.console()
        for problem in found.problems:
            console.print(problem, markup=False, soft_wrap=True)
        for note in found.notes:
            console.print(note, markup=False, soft_wrap=True)
        version = "not readable" if found.version is None else f"version {found.version}"
        console.print(
            f"{version}: {found.files} files, {show.count_text(found.rows)} rows, {len(found.problems)} problems, "
            f"{len(found.orphans)} files that no version names"
        )
    if found.problems:
        raise typer.Exit(exits.WRONG)
