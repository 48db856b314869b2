"""``penstock cluster DIRECTORY``: run the nodes of a NATS cluster on this machine, for ``penstock broker --store``."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.broker import STORE_TOKEN
from penstock.errors import InvalidArgument

RESTART_S = 2.0
app = typer.Typer()


@app.command()
def cluster(
    directory: Annotated[Path, typer.Argument(help="The directory for the nodes' data.")],
    nodes: Annotated[int, typer.Option(help="1, 3 or 5.")] = 3,
    stream: Annotated[str, typer.Option(help="The stream to be made.")] = "penstock",
    certificate: Annotated[Path | None, typer.Option(help="The nodes' certificate chain: switches TLS on.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
    authority: Annotated[Path | None, typer.Option(help="The authority that verifies the nodes' certificates.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON object.")] = False,
) -> None:
    """Run a cluster on this machine for trying: prints the address for [green]penstock broker --store[/] once it is up.

    All nodes are on one machine, so this does not protect against the loss of the machine: docs/rooms/replica.md has
    the configuration for three. With PENSTOCK_STORE_TOKEN set the nodes ask for that token.

    Example: [green]penstock cluster /tmp/nodes[/], then [green]penstock broker /tmp/broker --store ADDRESS[/]
    """
    from penstock.replica.cluster import Cluster, Encryption
    from penstock.replica.stream import tls_context

    if (certificate is None) != (key is None):
        raise InvalidArgument("--certificate and --key go together")
    encryption = None if certificate is None or key is None else Encryption(certificate, key)
    token = os.environ.get(STORE_TOKEN, "")
    started = Cluster(directory, nodes, stream=stream, token=token, encryption=encryption)
    with started:
        started.connect(tls_context(authority, None, None)).close()
        if as_json:
            show.print_json({"address": started.address, "monitors": started.monitors})
        else:
            print(started.address, flush=True)
        with contextlib.suppress(*exits.STOPPED):  # the usual end
            while True:
                time.sleep(RESTART_S)
                for node in started.nodes:
                    if not node.alive:  # the user may have killed it on purpose, to see what happens
                        exits.told(f"{node.name} has ended; it is started again")
                        node.start()
