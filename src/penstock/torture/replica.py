"""The replicated broker: nodes of its cluster, whoever leads it, and the broker itself are killed under load.

Faults: a node or the stream's leader is killed, all nodes are killed, a node is stopped for a while (as if it were cut
off), bits of a node's files are turned over, the broker is killed and finds its directory as it was, gone or damaged.
nats-server drops what it cannot read, and when that node leads, the others drop it too (docs/rooms/replica.md): the
broker puts it back from its directory. So after such a fault the directory is left alone until the stream is whole.
``takeover`` has two brokers of one stream instead: the one that leads is killed or stopped, and the other goes on.
Promises: every confirmed message is delivered to every queue, in order, and stands in the log exactly once; clients
reconnect by themselves; the stream and the directory are the same log in the end.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import PenstockError
from penstock.journal import Journal
from penstock.replica import JetStream, Replica
from penstock.replica.cluster import Cluster, Node
from penstock.replica.history import History
from penstock.replica.refill import BOOT_NAME
from penstock.torture import record
from penstock.torture.broker import CONSUMERS, delivered, disordered_runs, keys_of, logged_bytes, publisher_log
from penstock.torture.crew import Crew, grown, wait_until
from penstock.torture.report import Report
from penstock.torture.soak import free_port

PUBLISHERS = 2
STARTING = 128 + signal.SIGTERM  # the code of a broker that is told to end before it has begun
GOES_ON_S = 180.0  # after a fault: elections, refilling
DAMAGED_NODE = "node with damaged files"
FAULTS = (
    "node", "leader", "stopped node", "stopped leader", "all nodes",
    "broker", "broker", "broker without its directory", "broker with a damaged directory", DAMAGED_NODE,
)  # fmt: skip


class Scene:
    """The cluster, the brokers and what may be done to them."""

    def __init__(self, report: Report, cluster: Cluster, crew: Crew, chance: random.Random, brokers: int) -> None:
        self.report = report
        self.cluster = cluster
        self.chance = chance
        self.blocks: JetStream = cluster.connect()
        self.ports = [free_port() for _ in range(brokers)]
        self.directories = [report.directory / f"broker{i}" for i in range(brokers)]
        self.brokers = [crew.add_command(f"server{i}", self._command(i)) for i in range(brokers)]

    def _command(self, i: int) -> list[str]:
        command = [sys.executable, "-m", "penstock", "broker", str(self.directories[i]), str(self.ports[i])]
        return [*command, "--store", self.cluster.address, *(["--standby"] if len(self.ports) > 1 else [])]

    @property
    def address(self) -> str:
        return f"broker://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/torture"

    def leading(self) -> int:
        """The broker that leads: the only one that listens."""
        if len(self.ports) == 1:
            return 0
        found: list[int] = []

        def one_listens() -> bool:  # one that was stopped listens for a moment longer
            found.clear()
            for i, port in enumerate(self.ports):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                    found.append(i)
            return len(found) == 1

        wait_until(one_listens, GOES_ON_S, "one broker leads")
        return found[0]

    def goes_on(self, fault: str, since: int) -> None:
        """Wait until more has been confirmed than ``since``."""
        wait_until(lambda: logged_bytes(self.report) > since, GOES_ON_S, f"publishing goes on after {fault}")

    def leader(self) -> Node:
        """Who leads the stream at the moment; any node where nobody says."""
        try:
            name = self.blocks.describe().get("cluster", {}).get("leader")
        except (PenstockError, OSError):
            name = None
        found = [node for node in self.cluster.nodes if node.name == name]
        return found[0] if found else self.chance.choice(self.cluster.nodes)

    def lead(self, node: Node) -> None:
        """Ask for other leaders until it is this one, for a while."""
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and self.leader() is not node:
            with contextlib.suppress(PenstockError, OSError):
                self.blocks.step_down(node.name)
            time.sleep(0.5)

    def whole(self) -> bool:
        """Whether every block that counts is there: another machine could open it."""
        try:
            history = History(self.blocks, self.blocks.bounds())
            for segment in history.segments:
                for _ in history.commits(segment):
                    pass
        except (PenstockError, OSError):
            return False
        return True

    def strike(self, fault: str) -> None:
        """Do it, and start again what was ended; with several brokers once another one has gone on."""
        if "broker" in fault:
            i = self.leading()
            broker = self.brokers[i]
            if fault.startswith("stopped"):
                broker.signal(signal.SIGSTOP)
            else:
                broker.kill()
            time.sleep(0.1)  # what it had confirmed is written by then
            since = logged_bytes(self.report)
            if fault == "broker without its directory":
                shutil.rmtree(self.directories[i])
            elif fault == "broker with a damaged directory":
                self._damage(self.directories[i])
            if len(self.brokers) > 1:
                self.goes_on(fault, since)
            if fault.startswith("stopped"):
                broker.signal(signal.SIGCONT)
            else:
                broker.start()
            return
        nodes = [self.leader() if "leader" in fault else self.chance.choice(self.cluster.nodes)]
        nodes = self.cluster.nodes if fault == "all nodes" else nodes
        if fault.startswith("stopped"):
            nodes[0].signal(signal.SIGSTOP)
            time.sleep(self.chance.uniform(0, 4))
            nodes[0].signal(signal.SIGCONT)
            return
        for node in nodes:
            node.kill()
            if fault == DAMAGED_NODE:
                self._flip([*node.directory.rglob("*.blk")])
        time.sleep(self.chance.uniform(0, 1))
        for node in nodes:
            node.start()
        if fault == DAMAGED_NODE:  # the damage is seen on the stream when that node leads
            self.lead(nodes[0])
            wait_until(self.whole, GOES_ON_S, "the stream is whole again")

    def _damage(self, directory: Path) -> None:
        """As after a power cut: nothing was synced, so anything may be missing."""
        (directory / BOOT_NAME).unlink(missing_ok=True)
        logs = sorted(directory.glob("*.log"))
        self._flip(logs)
        if logs and self.chance.random() < 0.5:
            os.truncate(logs[-1], self.chance.randrange(logs[-1].stat().st_size + 1))

    def _flip(self, files: list[Path]) -> None:
        files = [path for path in files if path.stat().st_size]
        if files:
            path = self.chance.choice(files)
            with path.open("r+b") as file:
                at = self.chance.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0] ^ 1 << self.chance.randrange(8)
                file.seek(at)
                file.write(bytes([byte]))


def run(report: Report, chance: random.Random, faults: Sequence[str] = FAULTS, brokers: int = 1) -> None:
    pauses: dict[str, list[float]] = collections.defaultdict(list)
    with Cluster(report.directory / "nodes") as cluster, Crew(report.directory) as crew:
        cluster.connect().close()
        scene = Scene(report, cluster, crew, chance, brokers)
        address = scene.address
        consumers = [
            crew.add(
                f"consumer{i}", "consume", address, "--options", {"queue": f"torture{i}", "timeout": GOES_ON_S},
                "--log", report.directory / f"consumer{i}.log",
            )
            for i in range(CONSUMERS)
        ]  # fmt: skip
        publishers = [
            crew.add(
                f"publisher{i}", "publish", address, "--producer", i + 1, "--ready", CONSUMERS, "--rate", 500,
                "--options", {"timeout": GOES_ON_S}, "--log", publisher_log(report, i),
            )
            for i in range(PUBLISHERS)
        ]  # fmt: skip
        for i in range(PUBLISHERS):
            log = publisher_log(report, i)
            wait_until(lambda log=log: grown(log, record.ENTRY.size), 60, f"{log.name} begins")  # type: ignore[misc]
        for _ in range(report.kills):
            time.sleep(chance.uniform(0, 0.5))
            fault = chance.choice(faults)
            since, began = logged_bytes(report), time.monotonic()
            scene.strike(fault)
            if len(scene.brokers) == 1:
                scene.goes_on(fault, max(since, logged_bytes(report)))
            pauses[fault].append(time.monotonic() - began)
        codes = [worker.end() for worker in publishers]
        confirmed = {key for i in range(PUBLISHERS) for key in keys_of(publisher_log(report, i))}
        caught_up = True
        try:
            wait_until(
                lambda: all(confirmed <= delivered(report, i) for i in range(CONSUMERS)),
                GOES_ON_S,
                "the consumers have caught up",
            )
        except TimeoutError:
            caught_up = False
        led = scene.leading()
        codes += [worker.end() for worker in consumers]
        codes += [0 if (code := broker.end()) == STARTING else code for broker in scene.brokers]
        here, there = _log(scene.directories[led]), _refilled(report.directory / "other", cluster)
        scene.blocks.close()
    report.check("all end when asked to", codes, all(code == 0 for code in codes))
    lost = sum(len(confirmed - delivered(report, i)) for i in range(CONSUMERS))
    report.check("messages flowed", len(confirmed), len(confirmed) > report.kills)
    report.check("every confirmed message is delivered to both queues", f"{lost} lost", caught_up and lost == 0)
    disordered = sum(disordered_runs(report, i) for i in range(CONSUMERS))
    report.check("order per publisher, first deliveries", f"{disordered} runs out of order", disordered == 0)
    twice = len(here) - len(set(here))
    report.check("each message is in the log once", f"{twice} twice, {len(here)} in all", twice == 0)
    absent = len(confirmed - set(here))
    report.check("every confirmed message is in the log", f"{absent} not", absent == 0)
    report.check("another machine has the same log", f"{len(there)} messages", here == there)
    for fault, seconds in sorted(pauses.items()):
        worst = f"{sorted(seconds)[len(seconds) // 2]:.1f} s in the median, {max(seconds):.1f} s at most"
        report.facts[f"{fault}, {len(seconds)} times, to the next confirm"] = worst


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
