"""``penstock play``: plays a recording back, to where it came from or elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption, opened
from penstock.recording.player import Player, targets
from penstock.recording.span import OPTIONS, Span, located, reader
from penstock.recording.story import Story, parts, read_story
from penstock.recording.tables import Described

if TYPE_CHECKING:
    from penstock.journal import Journal

app = typer.Typer()


@app.command()
def play(
    directory: Annotated[Path, typer.Argument(help="A recording, or any journal.")],
    speed: Annotated[float, typer.Option(min=0.0, help="2 is twice as fast; 0 as fast as it goes.")] = 1.0,
    loop: Annotated[bool, typer.Option(help="Repeat from the start until Ctrl-C.")] = False,
    topic: TopicOption = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin here: an ISO time, or 10s for ten seconds after the start.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", help="Play so much of it: 30s, 5m.")] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", "-m", metavar="TOPIC=ADDRESS", help="Elsewhere; '*=shm:/again/{topic}' for all topics."),
    ] = None,
    wait: Annotated[int, typer.Option(min=0, help="Wait for so many subscribers of each address first.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for subscribers; then code 3.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was played as one JSON object.")] = False,
) -> None:
    """Play a recording back in order, at its own speed or another.

    Without --map each topic goes back to the address that it was recorded from. tcp://, journal: and broker:// keep the
    recorded times; at shm: a message has the time at which it is played. journal: and broker:// keep message ids and
    keys too; for other addresses a line says that these are not kept. Every message is stored, also at a broker that
    knows its id: a recording can be played again.

    Example: [green]penstock play run1 --speed 2 --map camera.front=shm:/replay --for 30s[/]
    """
    folders = parts(directory)
    story = read_story(directory)
    for gap in story.missing():
        exits.told(f"{directory}: {gap}")
    with contextlib.ExitStack() as stack:
        journals = [stack.enter_context(reader(folder)) for folder in folders]
        span = Span.of(journals, start, length, OPTIONS)
        to = targets(journals, topic, mapping, story)
        opened(list(to.values()))
        player = Player(stack, to, wait, timeout, Described(journals), exits.told)
        with contextlib.suppress(*exits.STOPPED), _bar(journals) as advance:
            while player.play(located(journals, topic, span), speed, advance) and loop:
                pass
    _report(player, story, as_json)


@contextlib.contextmanager
def _bar(journals: list[Journal]) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; nothing when piped."""
    total = sum(max(0, journal.frontier - journal.first) for journal in journals)
    if not sys.stderr.isatty() or not total:
        yield lambda count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("playing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=show.console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        shown = 0.0

        def advance(count: int) -> None:
            nonlocal shown
            progress.tasks[task].completed += count
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                progress.update(task)

        yield advance
        # messages that --topic and --for leave out do not count as remaining
        progress.update(task, total=progress.tasks[task].completed)


def _report(player: Player, story: Story, as_json: bool) -> None:
    total = sum(player.counts.values())
    if as_json:
        out = {"messages": total, "topics": player.counts, "seconds": round(player.seconds, 6)}
        show.print_json({**out, "lost_while_recording": story.lost, "ended": story.ended or not story.known})
        return
    lost = f"; {story.lost} were lost while recording" if story.lost else ""
    print(f"played {show.number_of(total, 'message')} in {player.seconds:.2f} s{lost}")
