"""``penstock call``: ask a server once and print its answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import penstock
from penstock.cli import show
from penstock.cli.target import OptionList, ServiceArgument, answer_within, with_options
from penstock.errors import InvalidArgument
from penstock.observe import decode

app = typer.Typer()


@app.command()
def call(
    address: ServiceArgument,
    data: Annotated[
        str | None, typer.Argument(help="What to ask; '-' or nothing reads it from standard input.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the answer; then code 3.")] = 30.0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Call this many times, one after the other.")] = 1,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a server first.")] = 0.0,
    option: OptionList = None,
    as_json: Annotated[bool, typer.Option("--json", help="Each answer as one JSON object a line.")] = False,
) -> None:
    """Ask a server and print its answer to standard output, byte for byte (a line end is added on a terminal).

    Ends with code 1 when the server raised, died or is not there, with 3 when no answer came in time.

    Example: [green]penstock call shm:/plan 'to the dock' --timeout 2[/]
    """
    if data is None and sys.stdin.isatty():
        raise InvalidArgument("give what to ask: penstock call ADDRESS DATA, or pipe it in")
    payload = sys.stdin.buffer.read() if data in (None, "-") else str(data).encode("utf-8", "surrogateescape")
    with penstock.client(with_options(address, option, **answer_within(address, option, timeout))) as client:
        if wait and not client.wait_ready(1, wait):
            raise TimeoutError(f"{client.address}: no server within {wait:g} s (--wait)")
        for _ in range(count):
            answer = client.call(payload, timeout)
            if as_json:
                show.print_json({"size": len(bytes(answer)), "payload": decode.body_value(bytes(answer))})
                continue
            sys.stdout.buffer.write(answer)
            if count > 1 or sys.stdout.isatty():
                sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
