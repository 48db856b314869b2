"""The journal: its writer is killed repeatedly; each time it must be intact and hold everything confirmed."""

from __future__ import annotations

import random
import time

from penstock.torture import record
from penstock.torture.crew import Crew, grown, wait_until
from penstock.torture.report import Report


def run(report: Report, chance: random.Random) -> None:
    address = f"journal:{report.directory / 'journal'}#torture"
    restarts: list[float] = []
    samples: list[int] = []
    with Crew(report.directory) as crew:
        log = report.directory / "writer.{incarnation}.log"
        writer = crew.add(
            "writer", "publish", address, "--log", log, "--producer", "{incarnation}", start=False,
        )  # fmt: skip
        reader = crew.add(
            "reader", "consume", address, "--options", {"start": "first"},
            "--log", report.directory / "reader.log", start=False,
        )  # fmt: skip
        for kill in range(report.kills):
            began = time.monotonic()
            writer.start()
            path = report.directory / f"writer.{writer.started}.log"
            wait_until(lambda path=path: grown(path, record.ENTRY.size), 60, "the writer confirms")  # type: ignore[misc]
            restarts.append(time.monotonic() - began)
            if kill == 0:
                reader.start()
            time.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.2:
                writer.pause(chance.uniform(0, 0.1))
            writer.kill()
            if grown(report.directory / "reader.log", record.ENTRY.size):
                samples.append(reader.descriptors())
        confirmed = _confirmed(report)
        wait_until(lambda: _seen(report) >= len(confirmed) or not reader.alive, 60, "the reader has caught up")
        if samples and reader.alive:
            report.check_descriptors("reader", samples, reader.descriptors)
        code = reader.end()
    report.check("the reader ends when asked to", code, code == 0)
    _judge(report, confirmed)
    report.facts["restart to first confirm, median s"] = round(sorted(restarts)[len(restarts) // 2], 3)


def _confirmed(report: Report) -> set[tuple[int, int]]:
    logs = report.directory.glob("writer.*.log")
    return {(producer, sequence) for path in logs for producer, sequence, _ in record.entries(path)}


def _seen(report: Report) -> int:
    return len({entry[:2] for entry in record.entries(report.directory / "reader.log")})


def _judge(report: Report, confirmed: set[tuple[int, int]]) -> None:
    from penstock.journal import Journal

    stored: list[tuple[int, int]] = []
    wrong = 0
    with Journal(report.directory / "journal", mode="read") as journal:
        position = 1
        while len(batch := journal.read_many(position, 4096)) > 0:
            for message in batch:
                found = record.look(bytes(message))
                wrong += found is None
                if found is not None:
                    stored.append(found)
            position = (batch[-1].position or 0) + 1
        damage = journal.verify() if hasattr(journal, "verify") else []
    report.facts.update(confirmed=len(confirmed), stored=len(stored))
    report.check("messages flowed", len(confirmed), len(confirmed) > report.kills)
    report.check("every confirmed message is stored", f"{len(confirmed - set(stored))} lost", confirmed <= set(stored))
    report.check("no wrong byte", wrong, wrong == 0)
    report.check("stored once, in order", len(stored) - len(set(stored)), stored == sorted(set(stored)))
    seen = [entry[:2] for entry in record.entries(report.directory / "reader.log")]
    report.check("a reader that follows sees the same", f"{len(seen)} of {len(stored)}", seen == stored[: len(seen)])
    report.check("the journal verifies", damage, not damage)
