"""Message and Draft by themselves; what rooms do with them is in the conformance suite."""

from __future__ import annotations

import gc
import sys

import pytest

import penstock
from penstock import Message


def test_a_message_says_what_it_is() -> None:
    message = Message(b"abc", ordinal=3, timestamp_ns=5, channel="x", position=9, id=4, vchan_id=2)
    assert (message.ordinal, message.timestamp_ns, message.channel) == (3, 5, "x")
    assert (message.position, message.id, message.vchan_id) == (9, 4, 2)
    assert repr(message) == "<Message x#3, 3 bytes>"


def test_what_a_reach_does_not_have_is_none() -> None:
    message = Message(b"")
    assert (message.position, message.id, message.vchan_id, message.channel, message.source) == (None,) * 5
    assert dict(message.properties) == {}


def test_equal_to_bytes_of_the_same_content() -> None:
    message = Message(b"abc")
    assert message == b"abc" == message
    assert message == bytearray(b"abc")
    assert message != b"abd"
    assert message not in ("abc", 5)
    assert {message: 1}[b"abc"] == 1  # type: ignore[index]


def test_read_only() -> None:
    message = Message(bytearray(b"abc"))
    with pytest.raises(TypeError):
        memoryview(message)[0] = 1
    with pytest.raises(AttributeError):
        message.ordinal = 5  # type: ignore[misc]


def test_a_message_holds_its_memory_until_released() -> None:
    data = bytearray(b"abc")
    message = Message(data)
    with pytest.raises(BufferError):
        data.append(1)
    message.release()
    data.append(1)


def test_a_view_holds_it_longer() -> None:
    data = bytearray(b"abc")
    message = Message(data)
    view = memoryview(message)
    message.release()
    assert message.pinned
    with pytest.raises(BufferError):
        data.append(1)
    assert bytes(view) == b"abc"
    view.release()
    assert not message.pinned
    data.append(1)


def test_released_twice() -> None:
    message = Message(b"abc")
    message.release()
    with pytest.raises(penstock.StateError):
        message.release()
    with pytest.raises(BufferError):
        bytes(message)
    with pytest.raises(BufferError):
        hash(message)


def test_subclasses() -> None:
    class Delivery(Message):
        tries = 0

    delivery = Delivery(b"abc", ordinal=1)
    delivery.tries = 3
    assert bytes(delivery) == b"abc" and isinstance(delivery, Message)


def test_reuse_of_dead_messages_keeps_nothing() -> None:
    first = Message(b"a", properties={"k": "v"}, source=object(), channel="c")
    del first
    second = Message(b"b")
    assert (dict(second.properties), second.source, second.channel) == ({}, None, None)


def test_no_leak() -> None:
    data = bytes(100)
    before = sys.getrefcount(data)
    for _ in range(10_000):
        message = Message(data, channel="c", properties={"a": "b"})
        memoryview(message).release()
    del message
    gc.collect()
    assert sys.getrefcount(data) == before


def test_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.arange(12, dtype="int32")
    message = Message(data)
    assert (message.array((3, 4), "int32") == data.reshape(3, 4)).all()
    assert message.array(dtype="int32").shape == (12,)
    assert message.array((2,), dtype="int32").tolist() == [0, 1]
    with pytest.raises(ValueError):
        message.array((100,), "int32")
    with pytest.raises(TypeError, match="unexpected"):
        message.array(shap=(1,))


@pytest.mark.parametrize("bad", [{"properties": [1]}, {"ordinal": "x"}, {"no": 1}])
def test_bad_arguments(bad: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Message(b"", **bad)  # type: ignore[arg-type]
