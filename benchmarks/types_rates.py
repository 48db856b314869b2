"""Typed messages over shared memory, published and read by one thread: what the types cost beside the bytes alone.

Three questions: a small Struct beside msgspec's own encode and decode of it; numpy records beside raw bytes of the same
size; types that are compared at opening beside ones that are not (``evolve="any"``), which must cost a message nothing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
from harness import Candidate, compare, options
from wishes import at_least

import penstock
from penstock import types

COUNT = 200_000
RECORD = numpy.dtype([("t", "<i8"), ("xyz", "<f8", 3), ("id", "<u4"), ("state", "<u4"), ("speed", "<f8", 2)])
_numbers = itertools.count()


class Pose(msgspec.Struct):
    """What a robot says of itself a thousand times a second."""

    x: float
    y: float
    z: float
    name: str
    sequence: int


POSE = Pose(1.5, -2.25, 0.125, "left arm", 123_456)


def channel(kind: Any, **more: Any) -> tuple[Any, Any]:
    """A publisher and a subscriber of a channel of their own."""
    name = f"shm:/bench/{os.getpid()}/types/{next(_numbers)}"
    given = {} if kind is None else {"type": kind, **more}
    return penstock.publisher(name, **given), penstock.subscriber(name, **given)


def both(
    name: str, kind: Any, once: Callable[[Any, Any], Callable[[], Any]], wishes: Any = (), **more: Any
) -> Candidate:
    publisher, subscriber = channel(kind, **more)

    def close() -> None:
        subscriber.close()
        publisher.close()

    return Candidate(name, _repeated(once(publisher, subscriber)), COUNT, wishes=wishes, close=close)


def _repeated(once: Callable[[], Any]) -> Callable[[int], float]:
    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            once()
        return time.perf_counter() - began

    return run


def objects(value: Any) -> Callable[[Any, Any], Callable[[], Any]]:
    """Publish the object, read a message, take its value."""

    def make(publisher: Any, subscriber: Any) -> Callable[[], Any]:
        publish, read = publisher.publish, subscriber.read
        return lambda: (publish(value), read().value)

    return make


def raw(data: bytes) -> Callable[[Any, Any], Callable[[], Any]]:
    """Publish bytes, read a message, look at its memory."""

    def make(publisher: Any, subscriber: Any) -> Callable[[], Any]:
        publish, read = publisher.publish, subscriber.read
        return lambda: (publish(data), memoryview(read()))

    return make


def reserved(publisher: Any, subscriber: Any) -> Callable[[], Any]:
    """Write a record into the channel's own memory, read a view of it."""
    reserve, read = publisher.reserve, subscriber.read

    def once() -> Any:
        with reserve(1) as records:
            records["t"] = 5
        return read().value

    return once


def alone(encoding: Any) -> Candidate:
    encode, decode = encoding.Encoder().encode, encoding.Decoder(Pose).decode
    return Candidate("msgspec alone", _repeated(lambda: decode(encode(POSE))), COUNT)


def main() -> None:
    arguments = options()
    for name, encoding in (("msgpack", msgspec.msgpack), ("json", msgspec.json)):
        typed = both("penstock", types.plain(Pose, name), objects(POSE), [at_least(0.5, "msgspec alone")])
        compare(f"types: a small Struct as {name} over shm", [alone(encoding), typed], "msgspec alone", arguments)
    record = numpy.zeros(1, RECORD)
    compare(
        f"types: numpy records of {RECORD.itemsize} bytes over shm",
        [
            both("raw bytes", None, raw(record.tobytes())),
            both("record views", RECORD, objects(record), [at_least(0.6, "raw bytes")]),
            both("reserved records", RECORD, reserved),
        ],
        "raw bytes",
        arguments,
    )
    data = record.tobytes()
    compare(
        "types: what comparing types costs a message",
        [
            both("nothing compared", bytes, objects(data), evolve="any"),
            both("compared at opening", bytes, objects(data), [at_least(0.97, "nothing compared")]),
            both("untyped", None, lambda p, s: lambda: (p.publish(data), bytes(s.read()))),
        ],
        "nothing compared",
        arguments,
    )


if __name__ == "__main__":
    main()
