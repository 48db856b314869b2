"""The table of commands: names, summaries, what must be installed; a command's module is imported when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["COMMANDS", "EXAMPLES", "EXTRAS", "HELP", "Entry", "benchmarks_folder", "load"]


def benchmarks_folder() -> Path | None:
    """The folder of the benchmarks: PENSTOCK_BENCHMARKS, or that of the source tree; a wheel has none."""
    place = Path(os.environ.get("PENSTOCK_BENCHMARKS") or Path(__file__).parents[3] / "benchmarks")
    return place if (place / "harness.py").is_file() else None


#: The panels of the help, by what a user wants to do.
TRY, LOOK, KEEP, RUN = "Try", "Look", "Keep", "Run"


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table: the command's module, its summary, and what must be installed for it."""

    name: str
    module: str
    summary: str
    panel: str
    attribute: str = "app"
    extra: str = ""
    runs_benchmarks: bool = False
    #: Whether it works without standard output; the others fail if that is closed.
    works_unheard: bool = False

    @property
    def installed(self) -> bool:
        """Whether its module, and what that runs, is part of this build of Penstock."""
        if self.runs_benchmarks and benchmarks_folder() is None:
            return False
        return importlib.util.find_spec(f"penstock.cli.{self.module}") is not None


COMMANDS: tuple[Entry, ...] = (
    Entry("demo", "demo", "A small demonstration of the whole system, counted.", TRY),
    Entry("doctor", "doctor", "Check this machine and say what to do.", TRY),
    Entry("pub", "pub", "Publish messages to any address.", TRY, works_unheard=True),
    Entry("sub", "sub", "Read messages from any address; reports losses as they happen.", TRY),
    Entry("call", "call", "Ask a server and print its answer.", TRY),
    Entry("serve", "serve", "Answer calls by running a command for each.", TRY, works_unheard=True),
    Entry("ls", "ls", "Every channel, queue, publisher and subscriber on this machine.", LOOK),
    Entry("top", "top", "A live table of what flows.", LOOK),
    Entry("why", "why", "Explain why nothing arrives at an address.", LOOK),
    Entry("autopsy", "autopsy", "What a killed process last published, held and never read.", LOOK),
    Entry("info", "info", "Everything known about one address.", LOOK),
    Entry("schema", "schema", "The schema of messages, if their publisher is typed.", LOOK),
    Entry("hz", "rates", "Messages per second, without disturbing the publisher.", LOOK, "hz_app"),
    Entry("bw", "rates", "Bytes per second, without disturbing the publisher.", LOOK, "bw_app"),
    Entry("delay", "delay", "How old messages are when they arrive.", LOOK),
    Entry("monitor", "monitor", "Serve a page that shows the flow moving.", LOOK, extra="monitor", works_unheard=True),
    Entry("foxglove", "foxglove", "Show channels or a recording in Foxglove.", LOOK,
          extra="foxglove", works_unheard=True),
    Entry("record", "record", "Record addresses into a journal.", KEEP, works_unheard=True),
    Entry("play", "play", "Play a recording back.", KEEP, works_unheard=True),
    Entry("replay", "replay", "Replay a recording into a gateway, the same way every time.", KEEP),
    Entry("sql", "sql", "Ask a recording or journal by SQL.", KEEP, extra="sql"),
    Entry("export", "export", "Turn a recording into MCAP, Parquet, CSV or JSON lines.", KEEP),
    Entry("import", "imports", "Turn an MCAP file into a recording.", KEEP, extra="mcap"),
    Entry("journal", "journal", "Inspect, verify and repair a journal.", KEEP),
    Entry("lake", "lake", "Archive journals to a Delta table; inspect, verify and compact it.", KEEP, extra="lake"),
    Entry("broker", "broker", "Run the durable broker.", RUN, works_unheard=True),
    Entry("cluster", "cluster", "Run nodes that a broker's log is kept on.", RUN, works_unheard=True),
    Entry("replica", "replica", "Follow a replicated broker's log into a directory.", RUN, works_unheard=True),
    Entry("queue", "queue", "List, make, change and empty the queues of a broker.", RUN),
    Entry("bridge", "bridge", "Carry messages from one address to another.", RUN, works_unheard=True),
    Entry("run", "run", "Run a gateway from its file.", RUN, works_unheard=True),
    Entry("gateway", "gateway", "Look at a gateway at work and change it.", RUN),
    Entry("pipeline", "pipeline", "Run a Spark pipeline over a journal.", RUN, extra="spark"),
    Entry("shm", "shm", "List and clean shared-memory channels.", RUN),
    Entry("config", "config", "Show the configuration and where each value came from.", RUN),
    Entry("bench", "bench", "Measure penstock beside its peers.", RUN, extra="bench", runs_benchmarks=True),
    Entry("torture", "torture", "Kill processes under load, then check that nothing is lost.", RUN),
)

#: A module that is missing, and the extra that brings it.
EXTRAS = {
    "starlette": "monitor", "uvicorn": "monitor", "prometheus_client": "monitor",
    "pyspark": "spark", "pandas": "spark", "pyarrow": "spark", "deltalake": "lake", "mcap": "mcap", "numpy": "numpy",
    "duckdb": "sql", "msgspec": "types", "foxglove": "foxglove",
}  # fmt: skip

HELP = """Publish and subscribe at every reach: a call, a process, a machine, a network, a disk, a Spark table.

Addresses: [bold]bus:NAME[/], [bold]shm:/NAME[/], [bold]tcp://HOST:PORT[/], [bold]journal:DIRECTORY#TOPIC[/],
[bold]broker://HOST:PORT/TOPIC?queue=NAME[/], [bold]nats://HOST:PORT/SUBJECT[/]. What follows '?' are options.
"""

EXAMPLES = """[bold]Examples[/]

[green]penstock demo[/]  the whole system at work, counted

[green]penstock sub shm:/camera[/]  in one terminal, in another:

[green]penstock pub shm:/camera 'frame {count}' --count 5[/]

[green]penstock top[/]  what flows; [green]penstock why shm:/camera[/]  why nothing does

[green]penstock record --all -o run1[/]  and then:

[green]penstock sql 'select topic, count(*) from run1 group by 1'[/]

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 timed out, 4 a check failed,

69 not installed, 129 SIGHUP, 130 Ctrl-C, 141 output closed, 143 SIGTERM

(0 for what runs until it is stopped: broker, record, replica and so on).
"""


def load(entry: Entry) -> typer.Typer:
    """The command's own application, imported now: the module's ``app``, or its function of the command's name."""
    import typer

    module = importlib.import_module(f"penstock.cli.{entry.module}")
    found = getattr(module, entry.attribute, None) or getattr(module, entry.name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer()
        found.command(entry.name)(function)
    return found
