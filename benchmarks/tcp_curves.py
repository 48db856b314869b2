"""TCP by size of the payload and by number of subscribers, beside pyzmq."""

from __future__ import annotations

from harness import Curve, compare, options
from peers_tcp import Penstock, Zmq
from tcp_rates import available, candidate

SIZES = (64, 1024, 16 << 10, 256 << 10, 4 << 20)
SUBSCRIBERS = (1, 2, 5, 10)


def main() -> None:
    arguments = options()
    for size in SIZES:
        curve = Curve("tcp: bytes a second one way, by size of the payload", "payload bytes", size)
        count = max(100, min(200_000, (1 << 30) // size))
        sides = [("penstock", Penstock()), ("pyzmq", available("pyzmq", Zmq))]
        found = [candidate(name, side, count, size, float(size)) for name, side in sides if side is not None]
        compare(f"tcp: one way, {size} B", found, "pyzmq", arguments, unit="B/s", curve=curve)
    for number in SUBSCRIBERS:
        curve = Curve("tcp: messages of 1 KiB delivered a second, by number of subscribers", "subscribers", number)
        sides = [("penstock", Penstock(1, number)), ("pyzmq", available("pyzmq", Zmq, 1, number))]
        found = [candidate(name, side, 100_000 // number, 1024, number) for name, side in sides if side is not None]
        compare(f"tcp: 1 KiB to {number} subscribers", found, "pyzmq", arguments, curve=curve)


if __name__ == "__main__":
    main()
