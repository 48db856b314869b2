"""TCP round trip of 64 B, pinned: both processes on one core, and on two. All readers sleep."""

from __future__ import annotations

from argparse import Namespace

from harness import Candidate, compare, options, pinned
from peers_tcp import CFloor, Penstock, PenstockStalled, Pynng, Raw, Zenoh, Zmq
from tcp_rates import PEERS, available
from wishes import ahead_of, at_most


def roundtrip(title: str, core: int, arguments: Namespace) -> None:
    data = bytes(64)
    count = 5000
    candidates = []
    for name, kind in (
        ("penstock", Penstock),
        ("raw sockets", Raw),
        ("C floor", CFloor),
        ("pyzmq", Zmq),
        ("zenoh", Zenoh),
        ("pynng", Pynng),
    ):
        side = available(name, kind, core)
        if side is None:
            continue
        run = Candidate(name, lambda n, side=side: side.echo(n, data), count, latency=True, close=side.close)  # type: ignore[misc]
        if isinstance(side, Penstock):
            run.wishes = (at_most(1.15, "raw sockets"), ahead_of(*PEERS))
        candidates.append(run)
    compare(title, candidates, "raw sockets", arguments, unit="s")


def stalled(title: str, arguments: Namespace) -> None:
    """A slow subscriber does not slow a fast one: its full queue costs a drop a message."""
    data = bytes(64)
    alone, beside = Penstock(1), PenstockStalled(1)
    candidates = [
        Candidate("beside a stalled one", lambda n: beside.echo(n, data), 5000, latency=True, close=beside.close,
                  wishes=[at_most(1.15, "alone")]),
        Candidate("alone", lambda n: alone.echo(n, data), 5000, latency=True, close=alone.close),
    ]  # fmt: skip
    compare(title, candidates, "alone", arguments, unit="s")


def main() -> None:
    arguments = options()
    with pinned(0):
        stalled("64 B round trip with a fast subscriber, two cores", arguments)
        roundtrip("64 B round trip, two cores", 1, arguments)
        roundtrip("64 B round trip, one core", 0, arguments)


if __name__ == "__main__":
    main()
