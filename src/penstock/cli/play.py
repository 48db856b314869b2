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
from penstock.cli.recording import STORY, Story, parts, read_story
from penstock.cli.target import duration_s, moment_ns
from penstock.errors import InvalidArgument

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
    if story.known and not story.ended:
        exits.told(f"{directory}: the recorder did not end properly; what it had not yet synced is missing")
    with contextlib.ExitStack() as stack:
        journals = [stack.enter_context(_reader(folder)) for folder in folders]
        span = Span.of(journals, start, length)
        player = _Player(stack, _targets(journals, topic, mapping, story), wait, timeout)
        with contextlib.suppress(KeyboardInterrupt), _bar(journals) as advance:
            while True:
                player.play(_messages(journals, topic, span), speed, advance)
                if not loop:
                    break
    _report(player, story, as_json)


class Span:
    """The part of a recording that is played, by time."""

    def __init__(self, begin_ns: int, end_ns: int | None) -> None:
        self.begin_ns, self.end_ns = begin_ns, end_ns

    @classmethod
    def of(cls, journals: list[Journal], start: str | None, length: str | None) -> Span:
        first_ns = min((_first_time_ns(journal) for journal in journals), default=0)
        begin_ns = first_ns
        if start is not None:
            try:
                begin_ns = first_ns + int(duration_s(start, "--from") * 1e9)
            except InvalidArgument:
                begin_ns = moment_ns(start, "--from")
        return cls(begin_ns, None if length is None else begin_ns + int(duration_s(length, "--for") * 1e9))


def _reader(folder: Path) -> Journal:
    from penstock.journal import Journal

    return Journal(folder, mode="read")


def _first_time_ns(journal: Journal) -> int:
    for message in _all(journal, None, journal.first):
        return message.timestamp_ns
    return 0


def _all(journal: Journal, topics: list[str] | None, position: int) -> Iterator[Message]:
    """Messages from a position to the frontier as it is now, without the recording's own story."""
    from penstock.journal.journal import topic_filter

    chosen = topic_filter(topics)
    frontier = journal.frontier
    while position < frontier:
        batch, following = journal.read_from(position, 1024, None, chosen)
        for message in batch:
            if (message.position or 0) >= frontier:
                return
            if message.channel != STORY:
                yield message
        position = max(following, position + 1)


def _messages(journals: list[Journal], topics: list[str] | None, span: Span) -> Iterator[Message]:
    for journal in journals:
        position = journal.find_time(span.begin_ns)
        if position is None:
            continue
        for message in _all(journal, topics, position):
            if message.timestamp_ns < span.begin_ns:
                continue
            if span.end_ns is not None and message.timestamp_ns >= span.end_ns:
                if message.timestamp_ns > span.end_ns + 1_000_000_000:
                    return  # topics are interleaved by the moment of recording: none is a second behind another
                continue
            yield message


def _targets(
    journals: list[Journal], topics: list[str] | None, mapping: list[str] | None, story: Story
) -> dict[str, str]:
    """The address of every topic that is played; ``InvalidArgument`` names those that have none."""
    from penstock.journal.layout import pattern_matches

    rules = []
    for rule in mapping or []:
        name, equals, address = rule.partition("=")
        if not equals or not address:
            raise InvalidArgument(f"--map {rule!r} is not of the form TOPIC=ADDRESS")
        rules.append((name, address))
    targets, homeless = {}, []
    for name in dict.fromkeys(name for journal in journals for name in journal.topics if name != STORY):
        if topics is not None and not any(pattern_matches(pattern, name) for pattern in topics):
            continue
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
                raise TimeoutError(f"{to}: no {wait} subscriber(s) within {timeout:g} s (--timeout, --wait)")

    def play(self, messages: Iterator[Message], speed: float, advance: Callable[[int], None]) -> None:
        """Publish each at its moment: the time since the first one, divided by the speed."""
        began = time.monotonic()
        first_ns: int | None = None
        for message in messages:
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
