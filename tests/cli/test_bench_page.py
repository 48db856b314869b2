"""The page of ``penstock bench --html``, from records such as the harness writes."""

from __future__ import annotations

import re
from typing import Any

from penstock.cli.bench_page import page


def result(name: str, median: float, unit: str = "messages/s", **more: Any) -> dict[str, Any]:
    spread = {"low": median / 2, "high": median * 2, "ratio": 1.0, "wishes": []}
    return {"name": name, "unit": unit, "median": median, **spread, **more}


def record(question: str, results: list[dict[str, Any]], curve: dict[str, Any] | None = None) -> dict[str, Any]:
    machine = {"date": "2026-01-01", "cores": 2, "versions": {"penstock": "1.2.3"}}
    return {"question": question, "machine": machine, "results": results, "failed": {}, "curve": curve}


def test_questions_of_one_curve_become_one_plot_with_a_line_a_candidate() -> None:
    records = [
        record(
            f"at {x}",
            [result("penstock", 10.0 * x), result("peer", 5.0 * x)],
            {"title": "by size", "axis": "bytes", "x": x},
        )
        for x in (64, 1024, 65536)
    ]
    made = page(records)
    assert made.count("<polyline") == 2 and made.count("<circle") == 6 and made.count("<h2>") == 1
    lines = re.findall(r'points="([^"]+)"', made)
    heights = [[float(point.split(",")[1]) for point in line.split()] for line in lines]
    assert all(line == sorted(line, reverse=True) for line in heights), "more is higher"
    assert all(ours < theirs for ours, theirs in zip(*heights, strict=True)), "the faster one is above"


def test_bars_have_verdicts_and_single_timings_a_distribution() -> None:
    timings = {"1": 1e-6, "50": 2e-6, "99": 9e-6, "100": 1e-3}
    wishes = [
        {"wanted": "<= 2 x floor", "got": "1.5 x floor", "reached": True},
        {"wanted": ">= 2 x peer", "got": "peer did not run", "reached": None},
    ]
    made = page(
        [
            record(
                "round trip", [result("penstock", 2e-6, "s", distribution=timings, wishes=wishes), result("floor", 1e-6, "s")]
            )
        ]
    )
    assert made.count("<rect") == 2 + 1 and made.count("<polyline") == 1, "two bars, one line with its legend"
    assert "wanted &lt;= 2 x floor, got 1.5 x floor, reached" in made and "got peer did not run, not judged" in made
    assert "less is better" in made
    assert "penstock 1.2.3" in made


def test_names_are_escaped_and_nothing_comes_from_outside() -> None:
    made = page([record("<script>", [result("<img src=x>", 1.0)])])
    assert "<script" not in made and "<img" not in made and "http" not in made
    assert "Penstock benchmarks" in page([]), "no record, no crash"
