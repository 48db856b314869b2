"""``penstock shm``: shared-memory channels as found in the file system, also those that killed processes left."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.shm import Channel, channels, sweep

app = typer.Typer(help="List and clean shared-memory channels.", no_args_is_help=True)

COLUMNS = (
    "channel",
    "slots",
    "slot size",
    "in use",
    "held",
    "memory",
    "published",
    "publishers",
    "subscribers",
    "state",
)
RIGHT = COLUMNS[1:7]


@app.command()
def ls(as_json: Annotated[bool, typer.Option("--json", help="One JSON object a channel.")] = False) -> None:
    """Every channel of this machine: its slots, its memory, its members and their processes.

    Example: [green]penstock shm ls[/]
    """
    found = channels()
    if as_json:
        for channel in found:
            by_id = {"vchans": channel.vchans, "vchan_types": channel.vchan_types}
            texts = {name: {str(number): text for number, text in found.items()} for name, found in by_id.items()}
            show.print_json({**asdict(channel), **texts})
        return
    if not found:
        typer.echo("there are no shared-memory channels")
        return
    show.console().print(show.table(COLUMNS, [_row(channel) for channel in found], RIGHT))


@app.command()
def clean(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Remove what killed processes left behind; live processes are not disturbed.

    Example: [green]penstock shm clean[/]
    """
    removed, recovered = sweep()
    if as_json:
        show.print_json({"removed": removed, "recovered": recovered})
        return
    for name in removed:
        typer.echo(f"removed {name}")
    for name in recovered:
        typer.echo(f"freed what killed processes held in {name}")
    # Nobody can tell who uses a damaged one: its members stand in what is damaged.
    damaged = [channel for channel in channels() if channel.problem]
    for channel in damaged:
        advice = f"penstock why shm:{channel.name} says what to do"
        exits.told(f"left as it is: {channel.name} ({channel.problem}); {advice}")
    if not removed and not recovered and not damaged:
        typer.echo("nothing was left behind")


def _row(channel: Channel) -> tuple[str, ...]:
    def members(found: Any) -> str:
        return ", ".join(f"{m.pid}{'' if m.alive else ' (dead)'}" for m in found) or "-"

    dead = sum(not member.alive for member in channel.members)
    state = channel.problem or (f"{dead} dead member{'s' * (dead != 1)}" if dead else "ok")
    return (
        channel.name, str(channel.slots), show.bytes_text(channel.slot_size), str(channel.live_slots),
        str(channel.held_slots), show.bytes_text(channel.memory_bytes), show.count_text(channel.published),
        members(channel.publishers), members(channel.subscribers), state,
    )  # fmt: skip
