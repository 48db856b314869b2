"""TCP, one way, nothing lost: 64 B one by one and batched, 1 MiB, and 1 MiB to ten subscribers; with the peers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from harness import Candidate, compare, options, pinned
from peers_tcp import CFloor, Penstock, PenstockBatched, Pynng, Raw, RawBuffered, Side, Zenoh, Zmq
from wishes import Wish, ahead_of, at_least

PEERS = ("pyzmq", "zenoh", "pynng")


def candidate(name: str, side: Side, count: int, size: int, quantity: float = 1.0, *wishes: Wish) -> Candidate:
    data = bytes(size)
    return Candidate(name, lambda n: side.rate(n, data), count, quantity, wishes=wishes, close=side.close)


def available(name: str, kind: type[Side], *arguments: object) -> Side | None:
    """A peer that is not installed is left out, and said so."""
    try:
        return kind(*arguments)  # type: ignore[arg-type]
    except Exception as error:
        print(f"{name} left out: {type(error).__name__}: {error}")
        return None


def peers(count: int, size: int, quantity: float = 1.0, names: Sequence[str] = PEERS) -> list[Candidate]:
    found = []
    for name, kind, share in (("pyzmq", Zmq, 1), ("zenoh", Zenoh, 1), ("pynng", Pynng, 2)):
        side = available(name, kind) if name in names else None
        if side is not None:
            found.append(candidate(name, side, count // share, size, quantity))
    return found


def small(arguments: Namespace) -> None:
    size, count = 64, 500_000
    compare(
        "64 B one way, one by one",
        [
            candidate("penstock", Penstock(), count, size, 1.0, ahead_of(*PEERS)),
            candidate("raw sockets", Raw(), count // 5, size),
            candidate("C floor, one write each", CFloor(), count, size),
            *peers(count, size),
        ],
        "pyzmq",
        arguments,
    )
    compare(
        "64 B one way, batched",
        [
            candidate(
                "penstock", PenstockBatched(), count * 2, size, 1.0, at_least(0.9, "raw buffered"), at_least(2, "pyzmq")
            ),
            candidate("raw buffered", RawBuffered(), count * 2, size),
            *peers(count, size, names=["pyzmq"]),
        ],
        "pyzmq",
        arguments,
    )


def large(arguments: Namespace) -> None:
    size, count = 1 << 20, 3000
    wish = at_least(0.85, "C floor")
    compare(
        "1 MiB one way",
        [
            candidate("penstock", Penstock(), count, size, size, wish),
            candidate("C floor", CFloor(), count, size, size),
            candidate("raw sockets", Raw(), count, size, size),
            *peers(count // 2, size, size),
        ],
        "C floor",
        arguments,
        unit="B/s",
    )
    compare(
        "1 MiB to ten subscribers",
        [
            candidate("penstock", Penstock(1, 10), count // 10, size, size * 10, wish),
            candidate("C floor", CFloor(1, 10), count // 10, size, size * 10),
        ],
        "C floor",
        arguments,
        unit="B/s",
    )


def main() -> None:
    arguments = options()
    with pinned(0):
        small(arguments)
        large(arguments)


if __name__ == "__main__":
    main()
