"""The durable broker as a part of the demo."""

from __future__ import annotations

from penstock.broker import Server
from penstock.cli.demo.part import Stage


def run(stage: Stage) -> None:
    """Serve until told to stop."""
    with Server(stage.configuration["directory"], 0).start() as server:
        stage.tell(ready=True, port=server.port)
        stage.stop.wait()
