"""Spark: a streaming query from one journal to another; its driver, JVM and Python workers are killed together.

A thread of this process writes on meanwhile, over three topics and in small segments. Promise: started again from its
checkpoint the query goes on, and in the end the target holds every message of the source exactly once, under its
topic and byte for byte.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

from penstock.torture import record
from penstock.torture.crew import Crew, Worker, processes_of_session, wait_until
from penstock.torture.report import Report

START_S = 300  # a JVM on a loaded machine


def run(report: Report, chance: random.Random) -> None:
    with Crew(report.directory) as crew, _Writer(report.directory / "source") as writer:
        restarts: list[float] = []
        for kill in range(report.kills):
            query = _query(crew, f"query{kill}", "follow")
            began = time.monotonic()
            _wait_batches(query, 1)
            restarts.append(time.monotonic() - began)
            _wait_batches(query, chance.randint(1, 4))
            time.sleep(chance.uniform(0, 0.5))  # so that the kill comes anywhere within a batch
            if chance.random() < 0.3:
                query.pause(chance.uniform(0, 1))
            if not query.alive:
                report.check("a query runs until it is killed", query.log.read_text()[-300:], False)
                return
            query.kill()
        writer.end()
        report.facts["confirmed"] = writer.confirmed
        last = _query(crew, "query-last", "finish")
        assert last.process is not None
        code = last.process.wait(START_S * 2)
        report.check("the last query ends by itself", code, code == 0)
        with contextlib.suppress(TimeoutError):  # the JVM ends a moment after its driver
            wait_until(lambda: not _living_processes(crew), 60, "all of Spark has ended")
        left = _living_processes(crew)
        report.check("no process is left", left or "none", not left)
    _judge(report, writer.confirmed)
    report.facts["start to first batch, median s"] = round(sorted(restarts)[len(restarts) // 2], 1)


class _Writer(threading.Thread):
    """Appends to the source until ``end``: fast at first, then just enough to keep the query busy."""

    TOPICS, EACH, PLENTY = ("a.x", "a.y", "b"), 40, 12_000

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.confirmed = 0
        self.failed: BaseException | None = None
        self.told = threading.Event()

    def run(self) -> None:
        from penstock.journal import Journal

        try:
            with Journal(self.path, segment_bytes=1 << 18) as journal:
                while not self.told.is_set():
                    topic = self.confirmed // self.EACH % len(self.TOPICS)
                    numbers = range(self.confirmed, self.confirmed + self.EACH)
                    journal.append_many(self.TOPICS[topic], [record.make(topic, number, 60) for number in numbers])
                    self.confirmed += self.EACH
                    self.told.wait(0.005 if self.confirmed < self.PLENTY else 0.5)
        except BaseException as error:
            self.failed = error

    def end(self) -> None:
        """Stop the thread and wait for it; raises its error, if any."""
        self.told.set()
        self.join()
        if self.failed is not None:
            raise self.failed

    def __enter__(self) -> Self:
        self.start()
        wait_until(lambda: self.confirmed > 0 or self.failed is not None, 60, "the writer confirms")
        return self

    def __exit__(self, *_: object) -> None:
        self.told.set()
        self.join()


def _living_processes(crew: Crew) -> list[int]:
    return [pid for query in crew.workers for pid in processes_of_session(query)]


def _query(crew: Crew, name: str, how: str) -> Worker:
    places = [str(crew.directory / part) for part in ("source", "target", "checkpoint")]
    command = [sys.executable, "-m", "penstock.torture.query", *places, how]
    return crew.add_command(name, command, own_session=True)


def _wait_batches(query: Worker, wanted: int) -> None:
    def reached() -> bool:
        return query.log.read_text(errors="replace").count("batch ") >= wanted or not query.alive

    wait_until(reached, START_S, f"{wanted} batches of {query.name}")


def _judge(report: Report, confirmed: int) -> None:
    source, target = (_everything(report.directory / name) for name in ("source", "target"))
    lost, added = source - target, target - source
    twice = sum(count > 1 for count in target.values())
    report.facts.update(source=source.total(), target=target.total())
    report.check("messages flowed", target.total(), target.total() > 0 and confirmed == source.total())
    report.check("nothing is lost", f"{lost.total()} of {source.total()}", not lost)
    report.check("nothing is written twice", f"{twice} twice", twice == 0)
    report.check("nothing is there that was not written", added.total(), not added)
    wrong = sum(record.look(data) is None for _, data in target)
    report.check("no wrong byte", wrong, wrong == 0)


def _everything(path: Path) -> Counter[tuple[str, bytes]]:
    """How often each message, by topic and bytes, is in a journal."""
    from penstock.journal import Journal

    found: Counter[tuple[str, bytes]] = Counter()
    position = 1
    with Journal(path, mode="read") as journal:
        while len(batch := journal.read_many(position, 4096)) > 0:
            found.update((str(message.channel), bytes(message)) for message in batch)
            position = (batch[-1].position or 0) + 1
    return found
