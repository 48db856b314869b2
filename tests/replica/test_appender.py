"""The outcome of an append is known, however the answer was lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from uuid import UUID

import pytest

from penstock.errors import describe
from penstock.replica.appender import WAITING, Appender, FencedError
from penstock.replica.block import Block
from penstock.replica.client import UnansweredError

from .conftest import until
from .fake_blocks import FakeBlocks, FakeStream

ANOTHERS = Block(UUID(int=1), 2, 8, 1, 1, 1, 0, 0, 0).encode()


class Scripted(FakeBlocks):
    """Each append does the next thing of a list, then goes as it should."""

    def __init__(self, stream: FakeStream, *fates: str) -> None:
        super().__init__(stream)
        self.fates = list(fates)
        self.tries = 0

    def append(self, data: bytes, after: int, identity: str) -> None:
        self.tries += 1
        fate = self.fates.pop(0) if self.fates else "stored"
        if fate == "other":
            self.stream.append(ANOTHERS, after)
            raise UnansweredError("cut")
        if fate == "unavailable":
            raise ConnectionError("nobody is there")
        if fate != "lost":
            super().append(data, after, identity)
        if fate != "stored":
            raise UnansweredError(fate)


def appender(
    stream: FakeStream, *fates: str, pause: Callable[[], None] = lambda: None
) -> tuple[Appender, Scripted]:
    blocks = Scripted(stream, *fates)
    return Appender(blocks, stream.last, 7, pause=pause), blocks


@pytest.mark.parametrize("fates", [["answer lost"], ["lost"], ["lost", "lost", "answer lost"], ["unavailable"] * 5])
def test_it_is_stored_once(fates: list[str]) -> None:
    stream = FakeStream()
    writer, _ = appender(stream, *fates)
    assert [writer.append(b"one"), writer.append(b"two")] == [1, 2]
    assert stream.blocks == {1: b"one", 2: b"two"}


def test_an_outage_is_told_once_and_its_end_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.replica.outage.SLOW_S", 0.0)
    writer, _ = appender(FakeStream(), *["unavailable"] * 5, pause=lambda: until(lambda: bool(caplog.messages)))
    for _ in range(2):
        writer.append(b"one")
        writer.append(b"two")
        begun, over = caplog.messages
        assert begun == f"stream fake, 3 of 3 nodes answer: nobody is there; {WAITING}"
        assert over.startswith("stream fake answers again, after ")
        caplog.clear()
        writer.blocks.fates += ["unavailable"] * 5  # type: ignore[attr-defined]


def test_a_short_outage_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("penstock.replica.outage.SLOW_S", math.inf)
    writer, _ = appender(FakeStream(), *["unavailable"] * 5)
    writer.append(b"one")
    assert not caplog.messages


def test_what_landed_is_not_sent_again() -> None:
    writer, blocks = appender(FakeStream(), "answer lost")
    writer.append(b"one")
    assert (blocks.tries, writer.unknown) == (1, 1)


def test_another_brokers_block_ends_it_for_good() -> None:
    stream = FakeStream()
    writer, blocks = appender(stream, "other")
    for _ in range(2):
        with pytest.raises(FencedError, match="another broker"):
            writer.append(b"one")
    assert blocks.tries == 1, "it does not even try again"
    assert stream.blocks == {1: ANOTHERS}


def test_who_wrote_and_is_no_broker_is_not_called_one() -> None:
    stream = FakeStream()
    writer, _ = appender(stream)
    stream.append(b"hello", 0)
    with pytest.raises(FencedError, match=r"no broker has written to .*: block 1 is no block of a journal") as told:
        writer.append(b"one")
    assert "another broker" not in str(told.value)


def test_another_brokers_block_that_was_purged_ends_it_too() -> None:
    stream = FakeStream()
    writer, _ = appender(stream)
    stream.append(b"another's", 0)
    stream.append(b"another's", 1)
    stream.purge(2)
    with pytest.raises(FencedError):
        writer.append(b"one")


def test_without_a_quorum_it_waits_until_it_is_told_to_end() -> None:
    stream = FakeStream()
    blocks = Scripted(stream, *["lost"] * 1000)
    writer = Appender(blocks, 0, 7, pause=lambda: writer.end_after(0) if blocks.tries == 20 else None)
    with pytest.raises(TimeoutError, match="not known") as ended:
        writer.append(b"one")
    assert describe(ended.value).endswith("is not known"), "without the words of a number of the system"
    assert blocks.tries == 21, "one more after it was told"
    with pytest.raises(TimeoutError):
        writer.append(b"two")
    assert not stream.blocks, "after an outcome that is not known nothing may follow"
