"""The natural zero-copy lines, on every reach: what is written is published, and nobody writes afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest

import penstock
from tests.conformance.reaches import Reach
from tests.conformance.reading import read_all

LONG = 30


def read(subscriber: penstock.Subscriber) -> bytes:
    message = subscriber.read(LONG)
    assert message is not None
    return bytes(message)


def test_an_array_that_has_a_name(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for number in (7, 8):
        with publisher.reserve(12) as draft:
            image = draft.array((3, 4))
            image[:] = number
        assert read(subscriber) == bytes([number]) * 12
        assert not image.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            image[0, 0] = 1


def test_an_array_without_a_shape(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(8)
    numbers = draft.array(dtype="uint16")
    numbers[:] = 0x4141
    draft.publish()
    assert read(subscriber) == b"A" * 8 and numbers.tolist() == [0x4141] * 4


def test_a_view_without_a_name(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for _ in range(3):
        draft = publisher.reserve(4)
        draft.view()[:] = b"good"
        draft.publish()
        assert read(subscriber) == b"good"


def test_a_view_ends_with_publishing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(10)
    view = draft.view()
    view[:4] = b"good"
    draft.publish(4)
    assert read(subscriber) == b"good"
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_a_with_block_that_publishes_itself(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    with publisher.reserve(10) as draft:
        draft.view()[:4] = b"good"
        draft.publish(4)
    assert read(subscriber) == b"good"


def slices(draft: Any, kind: str) -> Any:
    if kind == "slice of an array":
        return draft.array((4,))[1:]
    if kind == "slice of a named array":
        array = draft.array((2, 2))
        return array, array.T
    if kind == "slice of a view":
        return draft.view()[1:]
    return memoryview(draft)


@pytest.mark.parametrize("kind", ["slice of an array", "slice of a named array", "slice of a view", "memoryview"])
def test_who_could_still_write_stops_the_publishing(reach: Reach, kind: str) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(4)
    draft.write(b"good")
    alive = slices(draft, kind)
    for _ in range(2):
        with pytest.raises(BufferError, match="nothing was published"):
            draft.publish()
        assert draft.open and subscriber.read(0) is None
    del alive
    draft.publish()
    assert read(subscriber) == b"good"


@pytest.mark.parametrize("end", ["publish", "cancel"])
def test_a_with_block_with_a_slice_leaves_the_draft(reach: Reach, end: str) -> None:
    publisher, subscriber = reach.pair()
    with pytest.raises(BufferError, match="nothing was published"), publisher.reserve(4) as draft:
        row = draft.array((2, 2))[0]
        draft.write(b"good")
    assert draft.open
    del row
    if end == "publish":
        draft.publish()
        assert read(subscriber) == b"good"
    else:
        draft.cancel()
    publisher.publish(b"next")
    assert read(subscriber) == b"next"


def test_an_array_is_readable_as_long_as_it_lives(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    with publisher.reserve(1 << 16) as draft:
        array = draft.array()
        array[:] = 5
    assert read(subscriber) == b"\5" * (1 << 16)
    del draft
    gc.collect()
    assert int(numpy.asarray(array[:100]).sum()) == 500
    publisher.close()
    gc.collect()
    assert array.shape == (1 << 16,) and int(array[-1]) == 5


def forget_with_a_view(draft: Any) -> Any:
    return draft.view()


def forget_with_an_array(draft: Any) -> Any:
    return draft.array((4,))


@pytest.mark.parametrize("look", [forget_with_a_view, forget_with_an_array])
def test_a_forgotten_draft_is_collected(reach: Reach, look: Any) -> None:
    publisher, subscriber = reach.pair()
    for _ in range(100):
        draft = publisher.reserve(4)
        gone = weakref.ref(draft)
        alive = look(draft)
        del draft, alive
        assert gone() is None
    publisher.publish(b"next")
    assert read(subscriber) == b"next"


def test_a_draft_in_a_cycle_is_collected(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    box: dict[str, Any] = {}
    box["draft"] = publisher.reserve(4)
    box["view"] = box["draft"].view()
    box["box"] = box
    gone = weakref.ref(box["draft"])
    del box
    gc.collect()
    assert gone() is None
    publisher.publish(b"next")
    assert read(subscriber) == b"next"


def test_a_draft_in_a_cycle_does_not_keep_the_next_one_waiting(reach: Reach) -> None:
    """Where drafts are bounded, the collector is run before one is refused for those that nobody holds."""
    publisher, subscriber = reach.pair()
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)  # enabled, but never of its own accord
    try:
        for _ in range(3):
            box: dict[str, Any] = {}
            box["draft"], box["box"] = publisher.reserve(4), box
            del box
            publisher.publish(b"next")
            assert read(subscriber) == b"next"
    finally:
        gc.set_threshold(*before)


def uses_of_a_draft(draft: Any) -> list[Any]:
    return [
        draft.view, draft.array, draft.publish, lambda: draft.publish(2), lambda: draft.write(b"late"), lambda: draft[0],
        lambda: draft.__setitem__(0, 1), lambda: draft.__setitem__(slice(None), b"late"), lambda: memoryview(draft),
    ]  # fmt: skip


def test_the_draft_of_a_closed_publisher_is_refused(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(4)
    publisher.close()
    for use in uses_of_a_draft(draft):
        with pytest.raises(penstock.ClosedError, match="closed"):
            use()
    assert draft.open
    draft.cancel()
    with pytest.raises(penstock.StateError):
        draft.view()
    subscriber.close()
    other, subscriber = reach.pair()
    other.publish(b"next")
    assert read(subscriber) == b"next"


def test_a_with_block_of_a_draft_whose_publisher_is_closed_is_told(reach: Reach) -> None:
    publisher, _ = reach.pair()
    with pytest.raises(penstock.ClosedError), publisher.reserve(4) as draft:
        draft.write(b"lost")
        publisher.close()
    assert not draft.open


def test_an_old_view_of_a_draft_changes_nothing_that_others_publish(reach: Reach) -> None:
    """It is written after its publisher was closed, while others take all the memory that there is."""
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(4)
    view, array = draft.view(), draft.array()
    publisher.close()
    subscriber.close()
    other, subscriber = reach.pair()
    for _ in range(50):
        other.publish(b"next")
        message = subscriber.read(LONG)
        assert message is not None
        view[:] = b"late"
        array[:] = 7
        assert bytes(message) == b"next"
        del message
    del view, array
    draft.cancel()


def test_items_of_a_draft_are_set(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    with publisher.reserve(4) as draft:
        draft[:] = b"good"
    assert read(subscriber) == b"good"
    with publisher.reserve(6) as draft:
        draft[0] = 65
        draft[-1] = ord("F")
        draft[1:3] = bytearray(b"BC")
        draft[3:5] = numpy.array([0x4544], dtype="<u2")
        assert draft[0] == 65 and draft[1:4] == b"BCD" and draft[::-1] == b"FEDCBA"
    assert read(subscriber) == b"ABCDEF"
    with publisher.reserve(4) as draft:
        draft[:] = b"...."
        draft[::2] = b"ab"
        draft[1:] = draft[:3]
    assert read(subscriber) == b"aa.b"


def test_items_that_do_not_fit_a_draft_are_refused(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(4)
    draft[:] = b"good"
    for index in (4, -5):
        with pytest.raises(IndexError):
            draft[index] = 1
        with pytest.raises(IndexError):
            draft[index]
    for number in (256, -1):
        with pytest.raises(ValueError):
            draft[0] = number
    for data in (b"", b"abc", b"abcde"):
        with pytest.raises(ValueError, match="4 bytes"):
            draft[:] = data
    text: Any = "text"
    for bad in (text, None, 1.5):
        with pytest.raises(TypeError):
            draft[:] = bad
        with pytest.raises(TypeError):
            draft[0] = bad
        with pytest.raises(TypeError):
            draft[bad] = 1
    with pytest.raises(TypeError):
        del draft[0]  # type: ignore[attr-defined]
    draft.publish()
    for closed in (lambda: draft[0], lambda: draft[:]):
        with pytest.raises(penstock.StateError):
            closed()
    with pytest.raises(penstock.StateError):
        draft[:] = b"late"
    assert read(subscriber) == b"good"


def test_what_is_not_written_leaves_the_process_as_zeros(reach: Reach) -> None:
    """Not as what was in that memory before, which may be anything."""
    if reach.can["in place"] == "yes":
        pytest.skip(f"docs/reaches.md: readers of {reach.name} see the very memory")
    publisher, subscriber = reach.pair()
    for _ in range(20):
        publisher.publish(b"secret" * 100)
    assert read_all(subscriber, 20) == [b"secret" * 100] * 20
    with publisher.reserve(600) as draft:
        draft.write(b"ab")
    assert read_all(subscriber, 1) == [b"ab" + bytes(598)]


@pytest.mark.parametrize("kind", [None, "u1"])
def test_what_is_not_written_shows_no_memory_of_the_program(reach: Reach, kind: Any) -> None:
    """Of a reach whose readers see the very memory, too: a bridge may carry it off."""
    typed = {} if kind is None else {"type": numpy.dtype(kind)}
    publisher, subscriber = reach.pair((typed, typed))
    for size in (600, 5000, 70_000):
        secrets = [bytearray(b"secret" * (size // 6)) for _ in range(200)]
        del secrets
        with publisher.reserve(size):
            pass
        assert read(subscriber) == bytes(size)
