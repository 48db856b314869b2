"""Shared memory: publishers and subscribers of one channel killed and stopped at random.

Promises: no wrong byte; per subscriber and publisher the order holds; a reliable subscriber misses nothing between its
first and its last message; a dead process never blocks a living one; nothing is left when all have ended.
"""

from __future__ import annotations

import itertools
import random
import signal
import time

from penstock.torture import record
from penstock.torture.crew import Crew, Worker, own_shared_directory, shared_files_left
from penstock.torture.report import Report

ADDRESS = "shm:/torture"
PUBLISHERS, SUBSCRIBERS = 3, 3


def run(report: Report, chance: random.Random) -> None:
    with own_shared_directory(report.directory), Crew(report.directory) as crew:
        _torture(report, chance, crew)


def _torture(report: Report, chance: random.Random, crew: Crew) -> None:
    subscribers = [_subscriber(crew, i) for i in range(SUBSCRIBERS)]
    publishers = [_publisher(crew, i) for i in range(PUBLISHERS)]
    for worker in publishers + subscribers:
        crew.wait_moving(worker)
    stuck = 0
    for _ in range(report.kills):
        time.sleep(chance.uniform(0, 0.05))
        victim = chance.choice(publishers + subscribers)
        if chance.random() < 0.2:
            victim.signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.05))
        victim.kill()
        victim.start()
        crew.wait_moving(victim)
    stuck += sum(not crew.moves(worker) for worker in publishers + subscribers)
    report.check("who lives goes on after the last kill", f"{stuck} stuck", stuck == 0)
    codes = [worker.end() for worker in publishers]
    time.sleep(0.2)
    codes += [worker.end() for worker in subscribers]
    report.check("all end when asked to", codes, all(code == 0 for code in codes))
    _judge(report, publishers, subscribers)


def _publisher(crew: Crew, i: int) -> Worker:
    log = crew.directory / f"publisher{i}.{{incarnation}}.log"
    options = {"slots": 64, "slot_size": 1024, "reliable": True}
    return crew.add(
        f"publisher{i}", "publish", ADDRESS, "--log", log, "--options", options,
        "--producer", f"{i + 1}0{{incarnation}}", "--rate", 2000,
    )  # fmt: skip


def _subscriber(crew: Crew, i: int) -> Worker:
    log = crew.directory / f"subscriber{i}.{{incarnation}}.log"
    return crew.add(f"subscriber{i}", "consume", ADDRESS, "--log", log, "--options", {"reliable": True})


def _judge(report: Report, publishers: list[Worker], subscribers: list[Worker]) -> None:
    received = disordered = missed = 0
    for path in report.directory.glob("subscriber*.log"):
        ordinals = [ordinal for _, _, ordinal in record.entries(path)]
        received += len(ordinals)
        missed += sum(after - before - 1 for before, after in itertools.pairwise(ordinals))
        disordered += sum(sequences != sorted(set(sequences)) for sequences in record.runs(path))
    confirmed = sum(1 for path in report.directory.glob("publisher*.log") for _ in record.entries(path))
    wrong = sum(b"wrong bytes" in worker.log.read_bytes() for worker in subscribers)
    report.facts.update(published=confirmed, received=received)
    report.check("messages flowed", received, received > 100)
    report.check("no wrong byte", f"{wrong} subscribers saw one", wrong == 0)
    report.check("order per publisher and subscriber", f"{disordered} runs out of order", disordered == 0)
    report.check("a reliable subscriber misses nothing", f"{missed} missing ordinals", missed == 0)
    left = shared_files_left(report.directory)
    report.check("nothing is left when all are gone", left or "no file", not left)
