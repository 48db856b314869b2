"""``penstock top``: a live table of what flows, from shared counters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, keys, show
from penstock.cli.ls import as_record, waiting_text
from penstock.observe.health import ORDER
from penstock.observe.rates import carries_calls, flow
from penstock.observe.watcher import Look, State, Watcher, summary

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer()

COLOURS = {"books": "bold red", "stuck": "red", "losing": "yellow", "late": "yellow", "idle": "dim", "ok": "green"}
COLUMNS = ("address", "kind", "pid", "rate", "bytes", "messages", "lost", "waiting", "p50", "p99", "health", "why")
NARROW = ("address", "kind", "pid", "rate", "lost", "waiting", "p99", "health", "why")  #: below 100 columns
RIGHT = ("pid", "rate", "bytes", "messages", "lost", "waiting", "p50", "p99")
YIELDS = ("p50", "bytes", "messages")  #: left out before names are shortened
LAST = ("p99", "pid", "waiting")  #: left out before a number would be cut
SORTS = ("trouble", "rate", "lost", "waiting", "address")
HELP = "q quit  s sort  / filter  space pause  arrows scroll"
#: Figures of changing length keep the columns where they are.
WIDTHS = {"rate": 9, "bytes": 9, "messages": 8, "lost": 6, "waiting": 7, "p50": 7, "p99": 7}


@app.command()
def top(
    every: Annotated[float, typer.Option(min=0.1, max=86400.0, help="Seconds between two readings.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many looks.")] = None,
    match: Annotated[str, typer.Option(help="Only addresses that contain this.")] = "",
    sort: Annotated[
        str, typer.Option(help="trouble, rate, lost, waiting or address.", autocompletion=lambda: list(SORTS))
    ] = SORTS[0],
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also the channels that carry calls.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
) -> None:
    """A live table of what flows: rate, losses, queue, latency, health of every handle on this machine.

    Trouble comes first. Keys: s sorts by something else, / filters, space pauses, arrows scroll, q ends.
    p50 and p99 are latencies of the last minute, as the reader measured them.

    Example: [green]penstock top --match camera[/]
    """
    view = View(match, exits.choice(sort, SORTS, "--sort"), everything)
    watcher = Watcher(every_s=every)
    watcher.look()
    if as_json or not sys.stdout.isatty():
        _plain(watcher, every, count, view, as_json)
        return
    _live(watcher, every, count, view)


@dataclass(slots=True)
class View:
    """Which handles are shown, in which order, from which row on."""

    match: str = ""
    sort: str = SORTS[0]
    everything: bool = False
    first: int = 0
    paused: bool = False
    typing: bool = False

    def handle_key(self, key: str, page: int) -> bool:
        """Do what a key means; False to end."""
        if self.typing:
            self._type(key)
        elif key == "q":
            return False
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "/":
            self.typing, self.match = True, ""
        elif key == "escape":
            self.match = ""
        elif key == " ":
            self.paused = not self.paused
        else:
            steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
            steps |= {"home": -self.first, "end": sys.maxsize}
            self.first = max(0, self.first + steps.get(key, 0))
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing = False
            self.match = "" if key == "escape" else self.match
        elif key == "backspace":
            self.match = self.match[:-1]
        elif len(key) == 1 and key.isprintable():
            self.match += key

    def chosen(self, state: State) -> list[Look]:
        """The handles that are shown, in their order."""
        seen = [look for look in state.looks if self.everything or not carries_calls(look.block)]
        looks = [look for look in seen if self.match in _address(look)]
        orders: dict[str, Callable[[Look], Any]] = {
            "trouble": lambda look: (ORDER.index(look.verdict.word), -look.rate.messages_hz),
            "rate": lambda look: -look.rate.messages_hz,
            "lost": lambda look: -look.block.lost,
            "waiting": lambda look: -look.block.waiting,
            "address": lambda look: 0,
        }
        return sorted(looks, key=lambda k: (orders[self.sort](k), _address(k), k.block.kind, k.block.pid))


def _address(look: Look) -> str:
    return look.block.place


def _live(watcher: Watcher, every: float, count: int | None, view: View) -> None:
    from rich.live import Live

    console = show.console()
    state = watcher.state
    due, looks = time.monotonic() + every, 0
    with keys.pressed() as key, Live(console=console, screen=count is None, auto_refresh=False) as live:
        while count is None or looks < count:
            page = max(1, console.height - 3)
            if not view.handle_key(key(due - time.monotonic()), page):
                return
            if time.monotonic() >= due:
                due, looks = time.monotonic() + every, looks + 1
                state = state if view.paused else watcher.look()
            view.first = min(view.first, max(0, len(view.chosen(state)) - page))
            live.update(_table(state, view, page), refresh=True)


def _looks(every: float, count: int | None) -> Iterator[None]:
    """Wait before each look, so that already the first one shows a rate."""
    done = 0
    while count is None or done < count:
        time.sleep(every)
        done += 1
        yield


def _plain(watcher: Watcher, every: float, count: int | None, view: View, as_json: bool) -> None:
    for _ in _looks(every, count):
        state = watcher.look()
        if not as_json:
            show.console().print(_table(state, view))
            sys.stdout.flush()
            continue
        rows = [
            {
                **as_record(k.block),
                "messages_hz": k.rate.messages_hz,
                "bytes_hz": k.rate.bytes_hz,
                "latency_p50_ns": k.latency.p50_ns if k.latency else None,
                "latency_p99_ns": k.latency.p99_ns if k.latency else None,
                "health": k.verdict.word,
            }
            for k in view.chosen(state)
        ]
        show.print_json({"time_ns": state.time_ns, **summary(state), "rows": rows})


def _table(state: State, view: View, page: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    looks = view.chosen(state)
    sums = summary(replace(state, looks=tuple(looks)))  # sums of the visible rows, like the number of handles
    processes = len({look.block.pid for look in looks})
    rows = looks if page is None else looks[view.first : view.first + page]
    head = Text.assemble(
        (f"{show.rate_text(sums['published_hz'])} in", "bold"),
        f"  {show.rate_text(sums['delivered_hz'])} out  {show.bytes_text(sums['bytes_hz'], '/s')}  ",
        (f"{show.count_text(sums['lost'])} lost", "yellow" if sums["lost"] else "green"),
        f"  {show.number_of(len(looks), 'handle')} in {show.number_of(processes, 'process', 'processes')}",
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    columns = NARROW if show.columns_of(sys.stdout) < 100 else COLUMNS
    cells = [_cells(look) for look in rows]
    shown = [[row[name] for name in columns] for row in cells]
    made = show.table(columns, shown, RIGHT, least=WIDTHS, yields=YIELDS, last=LAST)
    if page is None:
        return Group(head, made)
    return Group(head, made, _status(view, len(rows), len(looks)))


def _status(view: View, shown: int, most: int) -> RenderableType:
    from rich.text import Text

    if view.typing:
        return Text(f"filter: {view.match}_", style="reverse")
    place = f"{view.first + 1}-{view.first + shown} of {most}" if shown < most else f"{most}"
    said = f"{place} by {view.sort}" + (f", /{view.match}" if view.match else "") + (", PAUSED" if view.paused else "")
    return Text(f"{said}   {HELP}", style="dim", no_wrap=True, overflow="ellipsis")


def _cells(look: Look) -> dict[str, show.Cell]:
    block, rate, verdict, latency = look.block, look.rate, look.verdict, look.latency
    why = verdict.reasons[0] if verdict.reasons and verdict.word != "idle" else ""
    return {
        "address": _address(look),
        "kind": block.kind,
        "pid": str(block.pid),
        "rate": show.rate_text(rate.messages_hz),
        "bytes": show.bytes_text(rate.bytes_hz, "/s"),
        "messages": show.count_text(flow(block)),
        "lost": (show.count_text(block.lost), "yellow" if block.lost else ""),
        "waiting": waiting_text(block),
        "p50": show.latency_text(latency.p50_ns) if latency else "-",
        "p99": show.latency_text(latency.p99_ns) if latency else "-",
        "health": (verdict.word, COLOURS[verdict.word]),
        "why": why,
    }
