"""``penstock bridge``: carry messages from one address to another, until Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.bridge import Bridge, read_map
from penstock.cli import exits, show, silence
from penstock.cli.target import live_addresses, opened
from penstock.shm import read_vchans

app = typer.Typer()


@app.command()
def bridge(
    source: Annotated[
        str, typer.Argument(help="Where messages come from.", callback=opened, autocompletion=live_addresses)
    ],
    sink: Annotated[str, typer.Argument(help="Where they go.", callback=opened, autocompletion=live_addresses)],
    vchans: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Lines 'ID = ID' or 'ID = ADDRESS'.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The sink is a multiplexer; lines 'ID /NAME', the same on all."),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a source that cannot be reached yet.")] = False,
    report: Annotated[float, typer.Option(min=0.0, help="Seconds between progress lines; 0: none.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Carry messages from one address to another: out of shared memory to the network, and back on another machine.

    Over TCP the source's ordinals, times, virtual channels and properties travel with the messages, so that a reader
    behind the bridge knows what was lost before it and what on the link.

    Example: [green]penstock bridge shm:/camera tcp://0.0.0.0:1588?insecure=true[/], and where it is wanted:
    [green]penstock bridge tcp://robot:1588 shm:/camera[/]
    """
    with Bridge(
        source, sink, vchans=read_map(vchans) if vchans else None, names=read_vchans(names) if names else None
    ) as carrying:
        if not wait:
            silence.refuse_unreachable(source, carrying.subscriber, None)
        try:
            place = carrying.sink
            if as_json and not quiet:
                show.print_json({"from": carrying.source, "to": place})
            elif not quiet:
                print(f"bridge: {carrying.source} > {place}", file=sys.stderr, flush=True)
            for said in () if quiet else carrying.losses:
                exits.told(said)
            if count is not None:
                carrying.run(count)
            else:
                _serve(carrying, 0.0 if quiet else report, as_json)
        except exits.STOPPED:  # the usual end
            pass
        if not quiet:
            _print_counts(carrying, as_json)


def _serve(carrying: Bridge, report: float, as_json: bool) -> None:
    """Carry messages until Ctrl-C, the end of the source, or an error, which ends the command."""
    carrying.start()
    while not carrying.wait(report or 60.0):
        if report:
            _print_counts(carrying, as_json)


def _print_counts(carrying: Bridge, as_json: bool) -> None:
    ledger, before = carrying.ledger, carrying.subscriber.ledger
    if as_json:
        measured = carrying.latency
        latency_ns = None if measured is None else measured.corrected_ns or measured.apparent_ns
        counts = {"carried": ledger.delivered, "lost_here": ledger.lost, "lost_before": before.lost}
        show.print_json({**counts, "latency_ns": latency_ns})
        return
    text = f"carried {ledger.delivered}, lost here {ledger.lost}, lost before {before.lost}"
    latency = carrying.latency
    if latency is not None:
        text += f", latency {latency.apparent_ns / 1e6:.3f} ms by both clocks"
        if latency.corrected_ns is not None:
            text += f", {latency.corrected_ns / 1e6:.3f} ms by one"
    print(text, file=sys.stderr, flush=True)
