"""A time that a publisher gives, or that ``forward`` brings, arrives as it is: 0 and times before 1970 too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Message
from penstock.bridge import Bridge
from penstock.carry import HOLDS, time_of
from penstock.journal import Journal
from penstock.recording.player import Player
from penstock.recording.recorder import Plan, Recorder

from .reaches import REACHES, Reach, capabilities

LONG = 60.0
TIMES = [-9_000_000_000_000_000_000, -(2**63) + 1, -1, 0, 1, 2**63 - 1, 9_000_000_000_000_000_000]


def read(subscriber: Any, count: int) -> list[Message]:
    """So many messages; copies, so that nothing is held."""
    found: list[Message] = []
    deadline = time.monotonic() + LONG
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        for message in subscriber.read_many(count, 1.0):
            found.append(Message(bytes(message), timestamp_ns=message.timestamp_ns))
    return found


def times_of(messages: Iterable[Message]) -> list[int]:
    return [message.timestamp_ns for message in messages]


def timed(reach: Reach) -> bool:
    return "time" in HOLDS[reach.address.partition(":")[0]]


def given() -> list[Message]:
    return [Message(b"%d" % number, ordinal=number + 1, timestamp_ns=when) for number, when in enumerate(TIMES)]


def batched(messages: Sequence[Message], directory: Path) -> Any:
    """The same messages as a native batch: what a journal's reader gives."""
    with Journal(directory / "batch") as journal:
        for message in messages:
            journal.append("t", bytes(message), timestamp_ns=message.timestamp_ns)
        with penstock.subscriber(f"journal:{directory / 'batch'}#t", start="first") as subscriber:
            return subscriber.read_many(len(messages), LONG)


def test_published_times_arrive(reach: Reach) -> None:
    if not timed(reach):
        pytest.skip(f"{reach.name} gives times itself")
    publisher, subscriber = reach.pair()
    publish: Any = publisher.publish
    for number, when in enumerate(TIMES):
        publish(b"%d" % number, timestamp_ns=when)
    assert times_of(read(subscriber, len(TIMES))) == TIMES


@pytest.mark.parametrize("kind", ["list", "batch"])
def test_forwarded_times_arrive(reach: Reach, kind: str, tmp_path: Path) -> None:
    if not timed(reach):
        pytest.skip(f"{reach.name} gives times itself")
    publisher, subscriber = reach.pair()
    publisher.forward(given() if kind == "list" else batched(given(), tmp_path))
    assert times_of(read(subscriber, len(TIMES))) == TIMES


