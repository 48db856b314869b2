"""Durable publishing through a broker: confirmed and synced, against Redis streams, NATS JetStream and SQLite.

Everything on the same disk, all servers started here on loopback, Python clients in this process. 1, 100 and 10,000 in
flight; "in flight" is the batch that is sent before anybody waits for a confirm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Candidate, compare, options
from peers_broker import (
    Bare,
    BrokerPeer,
    NatsPeer,
    Peer,
    RedisPeer,
    SqlitePeer,
    started,
)
from wishes import ahead_of, at_least, reaching

COUNTS = {1: 1_000, 100: 30_000, 10_000: 300_000}
WISHES = {
    1: (at_least(0.5, "write+fdatasync"), ahead_of("redis always", "nats always")),
    100: (at_least(4, "redis always"), at_least(2, "sqlite")),
    10_000: (reaching(500_000),),
}


def main() -> None:
    arguments = options()
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        peers: list[Peer] = started(
            [
                lambda: BrokerPeer(directory),
                lambda: RedisPeer(directory, "always"),
                lambda: RedisPeer(directory, "everysec"),
                lambda: NatsPeer(directory, "always"),
                lambda: NatsPeer(directory, "default"),
                lambda: SqlitePeer(directory),
                lambda: Bare(directory),
            ]
        )
        try:
            for size in (64, 4096):
                for flight in (1, 100, 10_000):
                    question = f"broker publish {size} B, {flight} in flight"
                    candidates = [candidate(peer, size, flight) for peer in peers if peer.takes(flight)]
                    compare(question, candidates, "redis always", arguments)
        finally:
            for peer in peers:
                peer.close()


def candidate(peer: Peer, size: int, flight: int) -> Candidate:
    body = os.urandom(size)

    def run(count: int) -> None:
        for _ in range(max(1, count // flight)):
            peer.publish([body] * flight)

    count = max(flight, COUNTS[flight] // (8 if size > 1000 else 1) // (10 if peer.slow else 1))
    made = Candidate(peer.name, run, count // flight * flight, note=peer.note)
    if peer.name == "penstock" and size == 64:
        made.wishes = WISHES[flight]
    return made


if __name__ == "__main__":
    main()
