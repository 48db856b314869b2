"""Memory of messages: allocators, references, zero copy, static and callback messages."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy
import pytest

import penstock
from penstock._core.bus import Message
from penstock.bus import (
    Bus,
    CallbackMessage,
    CustomAllocator,
    HeapAllocator,
    QueueSubscriber,
    SlabAllocator,
    StaticMessage,
    static_slab,
)
from penstock.errors import CapacityError, InvalidArgument, StateError

from .conftest import LONG, House

MODULE_SLAB = static_slab(16, 4, name="module")


def test_five_slabs() -> None:
    with Bus() as bus:
        for size, count in zip((2, 4, 8, 16, 32), (64, 32, 16, 8, 4), strict=True):
            slab = SlabAllocator(size, count)
            bus.add_allocator(slab)
            drafts = [slab.allocate(1, size) for _ in range(count)]
            assert all(draft is not None for draft in drafts)
            assert len({draft.address for draft in drafts if draft}) == count
            assert slab.allocate(1, size) is None
            assert slab.allocate(1, size, timeout=0.001) is None
            drafts.pop().cancel()  # type: ignore[union-attr]
            again = slab.allocate(1, size)
            assert again is not None and slab.allocate(1, size) is None
            again.cancel()
            for draft in drafts:
                draft.cancel()  # type: ignore[union-attr]
            assert slab.in_use == 0 and slab.most_in_use == count and slab.failed == 3


def test_ten_acquires_and_releases_change_nothing() -> None:
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        subscriber = bus.subscribe(1)
        bus.publish(slab.allocate(1, 8))
        message = subscriber.read(0)
        assert message.reference_count == 1
        for _ in range(10):
            message.acquire()
        assert message.reference_count == 11
        for _ in range(10):
            message.release()
        assert message.reference_count == 1 and not message.released and slab.in_use == 1
        message.release()
        assert message.released and message.reference_count == 0 and slab.in_use == 0
        with pytest.raises(StateError, match="released before"):
            message.release()
        with pytest.raises(StateError):
            message.acquire()


def test_allocating_waits_for_a_block_and_others_run() -> None:
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        held = slab.allocate(1, 8)
        threading.Timer(0.05, held.cancel).start()  # type: ignore[union-attr]
        got = slab.allocate(1, 8, timeout=LONG)
        assert got is not None
        got.cancel()


def test_the_handler_reads_the_very_memory_that_was_reserved(house: House) -> None:
    addresses = []
    house.bus.subscribe(1, kind="callback", handler=lambda message: addresses.append(message.address))
    queue = house.bus.subscribe(1)
    draft = house.bus.allocate(1, 8, house.slab)
    assert draft is not None
    address = draft.address
    house.bus.publish(draft)
    message = queue.read(LONG)
    assert house.bus.flush(LONG)
    assert addresses == [address] and message.address == address
    assert message.allocator_id == house.slab.id


def test_a_received_message_is_read_only(house: House) -> None:
    queue = house.bus.subscribe(1)
    house.publish(1)
    message = queue.read(LONG)
    with pytest.raises(TypeError):
        memoryview(message)[0] = 1
    assert not numpy.frombuffer(message, numpy.uint8).flags.writeable


def test_nobody_can_write_through_a_view_from_before_publishing(house: House) -> None:
    queue = house.bus.subscribe(1)
    draft = house.bus.allocate(1, 8, house.slab)
    assert draft is not None
    view = memoryview(draft)
    with pytest.raises(BufferError, match="nothing was published"):
        house.bus.publish(draft)
    with pytest.raises(BufferError, match="nothing was published"):
        draft.publish()
    assert queue.read(0) is None and draft.open
    view.release()
    house.bus.publish(draft)
    assert queue.read(LONG) is not None


def test_a_handler_finds_the_draft_published() -> None:
    """In direct mode handlers run inside publish: the draft must not be writable to them."""
    with Bus(mode="direct") as bus:
        outcome: list[Any] = []
        draft = bus.allocate(1, 4)
        assert draft is not None

        @bus.on(1)
        def handler(message: Any) -> None:
            with pytest.raises(BufferError):
                memoryview(draft)
            with pytest.raises(StateError, match="published before"):
                bus.publish(draft)
            outcome.append(bytes(message))

        draft.write(b"once")
        bus.publish(draft)
        assert outcome == [b"once"]


def test_a_kept_view_pins_the_block(house: House) -> None:
    queue = house.bus.subscribe(1)
    house.publish(1)
    message = queue.read(LONG)
    view = memoryview(message)
    message.release()
    assert house.slab.in_use == 1 and bytes(view) == bytes([1] * 8)
    view.release()
    assert house.slab.in_use == 0


def test_releasing_is_each_subscribers_own(house: House) -> None:
    queues = [house.bus.subscribe(1) for _ in range(3)]
    seen: list[bytes] = []
    house.bus.subscribe(1, kind="callback", handler=lambda message: message.release())
    house.bus.subscribe(1, kind="callback", handler=lambda message: seen.append(bytes(message)))
    house.publish(1)
    assert seen == [bytes([1] * 8)]
    messages = [queue.read(LONG) for queue in queues]
    messages[0].release()
    assert bytes(messages[1]) == bytes([1] * 8) and messages[1].reference_count == 2


def test_keeping_the_object_keeps_the_memory(house: House) -> None:
    kept: list[Any] = []
    for _ in range(2):
        house.bus.subscribe(1, kind="callback", handler=kept.append)
    house.publish(1)
    assert house.slab.in_use == 1 and [bytes(message) for message in kept] == [bytes([1] * 8)] * 2
    assert kept[0] is not kept[1] and kept[0].address == kept[1].address
    kept.clear()
    assert house.slab.in_use == 0


def test_the_count_is_wide() -> None:
    """More holders than the 8 bits of the reference's count can tell."""
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(8, 1)
        bus.add_allocator(slab)
        queues = [bus.subscribe(1) for _ in range(700)]
        bus.publish(slab.allocate(1, 8))
        messages = [queue.read(0) for queue in queues]
        assert messages[0].reference_count == 700
        assert messages[0].allocator_id == slab.id and messages[0].id == 1
        del messages
        assert slab.in_use == 0


