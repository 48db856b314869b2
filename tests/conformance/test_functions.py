"""Functions that are called with messages: process_all, and on_message= with a thread of its own, on every reach."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import channel

from .reaches import Reach, unique
from .reading import LONG, read_all


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def called(reach: Reach, function: Callable[[Any], Any]) -> tuple[penstock.Publisher, penstock.Subscriber]:
    for_publisher, for_subscriber = reach.lossless()
    return reach.pair((for_publisher, {**for_subscriber, "on_message": function}))


def test_process_all_leaves_what_came_meanwhile(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    calls = []

    def again(message: Any) -> None:
        calls.append(bytes(message))
        assert len(calls) < 100, "process_all does not return while its function publishes"
        publisher.publish(b"again")
        del message
        time.sleep(0.02)  # for reaches whose messages need a moment to arrive

    subscriber.on_message(again)
    publisher.publish(b"first")
    assert subscriber.wait(LONG)
    assert subscriber.process_all() == 1
    assert calls == [b"first"]
    assert subscriber.wait(LONG), "what came meanwhile is told of"
    subscriber.on_message(None)
    assert read_all(subscriber, 1) == [b"again"]


def test_process_all_ends_beside_a_fast_publisher(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            publisher.publish(b"x" * 100)

    count = 0

    def note(_: Any) -> None:
        nonlocal count
        count += 1

    subscriber.on_message(note)
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(5):
            assert subscriber.wait(LONG)
            assert subscriber.process_all() > 0
    finally:
        stop.set()
        deadline = time.monotonic() + LONG
        while thread.is_alive() and time.monotonic() < deadline:  # it may wait for room
            subscriber.process_all()
            thread.join(0.01)
    assert not thread.is_alive()
    assert count > 0


def test_a_function_given_at_opening_is_called(reach: Reach) -> None:
    found: list[tuple[bytes, int]] = []
    publisher, subscriber = called(reach, lambda message: found.append((bytes(message), threading.get_ident())))
    publisher.publish_many([b"%d" % i for i in range(50)])
    until(lambda: len(found) == 50, f"{len(found)} of 50 came")
    assert [data for data, _ in found] == [b"%d" % i for i in range(50)]
    threads = {thread for _, thread in found}
    assert len(threads) == 1 and threading.get_ident() not in threads
    with pytest.raises(penstock.StateError):
        subscriber.read(0)
    with pytest.raises(penstock.StateError):
        subscriber.read_many(1, 0)
    subscriber.close()
    assert threads.isdisjoint(thread.ident for thread in threading.enumerate())
    assert subscriber.ledger.balanced


def test_what_a_function_raises_is_counted_and_logged(reach: Reach, caplog: pytest.LogCaptureFixture) -> None:
    found: list[bytes] = []

    def fail(message: Any) -> None:
        found.append(bytes(message))
        if bytes(message) == b"bad":
            raise ValueError("this one is bad")

    with caplog.at_level(logging.ERROR, "penstock"):
        publisher, subscriber = called(reach, fail)
        publisher.publish_many([b"1", b"bad", b"2"])
        until(lambda: len(found) == 3, f"only {found} came")
        until(lambda: subscriber.errors == 1, "the failure was not counted")
    assert found == [b"1", b"bad", b"2"]
    assert "this one is bad" in caplog.text


def test_a_function_may_close_its_subscriber(reach: Reach) -> None:
    found: list[bytes] = []
    box: list[penstock.Subscriber] = []
    opened = threading.Event()

    def once(message: Any) -> None:
        assert opened.wait(LONG)
        found.append(bytes(message))
        box[0].close()

    publisher, subscriber = called(reach, once)
    box.append(subscriber)
    opened.set()
    publisher.publish(b"1")
    until(lambda: subscriber.closed, "it was not closed")
    assert found == [b"1"]


def test_a_function_that_nobody_calls_is_told_of(
    reach: Reach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "UNPROCESSED_S", 0.01)
    _, subscriber = reach.pair()
    with caplog.at_level(logging.WARNING, "penstock"):
        subscriber.on_message(print)
        until(lambda: "process_all" in caplog.text, "nobody was told")
        assert caplog.text.count("process_all()") == 1


def test_a_function_that_is_called_is_not_told_of(reach: Reach) -> None:
    _, subscriber = reach.pair()
    subscriber.on_message(print)
    assert subscriber._unprocessed
    subscriber.process_all()
    assert not subscriber._unprocessed


def test_a_subscriber_that_its_function_closed_is_closed(reach: Reach) -> None:
    options, for_subscriber = reach.lossless()
    publisher = reach.publisher(**options)
    closed = threading.Event()

    def close(_: Any) -> None:
        subscriber.close()
        closed.set()

    subscriber = reach.subscriber(**for_subscriber, on_message=close)
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish(b"x")
    assert closed.wait(LONG)
    for read in (subscriber.read, subscriber.read_many):
        with pytest.raises(penstock.ClosedError):
            read()


def test_on_message_is_a_decorator(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []

    @subscriber.on_message
    def note(message: Any) -> None:
        found.append(bytes(message))

    assert callable(note), "the name is the function's still"
    publisher.publish(b"1")
    assert subscriber.wait(LONG)
    assert subscriber.process_all() == 1
    note(b"2")
    assert found == [b"1", b"2"]
    assert subscriber.on_message(None) is None


def test_a_coroutine_function_is_refused(reach: Reach) -> None:
    """A thread would call it, await nothing, and every message would be gone."""

    async def note(message: Any) -> None: ...

    class Notes:
        async def __call__(self, message: Any) -> None: ...

    _, subscriber = reach.pair()
    for function in (note, Notes()):
        with pytest.raises(TypeError, match="async for"):
            subscriber.on_message(function)
        with pytest.raises(TypeError, match="async for"):
            called(reach, function)


def functions_taken(kind: type) -> list[str]:
    """The names of its methods that take a function."""
    return [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]


def check_assignment(handle: Any, whose: str) -> None:
    for name in functions_taken(type(handle)):
        before = getattr(handle, name)
        with pytest.raises(AttributeError) as refused:
            setattr(handle, name, print)
        assert f"{whose}.{name}(function)" in str(refused.value)
        assert ("on_message=function" in str(refused.value)) is (name == "on_message")
        assert getattr(handle, name) == before, f"{name} is another one now"


@pytest.mark.parametrize("kind", [None, dict])
def test_a_function_that_is_assigned_is_refused(reach: Reach, kind: Any) -> None:
    """It would hide the method, and nothing would ever call it."""
    typed = {} if kind is None else {"type": kind}
    for_publisher, for_subscriber = reach.lossless()
    publisher, subscriber = reach.pair(({**for_publisher, **typed}, {**for_subscriber, **typed}))
    check_assignment(subscriber, "subscriber")
    check_assignment(publisher, "publisher")
    assert "on_message" in functions_taken(type(subscriber))
    if reach.name.startswith("shm"):
        assert "on_dropped" in functions_taken(type(subscriber)) and "on_resize" in functions_taken(type(publisher))
    found: list[bytes] = []
    subscriber.on_message(lambda message: found.append(bytes(message)))
    publisher.publish(b"{}" if kind is None else {})
    assert subscriber.wait(LONG)
    assert subscriber.process_all() == 1 and found == [b"{}"]


def test_a_function_that_is_assigned_to_a_durable_publisher_is_refused(tmp_path: Path) -> None:
    with penstock.publisher(f"shm:/{unique()}", durable=tmp_path / "kept") as publisher:
        check_assignment(publisher, "publisher")
        assert "on_resize" in functions_taken(type(publisher))


def test_every_class_of_handles_refuses_it() -> None:
    """The rooms that need a server too, and whatever is opened natively."""
    import penstock.bridge.multiplexer
    import penstock.calls
    import penstock.nats.publishing
    import penstock.nats.subscribing

    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(further) for further in kind.__subclasses__()))

    classes = {kind for kind in below(channel.Handle) if kind.__module__.startswith("penstock.")}
    assert {penstock.nats.subscribing.Subscriber, penstock.tcp.Subscriber, penstock.shm.Publisher} <= classes
    for kind in classes:
        for name in functions_taken(kind):
            assert hasattr(inspect.getattr_static(kind, name), "__set__"), f"{kind.__name__}.{name} may be assigned to"


def test_a_class_of_yours_refuses_it_too(reach: Reach) -> None:
    _, subscriber = reach.pair()

    class Mine(type(subscriber)):  # type: ignore[misc]
        def on_message(self, function: Any) -> Any:
            """Another one."""
            return super().on_message(function)

    assert hasattr(inspect.getattr_static(Mine, "on_message"), "__set__")
    assert inspect.signature(Mine.on_message).parameters.keys() == {"self", "function"}
    assert Mine.on_message.__doc__ == "Another one."
