"""``penstock monitor``: serves the page that shows the flow moving."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from penstock.cli import exits, show

app = typer.Typer()

PORT = 8765


@app.command()
def monitor(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="The token that visitors need; generated when needed and not given.")
    ] = None,
    allow_actions: Annotated[bool, typer.Option(help="Let visitors purge, re-drive and pause.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the page is as one JSON object.")] = False,
    tls_certificate: Annotated[str | None, typer.Option(help="A PEM file: serve by TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="The key of the certificate, a PEM file.")] = None,
    insecure: Annotated[
        bool, typer.Option(help="Listen beyond loopback without TLS: others can read everything.")
    ] = False,
    history: Annotated[bool, typer.Option(help="Keep a day of the plots in the user's state directory.")] = True,
    otlp: Annotated[
        str | None, typer.Option(help="Send the counters to this OpenTelemetry collector (extra otel).")
    ] = None,
    grafana: Annotated[bool, typer.Option(help="Print a dashboard for Grafana as JSON, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two readings.")] = 1.0,
) -> None:
    """Serve the page that shows the flow moving, with /metrics for Prometheus, /health and a JSON API.

    It reads shared counters, which costs the watched programs nothing. It subscribes only when a visitor asks for a
    tail.

    Example: [green]penstock monitor --port 9000[/]
    """
    if grafana:
        from penstock.monitor.grafana import dashboard

        show.print_json(dashboard())
        return
    from penstock.broker.endpoint import descriptors
    from penstock.monitor.service import Service
    from penstock.system import state_directory

    descriptors()  # raise the limit of open files: connections in a TLS handshake need descriptors too
    kept = state_directory() / "monitor.sqlite" if history else None
    with contextlib.ExitStack() as opened:
        page = opened.enter_context(
            Service(
                host, port, token=token, allow_actions=allow_actions, every_s=every, certificate=tls_certificate,
                key=tls_key, insecure=insecure, history=kept,
            )
        )  # fmt: skip
        if otlp is not None:
            from penstock.monitor.otlp import exporting

            opened.enter_context(exporting(page.watcher, otlp))
        if as_json:
            show.print_json({"url": page.url, "token": page.token, "actions": allow_actions})
        else:
            print(f"monitor at {page.url}", flush=True)
        with contextlib.suppress(*exits.STOPPED):  # the usual end of a service
            page.run()
