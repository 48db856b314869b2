"""How publishing in one process grows with the number of callbacks, beside a plain loop and two peers."""

from __future__ import annotations

from bus_publish import penstock_bus, plain, psygnal, pyee
from harness import Candidate, Curve, compare, options

NUMBERS = (1, 3, 10, 30, 100, 300, 1000)


def main() -> None:
    arguments = options()
    for number in NUMBERS:
        candidates = [plain(number), penstock_bus(number)]
        for peer in (pyee, psygnal):
            try:
                candidates.append(peer(number))
            except ImportError:
                print(f"{peer.__name__} is not installed: pip install penstock[bench]")
        curve = Curve("bus: callbacks served a second, by number of subscribers", "subscribers", number)
        candidates = [scaled(candidate, number) for candidate in candidates]
        compare(f"bus: {number} callbacks", candidates, "plain loop", arguments, curve=curve)


def scaled(candidate: Candidate, number: int) -> Candidate:
    """Fewer rounds where each does more; the quantity is calls, so that the points of the curve compare."""
    candidate.count = max(100, candidate.count // number)
    candidate.quantity = number
    return candidate


if __name__ == "__main__":
    main()
