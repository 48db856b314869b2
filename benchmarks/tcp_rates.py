"""TCP, one way, nothing lost: 64 B one by one and batched, 1 MiB, and 1 MiB to ten subscribers; with the peers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from harness import Candidate, Result, compare, options, pinned
from peers_tcp import CFloor, Penstock, PenstockBatched, Pynng, Raw, RawBuffered, Side, Zenoh, Zmq


def candidate(name: str, side: Side, count: int, size: int, quantity: float = 1.0, **wanted: object) -> Candidate:
    data = bytes(size)
    return Candidate(name, lambda n: side.rate(n, data), count, quantity, close=side.close, **wanted)  # type: ignore[arg-type]


def available(name: str, kind: type[Side], *arguments: object) -> Side | None:
    """A peer that is not installed is left out, and said so."""
    try:
        return kind(*arguments)  # type: ignore[arg-type]
    except Exception as error:
        print(f"{name} left out: {type(error).__name__}: {error}")
        return None


def ahead_of_every(results: list[Result], names: Sequence[str], times: float = 1.0) -> None:
    """A wish that is about several candidates: the line that ``compare`` has no room for."""
    ours = next((result for result in results if result.name == "penstock"), None)
    for other in results:
        if ours is not None and other.name in names:
            ratio = ours.ratio / other.ratio
            verdict = "reached" if ratio >= times else "NOT reached"
            print(f"penstock wanted >= {times:g} x {other.name}; got {ratio:.2f} x {verdict}", flush=True)


def peers(count: int, size: int, quantity: float = 1.0) -> list[Candidate]:
    found = []
    for name, kind, share in (("pyzmq", Zmq, 1), ("zenoh", Zenoh, 1), ("pynng", Pynng, 2)):
        side = available(name, kind)
        if side is not None:
            found.append(candidate(name, side, count // share, size, quantity))
    return found


def small(arguments: Namespace) -> None:
    size, count = 64, 500_000
    results = compare(
        "64 B one way, one by one",
        [
            candidate("penstock", Penstock(), count, size, wanted="> pyzmq", wanted_ratio=1.0, wanted_of="pyzmq"),
            candidate("raw sockets", Raw(), count // 5, size),
            candidate("C floor, one write each", CFloor(), count, size),
            *peers(count, size),
        ],
        "pyzmq",
        arguments,
    )
    ahead_of_every(results, ("pyzmq", "zenoh", "pynng"))
    results = compare(
        "64 B one way, batched",
        [
            candidate(
                "penstock",
                PenstockBatched(),
                count * 2,
                size,
                wanted=">= 0.9 x raw buffered",
                wanted_ratio=0.9,
                wanted_of="raw buffered",
            ),
            candidate("raw buffered", RawBuffered(), count * 2, size),
            *peers(count, size)[:1],
        ],
        "pyzmq",
        arguments,
    )
    ahead_of_every(results, ("pyzmq",), 2.0)


def large(arguments: Namespace) -> None:
    size, count = 1 << 20, 3000
    wanted: dict[str, object] = {"wanted": ">= 0.85 x C floor", "wanted_ratio": 0.85, "wanted_of": "C floor"}
    compare(
        "1 MiB one way",
        [
            candidate("penstock", Penstock(), count, size, size, **wanted),
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
            candidate("penstock", Penstock(1, 10), count // 10, size, size * 10, **wanted),
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
