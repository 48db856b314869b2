"""A cluster, its brokers and a follower, each on a machine of its own, and the faults that may befall them.

Every fault is a context manager: entered it breaks something, left it mends that. So several may hold at the same time,
of the nodes, of the brokers and of the follower one each. Two take more care. nats-server drops what it cannot read,
and when that node leads, the others drop it too (docs/rooms/replica.md); a node without its files votes for anybody. In
both cases the broker puts back from its directory what is lost. So while a node has lost something (``LOSSES``),
nothing happens to the broker, and the fault ends when the stream is whole and all nodes are in step.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from penstock.errors import PenstockError
from penstock.replica import JetStream
from penstock.replica.cluster import Cluster, Node
from penstock.replica.history import History
from penstock.replica.refill import BOOT_NAME
from penstock.torture import wall_clock
from penstock.torture.broker import logged_bytes
from penstock.torture.crew import Crew, Worker, wait_until
from penstock.torture.network import Machine, Network
from penstock.torture.report import Report
from penstock.torture.soak import free_port

NODES = 3
GOES_ON_S = 180.0  # after a fault: elections, refilling
LEADS_S = 15.0  # how long another leader is asked for
JUMPS_S = (1, 30, 3600, 86400)
LOSSES = ("node with flipped bits", "node without its files")
NODE_KILLS = ("node killed", "leader killed", "all nodes killed", "node stopped", "leader stopped", *LOSSES)
NODE_CUTS = (
    "node cut off", "leader cut off", "leader cut off from the nodes", "node that hears nobody",
    "leader that hears nobody", "leader that nobody hears", "all nodes cut off from each other",
)  # fmt: skip
NODE_CLOCKS = ("clock of a node", "clock of the leader", "clocks of all nodes")
BROKER_KILLS = ("broker killed", "broker without its directory", "broker with a damaged directory")
TAKEOVER_KILLS = ("broker killed", "broker killed", "broker stopped", "broker without its directory")
BROKER_CUTS = (
    "broker cut off", "broker cut off from the leader", "broker that hears nobody", "broker that nobody hears",
)  # fmt: skip
BROKER_CLOCKS = ("clock of the broker",)
FOLLOWER_KILLS = ("follower killed", "follower with flipped bits", "follower without its directory")
FOLLOWER_CUTS = ("follower cut off", "follower that hears nobody")
FOLLOWER_CLOCKS = ("clock of the follower",)

Fault = Callable[[random.Random], AbstractContextManager[None]]


class Scene:
    """The participants. ``start_follower`` starts the follower once the stream is not empty."""

    def __init__(self, report: Report, network: Network | None, crew: Crew, brokers: int) -> None:
        def machine(name: str) -> Machine:
            return Machine(name) if network is None else network.machine(name)

        self.report = report
        self.network = network
        self.ended: list[str] = []  #: processes that ended by themselves, with their last output
        self._nodes = [machine(f"node{i + 1}") for i in range(NODES)]
        self._brokers = [machine(f"broker{i}") for i in range(brokers)]
        self._follower = machine("follower")
        self.cluster = Cluster(report.directory / "nodes", hosts=[each.address for each in self._nodes])
        for node, place in zip(self.cluster.nodes, self._nodes, strict=True):
            node.within = place.within
        self.ports = [free_port() for _ in range(brokers)]
        self.directories = [report.directory / f"broker{i}" for i in range(brokers)]
        self.copy = report.directory / "follower"
        self.brokers = [crew.add_command(f"broker{i}", self._command(i), start=False) for i in range(brokers)]
        command = [sys.executable, "-m", "penstock", "replica", str(self.copy), "--store", self.cluster.address]
        self.follower = crew.add_command("follower", [*self._follower.within, *command], start=False)
        self.blocks: JetStream

    def _command(self, i: int) -> list[str]:
        place = self._brokers[i]
        command = [sys.executable, "-m", "penstock", "broker", str(self.directories[i]), str(self.ports[i])]
        command += ["--store", self.cluster.address, "--host", place.address]
        command += [] if self.network is None else ["--insecure"]
        return [*place.within, *command, *(["--standby"] if len(self.ports) > 1 else [])]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The nodes and the brokers."""
        with self.cluster:
            self.blocks = self.cluster.connect()
            try:
                for broker in self.brokers:
                    broker.start()
                yield
            finally:
                self.blocks.close()

    @property
    def address(self) -> str:
        places = zip(self._brokers, self.ports, strict=True)
        return f"broker://{','.join(f'{place.address}:{port}' for place, port in places)}/torture"

    # -- how it is --------------------------------------------------------------------------------------------------

    def leading(self) -> int:
        """The broker that leads: the only one that listens."""
        if len(self.ports) == 1:
            return 0
        found: list[int] = []

        def one_listens() -> bool:  # one that was stopped listens for a moment longer
            found.clear()
            for i, port in enumerate(self.ports):
                with contextlib.suppress(OSError), socket.create_connection((self._brokers[i].address, port), 5):
                    found.append(i)
            return len(found) == 1

        wait_until(one_listens, GOES_ON_S, "one broker leads")
        return found[0]

    def wait_for_progress(self, faults: Sequence[str], since: int) -> None:
        """Wait until more has been confirmed than ``since``."""
        what = f"publishing goes on after {', '.join(faults)}"
        wait_until(lambda: logged_bytes(self.report) > since, GOES_ON_S, what)

    def restart_ended(self) -> None:
        """Note who ended by itself, and start it again."""
        for worker in (*self.brokers, self.follower):
            if not worker.alive:
                words = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
                self.ended.append(f"{worker.name}: {' '.join(words)[-300:]}")
                worker.start()

    def leader(self, chance: random.Random) -> int:
        """The node that leads the stream at the moment; any node if that is not known."""
        any_node = chance.randrange(NODES)
        try:
            name = self.blocks.describe().get("cluster", {}).get("leader")
        except (PenstockError, OSError):
            name = None
        return next((i for i, node in enumerate(self.cluster.nodes) if node.name == name), any_node)

    def lead(self, node: Node) -> None:
        """Ask for other leaders until it is this one, for a while."""
        deadline = time.monotonic() + LEADS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(PenstockError, OSError):
                if self.blocks.describe().get("cluster", {}).get("leader") == node.name:
                    return
                self.blocks.step_down(node.name)
            time.sleep(0.2)

    def in_step(self) -> bool:
        """Whether every node is there and has what the leader has."""
        try:
            found = self.blocks.describe().get("cluster", {})
        except (PenstockError, OSError):
            return False
        replicas = found.get("replicas") or []
        return bool(found.get("leader")) and [each.get("current") for each in replicas] == [True] * (NODES - 1)

    def stream_is_complete(self) -> bool:
        """Whether every block that counts is there: another machine could open it."""
        try:
            history = History(self.blocks, self.blocks.bounds())
            for segment in history.segments:
                for _ in history.commits(segment):
                    pass
        except (PenstockError, OSError):
            return False
        return True

    # -- faults -----------------------------------------------------------------------------------------------------

    def fault(self, name: str, chance: random.Random) -> AbstractContextManager[None]:
        """The fault of this name. What ``chance`` gives depends on how things stand, so it serves for this one only."""
        if name in NODE_CLOCKS or name in BROKER_CLOCKS or name in FOLLOWER_CLOCKS:
            return self._clock(name, chance)
        if name.startswith("broker"):
            return self._broker_fault(name, chance)
        if name.startswith("follower"):
            return self._follower_fault(name, chance)
        i = self.leader(chance) if name.startswith("leader") else chance.randrange(NODES)
        if name in LOSSES:
            return self._node_loss(name, self.cluster.nodes[i], chance)
        if name in NODE_CUTS:
            return self._cut(name, self._nodes[i], [each for each in self._everybody if each is not self._nodes[i]])
        nodes = self.cluster.nodes if name.startswith("all") else [self.cluster.nodes[i]]
        return self._stopped(nodes) if name.endswith("stopped") else self._killed(nodes)

    @property
    def _everybody(self) -> list[Machine]:
        return [*self._nodes, *self._brokers, self._follower]

    @contextlib.contextmanager
    def _killed(self, nodes: list[Node]) -> Iterator[None]:
        for node in nodes:
            node.kill()
        yield
        for node in nodes:
            node.start()

    @contextlib.contextmanager
    def _stopped(self, who: Sequence[Node | Worker]) -> Iterator[None]:
        for each in who:
            each.signal(signal.SIGSTOP)
        yield
        for each in who:
            each.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _node_loss(self, name: str, node: Node, chance: random.Random) -> Iterator[None]:
        wait_until(self.in_step, GOES_ON_S, "all nodes are in step")
        node.kill()
        if name == "node without its files":
            shutil.rmtree(node.directory / "data")
        else:
            flip([*node.directory.rglob("*.blk")], chance)
        yield
        node.start()
        if name == "node with flipped bits":
            self.lead(node)  # the damage is seen on the stream when that node leads
        wait_until(self.in_step, GOES_ON_S, f"all nodes are in step after {name}")
        wait_until(self.stream_is_complete, GOES_ON_S, f"the stream is whole after {name}")

    def _cut(self, name: str, one: Machine, others: list[Machine]) -> AbstractContextManager[None]:
        """Cut one machine off, in both directions, in one, or from some others, depending on the name."""
        assert self.network is not None
        if name.endswith("from the nodes"):
            others = [each for each in others if each in self._nodes]
        from_one, to_one = [(one, each) for each in others], [(each, one) for each in others]
        if name.startswith("all"):
            return self.network.cut([(a, b) for a in self._nodes for b in self._nodes if a is not b])
        if name.endswith("hears nobody"):
            return self.network.cut(to_one)
        return self.network.cut(from_one if name.endswith("nobody hears") else from_one + to_one)

    @contextlib.contextmanager
    def _broker_fault(self, name: str, chance: random.Random) -> Iterator[None]:
        i = self.leading()
        broker, directory = self.brokers[i], self.directories[i]
        if name in BROKER_CUTS:
            nodes = [self._nodes[self.leader(chance)]] if name.endswith("the leader") else self._nodes
            with self._cut(name, self._brokers[i], nodes):
                yield
            return
        if name == "broker stopped":
            with self._stopped([broker]):
                yield
            return
        broker.kill()
        if name == "broker without its directory":
            shutil.rmtree(directory)
        elif name == "broker with a damaged directory":
            lose_power(directory, chance)
        yield
        broker.start()

    @contextlib.contextmanager
    def _follower_fault(self, name: str, chance: random.Random) -> Iterator[None]:
        if name in FOLLOWER_CUTS:
            with self._cut(name, self._follower, self._nodes):
                yield
            return
        self.follower.kill()
        if name == "follower without its directory":
            shutil.rmtree(self.copy, ignore_errors=True)
        elif name == "follower with flipped bits":
            flip([path for path in self.copy.glob("*") if path.is_file()], chance)
        yield
        self.follower.start()

    @contextlib.contextmanager
    def _clock(self, name: str, chance: random.Random) -> Iterator[None]:
        """A clock that was set stays so until the process ends."""
        seconds = chance.choice(JUMPS_S) * chance.choice((-1, 1))
        if "node" in name or "leader" in name:
            i = self.leader(chance) if "leader" in name else chance.randrange(NODES)
            nodes = self.cluster.nodes if name.startswith("clocks") else [self.cluster.nodes[i]]
            processes = [node.process for node in nodes]
        else:
            processes = [self.follower.process if "follower" in name else self.brokers[self.leading()].process]
        for process in processes:
            if process is not None and process.poll() is None:
                wall_clock.shift(process.pid, seconds)
        yield


def lose_power(directory: Path, chance: random.Random) -> None:
    """What a power cut leaves of a directory that is not synced: anything may be missing."""
    (directory / BOOT_NAME).unlink(missing_ok=True)
    logs = sorted(directory.glob("*.log"))
    flip(logs, chance)
    if logs and chance.random() < 0.5:
        os.truncate(logs[-1], chance.randrange(logs[-1].stat().st_size + 1))


def flip(files: list[Path], chance: random.Random) -> None:
    """Flip one bit of one of the files."""
    files = [path for path in files if path.stat().st_size]
    if files:
        path = chance.choice(files)
        with path.open("r+b") as file:
            at = chance.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0] ^ 1 << chance.randrange(8)
            file.seek(at)
            file.write(bytes([byte]))