def test_a_message_without_a_time_gets_one(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    bare = Message(b"x")
    assert (bare.timestamp_ns, time_of(bare), time_of(Message(b"x", timestamp_ns=0))) == (0, None, 0)
    publisher.forward([bare])
    (found,) = read(subscriber, 1)
    assert abs(found.timestamp_ns - time.time_ns()) < 3600 * 10**9


def test_a_time_in_the_future_does_not_move_the_clock(reach: Reach) -> None:
    """What is published without a time has the time of publishing, whatever time the message before it had."""
    if not timed(reach):
        pytest.skip(f"{reach.name} gives times itself")
    publisher, subscriber = reach.pair()
    publish: Any = publisher.publish
    publish(b"1", timestamp_ns=TIMES[-1])
    publish(b"2")
    first, second = read(subscriber, 2)
    assert first.timestamp_ns == TIMES[-1] and abs(second.timestamp_ns - time.time_ns()) < 3600 * 10**9


@pytest.mark.parametrize("source", sorted(name for name in capabilities() if name in HOLDS and "time" in HOLDS[name]))
def test_times_pass_a_bridge(reach: Reach, source: str, tmp_path: Path) -> None:
    if not timed(reach):
        pytest.skip(f"{reach.name} gives times itself")
    (tmp_path / "source").mkdir()
    begin = REACHES[source](capabilities()[source], tmp_path / "source")
    with contextlib.closing(begin):
        publisher = begin.publisher()
        sink: Any = {"overflow": "block"} if reach.name == "tcp" else {}
        with Bridge(begin.address, reach.address, sink_options=sink) as bridge:
            to = reach.address
            if reach.name == "tcp":
                to = f"tcp://127.0.0.1:{bridge.publisher.port}"
            options: Any = {"start": "first"} if reach.name == "journal" else {}
            with penstock.subscriber(to, **options) as subscriber:
                bridge.start()
                assert publisher.wait_ready(1, LONG)
                assert reach.name != "tcp" or bridge.publisher.wait_ready(1, LONG)
                publish: Any = publisher.publish
                for number, when in enumerate(TIMES):
                    publish(b"%d" % number, timestamp_ns=when)
                assert times_of(read(subscriber, len(TIMES))) == TIMES


@pytest.mark.parametrize("wait", [False, True])
def test_times_in_a_durable_channel(wait: bool, tmp_path: Path) -> None:
    options: Any = {"durable": str(tmp_path / "kept"), "durable_wait": wait}
    with penstock.publisher("tcp://127.0.0.1:0", **options) as publisher:
        inner: Any = publisher
        with penstock.subscriber(f"tcp://127.0.0.1:{inner.inner.port}") as subscriber:
            assert publisher.wait_ready(1, LONG)
            for number, when in enumerate(TIMES):
                inner.publish(b"%d" % number, timestamp_ns=when)
            publisher.forward(given())
            assert times_of(read(subscriber, 2 * len(TIMES))) == 2 * TIMES
    with Journal(tmp_path / "kept", mode="read") as journal:
        assert times_of(journal.read_many(1, 100)) == 2 * TIMES


def test_a_history_by_age_counts_from_publishing() -> None:
    """The age of a kept message is that of its publishing; its own time is its publisher's business."""
    with penstock.publisher("tcp://127.0.0.1:0", history="1h") as publisher:
        publisher.forward(given())
        port = publisher.port  # type: ignore[attr-defined]
        with penstock.subscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            assert times_of(read(subscriber, len(TIMES))) == TIMES


@pytest.mark.parametrize("armed", [True, False])
def test_times_of_a_recording_that_is_played(armed: bool, tmp_path: Path) -> None:
    """Of a recorder that waits for its trigger too: it keeps what came in the last seconds, whatever its time."""
    with contextlib.ExitStack() as stack:
        source: Any = stack.enter_context(penstock.publisher("tcp://127.0.0.1:0"))
        plan = Plan(
            tmp_path / "recording", {f"tcp://127.0.0.1:{source.port}": "t"}, pre_buffer_s=None if armed else 3600.0
        )
        with Recorder(plan) as recorder:
            assert source.wait_ready(1, LONG)
            source.forward(given())
            if not armed:
                deadline = time.monotonic() + LONG
                while len(recorder.sources[0].waiting) < len(TIMES):
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                recorder.trigger()
            deadline = time.monotonic() + LONG
            while recorder.totals()["messages"] < len(TIMES):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            recorder.stop()
        recorded = stack.enter_context(Journal(tmp_path / "recording", mode="read"))
        kept = [message for message in recorded.read_many(1, 100) if message.channel == "t"]
        found = {bytes(message): message.timestamp_ns for message in kept}
        assert found == {bytes(message): message.timestamp_ns for message in given()}
        player = Player(stack, {"t": "tcp://127.0.0.1:0"}, 0, 0.0)
        sink: Any = player._publishers["t"]
        subscriber = stack.enter_context(penstock.subscriber(f"tcp://127.0.0.1:{sink.port}"))
        assert sink.wait_ready(1, LONG)
        player.play(((recorded, message) for message in kept), 0, lambda count: None)
        assert {bytes(message): message.timestamp_ns for message in read(subscriber, len(TIMES))} == found
