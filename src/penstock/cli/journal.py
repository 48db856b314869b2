"""``penstock journal``: look into a journal on disk, verify it, repair it, print it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption
from penstock.errors import InvalidArgument
from penstock.observe import decode
from penstock.printable import printable
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal.commands import JournalInfo

app = typer.Typer(no_args_is_help=True, help="Inspect, verify and repair a journal.")


def _journal(directory: Path) -> Path:
    """The directory; refused if it is not a journal."""
    from penstock.journal.layout import MARKER_NAME

    if not directory.exists():
        raise InvalidArgument(f"there is no directory {directory}")
    if not os.path.lexists(directory / MARKER_NAME):
        raise InvalidArgument(f"{directory} is not a journal (no {MARKER_NAME} in it)")
    return directory


Directory = Annotated[Path, typer.Argument(help="The journal's directory.", show_default=False, callback=_journal)]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines.")]


def _time(time_ns: int | None) -> str:
    if time_ns is None:
        return ""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


@app.command()
def info(directory: Directory, as_json: Json = False) -> None:
    """Show what is in it: topics, segments, queues, its writer.

    Example: [green]penstock journal info /var/lib/measurements[/]
    """
    from penstock.journal import commands

    report = commands.info(directory)
    if as_json:
        show.print_json(asdict(report) | {"messages": report.messages})
        return
    _print_info(report)


def _print_info(report: JournalInfo) -> None:
    console = show.console()
    writer = f"written by process {report.writer_pid}" if report.writer_pid else "no writer"
    console.print(f"{report.directory}  version {report.version}  {report.uuid}  {writer}")
    console.print(
        f"{show.number_of(report.messages, 'message')}, positions {report.first} to {report.frontier - 1}, "
        f"{show.bytes_text(report.bytes)} on disk"
    )
    topics = [
        (
            topic.name,
            str(topic.messages),
            f"{topic.least_ordinal}-{topic.greatest_ordinal}",
            _time(topic.greatest_time_ns),
        )
        for topic in report.topics
    ]
    console.print(show.table(("topic", "messages", "ordinals", "last"), topics, ("messages",)))
    segments = [
        (
            segment.name, str(segment.first), str(segment.next - 1), show.bytes_text(segment.bytes),
            "sealed" if segment.sealed else "open",
            "compacted" * segment.compacted + " repaired" * segment.repaired,
        )
        for segment in report.segments
    ]  # fmt: skip
    console.print(show.table(("segment", "first", "last", "bytes", "state", ""), segments, ("first", "last", "bytes")))
    if report.queues:
        queues = [(q.name, ",".join(q.topics), str(q.floor), str(q.done_above), str(q.behind)) for q in report.queues]
        columns = ("queue", "topics", "done up to", "done above", "behind")
        console.print(show.table(columns, queues, ("done up to", "done above", "behind")))


@app.command()
def verify(directory: Directory, as_json: Json = False) -> None:
    """Check every byte against its checksums. Ends with code 0 if intact, with 4 and the damaged places if not.

    Example: [green]penstock journal verify /var/lib/measurements[/]
    """
    from penstock.journal import commands
    from penstock.journal.recovery import mended_by

    damage = commands.verify(directory)
    for item in damage:
        if as_json:
            show.print_json(asdict(item))
        else:
            print(printable(str(item)))
    if damage:
        places = "1 place is" if len(damage) == 1 else f"{len(damage)} places are"
        exits.told(f"{places} damaged; {mended_by(directory)}")
        raise typer.Exit(exits.WRONG)
    if not as_json:
        print("no damage")


@app.command()
def repair(directory: Directory, as_json: Json = False) -> None:
    """Keep everything that is intact and report what is lost. No writer may be running.

    Example: [green]penstock journal repair /var/lib/measurements[/]
    """
    from penstock.journal import commands

    report = commands.repair(directory)
    if as_json:
        show.print_json(asdict(report))
        return
    for damage in report.damage:
        print(f"damaged: {printable(str(damage))}")
    for name in report.aside:
        print(f"set aside: {printable(name)}")
    for name in report.rewritten:
        print(f"rewritten: {name}")
    for name in report.caches:
        print(f"made again: {name}")
    lost = sum(last - first + 1 for first, last in report.lost)
    for first, last in report.lost:
        print(f"lost: positions {first} to {last}")
    kept = f"{show.number_of(report.kept_messages, 'message')} kept, {lost} lost"
    print(kept if not report.whole else "no damage, nothing to do")


@app.command()
def upgrade(directory: Directory, as_json: Json = False) -> None:
    """Convert a journal that an older release wrote, in place. No writer may be running; run again if it was cut off.

    Example: [green]penstock journal upgrade /var/lib/measurements[/]
    """
    from penstock.journal.upgrade import upgrade

    converted = upgrade(directory)
    if as_json:
        show.print_json({"directory": str(directory), "converted_segments": converted})
        return
    print(f"{converted} segments converted" if converted else "of this version already, nothing to do")


@app.command()
def cat(
    directory: Directory,
    start: Annotated[int | None, typer.Option(help="First position; default the least kept.")] = None,
    end: Annotated[int | None, typer.Option(help="Stop before this position.")] = None,
    topic: TopicOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new messages.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The bytes alone, one after the other.")] = False,
    as_json: Json = False,
) -> None:
    """Print messages, a line each: position, topic, ordinal, time, size, the beginning of the data.

    Example: [green]penstock journal cat /var/lib/measurements --topic 'sensors.>' --start 100[/]
    """
    from penstock.journal import commands

    for message in commands.cat(directory, start=start, end=end, topics=topic or None, follow=follow):
        if raw:
            sys.stdout.buffer.write(message)
            sys.stdout.buffer.flush()
        elif as_json:
            show.print_json(_as_json(message))
        else:
            beginning = bytes(memoryview(message)[:60])
            name = printable(message.channel or "", keep="")
            text = f"{message.position} {name} #{message.ordinal} {_time(message.timestamp_ns)}"
            print(f"{text} {len(message)} B {beginning!r}", flush=follow)
    if not follow:
        _refuse_missing(directory, topic or [])


def _refuse_missing(directory: Path, names: list[str]) -> None:
    """Say which of these topics the journal does not have: a misspelt name would look like a topic without messages."""
    from penstock.journal import Journal
    from penstock.journal.explain import no_topic

    plain = [name for name in names if not is_pattern(name)]
    if not plain:
        return
    with Journal(directory, mode="read") as journal:
        known = journal.topics
    lacking = [found for name in plain if (found := no_topic(directory, name, known))]
    for finding in lacking:
        exits.told(f"{finding.text} ({finding.remedy})")
    if lacking:
        raise typer.Exit(exits.FAILED)


def _as_json(message: Message) -> dict[str, object]:
    return {**decode.record(message), "topic": message.channel, "stored_ns": message.stored_ns}
