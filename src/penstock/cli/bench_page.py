"""The page of ``penstock bench --html``: bars with their spread, curves, distributions; nothing from outside.

It takes the records that ``benchmarks/harness.py`` writes.
"""

from __future__ import annotations

import html
import math
from typing import Any

Record = dict[str, Any]

COLOURS = ("#0a7", "#c60", "#67c", "#a4a", "#888", "#b33", "#5a2", "#29b")
WIDTH, HEIGHT, LEFT, TOP = 860, 260, 90, 12


def page(records: list[Record]) -> str:
    """One self-contained page."""
    machine = dict(records[0]["machine"]) if records else {}
    versions = machine.pop("versions", {})
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    facts += ". Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()) if versions else ""
    curves: dict[str, list[Record]] = {}
    for record in records:
        if record.get("curve"):
            curves.setdefault(record["curve"]["title"], []).append(record)
    plots = [_curve(title, found) for title, found in curves.items()]
    plots += [_bars(record) + _distribution(record) for record in records if not record.get("curve")]
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Penstock benchmarks</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; --ours: #0a7; --peer: #89a; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h2 {{ font-size: 1.05rem; margin: 2rem 0 .3rem; }} svg {{ width: 100%; height: auto; }}
text {{ fill: currentColor; font: 12px system-ui, sans-serif; }} .note {{ opacity: .7; font-size: .85rem; }}
.grid {{ stroke: currentColor; opacity: .15; }}
</style></head><body><h1>Penstock benchmarks</h1>
<p class="note">{html.escape(facts)}. Medians; thin lines are the spread; candidates were interleaved.</p>
{"".join(plots)}</body></html>"""


def verdict(wish: dict[str, Any]) -> str:
    """Whether a wish was reached, as text."""
    if wish["reached"] is None:
        return "not judged"
    return "reached" if wish["reached"] else "not reached"


def _bars(record: Record) -> str:
    results = record["results"]
    if not results:
        return ""
    most = max(result["high"] for result in results)
    rows = []
    for i, result in enumerate(results):
        y = 24 * i
        width, low, high = (430 * result[key] / most for key in ("median", "low", "high"))
        colour = "var(--ours)" if "penstock" in result["name"] else "var(--peer)"
        label = f"{_figure(result['median'], result['unit'])}  ({result['ratio']:.2f}x)"
        rows.append(
            f'<text x="0" y="{y + 16}">{html.escape(result["name"][:34])}</text>'
            f'<rect x="230" y="{y + 4}" width="{max(width, 1):.1f}" height="15" fill="{colour}"/>'
            f'<line x1="{230 + low:.1f}" x2="{230 + high:.1f}" y1="{y + 11.5}" y2="{y + 11.5}" stroke="currentColor"/>'
            f'<text x="{238 + high:.1f}" y="{y + 16}">{html.escape(label)}</text>'
        )
    verdicts = [
        f"{result['name']}: wanted {wish['wanted']}, got {wish['got']}, {verdict(wish)}"
        for result in results
        for wish in result["wishes"]
    ]
    return (
        f"<h2>{html.escape(record['question'])}{_direction(results[0])}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {24 * len(results) + 4}" role="img">{"".join(rows)}</svg>'
        f'<p class="note">{html.escape("; ".join(verdicts))}</p>'
    )


def _curve(title: str, records: list[Record]) -> str:
    """One line per candidate on two logarithmic axes, so that the slope shows how it grows."""
    series: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for result in record["results"]:
            series.setdefault(result["name"], []).append((record["curve"]["x"], result["median"]))
    if not series:
        return ""
    unit = next(result["unit"] for record in records for result in record["results"])
    less = _direction(next(result for record in records for result in record["results"]))
    return f"<h2>{html.escape(title)}{less}</h2>" + _lines(series, records[0]["curve"]["axis"], unit)


def _distribution(record: Record) -> str:
    """Percentiles of single timings, from the fastest to the slowest."""
    series = {
        result["name"]: [(_nines(float(p)), seconds) for p, seconds in result["distribution"].items()]
        for result in record["results"]
        if result.get("distribution")
    }
    if not series:
        return ""
    ticks = [(_nines(p), f"{p:g} %") for p in (1, 50, 90, 99, 99.9)]
    return _lines(series, "of all took at most this long", "s", ticks)


def _nines(percent: float) -> float:
    """The position of a percentile on an axis that stretches the slow end: 90, 99 and 99.9 are one step apart."""
    return 10 ** -math.log10(max(1 - percent / 100, 0.0005))


def _lines(
    series: dict[str, list[tuple[float, float]]], axis: str, unit: str, ticks: list[tuple[float, str]] | None = None
) -> str:
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points if y > 0]
    low_x, high_x = math.log10(xs[0]), math.log10(xs[-1])
    low_y, high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (math.log10(x) - low_x) / max(high_x - low_x, 1e-9)

    def down(y: float) -> float:
        return TOP + HEIGHT * (high_y - math.log10(max(y, 1e-12))) / max(high_y - low_y, 1)

    parts = []
    for power in range(low_y, high_y + 1):
        y = down(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="0" y="{y + 4:.1f}">{html.escape(_figure(10.0**power, unit))}</text>')
    for x, label in ticks or [(x, _figure(x, "")) for x in xs]:
        place = f'x="{across(x):.1f}" y="{TOP + HEIGHT + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{html.escape(label)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{html.escape(axis)}</text>')
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        at = TOP + HEIGHT + 56 + 16 * (i // 3)
        left = LEFT + 250 * (i % 3)
        parts.append(f'<rect x="{left}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 15}" y="{at}">{html.escape(name[:36])}</text>')
    bottom = TOP + HEIGHT + 64 + 16 * ((len(series) - 1) // 3)
    return f'<svg viewBox="0 0 {WIDTH} {bottom}" role="img">{"".join(parts)}</svg>'


def _direction(result: Record) -> str:
    return " (less is better)" if result["unit"] == "s" else ""


def _figure(value: float, unit: str) -> str:
    scales = (
        ((1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
        if unit == "s"
        else ((1e9, "G "), (1e6, "M "), (1e3, "k "), (1, ""))
    )
    scale, prefix = next((pair for pair in scales if value >= pair[0] * 0.999), scales[-1])
    return f"{value / scale:.3g} {prefix}{unit}".strip()
