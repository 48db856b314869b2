"""``penstock foxglove``: shows what flows, or a recording, in the Foxglove viewer."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.target import expanded, is_folder, live_addresses, opened
from penstock.errors import InvalidArgument

app = typer.Typer()

PORT = 8766  # the monitor has 8765


@app.command()
def foxglove(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS]...",
            help="What to show, or the folder of one recording; nothing: all that is published.",
            autocompletion=live_addresses,
            show_default=False,
            callback=opened,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    insecure: Annotated[bool, typer.Option(help="Listen beyond this machine: whoever reaches it sees all.")] = False,
    paused: Annotated[bool, typer.Option(help="Start paused; a viewer starts it.")] = False,
    loop: Annotated[bool, typer.Option(help="Play a recording again from its start.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="End after so long; otherwise Ctrl-C ends it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it is as one JSON object.")] = False,
) -> None:
    """Show live channels, or a recording with seek and speed, in the Foxglove viewer by its WebSocket protocol.

    Without an address it shows all that is published over shm:, tcp:// and journal: on this machine, also what comes
    later. A channel is read only while a viewer looks at it. The parameters 'paused' and 'speed' steer it from the
    viewer; a recording has the viewer's own buttons too.

    Example: [green]penstock foxglove shm:/camera shm:/pose[/]
    """
    from penstock.foxglove.server import Server
    from penstock.recording.story import read_story

    logging.getLogger("foxglove").addHandler(logging.NullHandler())
    # it logs viewers' mistakes as errors; the viewer itself is told about them
    logging.getLogger("foxglove").propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("penstock: %(message)s"))
    logging.getLogger("penstock.foxglove").addHandler(handler)
    folders = [one for one in given or [] if "*" not in one and is_folder(one)]
    if folders and len(given or []) > 1:
        raise InvalidArgument("a recording is shown alone: give one folder, or addresses")
    if loop and not folders:
        raise InvalidArgument("--loop is for a recording")
    addresses = [] if folders else expanded(given or [])
    recording = Path(folders[0]) if folders else None
    for gap in read_story(recording).missing() if recording else ():
        exits.told(f"{recording}: {gap}")
    with Server(
        addresses, recording, host=host, port=port, paused=paused, loop=loop, insecure=insecure
    ) as server:
        if as_json:
            show.print_json({"url": server.url})
        else:
            print(f"open {server.url} in Foxglove (Open connection, Foxglove WebSocket)", flush=True)
        with contextlib.suppress(*exits.STOPPED):  # the usual end of a service
            server.run(seconds)
