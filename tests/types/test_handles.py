"""Typed handles where reaches differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

import penstock
from penstock import types
from penstock.broker import Server


class Pose(msgspec.Struct):
    x: float


def test_the_rooms_openers_take_types_too() -> None:
    open_publisher: Any = penstock.shm.publisher
    open_subscriber: Any = penstock.shm.subscriber
    with open_publisher("/types-room", type=Pose) as publisher, open_subscriber("/types-room", type=Pose) as subscriber:
        publisher.publish(Pose(1.0))
        assert subscriber.receive(30).value == Pose(1.0)
    open_bus: Any = penstock.bus.publisher
    with open_bus("types-room", type=Pose) as publisher:
        publisher.publish(Pose(2.0))
    with penstock.publisher("bus:types-room-none", type=None) as untyped:
        untyped.publish(b"bytes")


def test_every_way_to_read_gives_values() -> None:
    open_publisher: Any = penstock.shm.publisher
    open_subscriber: Any = penstock.shm.subscriber
    with open_publisher("/types-ways", type=Pose) as publisher, open_subscriber("/types-ways", type=Pose) as subscriber:
        publisher.publish_many([Pose(1.0), Pose(2.0)])
        first = subscriber.find(0)
        assert first.value == Pose(1.0)
        weak = subscriber.weak_reference(first)
        assert weak().value == Pose(1.0)
        assert [message.value for message in subscriber.read_all()] == [Pose(1.0), Pose(2.0)]
        assert subscriber.find(2**62) is None
    with penstock.subscriber("bus:types-ways", type=Pose) as other, pytest.raises(AttributeError):
        other.read_all()


def test_a_queues_message_comes_again_after_an_error(tmp_path: Path) -> None:
    with Server(tmp_path, 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/poses?queue=q"
        with penstock.publisher(address, type=Pose) as publisher:
            publisher.publish(Pose(1.0))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), penstock.subscriber(address, type=Pose) as subscriber:
                assert subscriber.receive(30).value == Pose(1.0)
                raise ZeroDivisionError


def test_a_rooms_own_openers_take_a_type() -> None:
    with (
        penstock.shm.subscriber("/types-opener", type=str) as subscriber,
        penstock.shm.publisher("/types-opener", type=str, slots=8) as publisher,
    ):
        publisher.publish("hello")
        assert subscriber.receive(30).value == "hello"
    with pytest.raises(penstock.InvalidArgument, match="evolve"):
        penstock.shm.publisher("/types-opener", evolve="any")


def test_a_fast_decoder_is_asked_first_and_the_other_where_it_raises():
    asked = []

    def fast(message):
        asked.append("fast")
        if bytes(message) != b"good":
            raise ValueError("not for me")
        return "fast"

    def decode(message):
        asked.append("decode")
        if bytes(message) == b"bad":
            raise ValueError("nobody's")
        return "decoded"

    codec = types.Codec("Two", "x", {}, encode=bytes, decode=decode, fast=fast)
    with penstock.subscriber("bus:fast", type=codec) as subscriber, penstock.publisher("bus:fast", type=codec) as publisher:
        publisher.publish_many([b"good", b"odd", b"bad"])
        messages = [subscriber.receive(30) for _ in range(3)]
        assert [message.value for message in messages[:2]] == ["fast", "decoded"]
        with pytest.raises(penstock.DecodeError, match="message 3 of fast, 3 bytes, is not Two: nobody's") as raised:
            messages[2].value
        assert isinstance(raised.value.__cause__, ValueError) and raised.value.message is messages[2]
        assert subscriber.decode_errors == 1
        assert asked == ["fast", "fast", "decode", "fast", "decode"]


def test_an_interrupt_in_a_decoder_is_no_message_that_does_not_decode():
    def decode(message):
        raise KeyboardInterrupt

    codec = types.Codec("Slow", "x", {}, encode=bytes, decode=decode)
    with penstock.subscriber("bus:slow", type=codec) as subscriber, penstock.publisher("bus:slow", type=codec) as publisher:
        publisher.publish(b"x")
        message = subscriber.receive(30)
        with pytest.raises(KeyboardInterrupt):
            message.value
        assert subscriber.decode_errors == 0


def test_arrays_of_no_items_and_of_parts_of_items():
    with penstock.subscriber("bus:parts", type=numpy.dtype("<f8")) as subscriber, penstock.publisher("bus:parts") as publisher:
        publisher.publish_many([b"", b"12345", bytes(16)])
        messages = [subscriber.receive(30) for _ in range(3)]
        assert messages[0].value.shape == (0,) and messages[2].value.tolist() == [0.0, 0.0]
        with pytest.raises(penstock.DecodeError, match="no whole number of items of 8 bytes"):
            messages[1].value
