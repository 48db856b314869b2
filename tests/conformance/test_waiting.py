"""Time-outs, waiting, descriptors, iteration, asyncio and callbacks, on every reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .reaches import Reach
from .reading import LONG, read_all

# --- time-outs and waiting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.0, 0.0003, 0.02])
def test_read_gives_none_when_the_time_is_over(reach: Reach, timeout: float) -> None:
    _, subscriber = reach.pair()
    began = time.monotonic()
    assert subscriber.read(timeout) is None
    assert time.monotonic() - began >= timeout
    assert len(subscriber.read_many(10, timeout)) == 0
    assert subscriber.wait(timeout) is False


def test_a_fraction_of_a_millisecond_is_not_zero(reach: Reach) -> None:
    _, subscriber = reach.pair()
    began = time.monotonic()
    for _ in range(20):
        assert subscriber.read(0.0009) is None
    assert time.monotonic() - began >= 20 * 0.0009


def test_none_waits_until_a_message_comes(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    timer = threading.Timer(0.1, publisher.publish, args=(b"late",))
    timer.start()
    message = subscriber.read(None)
    timer.join()
    assert message is not None and bytes(message) == b"late"


def test_wait_then_read(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    assert subscriber.wait(0) is False
    publisher.publish(b"x")
    assert subscriber.wait(LONG) is True
    assert subscriber.wait(0) is True, "waiting does not take the message"
    assert read_all(subscriber, 1) == [b"x"]


def test_the_interpreter_runs_while_one_waits(reach: Reach) -> None:
    _, subscriber = reach.pair()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (subscriber.read(2), done.set()))
    thread.start()
    turns = 0
    while not done.is_set() and turns < 20:
        time.sleep(0.001)
        turns += 1
    assert turns == 20, "the waiting thread kept the interpreter to itself"
    thread.join()


@pytest.mark.parametrize("bad", [-1, float("nan"), -0.001])
def test_bad_timeouts(reach: Reach, bad: float) -> None:
    publisher, subscriber = reach.pair()
    with pytest.raises(ValueError):
        subscriber.read(bad)
    with pytest.raises(ValueError):
        subscriber.wait(bad)
    with pytest.raises(ValueError):
        subscriber.read_many(1, bad)
    with pytest.raises(ValueError):
        publisher.wait_ready(1, bad)


@pytest.mark.parametrize("bad", [-1, float("nan"), -0.001])
def test_bad_timeouts_are_refused_when_a_message_is_there_too(reach: Reach, bad: float) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    assert subscriber.wait(LONG)
    with pytest.raises(ValueError):
        subscriber.read(bad)
    with pytest.raises(ValueError):
        subscriber.read_many(1, bad)
    with pytest.raises(ValueError):
        subscriber.wait(bad)
    with pytest.raises(ValueError):
        subscriber.receive(bad)
    with pytest.raises(ValueError):
        asyncio.run(subscriber.read_async(bad))
    assert read_all(subscriber, 1) == [b"x"]


def test_receive_raises_when_the_time_is_over(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for timeout in (0, 0.001):
        with pytest.raises(TimeoutError):
            subscriber.receive(timeout)
    publisher.publish(b"x")
    assert bytes(subscriber.receive(LONG)) == b"x"


def test_timeouts_of_a_wrong_type(reach: Reach) -> None:
    _, subscriber = reach.pair()
    with pytest.raises(TypeError):
        subscriber.read("soon")  # type: ignore[arg-type]


def test_most_must_be_positive(reach: Reach) -> None:
    _, subscriber = reach.pair()
    for bad in (0, -3):
        with pytest.raises(ValueError):
            subscriber.read_many(bad, 0)


def test_wait_ready_gives_up(reach: Reach) -> None:
    publisher, _ = reach.pair()
    assert publisher.wait_ready(1, 0) is True
    assert publisher.wait_ready(50, 0.02) is False


# --- descriptors, iteration, asyncio, callbacks ----------------------------------------------------------------------


def test_the_descriptor_works_with_select(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    descriptor = subscriber.fileno()
    for round_ in range(20):
        assert subscriber.read(0) is None
        timer = threading.Timer(0.002, publisher.publish, args=(b"%d" % round_,))
        timer.start()
        ready, _, _ = select.select([descriptor], [], [], LONG)
        assert ready == [descriptor]
        message = subscriber.read(LONG)
        assert message is not None and bytes(message) == b"%d" % round_
        del message
        timer.join()


def test_select_says_nothing_while_there_is_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    assert read_all(subscriber, 1) == [b"x"]
    deadline = time.monotonic() + LONG
    while select.select([subscriber.fileno()], [], [], 0)[0]:  # a stale wake-up may be there; reading clears it
        assert subscriber.read(0) is None
        assert time.monotonic() < deadline, "the descriptor stays readable with nothing to read"


def test_iteration_ends_on_close(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    sent = [b"%d" % i for i in range(10)]
    publisher.publish_many(sent)
    found = []
    for message in subscriber:
        found.append(bytes(message))
        if len(found) == 10:
            threading.Timer(0.05, subscriber.close).start()
    assert found == sent


def test_async_for(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> list[bytes]:
        found = []
        asyncio.get_running_loop().call_later(0.02, publisher.publish_many, [b"1", b"2"])
        asyncio.get_running_loop().call_later(0.06, publisher.publish, b"3")
        async for message in subscriber:
            found.append(bytes(message))
            if len(found) == 3:
                break
        assert await subscriber.read_async(0.01) is None
        return found

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == [b"1", b"2", b"3"]


def test_callbacks(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []
    subscriber.on_message(lambda message: found.append(bytes(message)))
    assert subscriber.process_all() == 0
    publisher.publish_many([b"1", b"2"])
    deadline = time.monotonic() + LONG
    while len(found) < 2 and time.monotonic() < deadline:
        subscriber.wait(1)
        subscriber.process_all()
    assert found == [b"1", b"2"]
    subscriber.on_message(None)
    publisher.publish(b"3")
    assert subscriber.process_all() == 0
    assert read_all(subscriber, 1) == [b"3"]


def test_a_callback_may_unset_itself(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []

    def once(message: Any) -> None:
        found.append(bytes(message))
        subscriber.on_message(None)

    subscriber.on_message(once)
    publisher.publish_many([b"1", b"2"])
    assert subscriber.wait(LONG)
    assert subscriber.process_all() == 1
    assert found == [b"1"]
    assert read_all(subscriber, 1) == [b"2"]


READER = """
import json, sys, penstock
with penstock.subscriber(sys.argv[1], **json.loads(sys.argv[2])):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.needs("processes")
def test_a_subscriber_that_was_killed_is_not_ready(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher = reach.publisher(**for_publisher)
    command = [sys.executable, "-c", READER, reach.address, json.dumps(for_subscriber)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"open\n"
        assert publisher.wait_ready(1, LONG) and publisher.wait_ready(1, 0)
        reader.kill()
    deadline = time.monotonic() + LONG
    while publisher.wait_ready(1, 0):
        assert time.monotonic() < deadline, "it counts though it is dead"
        time.sleep(0.01)
    assert not publisher.wait_ready(1, 0.01)


class Interrupted(Exception):
    """By a signal's function."""


@contextlib.contextmanager
def a_signal_that_interrupts_no_call() -> Iterator[None]:
    """It comes to another thread, so that no system call of this one ends with EINTR: as one that comes in the last
    moment before the call begins."""

    def handle(*_: object) -> None:
        raise Interrupted

    def send() -> None:
        time.sleep(0.2)  # by now this thread waits; if not, it is told the sooner
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=send)
    try:
        thread.start()
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("method", ["read", "read_many", "wait", "receive"])
def test_a_signal_reaches_python_from_a_wait_that_nothing_interrupts(reach: Reach, method: str) -> None:
    _, subscriber = reach.pair()
    begin = time.monotonic()
    with pytest.raises(Interrupted), a_signal_that_interrupts_no_call():
        getattr(subscriber, method)(timeout=LONG)
    assert time.monotonic() - begin < LONG / 2


@pytest.mark.needs("block")
def test_a_signal_reaches_python_from_a_publish_that_waits(reach: Reach) -> None:
    publisher, _ = reach.pair(reach.bounded(4, "block", LONG))
    begin = time.monotonic()
    with pytest.raises(Interrupted), a_signal_that_interrupts_no_call():
        for _ in range(reach.flood_count):
            publisher.publish(bytes(reach.flood_padding + 1))
    assert time.monotonic() - begin < LONG / 2
