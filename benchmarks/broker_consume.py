"""Consuming with acknowledgement, and the compatible mode: against Redis streams, NATS JetStream and SQLite."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Candidate, compare, options
from peers_broker import BrokerPeer, NatsPeer, Peer, RedisPeer, SqlitePeer, started
from wishes import at_least, reaching


def main() -> None:
    arguments = options()
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        broker = BrokerPeer(directory)
        peers: list[Peer] = [
            broker,
            *started(
                [
                    lambda: RedisPeer(directory, "always"),
                    lambda: RedisPeer(directory, "everysec"),
                    lambda: NatsPeer(directory, "default"),
                    lambda: SqlitePeer(directory),
                ]
            ),
        ]
        try:
            compare("broker consume with ack 64 B", [candidate(peer) for peer in peers], "redis always", arguments)
            raw = Candidate("penstock raw mode", lambda count: raw_through(broker.port, count), 200_000)
            raw.note = "PUB to delivery on another connection, synced"
            raw.wishes = (reaching(500_000),)
            compare("broker raw mode 64 B", [raw], "penstock raw mode", arguments)
        finally:
            for peer in peers:
                peer.close()


def candidate(peer: Peer) -> Candidate:
    def run(count: int) -> float:
        peer.rewind(count)
        began = time.perf_counter()
        peer.consume(count)
        return time.perf_counter() - began

    made = Candidate(peer.name, run, 10_000 if peer.slow else 100_000, note=peer.note)
    if peer.name == "penstock":
        made.wishes = (at_least(3, "redis always"), at_least(1, "sqlite"))
    return made


def raw_through(port: int, count: int) -> float:
    """Messages through the compatible mode, from one connection to another."""
    with socket.create_connection(("127.0.0.1", port)) as near, socket.create_connection(("127.0.0.1", port)) as far:
        name = f"raw{time.monotonic_ns()}"
        near.sendall(f"SUB {name}\nPUB 4\nedge".encode())
        edge = b""
        while not edge.endswith(b"edge"):
            edge += near.recv(4)
        chunk = (b"PUB 64\n" + os.urandom(64)) * 1000
        began = time.perf_counter()
        sender = threading.Thread(target=lambda: [far.sendall(chunk) for _ in range(count // 1000)])
        sender.start()
        left = count // 1000 * 64_000
        while left > 0:
            left -= len(near.recv(1 << 20))
        sender.join()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
