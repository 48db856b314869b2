"""The quality table as an HTML page with plots, and as a table in the terminal.

The page is one file: plots are drawn as SVG here, nothing is fetched when it is opened. Names of topics are escaped.
The table is brought to the driver, so it is bounded: the newest ``MAX_WINDOWS`` windows.
"""

from __future__ import annotations

import datetime
import html
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.spark.pipelines.quality import FAULTS, worst

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from rich.table import Table

MAX_WINDOWS = 20_000
_COLUMNS = (
    ("topic", "topic"), ("window_start", "window"), ("messages", "messages"), ("rate_per_s", "per second"),
    ("payload_bytes", "bytes"), ("missing", "missing"), ("duplicates", "duplicates"), ("out_of_order", "out of order"),
    ("latency_p50_ms", "p50 ms"), ("latency_p99_ms", "p99 ms"),
)  # fmt: skip
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;
margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b2733;background:#fbfcfd}
h1{font-weight:600}h2{margin-top:2.2rem;font-weight:600}table{border-collapse:collapse;width:100%;font-variant-numeric:
tabular-nums}th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #dfe6ec}th:first-child,td:first-child{
text-align:left}th{color:#5b6b7a;font-weight:500}.bad{color:#b3261e;font-weight:600}.plot{display:inline-block;margin:.4rem
1rem .4rem 0}svg{background:#fff;border:1px solid #dfe6ec;border-radius:6px}.note{color:#5b6b7a}
"""


def report(table: DataFrame, path: str | os.PathLike[str], *, title: str = "Quality of topics", most: int = 10) -> Path:
    """Write the page for a quality table atomically; returns its path."""
    rows = _newest(table)
    text = page(rows, [row.asDict() for row in worst(table, most).collect()], title)
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".report-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _newest(table: DataFrame) -> list[dict[str, Any]]:
    from pyspark.sql import functions as F

    newest = table.orderBy(F.col("window_start").desc()).limit(MAX_WINDOWS).collect()
    return sorted((row.asDict() for row in newest), key=lambda row: (row["topic"], row["window_start"]))


def terminal(table: DataFrame, most: int = 20) -> Table:
    """The windows to look at first, for ``rich.print``; all windows are counted in the caption."""
    from rich.table import Table

    rows = _newest(table)
    flawed = [row.asDict() for row in worst(table, most).collect()] or rows[:most]
    made = Table(title="Worst windows", caption=_summary(rows))
    for _, heading in _COLUMNS:
        made.add_column(heading, justify="left" if heading in ("topic", "window") else "right")
    for row in flawed:
        made.add_row(*(_cell(row.get(name)) for name, _ in _COLUMNS))
    return made


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    messages = sum(row["messages"] for row in rows)
    faults = ", ".join(f"{sum(row[name] for row in rows)} {name.replace('_', ' ')}" for name in FAULTS)
    return f"{len(rows)} windows, {messages} messages, {faults}"


def page(rows: Sequence[dict[str, Any]], worst_rows: Sequence[dict[str, Any]], title: str) -> str:
    """The whole page."""
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><p class='note'>{_summary(rows)}</p>",
        "<h2>Worst windows</h2>",
        _html_table(worst_rows) if worst_rows else "<p>Every window is flawless.</p>",
    ]
    for topic in dict.fromkeys(row["topic"] for row in rows):
        own = [row for row in rows if row["topic"] == topic]
        parts.append(f"<h2>{html.escape(str(topic))}</h2>")
        faults = [sum(row[name] for name in FAULTS) for row in own]
        parts.append(plot("messages per second", [row["rate_per_s"] for row in own], own))
        parts.append(plot("faults", faults, own))
        if any(row["latency_p99_ms"] is not None for row in own):
            parts.append(plot("latency p99, ms", [row["latency_p99_ms"] for row in own], own))
        parts.append(plot("mean size, bytes", [row["size_mean"] for row in own], own))
    return "\n".join([*parts, "</body></html>\n"])


def plot(name: str, values: Sequence[float | None], rows: Sequence[dict[str, Any]]) -> str:
    """A small line plot over the windows, from 0 to the greatest value."""
    width, height, edge = 420, 130, 26
    known = [float(value) for value in values if value is not None]
    top = max(known, default=0.0) or 1.0
    step = (width - 2 * edge) / max(1, len(values) - 1)
    points = [
        f"{edge + index * step:.1f},{height - edge - float(value) / top * (height - 2 * edge):.1f}"
        for index, value in enumerate(values)
        if value is not None
    ]
    span = f"{_cell(rows[0]['window_start'])} to {_cell(rows[-1]['window_end'])}" if rows else ""
    dots = "".join(
        f"<circle cx='{p.split(',')[0]}' cy='{p.split(',')[1]}' r='2' fill='#1769aa'/>" for p in points[:200]
    )
    return (
        f"<div class='plot'><svg width='{width}' height='{height}' role='img' aria-label='{html.escape(name)}'>"
        f"<text x='{edge}' y='16' font-size='12' fill='#5b6b7a'>{html.escape(name)} (to {top:.4g})</text>"
        f"<polyline fill='none' stroke='#1769aa' stroke-width='1.5' points='{' '.join(points)}'/>{dots}"
        f"<text x='{edge}' y='{height - 8}' font-size='10' fill='#5b6b7a'>{html.escape(span)}</text></svg></div>"
    )


def _html_table(rows: Sequence[dict[str, Any]]) -> str:
    heads = "".join(f"<th>{heading}</th>" for _, heading in _COLUMNS)
    lines = []
    for row in rows:
        cells = []
        for name, _ in _COLUMNS:
            bad = " class='bad'" if name in FAULTS and row[name] else ""
            cells.append(f"<td{bad}>{html.escape(_cell(row.get(name)))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
