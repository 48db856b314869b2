"""``penstock top``: a live table of what flows, from shared counters."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import show
from penstock.observe.rates import flow
from penstock.observe.watcher import Look, State, Watcher, summary
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer()

COLOURS = {"books": "bold red", "stuck": "red", "losing": "yellow", "late": "yellow", "idle": "dim", "ok": "green"}
COLUMNS = ("address", "kind", "pid", "rate", "bytes", "messages", "lost", "waiting", "p50", "p99", "health")
RIGHT = ("pid", "rate", "bytes", "messages", "lost", "waiting", "p50", "p99")


@app.command()
def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many looks.")] = None,
    match: Annotated[str, typer.Option(help="Only addresses that contain this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
) -> None:
    """A live table of what flows: rate, bytes, losses, queue, latency, health of every handle on this machine.

    p50 and p99 are latencies of the last minute, as the reader measured them.

    Example: [green]penstock top --match camera[/]
    """
    watcher = Watcher(every_s=every)
    watcher.look()
    if as_json or not sys.stdout.isatty():
        _plain(watcher, every, count, match, as_json)
        return
    from rich.live import Live

    try:
        with Live(screen=count is None, auto_refresh=False) as view:
            for _ in _looks(every, count):
                view.update(_table(watcher.look(), match), refresh=True)
    except KeyboardInterrupt:
        return


def _looks(every: float, count: int | None) -> Iterator[None]:
    """Waits before each look, so that the first one shows a rate already."""
    done = 0
    while count is None or done < count:
        time.sleep(every)
        done += 1
        yield


def _plain(watcher: Watcher, every: float, count: int | None, match: str, as_json: bool) -> None:
    from penstock.cli.ls import as_record

    for _ in _looks(every, count):
        state = watcher.look()
        if as_json:
            rows = [
                {
                    **as_record(k.block),
                    "messages_hz": k.rate.messages_hz,
                    "bytes_hz": k.rate.bytes_hz,
                    "latency_p50_ns": k.latency.p50_ns if k.latency else None,
                    "latency_p99_ns": k.latency.p99_ns if k.latency else None,
                    "health": k.verdict.word,
                }
                for k in _chosen(state, match)
            ]
            show.print_json({"time_ns": state.time_ns, **summary(state), "rows": rows})
        else:
            show.console().print(_table(state, match))
            sys.stdout.flush()


def _chosen(state: State, match: str) -> list[Look]:
    looks = [look for look in state.looks if match in (look.block.address or look.block.name)]
    return sorted(looks, key=lambda k: (-k.rate.messages_hz, k.block.address, k.block.kind, k.block.pid))


def _table(state: State, match: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sums = summary(state)
    head = Text.assemble(
        (f"{show.rate_text(sums['published_hz'])} in", "bold"),
        f"  {show.rate_text(sums['delivered_hz'])} out  {show.bytes_text(sums['bytes_hz'], '/s')}  ",
        (f"{show.count_text(sums['lost'])} lost", "yellow" if sums["lost"] else "green"),
        f"  {sums['handles']} handles in {sums['processes']} processes",
    )
    made: Table = show.table(COLUMNS, [], RIGHT)
    for look in _chosen(state, match):
        made.add_row(*_row(look))
    return Group(head, made)


def _row(look: Look) -> tuple[str, ...]:
    from rich.markup import escape

    block, rate, verdict, latency = look.block, look.rate, look.verdict, look.latency
    colour = COLOURS[verdict.word]
    why = f" {verdict.reasons[0]}" if verdict.reasons and verdict.word != "idle" else ""
    return (
        escape(printable(block.address or f"{block.room}:{block.name}")),
        block.kind,
        str(block.pid),
        show.rate_text(rate.messages_hz),
        show.bytes_text(rate.bytes_hz, "/s"),
        show.count_text(flow(block)),
        show.count_text(block.lost),
        f"{block.depth}/{block.capacity}" if block.capacity else str(block.depth),
        show.latency_text(latency.p50_ns) if latency else "-",
        show.latency_text(latency.p99_ns) if latency else "-",
        f"[{colour}]{verdict.word}{escape(printable(why))}[/]",
    )
