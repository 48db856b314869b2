"""The broker over a cluster of three nodes on this machine, beside nats-py on the same cluster: every message is synced
by the nodes before it is confirmed. Then how far a follower is behind the leader at 100,000 messages a second.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Candidate, compare, options
from peers_broker import BrokerPeer, NatsPeer, Peer, free_port
from wishes import ahead_of, reaching

import penstock
from penstock.replica.cluster import Cluster

COUNTS = {1: 500, 100: 20_000, 10_000: 300_000}
WISHES = {1: (), 100: (reaching(50_000), ahead_of("nats-py")), 10_000: (reaching(400_000),)}
RATE, TICK_S = 100_000, 0.01


class ReplicatedPeer(BrokerPeer):
    note = "confirmed after the sync of two of three nodes"

    def __init__(self, directory: str, store: str) -> None:
        self.place = f"{directory}/broker"
        command = [sys.executable, "-m", "penstock", "broker", self.place, str(free_port()), "--store", store]
        self.connect(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


class ClusterPeer(NatsPeer):
    """nats-py with a stream of three copies on the same nodes."""

    name, note = "nats-py", "confirmed after the sync of two of three nodes"

    def __init__(self, store: str) -> None:
        import nats

        servers = [f"nats://{host}" for host in store.removeprefix("nats://").partition("/")[0].split(",")]
        self.loop = asyncio.new_event_loop()
        self.connection = self.loop.run_until_complete(nats.connect(servers))
        self.stream = self.connection.jetstream(publish_async_max_pending=20_000)
        self.loop.run_until_complete(self.stream.add_stream(name="bench", subjects=["bench"], num_replicas=3))


def main() -> None:
    arguments = options()
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory, Cluster(Path(directory, "nodes")) as cluster:
        cluster.connect().close()
        broker = ReplicatedPeer(directory, cluster.address)
        peers: list[Peer] = [broker, ClusterPeer(cluster.address)]
        try:
            for flight, count in COUNTS.items():
                question = f"replicated broker, publish 64 B, {flight} in flight"
                candidates = [publishing(peer, flight, count) for peer in peers if peer.takes(flight)]
                compare(question, candidates, peers[-1].name if flight <= 100 else broker.name, arguments)
            question = "replicated broker, consume with ack 64 B"
            compare(question, [consuming(peer) for peer in peers], "nats-py", arguments)
            compare_lag(broker, f"{directory}/follower", cluster.address, arguments)
        finally:
            for peer in peers:
                peer.close()


def publishing(peer: Peer, flight: int, count: int) -> Candidate:
    body = os.urandom(64)

    def run(count: int) -> None:
        for _ in range(max(1, count // flight)):
            peer.publish([body] * flight)

    count = max(flight, count // (10 if peer.slow else 1))
    return Candidate(peer.name, run, count, note=peer.note, wishes=() if peer.slow else WISHES[flight])


def consuming(peer: Peer) -> Candidate:
    def run(count: int) -> float:
        peer.rewind(count)
        began = time.perf_counter()
        peer.consume(count)
        return time.perf_counter() - began

    wishes = () if peer.slow else (reaching(1_500_000),)
    return Candidate(peer.name, run, 5_000 if peer.slow else 300_000, note=peer.note, wishes=wishes)


def compare_lag(broker: ReplicatedPeer, place: str, store: str, arguments: object) -> None:
    command = [sys.executable, "-m", "penstock", "replica", place, "--store", store]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as follower:
        try:
            while not Path(place, "frontier").exists():
                time.sleep(0.05)
            places = {"leader's directory": broker.place, "follower's directory": place}
            candidates = [
                Candidate(name, lag_of(broker, at), 200_000, latency=True) for name, at in places.items()
            ]  # fmt: skip
            candidates[1].wishes = (reaching(0.1),)
            question = f"replicated broker, published to seen by a reader at {RATE // 1000} k/s"
            compare(question, candidates, "leader's directory", arguments, unit="s")  # type: ignore[arg-type]
        finally:
            follower.terminate()


def lag_of(broker: ReplicatedPeer, place: str) -> Callable[[int], list[float]]:
    """Seconds from the publishing of a tick's messages to their being read from the directory."""

    def run(count: int) -> list[float]:
        each, seconds = int(RATE * TICK_S), []
        with penstock.subscriber(f"journal:{place}#bench", start="new") as reader:

            def read() -> None:
                left = count // each * each
                while left:
                    batch = reader.read_many(10_000, 60)
                    assert len(batch), "nothing came for a minute"
                    left -= len(batch)
                    seconds.append(time.perf_counter() - struct.unpack("d", bytes(batch[0])[:8])[0])

            thread = threading.Thread(target=read)
            thread.start()
            at = time.perf_counter()
            for _ in range(count // each):
                now = time.perf_counter()
                broker.publish([struct.pack("d", now) + bytes(56)] * each)
                at += TICK_S
                time.sleep(max(0.0, at - time.perf_counter()))
            thread.join()
        return seconds

    return run


if __name__ == "__main__":
    main()
