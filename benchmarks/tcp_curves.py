"""TCP by size of the payload, by number of subscribers and of channels, beside pyzmq."""

from __future__ import annotations

from crowds import curves
from harness import Curve, compare, options
from peers_tcp import Penstock, Zmq
from tcp_rates import available, candidate

SIZES = (8, 64, 1024, 16 << 10, 256 << 10, 4 << 20, 64 << 20)


def main() -> None:
    arguments = options()
    for size in SIZES:
        curve = Curve("tcp: bytes a second one way, by size of the payload", "payload bytes", size)
        count = max(20, min(200_000, (1 << 30) // size))
        sides = [("penstock", Penstock()), ("pyzmq", available("pyzmq", Zmq))]
        found = [candidate(name, side, count, size, float(size)) for name, side in sides if side is not None]
        compare(f"tcp: one way, {size} B", found, "pyzmq", arguments, unit="B/s", curve=curve)
    curves("tcp", lambda number: ["tcp://127.0.0.1:0"] * number, "tcp", arguments)


if __name__ == "__main__":
    main()
