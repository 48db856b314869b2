"""The demo's tables: while it runs, and at the end. Every number comes out of a part's report."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.cli import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.cli.demo.conductor import Demo

__all__ = ["closing", "live_table", "rows"]

COLUMNS = ("reach", "published", "delivered", "lost", "p50", "p99", "most", "ledger")
RIGHT = COLUMNS[1:7]


def rows(demo: Demo) -> list[dict[str, Any]]:
    """One row per reach: what the sensors published there, and what its reader has received."""
    from penstock.cli.demo.conductor import SOURCES

    edge = demo.parts["edge"].report if "edge" in demo.parts else {}
    readers = demo.parts["readers"].report.get("readers", {}) if "readers" in demo.parts else {}
    made = []
    for reach in demo.reaches:
        reader = edge.get("bus", {}) if reach == "bus" else readers.get(reach, {})
        published = sum(edge.get("published", {}).get(sensor, 0) for sensor in SOURCES[reach])
        made.append({"reach": reach, "published": published, "delivered": 0, "balanced": True, **reader})
    return made


def _cells(row: dict[str, Any], final: bool) -> tuple[str, ...]:
    def latency(name: str) -> str:
        return show.seconds_text(row[name] / 1e6) if name in row else "-"

    lost = row["published"] - row["delivered"] if final else row.get("lost", 0)
    return (
        row["reach"], show.count_text(row["published"]), show.count_text(row["delivered"]), show.count_text(lost),
        latency("p50_us"), latency("p99_us"), latency("most_us"), "balanced" if row["balanced"] else "NOT balanced",
    )  # fmt: skip


def live_table(demo: Demo) -> RenderableType:
    """What flows now."""
    from rich.console import Group
    from rich.text import Text

    seconds = time.monotonic() - demo.began
    head = Text(f"{seconds:.0f} s", style="bold")
    if demo.page is not None:
        head.append(f"   page {demo.page.url}", style="cyan")
    lines = [show.table(COLUMNS, [_cells(row, False) for row in rows(demo)], RIGHT)]
    recorded = demo.parts["recorder"].report.get("recorded", {}) if "recorder" in demo.parts else {}
    tail = Text(
        f"recorded {show.count_text(recorded.get('messages', 0))} ({show.bytes_text(recorded.get('bytes', 0))})"
    )
    if "lake" in demo.parts:
        archive = demo.parts["lake"].report.get("archive")
        tail.append(f"   Spark {show.count_text(archive['rows'])} rows" if archive else "   Spark is starting")
    tail.append(f"   memory {show.bytes_text(demo.most_memory)}")
    tail.append("\nevery process reports twice a second: two columns may be half a second apart", style="dim")
    return Group(head, *lines, tail)


def closing(result: dict[str, Any]) -> RenderableType:
    """The closing table."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [
        show.table(COLUMNS, [_cells(row, True) for row in result["reaches"]], RIGHT,
                   title=f"what flowed in {result['seconds']:.1f} s")
    ]  # fmt: skip
    recorded = result["recorded"]
    facts = [("recorded", f"{show.count_text(recorded.get('messages', 0))} messages, {recorded.get('lost', 0)} lost")]
    facts += [("failed", f"{address}: {error}") for address, error in result["errors"].items()]
    facts += [("given up", f"{role} did not end") for role in result["given_up"]]
    spark = result["spark"]
    if "parquet" in spark:
        total = sum(spark["parquet"]["rows"].values())
        rounds = spark.get("archive", {}).get("rounds", 0)
        facts.append(("lake", f"{show.count_text(total)} rows in {rounds} rounds: {spark['parquet']['directory']}"))
        facts.append(
            ("rollup", f"{spark['rollup']['rows']} rows of {show.count_text(spark['rollup']['readings'])} readings")
        )
        found = spark["quality"]
        facts.append(
            ("quality", f"{found['missing']} missing, {found['duplicates']} twice, {found['out_of_order']} late")
        )
    facts.append(("memory", f"{show.bytes_text(result['most_memory_bytes'])} at most, all processes together"))
    facts.append(("data", result["data"]))
    if result["missing_reaches"]:
        facts.append(("left out", f"{', '.join(result['missing_reaches'])}: not part of this build"))
    verdict = ("every message arrived", "bold green") if result["complete"] else ("NOT everything arrived", "bold red")
    for name, text in facts:
        lines.append(Text.assemble((f"{name:<10}", "bold"), text))
    lines.append(Text(verdict[0], style=verdict[1]))
    return Group("", *lines, "", *(Text(line) for line in _what_next(result)))


def _what_next(result: dict[str, Any]) -> list[str]:
    """What a new user may look at next."""
    penstock = "penstock" if shutil.which("penstock") else os.path.relpath(sys.argv[0])
    quality = result["spark"].get("quality")
    found = [("the quality of every topic, a page", quality["page"])] if quality else []
    found += [
        ("publish the recording again", f"{penstock} play {result['data']}/recording --map '*=shm:/{{topic}}'"),
        ("watch it, in another terminal", f"{penstock} monitor"),
        ("ten minutes by hand", "docs/tutorial.md"),
    ]
    return ["what to look at next:", *(f"  {what:<36}{where}" for what, where in found)]
