"""``penstock info``: everything known about one address."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from penstock import address as addresses
from penstock.cli import exits, show
from penstock.cli.ls import as_record, waiting_text
from penstock.cli.target import SeenAddressArgument, broker_address
from penstock.errors import PenstockError, describe
from penstock.observe import decode
from penstock.observe.latency import spread
from penstock.observe.memory import LOCAL, has_side, seen
from penstock.observe.rates import flow
from penstock.observe.snapshot import Block, matching, named, of_queue
from penstock.printable import printable

app = typer.Typer()


@app.command()
def info(
    address: SeenAddressArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show everything known about one address: its parts, its publishers and subscribers, their counts, and what the
    room knows.

    Example: [green]penstock info shm:/camera[/]
    """
    if blocks := named(seen(), address):
        if as_json:
            show.print_json({"address": address, "scheme": "", "facts": {}, "handles": [as_record(b) for b in blocks]})
        else:
            _print(address, blocks, {})
        return
    blocks = matching(seen(), address)
    address = broker_address(address)
    parts = addresses.parse(address)
    blocks = blocks or matching(seen(), address)
    if parts.scheme == "broker" and (queue := parts.options.get("queue")):
        blocks = of_queue(seen(), f"broker://{parts.host}:{parts.port or 9876}", queue) or blocks
    told = room_facts(parts)
    if as_json:
        show.print_json(
            {"address": parts.text, "scheme": parts.scheme, "facts": told, "handles": [as_record(b) for b in blocks]}
        )
    else:
        _print(parts.text, blocks, told)
    if not blocks and not told.keys() - {"error"}:
        exits.told(f"{parts.text}: {told.get('error') or 'nobody has it open and nothing is kept of it'}")
        raise typer.Exit(exits.FAILED)


def _latency(block: Block) -> str:
    found = spread(block.latency_counts)
    if found is None:
        return "not measured"
    p50, p99 = show.latency_text(found.p50_ns), show.latency_text(found.p99_ns)
    last = show.seconds_text(block.latency_ns / 1e9)
    return f"p50 {p50}, p99 {p99} of {show.count_text(found.measured)} measured, the last {last}"


def _last(block: Block) -> str:
    if block.last_ns:
        return f"{show.age_text(block.idle_s)} ago".replace("now ago", "now")
    return "not recorded" if flow(block) else "none"


def _peers(block: Block) -> str:
    """The number of peers; a dash where it is not counted: for a whole bus, a gateway's modules, publishers to a
    broker.
    """
    counted = block.kind == "queue" or (has_side(block) and block.room in (*LOCAL, "tcp"))
    return str(block.peers) if block.peers or counted else "-"


def room_facts(parts: addresses.Address) -> dict[str, Any]:
    """What the room's ``explain.describe`` says about an address, where the room has such a function."""
    try:
        facts = getattr(importlib.import_module(f"{addresses.ROOMS[parts.scheme]}.explain"), "describe", None)
        return dict(facts(parts)) if facts is not None else {}
    except ImportError as error:
        return {"error": str(error)}
    except (OSError, PenstockError) as error:
        return {"error": describe(error)}


def _print(address: str, blocks: list[Block], facts: dict[str, Any]) -> None:
    console = show.console()
    console.print(address, style="bold")
    for name, value in facts.items():
        console.print(f"  {name:<20} {value}")
    for block in blocks:
        ledger = block.ledger
        which = "" if block.place == address else f" {printable(block.place)}"
        console.print(f"\n{block.kind}{which} in process {block.pid} ({block.program})  {block.state}")
        rows = {
            "open since": decode.iso_time(block.opened_ns),
            "messages": f"{show.count_text(flow(block))} ({show.bytes_text(block.bytes)})",
            "ledger": f"matched {ledger.matched} = delivered {ledger.delivered} + dropped {ledger.lost} + expired "
            f"{ledger.expired} + in flight {block.in_flight}",
            "dropped": ", ".join(f"{n} {reason}" for reason, n in ledger.dropped.items() if n) or "none",
            "waiting": waiting_text(block),
            "held": f"{block.depth} of {block.capacity}" if block.capacity else str(block.depth),
            "peers": _peers(block),
            "memory": show.bytes_text(block.memory_bytes),
            "last message": _last(block),
            "latency": _latency(block),
        }
        for name, text in rows.items():
            console.print(f"  {name:<14} {text}")
