"""Conducts the demo: starts the parts in order, shows what flows, ends them in order, prints the closing table.

Readers are started before the sensors, so that nothing is missed. Sensors end first, then readers and recorder when
everything published has arrived, then Spark when everything recorded is in Parquet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from penstock.cli import exits, show
from penstock.cli.demo.closing import closing, live_table, rows
from penstock.cli.demo.part import Part

__all__ = ["Demo", "conduct"]

#: Which sensors go to which reach.
SOURCES = {
    "bus": ("temperature", "vibration"), "shm": ("camera",), "tcp": ("vibration",), "broker": ("temperature",),
}  # fmt: skip


#: Generous, because a slow machine is no failure: the demo judges what has arrived, never how long it took.
PATIENCE_S = 900.0
STILL_S = 60.0  # how long without a new message before missing ones count as lost


def conduct(seconds: float | None, archive_every_s: float | None, port: int, directory: Path, as_json: bool) -> None:
    """The whole demo, without Spark when ``archive_every_s`` is None.

    Ends by ``typer.Exit`` with code 4 when something was lost.
    """
    place = directory / time.strftime("%Y%m%d-%H%M%S")
    place.mkdir(parents=True)
    if archive_every_s is not None and not _spark_is_there():
        archive_every_s = None
    with Demo(place, archive_every_s, port) as demo:
        with contextlib.suppress(KeyboardInterrupt, exits.Terminated):
            demo.start()
            demo.show(seconds)
        demo.finish()
        result = demo.result()
    (place / "result.json").write_text(json.dumps(result, indent=1))
    if as_json:
        show.print_json(result)
    else:
        show.console().print(closing(result))
    if not result["complete"]:
        raise typer.Exit(exits.WRONG)


def _spark_is_there() -> bool:
    if importlib.util.find_spec("pyspark") is None:
        exits.told("Spark is left out: PySpark is not installed (pip install 'penstock[spark]')")
        return False
    from penstock.errors import PenstockError
    from penstock.spark import find_java

    try:
        find_java()
    except (PenstockError, OSError) as error:
        exits.told(f"Spark is left out: {error}")
        return False
    return True


def reach_is_there(reach: str) -> bool:
    """Whether a room is part of this build and can be opened."""
    from penstock import address

    try:
        return hasattr(address.room(reach), "open_publisher")
    except ImportError:
        return False


class Demo:
    """The parts, in the order of their starting."""

    def __init__(self, place: Path, archive_every_s: float | None, port: int) -> None:
        self.place, self.spark, self.archive_every_s = place, archive_every_s is not None, archive_every_s
        self.parts: dict[str, Part] = {}
        self.reaches = [reach for reach in SOURCES if reach_is_there(reach)]
        self.began = time.monotonic()
        self.flowed_s = 0.0
        self.most_memory = 0
        self.given_up: list[str] = []
        self.page: Any = _page(port)

    def __enter__(self) -> Demo:
        if self.page is not None:
            self.page.__enter__()
            self.page.start()
            print(f"page   {self.page.url}", file=sys.stderr)
        print(f"data   {self.place}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        for part in reversed(self.parts.values()):
            part.end(10)
        if self.page is not None:
            self.page.__exit__(None, None, None)

    def _begin(self, role: str, configuration: dict[str, Any]) -> Part:
        self.parts[role] = part = Part(role, configuration, self.place / f"{role}.log")
        part.wait_for("ready", PATIENCE_S)
        return part

    def start(self) -> None:
        """Start all parts, the sensors last."""
        if "broker" in self.reaches:
            self._begin("store", {"directory": str(self.place / "broker")})
        addresses = self._addresses()
        reading = {reach: one["read"] for reach, one in addresses.items() if reach != "bus"}
        recording = {one["record"]: SOURCES[reach][0] for reach, one in addresses.items() if reach != "bus"}
        self._begin("readers", {"addresses": reading})
        self._begin("recorder", {"directory": str(self.place / "recording"), "topics": recording})
        links = [[sensor, one["write"]] for reach, one in addresses.items() for sensor in SOURCES[reach]]
        awaited = [one["write"] for reach, one in addresses.items() if reach in ("shm", "tcp")]
        self._begin("edge", {"links": links, "awaited": awaited})
        self.began = time.monotonic()
        if self.spark:
            lake = {
                "directory": str(self.place / "lake"), "recording": str(self.place / "recording"),
                "archive_every_s": self.archive_every_s,
            }  # fmt: skip
            (self.place / "lake").mkdir()
            self.parts["lake"] = Part("lake", lake, self.place / "lake.log")

    def _addresses(self) -> dict[str, dict[str, str]]:
        """The addresses at which each reach is written, read and recorded; reliable if the reach has that option."""
        made: dict[str, dict[str, str]] = {}
        if "bus" in self.reaches:
            made["bus"] = {"write": "bus:plant"}
        if "shm" in self.reaches:
            name = f"shm:/demo-{self.place.name}/camera"
            reader = f"{name}?reliable=true"
            made["shm"] = {"write": f"{name}?reliable=true&slots=32&slot_size=32768", "read": reader, "record": reader}
        if "tcp" in self.reaches:
            name = f"tcp://127.0.0.1:{_free_port()}"
            made["tcp"] = {"write": name, "read": name, "record": name}
        if "broker" in self.reaches:
            name = f"broker://127.0.0.1:{self.parts['store'].report['port']}/temperature"
            queues = {"read": f"{name}?queue=alarms", "record": f"{name}?queue=recorder"}
            made["broker"] = {"write": f"{name}?unconfirmed=64", **queues}
        return made

    def show(self, seconds: float | None) -> None:
        """A live table until the time is over, Ctrl-C, or a part has failed."""
        with _live() as update:
            while seconds is None or time.monotonic() - self.began < seconds:
                self._measure_memory()
                update(self)
                broken = [part for part in self.parts.values() if part.failed]
                if broken:
                    exits.told(f"the demo's {broken[0].role} failed: {broken[0].last_words()}")
                    return
                time.sleep(0.25)

    def _measure_memory(self) -> None:
        from penstock.system import tree_bytes

        self.most_memory = max(self.most_memory, tree_bytes())

    def finish(self) -> None:
        """End in order; a second Ctrl-C ends at once."""
        if "edge" not in self.parts:
            return
        print("ending: sensors, readers, recorder" + (", Spark" * self.spark), file=sys.stderr, flush=True)
        self.flowed_s = time.monotonic() - self.began
        self._measure_memory()
        self._end("edge")
        self._wait_until_arrived()
        self._end("readers")
        self._end("recorder")
        if "lake" in self.parts:
            self._measure_memory()
            self._end("lake")
        if "store" in self.parts:
            self._end("store")

    def _end(self, role: str) -> None:
        if not self.parts[role].end(PATIENCE_S):
            self.given_up.append(role)

    def _wait_until_arrived(self) -> None:
        """Wait until everything has arrived, or until nothing more arrives."""
        before, until = -1, 0.0
        while True:
            counted = [row for row in rows(self) if row["reach"] != "bus"]
            if all(row["delivered"] >= row["published"] for row in counted):
                return
            delivered = sum(row["delivered"] for row in counted)
            if delivered != before:
                before, until = delivered, time.monotonic() + STILL_S
            elif time.monotonic() > until:
                return
            time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        """Every number of the closing table."""
        counted = rows(self)
        recorder = self.parts["recorder"].report if "recorder" in self.parts else {}
        recorded = recorder.get("recorded", {})
        lake = self.parts["lake"].report if "lake" in self.parts else {}
        lost = sum(max(0, row["published"] - row["delivered"]) for row in counted)
        stored = lake.get("parquet", {})
        archived = not self.spark or stored.get("rows") == stored.get("plain_rows") == recorded.get("topics")
        return {
            "seconds": round(self.flowed_s, 3), "reaches": counted, "recorded": recorded, "lost": lost,
            "spark": {key: lake[key] for key in ("archive", "parquet", "rollup", "quality") if key in lake},
            "most_memory_bytes": self.most_memory, "data": str(self.place),
            "page": None if self.page is None else self.page.url,
            "missing_reaches": [reach for reach in SOURCES if reach not in self.reaches],
            "given_up": self.given_up, "errors": recorder.get("errors", {}),
            "complete": archived and everything_arrived(counted, recorder),
        }  # fmt: skip


def everything_arrived(counted: list[dict[str, Any]], recorder: dict[str, Any]) -> bool:
    """Whether each reach delivered, and the recorder stored, exactly what was published there."""
    recorded = recorder.get("recorded", {})
    published = {SOURCES[row["reach"]][0]: row["published"] for row in counted if row["reach"] != "bus"}
    delivered = bool(counted) and all(row["delivered"] == row["published"] for row in counted)
    stored = recorded.get("topics") == published and recorded.get("lost") == 0
    return delivered and stored and bool(recorder.get("finished")) and not recorder.get("errors")


def _page(port: int) -> Any:
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        exits.told("the page is left out: pip install 'penstock[monitor]'")
        return None
    from penstock.monitor.service import Service

    return Service("127.0.0.1", port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _live() -> Iterator[Callable[[Demo], None]]:
    """A table that moves on a terminal; a line every five seconds when piped."""
    if sys.stderr.isatty():
        from rich.live import Live

        with Live(console=show.console(stderr=True), refresh_per_second=4, transient=True) as view:
            yield lambda demo: view.update(live_table(demo))
        return
    printed = time.monotonic()

    def line(demo: Demo) -> None:
        nonlocal printed
        if time.monotonic() - printed >= 5:
            printed = time.monotonic()
            parts = [f"{row['reach']} {row['delivered']}/{row['published']}" for row in rows(demo)]
            print(f"{time.monotonic() - demo.began:5.0f} s  " + "  ".join(parts), file=sys.stderr, flush=True)

    yield line