# --- static, callback --------------------------------------------------------------------------------------------------


def test_static_messages(house: House) -> None:
    memory = bytearray(b"first")
    static = StaticMessage(memory, 3)
    seen: list[tuple[bytes, int]] = []
    house.bus.subscribe(
        3, kind="callback", handler=lambda message: seen.append((bytes(message), message.address)), max_public_id=7
    )
    assert static.reference_count == 0
    static.acquire()
    assert static.reference_count == 1
    house.bus.publish(static)
    assert house.bus.flush(LONG)
    assert static.reference_count == 0
    memory[:] = b"again"
    house.bus.publish(static.acquire())
    assert house.bus.flush(LONG)
    assert seen == [(b"first", static.address), (b"again", static.address)]
    assert static.allocator_id == 255


def test_static_message_in_numpy_memory() -> None:
    with Bus(mode="direct") as bus:
        array = numpy.arange(4, dtype="int32")
        static = StaticMessage(array, 1)
        queue = bus.subscribe(1)
        bus.publish(static.acquire())
        message = queue.read(0)
        assert message.address == array.ctypes.data
        with pytest.raises(StateError, match="in flight"):
            static.acquire()
            bus.publish(static)
        static.release()
        assert message.reference_count == 1


def test_static_message_must_be_acquired() -> None:
    with Bus(mode="direct") as bus:
        static = StaticMessage(bytearray(4), 1)
        with pytest.raises(StateError, match="acquire"):
            bus.publish(static)
        with pytest.raises(StateError, match="no reference"):
            static.release()


def test_callback_message_with_four_fifo_subscribers(house: House) -> None:
    subscribers = [house.subscribe(i, 2, kind="fifo") for i in range(4)]
    calls: list[tuple[int, list[Any]]] = []
    message = CallbackMessage(bytearray(4), 2, lambda it: calls.append((it.reference_count, list(house.order))))
    house.bus.publish(message.acquire())
    assert house.bus.flush(LONG)
    for subscriber in subscribers:
        assert calls == []
        assert subscriber.handle_queued(LONG)
    assert calls == [(0, [0, 1, 2, 3])]


