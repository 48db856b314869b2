"""Publishing one message to callbacks in this process, against a plain Python loop and the peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from harness import Candidate, compare, options
from wishes import ahead_of, at_most

from penstock.bus import Bus

DATA = b"x" * 64
COUNT = 100_000


def handlers(number: int) -> list[Callable[[Any], None]]:
    """Functions of their own, so that no candidate profits from calling one over and over."""

    def make() -> Callable[[Any], None]:
        def handler(message: Any) -> None:
            pass

        return handler

    return [make() for _ in range(number)]


def loop(publish: Callable[[Any], Any]) -> Callable[[int], float]:
    def run(count: int) -> float:
        data = DATA
        began = time.perf_counter()
        for _ in range(count):
            publish(data)
        return time.perf_counter() - began

    return run


def plain(number: int) -> Candidate:
    functions = handlers(number)

    def publish(data: Any) -> None:
        for function in functions:
            function(data)

    return Candidate("plain loop", loop(publish), COUNT)


def penstock_bus(number: int, others: int = 0, name: str = "penstock") -> Candidate:
    bus = Bus(mode="direct")
    for identifier in range(1, others + 1):
        bus.subscribe(identifier, kind="callback", handler=lambda message: None)
    for function in handlers(number):
        bus.subscribe(0, kind="callback", handler=function)
    return Candidate(name, loop(bus.publisher(0).publish), COUNT, close=bus.close)


def pyee(number: int) -> Candidate:
    from pyee.base import EventEmitter

    emitter = EventEmitter()
    for function in handlers(number):
        emitter.on("e", function)
    return Candidate("pyee", loop(lambda data: emitter.emit("e", data)), COUNT)


def reactivex(number: int) -> Candidate:
    from reactivex.subject import Subject

    subject: Any = Subject()
    for function in handlers(number):
        subject.subscribe(function)
    return Candidate("reactivex", loop(subject.on_next), COUNT)


def blinker(number: int) -> Candidate:
    from blinker import Signal

    signal = Signal()
    kept = handlers(number)
    for function in kept:
        signal.connect(function, weak=False)
    return Candidate("blinker", loop(signal.send), COUNT // 4)


def psygnal(number: int) -> Candidate:
    from psygnal import SignalInstance

    signal = SignalInstance((object,))
    for function in handlers(number):
        signal.connect(function)
    return Candidate("psygnal", loop(signal.emit), COUNT // 4)


def pypubsub(number: int) -> Candidate:
    from pubsub import pub

    topic = f"topic{number}"
    kept = handlers(number)
    for function in kept:
        pub.subscribe(function, topic)
    candidate = Candidate("PyPubSub", loop(lambda data: pub.sendMessage(topic, message=data)), COUNT // 10)
    candidate.close = kept.clear  # it holds its listeners weakly
    return candidate


def pymitter(number: int) -> Candidate:
    from pymitter import EventEmitter

    emitter = EventEmitter()
    for function in handlers(number):
        emitter.on("e", function)
    return Candidate("pymitter", loop(lambda data: emitter.emit("e", data)), COUNT // 10)


PEERS = (pyee, reactivex, blinker, psygnal, pypubsub, pymitter)


def beside_peers(number: int, floor: float, arguments: Any) -> None:
    peers = []
    for peer in PEERS:
        try:
            peers.append(peer(number))
        except ImportError:
            print(f"{peer.__name__} is not installed: pip install penstock[bench]")
    ours = penstock_bus(number)
    ours.wishes = (at_most(floor, "plain loop"), ahead_of(*(peer.name for peer in peers), times=2))
    compare(f"bus publish to {number}", [plain(number), ours, *peers], "plain loop", arguments)


def main() -> None:
    arguments = options()
    beside_peers(1, 1.5, arguments)
    beside_peers(10, 1.2, arguments)
    crowd = penstock_bus(1, 999, "1 of 1000 matches")
    crowd.wishes = (at_most(2, "1 of 1 matches"),)
    compare("bus publish in a crowd", [penstock_bus(1, 0, "1 of 1 matches"), crowd], "1 of 1 matches", arguments)


if __name__ == "__main__":
    main()
