"""The replicated broker: faults befall its cluster, the broker itself and a follower, several at a time, under load.

Faults: nodes, the stream's leader, the broker and the follower are killed (with and without their files, or with bits
of them turned over), stopped, cut off by nftables in both directions or in one, and their clocks are set
(``penstock.torture.scene``). Those of one round hold at the same time; ``kills`` counts each of them.
``takeover`` has two brokers of one stream instead: something happens to the one that leads, and the other goes on.
Promises: every confirmed message is delivered to every queue, in order, and stands in the log exactly once; clients
reconnect by themselves; the stream, the broker's directory and the follower's are the same log in the end.

The scenario runs in a process of its own, in a network namespace where there may be one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.errors import PenstockError
from penstock.journal import Journal
from penstock.journal.verify import verify
from penstock.replica import Replica
from penstock.replica.cluster import Cluster
from penstock.torture import network, record, scene, wall_clock
from penstock.torture.broker import CONSUMERS, delivered, disordered_runs, keys_of, logged_bytes, publisher_log
from penstock.torture.crew import Crew, Worker, grown, wait_until
from penstock.torture.report import Check, Report
from penstock.torture.scene import GOES_ON_S, Scene

PUBLISHERS = 2
STARTING = 128 + signal.SIGTERM  # the code of a broker that is told to end before it has begun
HOLD_S = 10.0  # faults hold for at most so long, most of them shorter: an election takes 4 s or more
OFTEN = 0.75  # how often something happens to the broker, or to the follower, beside the nodes


def run(report: Report, chance: random.Random, brokers: int = 1) -> None:
    """Run it in a process of its own, and take over what that has found."""
    way, no_network = network.namespace()
    no_clock = wall_clock.unavailable()
    words = [report.scenario, report.kills, chance.randrange(1 << 32), report.directory, brokers, no_network, no_clock]
    command = [*way, sys.executable, "-m", "penstock.torture.replica", *map(str, words)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        text, _ = child.communicate()
    except BaseException:
        child.send_signal(signal.SIGINT)  # once: Ctrl-C does not reach its session, and it ends all others in order
        child.wait()
        raise
    if child.returncode != 0:
        report.check("the scenario comes to its end", f"code {child.returncode}", False)
        return
    found = json.loads(text.splitlines()[-1])
    report.checks += [Check(**fields) for fields in found["checks"]]
    report.facts.update(found["facts"])


class Plan:
    """What happens: rounds of faults that hold at the same time, as the seed says."""

    def __init__(self, chance: random.Random, count: int, brokers: int, cuts: bool, clocks: bool) -> None:
        self._chance = chance
        self._count = count
        self._brokers = brokers

        def kinds(killed: tuple[str, ...], cut: tuple[str, ...], clock: tuple[str, ...]) -> list[str]:
            return [*killed, *(cut if cuts else ()), *(clock if clocks else ())]

        self._of_nodes = kinds(scene.NODE_KILLS, scene.NODE_CUTS, scene.NODE_CLOCKS)
        self._of_broker = kinds(scene.BROKER_KILLS, scene.BROKER_CUTS, scene.BROKER_CLOCKS)
        self._of_leading = kinds(scene.TAKEOVER_KILLS, scene.BROKER_CUTS, ())
        self._of_follower = kinds(scene.FOLLOWER_KILLS, scene.FOLLOWER_CUTS, scene.FOLLOWER_CLOCKS)

    def rounds(self) -> Iterator[tuple[list[str], random.Random]]:
        """The faults of each round, and the chance that decides where they strike."""
        left = self._count
        while left:
            faults = self._round()[:left]
            left -= len(faults)
            yield faults, random.Random(self._chance.getrandbits(64))

    def _round(self) -> list[str]:
        chance = self._chance
        if self._brokers > 1:
            return [chance.choice(self._of_leading)]
        faults = [chance.choice(self._of_nodes)]
        if faults[0] not in scene.LOSSES and chance.random() < OFTEN:
            faults.append(chance.choice(self._of_broker))
        if chance.random() < OFTEN:
            faults.append(chance.choice(self._of_follower))
        return faults


def torture(report: Report, plan: Plan, lan: network.Network | None, brokers: int) -> None:
    """Strike, then count."""
    pauses: dict[str, list[float]] = collections.defaultdict(list)
    with Crew(report.directory) as crew:
        stage = Scene(report, lan, crew, brokers)
        with stage.running(), flowing(stage, crew) as (publishers, consumers):
            for faults, chance in plan.rounds():
                took = strike(stage, faults, chance)
                for fault in faults:
                    pauses[fault].append(took)
            judge(stage, publishers, consumers)
    for fault, seconds in sorted(pauses.items()):
        worst = f"{sorted(seconds)[len(seconds) // 2]:.1f} s in the median, {max(seconds):.1f} s at most"
        report.facts[f"{fault}, {len(seconds)} times, to the next confirm"] = worst


def strike(stage: Scene, faults: list[str], chance: random.Random) -> float:
    """One round; how long it took until something was confirmed after it."""
    time.sleep(chance.uniform(0, 0.5))
    began = time.monotonic()
    with contextlib.ExitStack() as broken:
        for fault in faults:
            broken.enter_context(stage.fault(fault, random.Random(chance.getrandbits(64))))
        time.sleep(0.1)  # what had been confirmed is written by then
        since = logged_bytes(stage.report)
        if len(stage.brokers) > 1:
            stage.wait_for_progress(faults, since)  # another one leads meanwhile
        else:
            time.sleep(HOLD_S * chance.random() ** 2)
    stage.wait_for_progress(faults, logged_bytes(stage.report))
    stage.restart_ended()
    return time.monotonic() - began


@contextlib.contextmanager
def flowing(stage: Scene, crew: Crew) -> Iterator[tuple[list[Worker], list[Worker]]]:
    """Publishers, consumers and the follower, once messages flow."""
    report, address = stage.report, stage.address
    consumers = [
        crew.add(
            f"consumer{i}", "consume", address, "--options", {"queue": f"torture{i}", "timeout": GOES_ON_S},
            "--log", report.directory / f"consumer{i}.log", "--ledger",
        )
        for i in range(CONSUMERS)
    ]  # fmt: skip
    publishers = [
        crew.add(
            f"publisher{i}", "publish", address, "--producer", i + 1, "--ready", CONSUMERS, "--rate", 100,
            "--options", {"timeout": GOES_ON_S}, "--log", publisher_log(report, i),
        )
        for i in range(PUBLISHERS)
    ]  # fmt: skip
    for i in range(PUBLISHERS):
        log = publisher_log(report, i)
        wait_until(lambda log=log: grown(log, record.ENTRY.size), 60, f"{log.name} begins")  # type: ignore[misc]
    stage.follower.start()
    yield publishers, consumers


def judge(stage: Scene, publishers: list[Worker], consumers: list[Worker]) -> None:
    """End everything in order, and check every promise."""
    report = stage.report
    codes = [worker.end() for worker in publishers]
    confirmed = {key for i in range(PUBLISHERS) for key in keys_of(publisher_log(report, i))}
    caught_up = _until(lambda: all(confirmed <= delivered(report, i) for i in range(CONSUMERS)), "consumers catch up")
    led = stage.leading()
    codes += [worker.end() for worker in consumers]
    codes += [0 if (code := broker.end()) == STARTING else code for broker in stage.brokers]
    broker = stage.directories[led]
    end = _frontier(broker)
    followed = _until(lambda: _has_copied(stage.copy, end), "the follower has caught up")
    codes.append(0 if (code := stage.follower.end()) == STARTING else code)
    here, copied = _log(broker), _log(stage.copy)
    there = _refilled(report.directory / "other", stage.cluster)
    report.check("all end when asked to", codes, all(code == 0 for code in codes))
    report.check("none ends by itself", stage.ended or "none", not stage.ended)
    lost = sum(len(confirmed - delivered(report, i)) for i in range(CONSUMERS))
    report.check("messages flowed", len(confirmed), len(confirmed) > report.kills)
    report.check("every confirmed message is delivered to both queues", f"{lost} lost", caught_up and lost == 0)
    disordered = sum(disordered_runs(report, i) for i in range(CONSUMERS))
    report.check("order per publisher, first deliveries", f"{disordered} runs out of order", disordered == 0)
    unbalanced = [worker.name for worker in consumers if not _balanced(worker)]
    report.check("the ledgers of the consumers balance", unbalanced or "both", not unbalanced)
    twice = len(here) - len(set(here))
    report.check("each message is in the log once", f"{twice} twice, {len(here)} in all", twice == 0)
    absent = len(confirmed - set(here))
    report.check("every confirmed message is in the log", f"{absent} not", absent == 0)
    numbers = [[key for key in here if key >> 48 == i + 1] for i in range(PUBLISHERS)]
    report.check("order per publisher, in the log", "both", all(keys == sorted(keys) for keys in numbers))
    report.check("another machine has the same log", f"{len(there)} messages", here == there)
    report.check("the follower has the same log", f"{len(copied)} messages", followed and here == copied)
    damages = [str(damage) for place in (broker, stage.copy) for damage in verify(place)]
    report.check("no damage is left", damages or "none", not damages)


def _until(condition: Callable[[], bool], what: str) -> bool:
    try:
        wait_until(condition, GOES_ON_S, what)
    except TimeoutError:
        return False
    return True


def _balanced(consumer: Worker) -> bool:
    """What the consumer printed in the end: matched is delivered and dropped."""
    books = [json.loads(line) for line in consumer.log.read_text().splitlines() if line.startswith('{"matched"')]
    return bool(books) and bool(books[-1]["balanced"])


def _has_copied(copy: Path, end: int) -> bool:
    try:
        return _frontier(copy) >= end
    except (PenstockError, OSError):  # the follower is just mending it
        return False


def _frontier(directory: Path) -> int:
    with Journal(directory, mode="read") as journal:
        return journal.frontier


def _log(directory: Path) -> list[int]:
    """Producer and sequence of each message, in the order of the log."""
    with Journal(directory, mode="read") as journal:
        found: list[int] = []
        start = journal.first
        while start < journal.frontier:
            batch = journal.read_many(start, 4096)
            for message in batch:
                producer, sequence = record.look(bytes(message)) or (0, 0)
                found.append(producer << 48 | sequence)
            start += len(batch)
        return found


def _refilled(directory: Path, cluster: Cluster) -> list[int]:
    """The same from the stream alone."""
    blocks = cluster.connect()
    try:
        Journal(directory, disk=Replica(directory, blocks).disk()).close()
    finally:
        blocks.close()
    return _log(directory)


def main() -> None:
    scenario, kills, seed, directory, brokers, no_network, no_clock = sys.argv[1:]
    report = Report(scenario, int(kills), int(seed), Path(directory))
    plan = Plan(random.Random(int(seed)), int(kills), int(brokers), not no_network, not no_clock)
    for what, reason in (("cuts", no_network), ("clock jumps", no_clock)):
        if reason:
            report.facts[f"without {what}"] = reason
    with contextlib.ExitStack() as stack:
        lan = None if no_network else stack.enter_context(network.Network())
        torture(report, plan, lan, int(brokers))
    print(json.dumps({"checks": [vars(check) for check in report.checks], "facts": report.facts}))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
