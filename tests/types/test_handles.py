"""Typed handles where reaches differ."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.broker import Server


class Pose(msgspec.Struct):
    x: float


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
