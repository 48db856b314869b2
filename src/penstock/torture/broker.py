"""The broker: its server is killed again and again under four publishers and two acknowledging consumers, and their
connections are closed in between.

Each consumer has a queue of its own, because order is guaranteed only then: consumers that share a queue get each
other's redeliveries. Promises: every confirmed message is delivered at least once to every queue; none is corrupted;
the first deliveries of one publisher's messages come in its order; clients reconnect by themselves.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.torture import record
from penstock.torture.crew import Crew, descriptors, grown, wait_until
from penstock.torture.relay import Relay
from penstock.torture.report import Report
from penstock.torture.soak import free_port

PUBLISHERS, CONSUMERS = 4, 2


def run(report: Report, chance: random.Random) -> None:
    port = free_port()
    cuts = 0
    restarts: list[float] = []
    samples: list[int] = []
    with Crew(report.directory) as crew, Relay(port) as relay:
        address = f"broker://127.0.0.1:{relay.port}/torture"
        command = [sys.executable, "-m", "penstock", "broker", str(report.directory / "broker"), str(port)]
        server = crew.add_command("server", command)
        consumers = [
            crew.add(
                f"consumer{i}", "consume", address, "--options", {"queue": f"torture{i}"},
                "--log", report.directory / f"consumer{i}.log",
            )
            for i in range(CONSUMERS)
        ]  # fmt: skip
        publishers = [
            crew.add(
                f"publisher{i}", "publish", address, "--producer", i + 1, "--ready", CONSUMERS,
                "--log", report.directory / f"publisher{i}.log",
            )
            for i in range(PUBLISHERS)
        ]  # fmt: skip
        for worker in publishers:
            log = report.directory / f"{worker.name}.log"
            wait_until(lambda log=log: grown(log, record.ENTRY.size), 60, f"{log.name} begins")  # type: ignore[misc]
        for _ in range(report.kills):
            time.sleep(chance.uniform(0, 0.3))
            if chance.random() < 0.3:
                cuts += relay.cut()
                time.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.2:
                server.pause(chance.uniform(0, 0.3))
            server.kill()
            began = time.monotonic()
            size = logged_bytes(report)
            server.start()
            wait_until(lambda size=size: logged_bytes(report) > size, 60, "publishing goes on")  # type: ignore[misc]
            restarts.append(time.monotonic() - began)
            samples.append(descriptors(publishers + consumers))
        report.check_descriptors("clients", samples, lambda: descriptors(publishers + consumers))
        codes = [worker.end() for worker in publishers]
        confirmed = {key for i in range(PUBLISHERS) for key in keys_of(publisher_log(report, i))}
        caught_up = True
        try:
            wait_until(
                lambda: all(confirmed <= delivered(report, i) for i in range(CONSUMERS)),
                120,
                "the consumers have caught up",
            )
        except TimeoutError:
            caught_up = False
        codes += [worker.end() for worker in consumers] + [server.end()]
    report.check("all end when asked to", codes, all(code == 0 for code in codes))
    lost = sum(len(confirmed - delivered(report, i)) for i in range(CONSUMERS))
    report.facts.update({"confirmed": len(confirmed), "connections cut": cuts})
    report.facts["restart to next confirm, median s"] = round(sorted(restarts)[len(restarts) // 2], 3)
    report.check("messages flowed", len(confirmed), len(confirmed) > report.kills)
    report.check("every confirmed message is delivered to both queues", f"{lost} lost", caught_up and lost == 0)
    wrong = sum(b"wrong bytes" in worker.log.read_bytes() for worker in consumers)
    report.check("no wrong byte", f"{wrong} consumers saw one", wrong == 0)
    disordered = sum(disordered_runs(report, i) for i in range(CONSUMERS))
    report.check("order per publisher, first deliveries", f"{disordered} runs out of order", disordered == 0)


def publisher_log(report: Report, i: int) -> Path:
    return report.directory / f"publisher{i}.log"


def logged_bytes(report: Report) -> int:
    return sum(path.stat().st_size for path in report.directory.glob("publisher*.log"))


def delivered(report: Report, i: int) -> set[int]:
    return set(keys_of(report.directory / f"consumer{i}.log"))


def keys_of(log: Path) -> Iterator[int]:
    """Producer and sequence packed into one number, to save memory: there are millions."""
    return (producer << 48 | sequence for producer, sequence, _ in record.entries(log))


def disordered_runs(report: Report, i: int) -> int:
    """How many producers' first deliveries to one consumer are not in ascending order."""
    firsts = (list(dict.fromkeys(sequences)) for sequences in record.runs(report.directory / f"consumer{i}.log"))
    return sum(first != sorted(first) for first in firsts)
