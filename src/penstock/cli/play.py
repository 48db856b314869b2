"""``penstock play``: plays a recording back, to where it came from or elsewhere."""

from __future__ import annotations

import contextlib
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.cli import exits, show
from penstock.cli.recording import Story, parts, read_story
from penstock.cli.span import Span, messages, reader, topic_names
from penstock.errors import InvalidArgument
from penstock.secrecy import without_secrets

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

app = typer.Typer()


@app.command()
def play(
    directory: Annotated[Path, typer.Argument(help="A recording, or any journal.")],
    speed: Annotated[float, typer.Option(min=0.0, help="2 is twice as fast; 0 as fast as it goes.")] = 1.0,
    loop: Annotated[bool, typer.Option(help="Again from the start until Ctrl-C.")] = False,
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="Only these; * and > as in topics.")] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin here: an ISO time, or 10s for ten seconds after the start.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", help="Play so much of it: 30s, 5m.")] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", "-m", metavar="TOPIC=ADDRESS", help="Elsewhere; '*=shm:/again/{topic}' for all topics."),
    ] = None,
    wait: Annotated[int, typer.Option(min=0, help="Wait for so many subscribers of each address first.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for them before code 3.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was played as one JSON object.")] = False,
) -> None:
    """Play a recording back in order, at its own speed or another.

    Without --map each topic goes back to the address that it was recorded from.

    Example: [green]penstock play run1 --speed 2 --map camera.front=shm:/replay --for 30s[/]
    """
    folders = parts(directory)
    story = read_story(directory)
    for gap in story.missing():
        exits.told(f"{directory}: {gap}")
    with contextlib.ExitStack() as stack:
        journals = [stack.enter_context(reader(folder)) for folder in folders]
        span = Span.of(journals, start, length)
        player = _Player(stack, _targets(journals, topic, mapping, story), wait, timeout)
        with contextlib.suppress(KeyboardInterrupt), _bar(journals) as advance:
            while player.play(messages(journals, topic, span), speed, advance) and loop:
                pass
    _report(player, story, as_json)


def _targets(
    journals: list[Journal], topics: list[str] | None, mapping: list[str] | None, story: Story
) -> dict[str, str]:
    """The address of every topic that is played; ``InvalidArgument`` names those that have none."""
    rules = []
    for rule in mapping or []:
        name, equals, address = rule.partition("=")
        if not equals or not address:
            raise InvalidArgument(f"--map {rule!r} is not of the form TOPIC=ADDRESS")
        rules.append((name, address))
    targets, homeless = {}, []
    for name in sorted({name for journal in journals for name in topic_names(journal, topics)}):
        mapped = next((to for pattern, to in rules if fnmatch.fnmatchcase(name, pattern)), story.addresses.get(name))
        if mapped is None:
            homeless.append(name)
        else:
            targets[name] = mapped.replace("{topic}", name)
    if homeless:
        raise InvalidArgument(f"no address for {', '.join(sorted(homeless)[:5])}: give --map TOPIC=ADDRESS")
    return targets


class _Player:
    """Publishers of all topics, and what went through them."""

    def __init__(self, stack: contextlib.ExitStack, targets: dict[str, str], wait: int, timeout: float) -> None:
        opened = {to: stack.enter_context(penstock.publisher(to)) for to in dict.fromkeys(targets.values())}
        self._publish = {name: _publishing(opened[to]) for name, to in targets.items()}
        self.counts = dict.fromkeys(targets, 0)
        self.seconds = 0.0
        for to, publisher in opened.items():
            if wait and not publisher.wait_ready(wait, timeout):
                shown = without_secrets(to)
                raise TimeoutError(f"{shown}: no {wait} subscriber(s) within {timeout:g} s (--timeout, --wait)")

    def play(self, chosen: Iterator[Message], speed: float, advance: Callable[[int], None]) -> int:
        """Publish each at its moment: the time since the first one, divided by the speed. Gives how many."""
        began = time.monotonic()
        before = sum(self.counts.values())
        first_ns: int | None = None
        for message in chosen:
            if first_ns is None:
                first_ns = message.timestamp_ns
            if speed:
                left = began + (message.timestamp_ns - first_ns) / 1e9 / speed - time.monotonic()
                if left > 0:
                    time.sleep(left)
            name = message.channel or ""
            if name in self._publish:
                self._publish[name](message)
                self.counts[name] += 1
            advance(message.position or 0)
        self.seconds += time.monotonic() - began
        return sum(self.counts.values()) - before


def _publishing(publisher: penstock.Publisher) -> Callable[[Message], Any]:
    """``publish``, with the properties where the reach carries them."""
    if not publisher.carries_properties:
        return publisher.publish
    keeps: Any = publisher.publish
    return lambda message: keeps(message, properties=dict(message.properties))


@contextlib.contextmanager
def _bar(journals: list[Journal]) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; nothing when piped."""
    total = sum(max(0, journal.frontier - journal.first) for journal in journals)
    if not sys.stderr.isatty() or not total:
        yield lambda position: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("playing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=show.console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        shown = 0.0

        def advance(_position: int) -> None:
            nonlocal shown
            progress.tasks[task].completed += 1
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                progress.update(task)

        yield advance


def _report(player: _Player, story: Story, as_json: bool) -> None:
    total = sum(player.counts.values())
    if as_json:
        out = {"messages": total, "topics": player.counts, "seconds": round(player.seconds, 6)}
        show.print_json({**out, "lost_while_recording": story.lost, "ended": story.ended or not story.known})
        return
    lost = f"; {story.lost} were lost while recording" if story.lost else ""
    print(f"played {show.count_text(total)} messages in {player.seconds:.2f} s{lost}")
