"""``penstock replica DIRECTORY --store ADDRESS``: follow a replicated broker's log, for readers on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.broker import STORE_TOKEN

app = typer.Typer()


@app.command()
def replica(
    directory: Annotated[Path, typer.Argument(help="The directory of the copy; created if it does not exist.")],
    store: Annotated[str, typer.Option(metavar="ADDRESS", help="The stream: nats://H1,H2,H3/STREAM.")],
    store_authority: Annotated[
        Path | None, typer.Option(help="The authority that signed the cluster's certificates; switches TLS on.")
    ] = None,
    store_certificate: Annotated[Path | None, typer.Option(help="The certificate to present to the cluster.")] = None,
    store_key: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it begins as one JSON object.")] = False,
) -> None:
    """Keep a directory a copy of a replicated broker's log, as it grows; readers there use journal:DIRECTORY.

    Every segment is checked at the beginning and once an hour; a damaged one is fetched again, and reported.

    Example: [green]penstock replica /var/lib/copy --store nats://10.0.0.1,10.0.0.2,10.0.0.3/orders[/], then
    [green]penstock sub journal:/var/lib/copy#sensors[/]
    """
    from penstock.replica import JetStream
    from penstock.replica.follower import follow
    from penstock.replica.stream import Target, tls_context

    exits.log_to_stderr("%(levelname)s %(name)s: %(message)s", logging.INFO)
    tls = tls_context(store_authority, store_certificate, store_key)
    blocks = JetStream(Target.parse(store, tls, os.environ.get(STORE_TOKEN, "")))
    with contextlib.closing(blocks):
        blocks.patiently(blocks.describe_fit)
        with follow(directory, blocks) as follower, contextlib.suppress(*exits.STOPPED):  # the usual end, from here on
            if as_json:
                show.print_json({"directory": str(directory), "position": follower.position})
            else:
                print(f"following {blocks.name} from position {follower.position} on", flush=True)
            follower.run()
