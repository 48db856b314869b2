"""The replicated log against a model: whatever is confirmed is there, in order, each once, wherever it is opened.

Brokers come and go on old, empty and damaged directories, several at a time; answers are lost, appends land late, and
commits are larger than a block, which is shorter at one server than at another.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.journal import Journal
from penstock.replica import FencedError, Replica
from penstock.replica.client import UnansweredError
from penstock.replica.refill import BOOT_NAME

from .fake_blocks import FakeBlocks, FakeStream

STEPS = 60


def contents(journal: Journal) -> dict[int, bytes]:
    """Every message, by position."""
    found: dict[int, bytes] = {}
    start = journal.first
    while batch := journal.read_many(start, 4096):
        found.update((message.position or 0, bytes(message)) for message in batch)
        start = max(found) + 1
    return found


class Model:
    """A few directories over one stream, and what was confirmed."""

    def __init__(self, place: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.place = place
        self.stream = FakeStream()
        self.open: dict[int, tuple[Replica, Journal]] = {}
        self.confirmed: dict[int, bytes] = {}  # by position
        self.sent = 0
        self.fenced = 0
        self.damaged = 0
        self.leader: int | None = None  # whose directory has everything that was confirmed

    def blocks(self, trouble: float) -> FakeBlocks:
        return FakeBlocks(self.stream, self.chance, trouble, limits=(20_000, 5_000, 70_000))

    def start(self, number: int, trouble: float = 0.2) -> None:
        self.kill(number)
        replica = Replica(self.place / str(number), self.blocks(trouble), short_s=0, pause=lambda: None)
        while True:
            try:
                disk = replica.disk()
                break
            except (UnansweredError, ConnectionError, PenstockError) as error:
                if isinstance(error, PenstockError) and "no quorum" not in str(error):
                    raise
        self.leader = number
        self.open[number] = (
            replica,
            Journal(self.place / str(number), disk=disk, segment_bytes=65536, refuse_damage=True),
        )

    def kill(self, number: int) -> None:
        if number in self.open:
            self.open.pop(number)[1].close()

    def lose(self, number: int) -> None:
        """The machine loses power: what was not synced may be there or not. Or its disk is gone."""
        self.kill(number)
        directory = self.place / str(number)
        self.leader = None if number == self.leader else self.leader
        if not directory.exists():
            return
        if self.chance.random() < 0.3:
            shutil.rmtree(directory)
            return
        (directory / BOOT_NAME).unlink(missing_ok=True)
        for path in directory.glob("*-*.*"):
            fate = self.chance.random()
            size = path.stat().st_size
            if fate < 0.2 and size:
                os.truncate(path, self.chance.randrange(size))
            elif fate < 0.4 and size:
                at = self.chance.randrange(size)
                data = bytearray(path.read_bytes())
                data[at : at + 5000] = bytes(len(data[at : at + 5000]))
                path.write_bytes(data)
            elif fate < 0.5:
                path.unlink()

    def publish(self, number: int) -> None:
        replica, journal = self.open[number]
        count = self.chance.choice([1, 1, 3, 20])
        bodies = []
        for _ in range(count):
            self.sent += 1
            bodies.append(b"%d " % self.sent + bytes(self.chance.choice([10, 100, 3000, 50_000])))
        try:
            first, last = journal.append_many("t", bodies)
        except OSError:
            assert isinstance(replica.fault, FencedError)
            self.fenced += 1
            self.kill(number)
            return
        for position, body in zip(range(first, last + 1), bodies, strict=True):
            assert position not in self.confirmed, "a position is given once"
            self.confirmed[position] = body

    def group(self, number: int) -> None:
        """A transaction in parts, which is dropped half way."""
        _, journal = self.open[number]
        transaction = journal.transaction()
        transaction.append("t", b"never %d" % self.sent)
        with contextlib.suppress(OSError):
            transaction.spill(roll=False)
        self.kill(number)

    def damage(self) -> None:
        """The cluster loses or changes blocks, and the broker that leads is started again."""
        if self.leader is None or not self.stream.blocks:
            return
        self.damaged += 1
        for number in list(self.open):  # sequences are given a second time: they fence off nobody who is left
            self.kill(number)
        blocks = self.stream.blocks
        for _ in range(self.chance.choice([1, 1, 3])):
            fate, at = self.chance.random(), self.chance.choice([*blocks] or [1])
            if fate < 0.8:
                for lost in range(at, at + self.chance.choice([1, 2, 20])):
                    blocks.pop(lost, None)
            else:
                self.stream.last = max(self.stream.first, at)
                for lost in [found for found in blocks if found > self.stream.last]:
                    del blocks[lost]
        self.start(self.leader, trouble=0.02)

    def step(self) -> None:
        number = self.chance.randrange(3)
        choice = self.chance.random()
        if number not in self.open or choice < 0.1:
            self.start(number)
        elif choice < 0.15:
            self.kill(number)
        elif choice < 0.25:
            self.lose(number)
        elif choice < 0.3:
            self.group(number)
        elif choice < 0.37:
            self.damage()
        else:
            self.publish(number)

    def check(self) -> None:
        for number in list(self.open):
            self.kill(number)
        for number in (0, 1, 2, 99):  # the old ones and an empty one
            self.start(number, trouble=0.0)
            journal = self.open[number][1]
            found = contents(journal)
            self.kill(number)
            missing = {position: body for position, body in self.confirmed.items() if found.get(position) != body}
            assert not missing, f"{len(missing)} confirmed messages are not there, the first at {min(missing)}"
            assert sorted(found) == list(range(1, len(found) + 1)), "positions are dense"
            numbers = [int(body.split()[0]) for _, body in sorted(found.items())]
            assert len(set(numbers)) == len(numbers), "each once"
            assert not any(body.startswith(b"never") for body in found.values())
        assert not list(self.place.glob("*/aside-*")), "nothing that was confirmed is anywhere but on the stream"


@pytest.mark.parametrize("seed", range(12))
def test_confirmed_is_there_wherever_it_is_opened(seed: int, tmp_path: Path) -> None:
    model = Model(tmp_path, seed)
    for _ in range(STEPS):
        model.step()
    assert model.confirmed
    model.check()
