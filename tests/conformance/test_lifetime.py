"""Closing, and memory that outlives what it came from, on every reach."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all

# --- close -----------------------------------------------------------------------------------------------------------


def test_use_after_close(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.close()
    publisher.close()
    assert publisher.closed
    with pytest.raises(penstock.ClosedError):
        publisher.publish(b"x")
    with pytest.raises(penstock.ClosedError):
        publisher.publish_many([b"x"])
    with pytest.raises(penstock.ClosedError):
        publisher.reserve(1)
    subscriber.close()
    subscriber.close()
    assert subscriber.closed
    with pytest.raises(penstock.ClosedError):
        subscriber.read(0)
    with pytest.raises(penstock.ClosedError):
        subscriber.read_many(1, 0)
    with pytest.raises(penstock.ClosedError):
        subscriber.wait(0)
    with pytest.raises(penstock.ClosedError):
        subscriber.fileno()
    assert subscriber.ledger.balanced


def test_close_wakes_a_reader(reach: Reach) -> None:
    _, subscriber = reach.pair()
    threading.Timer(0.05, subscriber.close).start()
    with pytest.raises(penstock.ClosedError):
        subscriber.read(LONG)


@pytest.mark.needs("processes")
def test_a_forked_child_does_not_publish_by_its_parents_handle(reach: Reach, tmp_path: Path) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"before")
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:
        try:
            publisher.publish(b"of the child")
        except BaseException as error:
            said.write_text(f"{type(error).__name__} {error}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert re.match("StateError .*fork.* in the child", said.read_text()), said.read_text()
    publisher.publish(b"after")
    assert read_all(subscriber, 2) == [b"before", b"after"]
    assert subscriber.read(0.05) is None


@pytest.mark.needs("outlives")
def test_messages_outlive_their_publisher(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"1", b"2"])
    publisher.close()
    assert read_all(subscriber, 2) == [b"1", b"2"]
    assert subscriber.read(0.01) is None


@pytest.mark.needs("history")
def test_a_late_subscriber_sees_history(reach: Reach) -> None:
    publisher = reach.publisher(**reach.lossless()[0])
    publisher.publish_many([b"1", b"2"])
    subscriber = reach.subscriber(**reach.lossless()[1])
    assert read_all(subscriber, 2) == [b"1", b"2"]


def test_a_subscriber_that_leaves_does_not_hinder(reach: Reach) -> None:
    if reach.can["many"] == "no":
        pytest.skip(f"docs/reaches.md: {reach.name} does not declare many")
    publisher, subscriber = reach.pair()
    other = reach.subscriber(**reach.lossless()[1])
    assert publisher.wait_ready(2, timeout=LONG)
    other.close()
    sent = [b"%d" % i for i in range(300)]
    thread = threading.Thread(target=publisher.publish_many, args=(sent,))
    thread.start()
    assert read_all(subscriber, 300) == sent
    thread.join()


def test_both_can_be_opened_again(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"1")
    assert read_all(subscriber, 1) == [b"1"]
    subscriber.close()
    publisher.close()
    publisher, subscriber = reach.pair()
    publisher.publish(b"2")
    last = b""
    while last != b"2":  # where history is kept, the first message may come again
        message = subscriber.read(LONG)
        assert message is not None
        last = bytes(message)
        message.release()


@pytest.mark.parametrize("kept", [False, True], ids=["", "durable"])
def test_a_forgotten_publisher_ends(reach: Reach, kept: bool) -> None:
    """As with a file: nobody closes it, and nobody can use it any more. Another one takes its place at once."""
    if kept and reach.can["durable"] == "no":
        pytest.skip(f"docs/reaches.md: {reach.name} does not declare durable")
    options = {"durable": reach.directory / "kept"} if kept else {}
    before = _threads("durable")
    address = reach.address
    for number in range(3):
        publisher: Any = penstock.publisher(address, **options)
        publisher.publish(b"%d" % number)
        if reach.name == "tcp":
            address = publisher.address
        handle = weakref.ref(publisher)
        del publisher
        wait_collected(handle)
    if kept:
        penstock.publisher(address, **options).close()
        with penstock.journal.Journal(reach.directory / "kept", mode="read") as journal:
            assert [bytes(message) for message in journal.read_many(1)] == [b"0", b"1", b"2"]
    assert _threads("durable") == before


def test_a_forgotten_subscriber_ends(reach: Reach) -> None:
    publisher, _ = reach.pair()
    subscriber = penstock.subscriber(reach.address)
    subscriber.read(0.1)
    handle = weakref.ref(subscriber)
    del subscriber
    wait_collected(handle)
    publisher.publish(b"x")


def test_a_handle_lives_as_long_as_one_of_its_methods_is_held(reach: Reach) -> None:
    """``penstock.subscriber(address).read(5)`` in one line, too."""
    for_publisher, for_subscriber = reach.lossless()
    publish = (opened := penstock.publisher(reach.address, **for_publisher)).publish
    if reach.name == "tcp":
        reach.address = opened.address  # type: ignore[attr-defined]
    read = penstock.subscriber(reach.address, **for_subscriber).read
    assert opened.wait_ready(1, timeout=LONG)
    del opened
    for number in range(3):
        gc.collect()
        publish(b"%d" % number)
        message = read(LONG)
        assert message is not None and bytes(message) == b"%d" % number
        message.release()


def wait_collected(handle: weakref.ref[Any]) -> None:
    deadline = time.monotonic() + LONG
    while gc.collect() is not None and handle() is not None:
        assert time.monotonic() < deadline, gc.get_referrers(handle())
        time.sleep(0.01)  # another thread may be closing it


def _threads(name: str) -> int:
    return sum(name in thread.name for thread in threading.enumerate())


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_message_outlives_its_handle(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"kept")
    message = subscriber.read(LONG)
    assert message is not None
    subscriber.close()
    publisher.close()
    gc.collect()
    assert bytes(message) == b"kept"


def test_a_view_outlives_its_message(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"kept")
    message = subscriber.read(LONG)
    assert message is not None
    view = memoryview(message)
    assert view.readonly
    message.release()
    for i in range(20):
        publisher.publish(b"%04d" % i)
        read_all(subscriber, 1)
    assert bytes(view) == b"kept", "a view never shows another message's bytes"
    del view


def test_a_released_message_gives_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"gone")
    message = subscriber.read(LONG)
    assert message is not None
    with message:
        assert bytes(message) == b"gone"
    assert message.released
    with pytest.raises(BufferError):
        memoryview(message)
    with pytest.raises(penstock.StateError):
        message.release()


def test_messages_are_collected(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    message = subscriber.read(LONG)
    assert message is not None
    gone = weakref.ref(message)
    del message
    gc.collect()
    assert gone() is None


@pytest.mark.needs("pins")
def test_many_more_messages_than_slots_flow(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for i in range(3000):
        publisher.publish(b"%d" % i)
        message = subscriber.read(LONG)
        assert message is not None and bytes(message) == b"%d" % i
        del message


def test_closing_with_drafts_and_messages_out(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    message = subscriber.read(LONG)
    draft = publisher.reserve(10)
    publisher.close()
    subscriber.close()
    with pytest.raises((penstock.ClosedError, penstock.StateError)):
        draft.publish(3)
    del draft, message
    gc.collect()