def test_a_callback_may_publish_the_message_again() -> None:
    with Bus(mode="direct") as bus:
        rounds: list[int] = []

        def again(it: CallbackMessage) -> None:
            if len(rounds) < 5:
                bus.publish(it.acquire())

        bus.subscribe(1, kind="callback", handler=lambda message: rounds.append(message.ordinal))
        message = CallbackMessage(bytearray(1), 1, again)
        bus.publish(message.acquire())
        assert rounds == [1, 2, 3, 4, 5]


def test_static_messages_are_collected() -> None:
    class Memory(bytearray):
        pass

    import weakref

    memory = Memory(4)
    message: Any = CallbackMessage(memory, 1, lambda it: None)
    holder = [message]
    message = None
    gone = weakref.ref(memory)
    del memory
    holder.clear()
    gc.collect()
    assert gone() is None


# --- allocators --------------------------------------------------------------------------------------------------------


def test_an_allocator_must_be_added() -> None:
    slab = SlabAllocator(8, 2)
    assert slab.id is None
    with pytest.raises(StateError, match="add_allocator"):
        slab.allocate(1, 8)
    with Bus() as bus, Bus() as other:
        with pytest.raises(StateError, match="add_allocator"):
            bus.allocate(1, 8, slab)
        assert 128 <= bus.add_allocator(slab) <= 254
        with pytest.raises(StateError, match="added before"):
            other.add_allocator(slab)
        with pytest.raises(StateError, match="add_allocator"):
            other.allocate(1, 8, slab)
        draft = slab.allocate(1, 8)
        assert draft is not None
        with pytest.raises(StateError, match="1 message"):
            bus.remove_allocator(slab)
        draft.cancel()
        bus.remove_allocator(slab)
        assert slab.id is None
        other.add_allocator(slab)


def test_a_static_allocator_serves_every_bus() -> None:
    assert MODULE_SLAB.id is not None and 1 <= MODULE_SLAB.id <= 127
    for name in ("one", "two"):
        with Bus(name, mode="direct") as bus:
            queue = bus.subscribe(1)
            draft = MODULE_SLAB.allocate(1, 4)
            assert draft is not None
            with pytest.raises(StateError, match=r"bus\.publish"):
                draft.publish()
            bus.publish(draft)
            with bus.publisher(1, allocator=MODULE_SLAB).reserve(2) as second:
                second.write(b"hi")
            assert [message.allocator_id for message in queue.read_many(5, 0)] == [MODULE_SLAB.id] * 2
    assert MODULE_SLAB.in_use == 0


def test_heap_allocator_with_bounds() -> None:
    with Bus(mode="direct") as bus:
        heap = HeapAllocator(max_message_bytes=1000, max_messages=2)
        bus.add_allocator(heap)
        drafts = [heap.allocate(1, size) for size in (0, 1000)]
        assert heap.allocate(1, 1) is None
        with pytest.raises(InvalidArgument, match="1001 bytes"):
            heap.allocate(1, 1001)
        del drafts
        assert heap.in_use == 0


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 129, 2048, 2049, 100_000, 3_000_000])
def test_heap_messages_of_all_sizes(size: int) -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1)
        data = numpy.random.default_rng(size).bytes(size)
        for _ in range(3):
            bus.publish(data, 1)
            assert bytes(queue.read(0)) == data
        assert bus.heap_in_use == 0


class Arena:
    """A custom source: bytearrays it counts."""

    def __init__(self, most: int) -> None:
        self.out = 0
        self.most = most

    def allocate(self, size: int) -> bytearray | None:
        if self.out == self.most:
            return None
        self.out += 1
        return bytearray(size)

    def free(self, memory: Any) -> None:
        assert isinstance(memory, bytearray)
        self.out -= 1


