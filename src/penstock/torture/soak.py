"""Soak: every reach at once, at a steady rate, for a long time; nothing may grow.

For each reach one process publishes and one consumes. Memory, descriptors and latency of every process are sampled; a
line is fitted through each series after the first fifth (warm-up), and what it would add over the whole run is compared
with the level: a slope test, not a threshold alone.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from penstock.torture import record
from penstock.torture.crew import Crew, Worker
from penstock.torture.report import Report

RATE_HZ = 2000
MOST = 200  # samples of a series that are compared, each with each
GROWTH = 0.10  # of the level, over the whole run: more than that is a leak
LATENCY_GROWTH = 0.50  # a machine with other work moves it by more than memory
SURE = 3.0  # standard deviations of Mann and Kendall's test: chance alone does this once in 700 series


@dataclass
class Series:
    """Samples of one quantity of one process."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.times.append(at)
        self.values.append(value)

    def growth(self) -> float:
        """What a line through the samples adds over the whole time, relative to their level."""
        times, values = self._thinned()
        if len(values) < 3:
            return 0.0
        pairs = itertools.combinations(zip(times, values, strict=True), 2)
        slope = statistics.median(
            (b - a) / (t - s) for (s, a), (t, b) in pairs if t > s
        )  # Theil and Sen: no outlier moves it
        return slope * (times[-1] - times[0]) / max(statistics.median(values), 1)

    @property
    def rises(self) -> bool:
        """Whether the samples go up more often than chance does."""
        values = self._thinned()[1]
        count = len(values)
        if count < 5:
            return False
        ups = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
        return bool(ups / (count * (count - 1) * (2 * count + 5) / 18) ** 0.5 > SURE)

    def _thinned(self) -> tuple[list[float], list[float]]:
        """Without the first fifth, and at most ``MOST`` of the rest."""
        skip = len(self.values) // 5
        step = max(1, (len(self.values) - skip) // MOST)
        return self.times[skip::step], self.values[skip::step]


def run_soak(minutes: float, seed: int, directory: Path | None = None) -> Report:
    """Run for so many minutes; the report has a row for each process and quantity that grew."""
    import tempfile

    place = Path(tempfile.mkdtemp(prefix="penstock-soak-")) if directory is None else directory
    report = Report("soak", 0, seed, place)
    series: dict[tuple[str, str], Series] = {}
    began = time.monotonic()
    with Crew(place) as crew:
        pairs = _start(crew, place)
        while (passed := time.monotonic() - began) < minutes * 60:
            time.sleep(min(5.0, minutes * 6))
            for worker in crew.workers:
                for name, value in _sample(worker).items():
                    series.setdefault((worker.name, name), Series()).add(passed, value)
        codes = {worker.name: worker.end() for worker in reversed(crew.workers)}  # the broker, started first, last
    report.seconds = time.monotonic() - began
    report.check("all end when asked to", codes, all(code == 0 for code in codes.values()))
    for reach in pairs:
        _judge_reach(report, reach)
        series[f"{reach}-subscriber", "latency (us)"] = _latency(report, reach)
    for (name, quantity), values in sorted(series.items()):
        growth = values.growth()
        allowed = LATENCY_GROWTH if "latency" in quantity else GROWTH
        counted = f"{growth:+.1%} over the run at {statistics.median(values.values or [0]):.0f}"
        held = growth <= allowed or not values.rises
        report.check(f"{name} {quantity} does not grow", counted, held and bool(values.values))
    return report


def _start(crew: Crew, place: Path) -> list[str]:
    """A publisher and a subscriber of every reach that crosses processes."""
    tcp_port = free_port()
    broker_port = free_port()
    broker = [sys.executable, "-m", "penstock", "broker", str(place / "broker"), str(broker_port)]
    crew.add_command("broker", broker)
    reaches = {
        "shm": ("shm:/soak", {"reliable": True, "slots": 64}, {"reliable": True}),
        "tcp": (f"tcp://127.0.0.1:{tcp_port}", {}, {}),
        "journal": (f"journal:{place / 'journal'}#soak", {}, {}),
        "broker": (f"broker://127.0.0.1:{broker_port}/soak", {}, {"queue": "soak"}),
    }
    for reach, (address, for_publisher, for_subscriber) in reaches.items():
        crew.add(
            f"{reach}-publisher", "publish", address, "--options", for_publisher, "--rate", RATE_HZ,
            "--log", place / f"{reach}-published.log", "--ready", 1,
        )  # fmt: skip
        crew.add(
            f"{reach}-subscriber", "consume", address, "--options", for_subscriber,
            "--log", place / f"{reach}-received.log", "--latency", place / f"{reach}-latency.txt",
        )  # fmt: skip
    return list(reaches)


def free_port() -> int:
    """A port on loopback that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sample(worker: Worker) -> dict[str, float]:
    """Own memory in KiB and open descriptors of a worker."""
    assert worker.process is not None
    process = Path("/proc") / str(worker.process.pid)
    try:
        # Not the pages of mapped files: a reader that maps a log of a gigabyte has them, and they can be taken back.
        lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return {
            "memory (KiB)": float(lines["RssAnon"].split()[0]),
            "descriptors": len(os.listdir(process / "fd")),
        }
    except (OSError, KeyError):
        return {}


def _latency(report: Report, reach: str) -> Series:
    """What the subscriber noted; the last line may be torn."""
    found = Series()
    path = report.directory / f"{reach}-latency.txt"
    for line in path.read_text().splitlines()[:-1] if path.exists() else []:
        at, seconds = line.split()
        found.add(float(at), float(seconds) * 1e6)
    return found


def _judge_reach(report: Report, reach: str) -> None:
    published = sum(1 for _ in record.entries(report.directory / f"{reach}-published.log"))
    received = [entry[1] for entry in record.entries(report.directory / f"{reach}-received.log")]
    ordered = received == sorted(set(received))
    report.check(f"{reach}: messages flowed in order", f"{len(received)} of {published}", ordered and bool(received))
