"""Every wrong use is a clear exception that names what and why; nothing is lost or leaked."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

import penstock
from penstock._core import bus as native
from penstock.bus import (
    Bus,
    CallbackMessage,
    CallbackSubscriber,
    QueueSubscriber,
    SlabAllocator,
    StaticMessage,
    declare,
)
from penstock.errors import InvalidArgument, StateError

BAD_IDS: list[Any] = [-1, 65536, 1 << 40, -(1 << 80)]


@pytest.mark.parametrize("kind", ["queue", "fifo", "callback"])
def test_an_unknown_option_is_told_with_the_nearest(kind: str) -> None:
    with Bus(mode="direct") as bus, pytest.raises(InvalidArgument, match=f"{kind} subscriber has no option 'dept'.*depth"):
        bus.subscribe(1, kind=kind, handler=print, dept=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_out_of_range(bad: int) -> None:
    with Bus(mode="direct") as bus:
        subscriber = bus.subscribe()
        for use in (
            lambda: bus.publish(b"", bad),
            lambda: bus.publish(b"", id=bad),
            lambda: bus.publish_many([b""], bad),
            lambda: bus.allocate(bad, 1),
            lambda: bus.publisher(bad),
            lambda: bus.subscribe(bad),
            lambda: subscriber.subscribe(1, bad),
            lambda: subscriber.unsubscribe(bad),
            lambda: StaticMessage(bytearray(1), bad),
            lambda: QueueSubscriber(max_public_id=bad),
            lambda: QueueSubscriber(drop_above=bad),
            lambda: subscriber.range_of(bad),
        ):
            with pytest.raises(InvalidArgument, match=r"65535|range"):
                use()
        assert subscriber.ids == [], "all or none"
        assert bus.heap_in_use == 0


@pytest.mark.parametrize("open_handle", [penstock.subscriber, penstock.publisher])
def test_an_id_out_of_range_in_an_address_is_told_as_that(open_handle: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^id=70000 is not between 0 and 65535"):
        open_handle("bus:bad-ids?id=70000")


@pytest.mark.parametrize("bad", ["1", 1.0, None, True, b"1"])
def test_ids_of_a_wrong_type(bad: Any) -> None:
    with Bus(mode="direct") as bus:
        for use in (lambda: bus.publish(b"", bad), lambda: bus.allocate(bad, 1), lambda: bus.subscribe(bad)):
            with pytest.raises(TypeError):
                use()


def test_the_address_names_the_id() -> None:
    with penstock.publisher("bus:ids?id=300") as publisher, penstock.subscriber("bus:ids?id=300") as subscriber:
        publisher.publish(b"x")
        message = subscriber.read(1)
        assert message is not None and message.id == 300
    with pytest.raises(InvalidArgument, match="70000"):
        penstock.publisher("bus:ids?id=70000")
    with pytest.raises(InvalidArgument, match="depth"):
        penstock.subscriber("bus:ids?deph=1")
    with pytest.raises(InvalidArgument, match="depth"):
        penstock.subscriber("bus:ids", depth=0)
    with pytest.raises(InvalidArgument, match="overflow"):
        penstock.subscriber("bus:ids", overflow="drop")


def test_oversize() -> None:
    with Bus(mode="direct", max_message_bytes=100) as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        for use in (
            lambda: bus.publish(bytes(101), 1),
            lambda: bus.allocate(1, 101),
            lambda: slab.allocate(1, 9),
            lambda: bus.allocate(1, 9, slab),
            lambda: bus.publisher(1, allocator=slab).publish(bytes(9)),
            lambda: bus.publisher(1).reserve(101),
            lambda: bus.allocate(1, -1),
        ):
            with pytest.raises(InvalidArgument, match="bytes"):
                use()
        assert slab.in_use == 0 and bus.heap_in_use == 0


def test_publishing_twice() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        draft = bus.allocate(1, 1)
        assert draft is not None
        bus.publish(draft)
        for again in (lambda: bus.publish(draft), draft.publish, lambda: bus.publish(queue.read(0))):
            with pytest.raises(StateError, match="published before"):
                again()
        cancelled = bus.allocate(1, 1)
        assert cancelled is not None
        cancelled.cancel()
        with pytest.raises(StateError, match="cancelled"):
            bus.publish(cancelled)
        assert bus.heap_in_use == 0


def test_a_draft_of_another_bus() -> None:
    with Bus("one", mode="direct") as one, Bus("two", mode="direct") as two:
        queue = one.subscribe(1)
        for draft in (one.allocate(1, 1), one.publisher(1).reserve(1)):
            assert draft is not None
            with pytest.raises(StateError, match="'one', not of bus 'two'"):
                two.publish(draft)
            assert draft.open
            one.publish(draft)
        assert queue.queued == 2


def test_a_draft_of_another_reach(tmp_path: Any) -> None:
    with Bus(mode="direct") as bus:
        for foreign in (object(), 7, None, "text", [b"x"]):
            with pytest.raises(TypeError):
                bus.publish(foreign, 1)
        with pytest.raises(InvalidArgument, match="its id already"):
            bus.publish(bus.allocate(1, 1), 1)
        assert bus.heap_in_use == 0


def test_a_subscriber_on_two_buses() -> None:
    with Bus("one") as one, Bus("two") as two:
        subscriber = one.subscribe(1)
        with pytest.raises(StateError, match="is on bus 'one'"):
            two.add(subscriber)
        one.remove(subscriber)
        two.add(subscriber)
        assert subscriber.bus is two


def test_wrong_types() -> None:
    with Bus(mode="direct") as bus:
        wrong: list[tuple[type[Exception], Any]] = [
            (TypeError, lambda: bus.add(7)),
            (TypeError, lambda: bus.remove("x")),  # type: ignore[arg-type]
            (TypeError, lambda: CallbackSubscriber(7)),  # type: ignore[arg-type]
            (TypeError, lambda: setattr(QueueSubscriber(), "handler", 7)),
            (TypeError, lambda: setattr(QueueSubscriber(), "predicate", 7)),
            (InvalidArgument, lambda: setattr(QueueSubscriber(), "priority", 256)),
            (InvalidArgument, lambda: QueueSubscriber(priority=-1)),
            (InvalidArgument, lambda: QueueSubscriber(depth=0)),
            (InvalidArgument, lambda: QueueSubscriber(timeout=-1)),
            (InvalidArgument, lambda: bus.subscribe(1, kind="quue")),
            (InvalidArgument, lambda: SlabAllocator(0, 1)),
            (InvalidArgument, lambda: SlabAllocator(1, 0)),
            (InvalidArgument, lambda: SlabAllocator(1 << 40, 1)),
            (TypeError, lambda: CallbackMessage(bytearray(1), 1, 7)),  # type: ignore[arg-type]
            (TypeError, lambda: StaticMessage(7, 1)),
            (TypeError, lambda: bus.publish()),  # type: ignore[call-arg]
            (TypeError, lambda: bus.publish(b"", 1, 2)),  # type: ignore[call-arg]
            (TypeError, lambda: bus.publish(b"", identifier=1)),  # type: ignore[call-arg]
            (TypeError, lambda: bus.publish_many(7, 1)),  # type: ignore[arg-type]
            (TypeError, lambda: bus.publish_many([b"a", 7], 1)),
            (TypeError, lambda: bus.allocate(1, 1, allocator=7)),  # type: ignore[arg-type]
            (TypeError, lambda: bus.allocate(1, 1, timeout="soon")),  # type: ignore[arg-type]
            (InvalidArgument, lambda: bus.allocate(1, 1, timeout=-1)),
            (TypeError, lambda: bus.publisher(1, allocator=7)),
            (MemoryError, lambda: SlabAllocator(1 << 30, 1 << 31)),
        ]
        for kind, use in wrong:
            with pytest.raises(kind):
                use()


def test_objects_that_were_never_set_up_do_not_crash() -> None:
    """Native classes made without their __init__."""
    bus = native.Bus.__new__(native.Bus)
    subscriber = native.Subscriber.__new__(native.Subscriber)
    publisher = native.Publisher.__new__(native.Publisher)
    uses: list[Any] = [
        lambda: bus.publish(b"", 1),
        lambda: bus.allocate(1, 1),
        lambda: bus._counts(),
        lambda: bus._flush(0),
        lambda: bus._serve(weakref.ref(bus)),
        lambda: bus._drain(),
        lambda: bus._wait_ready(1, 1, 0, publisher),
        lambda: bus.add(subscriber),
        lambda: Bus().add(subscriber),
        lambda: subscriber.read(0),
        lambda: subscriber._set(0, True),
        lambda: subscriber._counts(),
        lambda: subscriber.fileno(),
        lambda: subscriber._deliver(StaticMessage(bytearray(1), 9).acquire(), False, True),
        lambda: publisher.publish(b""),
        lambda: publisher.reserve(1),
        lambda: publisher.publish_many([b""]),
    ]
    for use in uses:
        with pytest.raises(penstock.PenstockError):
            use()
    bus._stop(True)
    bus._finish()
    bus._forked()
    subscriber.close()
    publisher.close()


def test_setting_up_twice() -> None:
    with Bus() as bus:
        with pytest.raises(StateError, match="once"):
            bus.__init__("again")  # type: ignore[misc]
        subscriber = bus.subscribe(1)
        with pytest.raises(StateError, match="once"):
            subscriber.__init__()
        publisher = bus.publisher(1)
        with pytest.raises(StateError, match="once"):
            publisher.__init__(bus, 2)  # type: ignore[misc]
        assert publisher.id == 1


def test_releasing_twice() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        bus.publish(b"x", 1)
        message = queue.read(0)
        message.release()
        for use in (message.release, message.acquire, lambda: message.allocator_id, lambda: message.generation):
            with pytest.raises(StateError, match="released"):
                use()
        with pytest.raises(BufferError, match="released"):
            bytes(message)
        assert bus.heap_in_use == 0


def test_on_without_an_id_is_refused_at_once() -> None:
    """``@bus.on`` would take the function for an id and never call it."""
    with Bus("on") as bus:
        with pytest.raises(TypeError, match=r"@bus\.on"):
            bus.on(lambda message: None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="async for"):

            @bus.on(1)
            async def note(message: object) -> None: ...


def test_a_function_that_cannot_keep_its_subscriber_is_refused_before_there_is_one() -> None:
    found: list[object] = []
    with Bus("house", mode="direct") as bus:
        for function in (found.append, print):
            for decorate in (bus.on(1), declare(1)):
                with pytest.raises(TypeError, match=r"cannot keep its subscriber.*handler=FUNCTION"):
                    decorate(function)
        bus.publish(b"x", 1)
        assert found == []
        bus.subscribe(1, kind="callback", handler=found.append)
        bus.publish(b"x", 1)
        assert len(found) == 1


def test_an_executor_is_one() -> None:
    with pytest.raises(TypeError, match="executor must have a method submit"):
        Bus("house", executor=5)  # type: ignore[arg-type]