def test_custom_allocator() -> None:
    with Bus(mode="direct") as bus:
        arena = Arena(2)
        allocator = CustomAllocator(arena)
        bus.add_allocator(allocator)
        queue = bus.subscribe(1)
        draft = allocator.allocate(1, 5)
        assert draft is not None
        draft.write(b"hello")
        address = draft.address
        bus.publish(draft)
        message = queue.read(0)
        assert bytes(message) == b"hello" and message.address == address and arena.out == 1
        second = allocator.allocate(1, 1)
        assert allocator.allocate(1, 1) is None and allocator.allocate(1, 1, timeout=0.001) is None
        del message, second
        assert arena.out == 0 and allocator.in_use == 0


def test_custom_allocator_that_misbehaves() -> None:
    class Bad(Arena):
        def allocate(self, size: int) -> Any:
            return {"short": bytearray(1), "read-only": b"12345", "nothing": 7}[self.kind]

        kind = "short"

    with Bus(mode="direct") as bus:
        source = Bad(1)
        allocator = CustomAllocator(source)
        bus.add_allocator(allocator)
        with pytest.raises(InvalidArgument, match="gave 1 bytes"):
            allocator.allocate(1, 5)
        source.kind = "read-only"
        with pytest.raises(BufferError):
            allocator.allocate(1, 5)
        source.kind = "nothing"
        with pytest.raises(TypeError):
            allocator.allocate(1, 5)
        source.kind = "missing"
        with pytest.raises(KeyError):
            allocator.allocate(1, 5, timeout=1)
        with pytest.raises(TypeError, match="allocate"):
            CustomAllocator(object())  # type: ignore[arg-type]
        assert allocator.in_use == 0


def test_leaks_are_findable() -> None:
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(16, 8, debug=True)
        bus.add_allocator(slab)
        queue = bus.subscribe(7)

        def take_and_keep() -> None:
            bus.publish(bus.allocate(7, 5, slab))

        take_and_keep()
        kept = queue.read(0)
        [leak] = slab.outstanding()
        assert (leak.id, leak.size, leak.reference_count, leak.address) == (7, 5, 1, kept.address)
        assert "test_messages.py" in leak.place[0] and "take_and_keep" in leak.place[0]
        del kept
        assert slab.outstanding() == []


def test_debugging_does_not_grow_without_end() -> None:
    with Bus(mode="direct") as bus:
        slab = SlabAllocator(16, 8, debug=True)
        bus.add_allocator(slab)
        for _ in range(5000):
            bus.publish(bus.allocate(7, 5, slab))
        assert slab._places() <= 1000


def test_messages_outlive_bus_and_allocator() -> None:
    bus = Bus(mode="direct")
    slab = SlabAllocator(8, 2)
    bus.add_allocator(slab)
    queue = bus.subscribe(1)
    bus.publish(slab.allocate(1, 8))
    bus.publish(b"heap", 1)
    messages = queue.read_many(5, 0)
    bus.close()
    del bus, slab, queue
    gc.collect()
    assert bytes(messages[0]) is not None and bytes(messages[1]) == b"heap"
    messages.clear()
    gc.collect()


def test_the_bus_bounds_its_heap() -> None:
    with Bus(mode="direct", max_messages=2, max_message_bytes=10) as bus:
        queue = bus.subscribe(1)
        bus.publish(b"a", 1)
        bus.publish(b"b", 1)
        with pytest.raises(CapacityError, match="max_messages"):
            bus.publish(b"c", 1)
        with pytest.raises(InvalidArgument, match="max_message_bytes"):
            bus.publish(b"12345678901", 1)
        assert queue.queued == 2 and queue.ledger.matched == 2


def test_a_message_is_a_penstock_message() -> None:
    with Bus("name", mode="direct") as bus:
        queue = bus.subscribe(9)
        bus.publish(b"payload", 9)
        message = queue.read(0)
        assert isinstance(message, penstock.Message) and type(message) is Message
        assert (message.id, message.ordinal, message.channel) == (9, 1, "name")
        assert message.timestamp_ns > 0 and message.position is None and dict(message.properties) == {}
        assert isinstance(queue, QueueSubscriber)


def test_the_class_of_its_messages_has_a_public_name() -> None:
    with penstock.publisher("bus:named-class") as publisher, penstock.subscriber("bus:named-class") as subscriber:
        publisher.publish(b"x")
        message = subscriber.receive(1)
        assert type(message) is penstock.bus.Message and message.reference_count >= 1
