"""Soak: every reach at once, at half of its speed, for a long time; nothing may grow.

For each reach one process publishes and one consumes (the bus: one process, two threads). First all run for some
seconds as fast as they go beside each other; half of what each reached is its rate. Then memory, descriptors and
latency of every process are sampled; a line is fitted through each series after the first fifth (warm-up), and what it
would add over the whole run is compared with the level: a slope test, not a threshold alone. The journal keeps
``KEPT_BYTES`` and the broker what its queue has not passed, so their files are held against a bound.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import penstock
from penstock.torture import record
from penstock.torture.crew import Crew, Worker, wait_until
from penstock.torture.report import Report

CALIBRATION_S = 10.0  # at most; a tenth of a shorter run
MOST_PADDING_BYTES = 64
MOST = 200  # at most so many samples of a series are compared pairwise
GROWTH = 0.10  # relative growth over the whole run; more is called a leak
LATENCY_GROWTH = 0.50  # other load on the machine changes latency more than memory
KEPT_BYTES = 64 << 20  # the journal's retention; reached in the warm-up, so that the number of segments stays constant
# Retention counts logs; indexes come on top, half as long for messages this short, and segments are freed whole.
FILES_BYTES = {"journal": KEPT_BYTES * 7 // 4, "broker": 256 << 20}
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
        """How much a line through the samples rises over the whole run, relative to their level."""
        times, values = self._thinned()
        if len(values) < 3:
            return 0.0
        pairs = itertools.combinations(zip(times, values, strict=True), 2)
        slope = statistics.median(
            (b - a) / (t - s) for (s, a), (t, b) in pairs if t > s
        )  # the Theil-Sen estimator: robust against outliers
        return slope * (times[-1] - times[0]) / max(statistics.median(values), 1)

    @property
    def rises(self) -> bool:
        """Whether the samples rise more often than chance explains."""
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
    rates = _calibrate(place / "calibration", min(CALIBRATION_S, minutes * 6))
    most_files = dict.fromkeys(FILES_BYTES, 0)
    with Crew(place) as crew:
        pairs = _start(crew, place, rates)
        _wait_until_all_deliver(place, pairs)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < minutes * 60:
            time.sleep(min(5.0, minutes * 6))
            for worker in crew.workers:
                for name, value in _sample(worker).items():
                    series.setdefault((worker.name, name), Series()).add(passed, value)
            for name in most_files:
                most_files[name] = max(most_files[name], _bytes_in(place / name))
        codes = _end(crew, place)
    report.seconds = time.monotonic() - began
    report.check("all end when asked to", codes, all(code == 0 for code in codes.values()))
    for reach in pairs:
        _judge_reach(report, reach, rates[reach])
        series[f"{reach}-subscriber", "latency (us)"] = _latency(report, reach)
    for name, held_bytes in most_files.items():
        counted = f"{held_bytes >> 20} of {FILES_BYTES[name] >> 20} MiB at most"
        report.check(f"{name}: its files stay within bounds", counted, 0 < held_bytes <= FILES_BYTES[name])
    for (name, quantity), values in sorted(series.items()):
        growth = values.growth()
        allowed = LATENCY_GROWTH if "latency" in quantity else GROWTH
        counted = f"{growth:+.1%} over the run at {statistics.median(values.values or [0]):.0f}"
        held = growth <= allowed or not values.rises
        report.check(f"{name} {quantity} does not grow", counted, held and bool(values.values))
    if report.passed and directory is None:
        shutil.rmtree(place)
    return report


def _calibrate(place: Path, seconds: float) -> dict[str, float]:
    """Half of the messages per second that each reach delivers when all run unthrottled at once."""
    place.mkdir()
    with Crew(place) as crew:
        reaches = _start(crew, place, {})
        _wait_until_all_deliver(place, reaches)
        before, began = {reach: _received(place, reach).total for reach in reaches}, time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        rates = {reach: (_received(place, reach).total - before[reach]) / passed / 2 for reach in reaches}
        _end(crew, place)
    shutil.rmtree(place)
    return rates


def _start(crew: Crew, place: Path, rates: dict[str, float]) -> list[str]:
    """Start a publisher and a subscriber of every reach, unthrottled if no rate is given."""
    tcp_port = free_port()
    broker_port = free_port()
    broker = [sys.executable, "-m", "penstock", "broker", str(place / "broker"), str(broker_port), "--retain-queues"]
    crew.add_command("broker", broker)
    kept = {"retain_bytes": KEPT_BYTES, "segment_bytes": KEPT_BYTES // 16}
    reaches = {
        "shm": ("shm:/soak", {"reliable": True, "slots": 64}, {"reliable": True}),
        "tcp": (f"tcp://127.0.0.1:{tcp_port}", {}, {}),
        "journal": (f"journal:{place / 'journal'}#soak", kept, {}),
        "broker": (f"broker://127.0.0.1:{broker_port}/soak", {}, {"queue": "soak"}),
    }
    penstock.publisher(reaches["journal"][0], **kept).close()  # a reader does not create a journal if it comes first
    common = ("--tally", "--most", MOST_PADDING_BYTES)
    for reach, (address, for_publisher, for_subscriber) in reaches.items():
        crew.add(
            f"{reach}-publisher", "publish", address, "--options", for_publisher, "--rate", rates.get(reach, 0),
            "--log", place / f"{reach}-published.tally", "--ready", 1, *common,
        )  # fmt: skip
        crew.add(
            f"{reach}-subscriber", "consume", address, "--options", for_subscriber,
            "--log", place / f"{reach}-received.tally", "--latency", place / f"{reach}-latency.txt", *common,
        )  # fmt: skip
    crew.add(
        "bus-subscriber", "both", "bus:soak", "--rate", rates.get("bus", 0), "--ready", 1,
        "--log", place / "bus-published.tally", "--received", place / "bus-received.tally",
        "--latency", place / "bus-latency.txt", *common,
    )  # fmt: skip
    return [*reaches, "bus"]


def _wait_until_all_deliver(place: Path, reaches: list[str]) -> None:
    wait_until(lambda: all(_received(place, reach).total for reach in reaches), 60, "every reach delivers")


def _end(crew: Crew, place: Path) -> dict[str, int]:
    """End publishers first, then subscribers once they have everything, the broker last. Returns the exit codes."""
    codes = {worker.name: worker.end() for worker in crew.workers if worker.name.endswith("publisher")}
    for reach in (name.removesuffix("-publisher") for name in codes):
        published = record.counts(place / f"{reach}-published.tally").total
        with contextlib.suppress(TimeoutError):  # the counts will show what is missing
            wait_until(lambda r=reach, p=published: _received(place, r).total >= p, 60, "all arrives")  # type: ignore[misc]
    rest = [worker for worker in reversed(crew.workers) if worker.name not in codes]
    return codes | {worker.name: worker.end() for worker in rest}


def _received(place: Path, reach: str) -> record.Counts:
    return record.counts(place / f"{reach}-received.tally")


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
        # Without the pages of mapped files: the kernel can reclaim them, and a reader of a large log maps many.
        lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return {
            "memory (KiB)": float(lines["RssAnon"].split()[0]),
            "descriptors": len(os.listdir(process / "fd")),
        }
    except (OSError, KeyError):
        return {}


def _bytes_in(directory: Path) -> int:
    """The total size of a directory's files; a file that is deleted meanwhile does not count."""
    found = 0
    for path in directory.iterdir() if directory.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def _latency(report: Report, reach: str) -> Series:
    """The latencies that the subscriber logged; the last line may be incomplete."""
    found = Series()
    path = report.directory / f"{reach}-latency.txt"
    for line in path.read_text().splitlines()[:-1] if path.exists() else []:
        at, seconds = line.split()
        found.add(float(at), float(seconds) * 1e6)
    return found


def _judge_reach(report: Report, reach: str, rate_hz: float) -> None:
    published = record.counts(report.directory / f"{reach}-published.tally").total
    received = _received(report.directory, reach)
    # A message that was being published at the end may have arrived without being counted.
    whole = received.missing == received.disordered == 0 and published <= received.total <= published + 1
    wrong = f"{received.missing} missing, {received.disordered} out of order"
    counted = f"{received.total} of {published} at {rate_hz:.0f} a second asked for, {wrong}"
    report.check(f"{reach}: everything arrives in order", counted, whole and received.total > 0)
