"""TCP round trip of 64 B, pinned: both processes on one core, and on two. All readers sleep."""

from __future__ import annotations

from argparse import Namespace

from harness import Candidate, compare, options, pinned
from peers_tcp import CFloor, Penstock, Pynng, Raw, Zenoh, Zmq
from tcp_rates import available


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
            run.wanted, run.wanted_ratio, run.wanted_of = "<= 1.15 x raw sockets", 1 / 1.15, "raw sockets"
        candidates.append(run)
    compare(title, candidates, "raw sockets", arguments, unit="s")


def main() -> None:
    arguments = options()
    with pinned(0):
        roundtrip("64 B round trip, two cores", 1, arguments)
        roundtrip("64 B round trip, one core", 0, arguments)


if __name__ == "__main__":
    main()
