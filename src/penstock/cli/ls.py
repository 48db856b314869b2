"""``penstock ls``: every handle on this machine, from the counters of every live process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.address import without_secrets
from penstock.cli import show
from penstock.cli.target import live_addresses
from penstock.observe.memory import seen
from penstock.observe.rates import READERS, carries_calls, flow
from penstock.observe.snapshot import Block, matching

app = typer.Typer()

COLUMNS = ("address", "kind", "pid", "messages", "bytes", "lost", "waiting", "last", "program", "state")
RIGHT = ("pid", "messages", "bytes", "lost", "waiting", "last")
LAST = ("bytes", "last", "pid")  #: left out before a number would be cut


@app.command()
def ls(
    address: Annotated[
        str | None,
        typer.Argument(help="An address, part of one, or a pattern with '*'.", autocompletion=live_addresses),
    ] = None,
    watch: Annotated[float | None, typer.Option(min=0.1, help="Repeat every so many seconds, until Ctrl-C.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also the channels that carry calls.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a handle.")] = False,
) -> None:
    """Every channel, queue, publisher and subscriber on this machine, with the process it belongs to.

    It reads shared counters and disturbs nobody. Processes of other users are listed where their files may be read.

    Example: [green]penstock ls 'shm:/camera/*'[/]
    """
    nothing = _nothing()  # checked before the first look, which creates that folder

    def blocks() -> list[Block]:
        return _blocks(address, everything)

    if as_json:
        _print_json(blocks, watch)
    elif watch is None and not blocks():
        typer.echo(nothing if address is None else f"nobody has {without_secrets(address)} open")
    else:
        show.watched(lambda: show.table(COLUMNS, [_row(block) for block in blocks()], RIGHT, last=LAST), watch)


def _print_json(blocks: Callable[[], list[Block]], watch: float | None) -> None:
    while True:
        for block in blocks():
            show.print_json(as_record(block))
        if watch is None:
            return
        sys.stdout.flush()
        time.sleep(watch)


def _nothing() -> str:
    place = os.environ.get("PENSTOCK_SHM_DIR", "")
    absent = place and not os.path.isdir(place)
    said = f" (there is no folder {place}, which PENSTOCK_SHM_DIR names)" if absent else ""
    return f"nothing of Penstock is open on this machine{said}"


def _blocks(address: str | None, everything: bool) -> list[Block]:
    blocks = seen() if address is None else matching(seen(), address)
    shown = [block for block in blocks if everything or not carries_calls(block)]
    return sorted(shown, key=lambda b: (b.room, b.name, b.kind, b.pid, b.index))


def as_record(block: Block) -> dict[str, Any]:
    """A block as a JSON record: its counts and figures derived from them."""
    return {**asdict(block), "address": block.address, "lost": block.lost, "in_flight": block.in_flight}


def waiting_text(block: Block) -> str:
    """How many messages wait for a reader; for a publisher how many of its slots are in use."""
    if block.kind in READERS or not block.capacity:
        return show.count_text(block.waiting)
    return f"{block.depth}/{block.capacity}"


def _row(block: Block) -> tuple[str, ...]:
    return (
        block.place,
        block.kind,
        str(block.pid),
        show.count_text(flow(block)),
        show.bytes_text(block.bytes),
        show.count_text(block.lost),
        waiting_text(block),
        show.age_text(block.idle_s),
        block.program,
        block.state,
    )
