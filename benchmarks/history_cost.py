"""What a publisher pays for the past that it keeps: ``history=``, ``latest=`` and ``durable=`` beside none of them.

One subscriber is there: on the bus a queue that drops what nobody reads, at the other reaches another process that
reads all. What is timed is publishing one by one, so many that what waits for the disk is full; once also until all is
there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness import Candidate, compare, options
from shm_peers import Pair
from wishes import Wish, at_least, at_most

import penstock

DATA = b"x" * 64
COUNT = 300_000
REFERENCE = "without a past"
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "history=10": {"history": 10},
    "latest": {"latest": True},
    "history='5 s'": {"history": "5 s"},
    "durable": {"durable": "a directory of its own"},
    "durable, all on disk": {"durable": "another one"},
}


def read(pipe: Connection, address: str) -> None:
    """Takes all that comes until the other side has nothing more to tell."""
    with penstock.subscriber(address, history=False) as subscriber:
        pipe.send("there")
        while not pipe.poll(0):
            for message in subscriber.read_many(256, 0.05):
                message.release()


def loop(publisher: Any, durable: bool, to_the_end: bool) -> Callable[[int], float]:
    def run(count: int) -> float:
        publish = publisher.publish
        began = time.perf_counter()
        for _ in range(count):
            publish(DATA)
        published = time.perf_counter()
        if durable:
            publisher.flush()  # also so that the next candidate has the disk for itself
        return (time.perf_counter() if to_the_end else published) - began

    return run


def candidate(scheme: str, name: str, given: dict[str, Any]) -> Candidate:
    given, directory = dict(given), ""
    if "durable" in given:
        given["durable"] = directory = tempfile.mkdtemp(prefix="penstock-bench-")
    address = {
        "bus": f"bus:bench-{name}",
        "shm": f"shm:/bench/{os.getpid()}/{list(WAYS).index(name)}",
        "tcp": "tcp://127.0.0.1:0",
    }[scheme]
    publisher: Any = penstock.publisher(address, **given)
    if scheme == "bus":
        other: Any = penstock.subscriber(address, overflow="drop_oldest", history=False)
    else:
        other = Pair(read, f"tcp://127.0.0.1:{publisher.port}" if scheme == "tcp" else address)
    publisher.wait_ready(1, 30)

    def close() -> None:
        other.close()
        publisher.close()
        if directory:
            shutil.rmtree(directory)

    to_the_end = name == "durable, all on disk"
    wishes: tuple[Wish, ...] = ()
    if given and not to_the_end:
        wishes = (at_least(0.5, REFERENCE) if directory else at_most(1.1, REFERENCE),)
    return Candidate(name, loop(publisher, bool(directory), to_the_end), COUNT, wishes=wishes, close=close)


def main() -> None:
    arguments = options()
    for scheme in ("bus", "shm", "tcp"):
        candidates = [candidate(scheme, name, given) for name, given in WAYS.items()]
        compare(f"{scheme} publish with a past", candidates, REFERENCE, arguments)


if __name__ == "__main__":
    main()
