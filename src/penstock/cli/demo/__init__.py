"""``penstock demo``: an edge gateway with simulated sensors over every reach, recorded, analysed by Spark, watched.

::

    temperature 100/s ─┬─ broker:// (durable) ──┬─ alarms
    vibration  1000/s ─┼─ tcp:// ───────────────┼─ control room
    camera       15/s ─┼─ shm:/ ────────────────┼─ vision
                       └─ bus: ── display       └─ recorder ── journal ── Spark (archive, rollup, quality)

Every box is a process of its own (the sensors and the bus share one). Each number printed was counted: by the sensors
when they published, by the readers' ledgers, by the recorder, by Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to run.")] = 60.0,
    forever: Annotated[bool, typer.Option("--forever", help="Until Ctrl-C.")] = False,
    no_spark: Annotated[bool, typer.Option("--no-spark", help="For machines without Java.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The page's port; 0 takes a free one.")] = 0,
    directory: Annotated[Path, typer.Option(help="Where the data goes, a new folder for each run.")] = Path(
        "penstock-demo"
    ),
    archive_every: Annotated[float, typer.Option(min=0.0, help="Seconds between two rounds of Spark's archive.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the closing numbers as one JSON object.")] = False,
) -> None:
    """The whole system at work: sensors over bus, shared memory, TCP and broker, recorded, analysed, watched, counted.

    Ends by itself, or on Ctrl-C, with a closing table; code 4 when a message was lost.

    Example: [green]penstock demo --seconds 30 --no-spark[/]
    """
    from penstock.cli.demo.conductor import conduct

    conduct(None if forever else seconds, None if no_spark else archive_every, port, directory, as_json)
