"""One bad message costs one message, and so does a function that raises: none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import shm

LONG = 30


def overwrite(kind: str, old: bytes, new: bytes) -> None:
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    (path,) = (path for path in directory.iterdir() if f".{kind}." in path.name)
    with path.open("r+b") as file:
        at = file.read().index(old)
        file.seek(at)
        file.write(new)


def read_in(subscriber: shm.Subscriber, way: str) -> list[bytes | str]:
    """What is there, by one way to read; where that raises, the word damaged."""
    got: list[bytes | str] = []
    subscriber.on_message(lambda message: got.append(bytes(message)))
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: [got.append(bytes(message)) for message in iter(lambda: subscriber.read(0), None)],
        "read_many": lambda: [got.append(bytes(message)) for message in subscriber.read_many(64, 0)],
        "read_all": lambda: [got.append(bytes(message)) for message in subscriber.read_all()],
        "process_all": subscriber.process_all,
    }
    while subscriber.wait(0):
        try:
            ways[way]()
        except penstock.CorruptionError:
            got.append("damaged")
    return got


WAYS = ["read", "read_many", "read_all", "process_all"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [0, 4, 9])
def test_a_damaged_message_costs_one(name: str, bad: int, way: str) -> None:
    with shm.Publisher(name, slots=64, checksum=True) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish_many([b"message %d" % i for i in range(10)])
        overwrite("payload", b"message %d" % bad, b"m")
        overwrite("payload", b"message %d" % bad, b"M")
        expected: list[bytes | str] = [b"message %d" % i for i in range(10)]
        expected[bad] = "damaged"
        assert read_in(subscriber, way) == expected
        ledger = subscriber.ledger
        assert ledger.delivered == 9 and ledger.dropped == {"error": 1} and ledger.balanced
        assert subscriber.held == 0 and subscriber.checksum_errors == 1


def test_metadata_is_under_the_checksum(name: str) -> None:
    with shm.Publisher(name, slots=8, checksum=True, metadata_size=16) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"whole", metadata=b"beside")
        message = subscriber.read(0)
        assert message is not None and message.metadata == b"beside".ljust(16, b"\0") and message.intact
        publisher.publish(b"whole", metadata=b"to be broken")
        overwrite("tables", b"to be broken", b"T")
        with pytest.raises(penstock.CorruptionError, match="checksum"):
            subscriber.read(0)


def test_metadata_of_a_batch(name: str) -> None:
    with shm.Publisher(name, slots=16, metadata_size=4) as publisher, shm.Subscriber(name) as subscriber:
        for i in range(4):
            publisher.publish(b"x", metadata=b"%04d" % i)
        assert [message.metadata for message in subscriber.read_many(8, 0)] == [b"%04d" % i for i in range(4)]


def test_what_a_channel_has_not_is_none(name: str) -> None:
    with shm.Publisher(name) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"plain")
        message = subscriber.read(0)
        assert message is not None
        assert message.metadata is None and message.intact is None and not message.activation


def test_a_function_that_raises_loses_nothing(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name) as subscriber:

        def told(_: shm.Subscriber, count: int) -> None:
            raise RuntimeError(f"{count} lost")

        subscriber.on_dropped(told)
        publisher.publish_many([b"%d" % i for i in range(20)])
        with pytest.raises(RuntimeError, match="12 lost"):
            subscriber.read(0)
        assert subscriber.wait(0)
        first = subscriber.read(0)
        assert first is not None and bytes(first) == b"12"
        publisher.publish_many([b"%d" % i for i in range(20, 40)])
        with pytest.raises(RuntimeError, match="lost"):
            subscriber.read_many(64, 0)
        got = read_in(subscriber, "read_many")
        assert got[-1] == b"39" and subscriber.ledger.balanced
        assert subscriber.ledger.delivered == len(got) + 1


class Ended(Exception):
    pass


@pytest.mark.parametrize("spin_us", [0, 60_000_000])
@pytest.mark.parametrize("delay", [0.0005, 0.005, 0.05])
def test_a_signal_reaches_python_from_a_wait(name: str, spin_us: int, delay: float) -> None:
    """The handler ends the wait: what is late by the whole wait would show as its time-out."""

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGALRM, end)
    try:
        with shm.Publisher(name, reliable=True, spin_us=spin_us) as publisher, shm.Subscriber(
            f"{name}-other", spin_us=spin_us
        ) as subscriber:
            for wait in (
                lambda: publisher.publish(b"x", timeout=LONG),
                lambda: publisher.reserve(5, timeout=LONG),
                lambda: publisher.wait(LONG),
                lambda: publisher.wait_ready(1, LONG),
                lambda: subscriber.read(LONG),
                lambda: subscriber.read_many(5, LONG),
                lambda: subscriber.wait(LONG),
            ):
                for _ in range(5):
                    with pytest.raises(Ended):
                        signal.setitimer(signal.ITIMER_REAL, delay)
                        wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
