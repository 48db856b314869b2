"""The gateway: ``penstock run`` with a module in a process of its own, which is killed again and again under load.

Promises: only the message that a killed process was handling can be missing, and it is counted; only such a message can
arrive twice, if it had been passed on; order holds; the gateway and its other modules go on; when it ends no process,
shared file or descriptor is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from penstock.torture import record
from penstock.torture.crew import Crew, Worker, grown, own_shared_directory, shared_files_left, wait_until
from penstock.torture.report import Report


def run(report: Report, chance: random.Random) -> None:
    with own_shared_directory(report.directory), Crew(report.directory) as crew:
        file = _configuration(report.directory)
        gateway = crew.add_command("gateway", [sys.executable, "-m", "penstock", "run", str(file), "--json"])
        _torture(report, chance, gateway)
        report.check("nothing is left when all are gone", *_none_left(shared_files_left(report.directory)))


def _configuration(directory: Path) -> Path:
    here = "penstock.torture.modules"
    modules: list[dict[str, Any]] = [
        {
            "name": "source",
            "loader": {"name": "python", "entrypoint": f"{here}:Numbers"},
            "args": {"log": str(directory / "published.log"), "pause_s": 0.001, "burst": 2},
        },
        {
            "name": "relay",
            "loader": {"name": "process", "entrypoint": f"{here}:Relay"},
            "restart": {"policy": "on_failure", "backoff_s": 0.01, "max_backoff_s": 0.05, "limit": None},
        },
        {
            "name": "notes",
            "loader": {"name": "python", "entrypoint": f"{here}:Notes"},
            "args": {"log": str(directory / "received.log")},
        },
    ]
    links = [{"source": "source", "sink": "relay"}, {"source": "relay", "sink": "notes"}]
    file = directory / "gateway.json"
    file.write_text(json.dumps({"modules": modules, "links": links}))
    return file


def _torture(report: Report, chance: random.Random, gateway: Worker) -> None:
    received = report.directory / "received.log"
    wait_until(lambda: grown(received, 100 * record.ENTRY.size), 120, "messages flow")
    ever: dict[int, str] = {}  # with the start time of each: the system reuses pids
    samples: list[int] = []
    restarts: list[float] = []
    for _ in range(report.kills):
        time.sleep(chance.uniform(0, 0.1))
        victim = _child(gateway)
        ever[victim] = _start_time(victim)
        if chance.random() < 0.2:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.2))
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda victim=victim: _child(gateway) not in (0, victim), 60, "the next one runs")  # type: ignore[misc]
        size = received.stat().st_size + 10 * record.ENTRY.size
        wait_until(lambda size=size: grown(received, size), 60, "messages flow again")  # type: ignore[misc]
        restarts.append(time.monotonic() - began)
        samples.append(gateway.descriptors())
    report.check_descriptors("gateway", samples, gateway.descriptors)
    last = _child(gateway)
    ever[last] = _start_time(last)
    code = gateway.end()
    report.check("the gateway ends when asked to", code, code == 0)
    report.facts["restart to next message, median s"] = round(sorted(restarts)[len(restarts) // 2], 3)
    left = [pid for pid, began in ever.items() if _is_running(pid) and _start_time(pid) == began]
    report.check("no process is left", left or "none", not left)
    _judge(report, gateway)


def _child(gateway: Worker) -> int:
    """The pid of the module's process; 0 while there is none."""
    assert gateway.process is not None
    pid = gateway.process.pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                if b"penstock.gateway.child" in Path(f"/proc/{child}/cmdline").read_bytes() and _is_running(int(child)):
                    return int(child)
    return 0


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _start_time(pid: int) -> str:
    """When the process started, in ticks since boot; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _judge(report: Report, gateway: Worker) -> None:
    rows = {row["module"]: row for row in _table(gateway)}
    published = [sequence for _, sequence, _ in record.entries(report.directory / "published.log")]
    entries = list(record.entries(report.directory / "received.log"))
    received = [sequence for _, sequence, _ in entries]
    missing = set(published) - set(received)
    twice = len(received) - len(set(received))
    lost = rows.get("relay", {}).get("lost", -1)
    report.facts.update(published=len(published), received=len(received))
    report.check("messages flowed", len(received), len(received) > 10 * report.kills)
    report.check("only what was in hand is missing", f"{len(missing)} missing", len(missing) <= report.kills)
    told = len(missing) <= lost <= report.kills
    report.check("what is missing is counted", f"{len(missing)} missing, {lost} counted", told)
    report.check("none comes twice", f"{twice} twice", twice == 0)
    report.check("order", "ascending", all(before < after for before, after in itertools.pairwise(received)))
    report.check("no wrong byte", "none", all(producer for producer, _, _ in entries))
    counted = rows.get("notes", {}).get("received", -1), rows.get("source", {}).get("published", -1)
    balanced = counted == (len(received), len(published))
    report.check("the closing table counts right", f"received, published: {counted}", balanced)


def _table(gateway: Worker) -> list[dict[str, Any]]:
    for line in reversed(gateway.log.read_text().splitlines()):
        if line.startswith("["):
            rows: list[dict[str, Any]] = json.loads(line)
            return rows
    return []


def _none_left(found: list[str]) -> tuple[object, bool]:
    return found or "none", not found
