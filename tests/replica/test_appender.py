"""The outcome of an append is known, however the answer was lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from penstock.errors import describe
from penstock.replica import Replica
from penstock.replica.appender import STARTING, WAITING, Appender, FencedError, LostBlocksError
from penstock.replica.block import BEGIN, HEAD, Block, decode
from penstock.replica.client import UnansweredError
from penstock.replica.history import chains
from penstock.replica.stream import StreamError, WrongLastError

from .conftest import until
from .fake_blocks import FakeBlocks, FakeStream

ANOTHERS = Block(UUID(int=1), 2, 8, 1, 1, 1, 0, 0, 0).encode()
ONE = Block(UUID(int=1), 1, 7, 1, 2, 1, 0, 0, 0, BEGIN, bytes(range(200)))
TWO = Block(UUID(int=1), 1, 7, 2, 3, 1, 0, 200, 1, 0, b"two")


class Scripted(FakeBlocks):
    """Each append does the next thing of a list, then goes as it should."""

    def __init__(self, stream: FakeStream, *fates: str) -> None:
        super().__init__(stream)
        self.sizes: list[int] = []  # how much the next connections take; the last one stays
        self.fates = list(fates)
        self.tries = 0

    def append(self, data: bytes, after: int, identity: str = "") -> None:
        self.tries += 1
        fate = self.fates.pop(0) if self.fates else "stored"
        if len(data) > self.max_bytes:
            self._reconnect()
            raise UnansweredError("connection reset by peer")
        if fate == "late":  # it lands before the next one
            self._late.append((data, after, identity))
            self._reconnect()
            raise UnansweredError(fate)
        while self._late:
            with contextlib.suppress(WrongLastError):
                self.stream.append(*self._late.pop())
        if fate == "other":
            self.stream.append(ANOTHERS, after)
            raise UnansweredError("cut")
        if fate == "full":
            raise StreamError(f"{self.name}: maximum bytes exceeded")
        if fate == "unavailable":
            raise ConnectionError("nobody is there")
        if fate != "lost":
            super().append(data, after, identity)
        if fate != "stored":
            self._reconnect()
            raise UnansweredError(fate)

    def _reconnect(self) -> None:
        if self.sizes:
            self.max_bytes = HEAD.size + self.sizes.pop(0)


def appender(stream: FakeStream, *fates: str, pause: Callable[[], None] = lambda: None) -> tuple[Appender, Scripted]:
    blocks = Scripted(stream, *fates)
    return Appender(blocks, stream.last, 7, pause=pause), blocks


@pytest.mark.parametrize("fates", [["answer lost"], ["lost"], ["lost", "lost", "answer lost"], ["unavailable"] * 5])
def test_it_is_stored_once(fates: list[str]) -> None:
    stream = FakeStream()
    writer, _ = appender(stream, *fates)
    assert [writer.append(ONE), writer.append(TWO)] == [1, 2]
    assert stream.blocks == {1: ONE.encode(), 2: TWO.encode()}


def test_an_outage_is_told_once_and_its_end_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.replica.outage.SLOW_S", 0.0)
    writer, _ = appender(FakeStream(), *["unavailable"] * 5, pause=lambda: until(lambda: bool(caplog.messages)))
    for _ in range(2):
        writer.append(ONE)
        writer.append(TWO)
        begun, over = caplog.messages
        assert begun == f"stream fake, 3 of 3 nodes answer: nobody is there; {WAITING}"
        assert over.startswith("stream fake answers again, after ")
        caplog.clear()
        writer.blocks.fates += ["unavailable"] * 5  # type: ignore[attr-defined]


def test_what_the_stream_itself_says_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not that a request had no answer, which follows from it."""
    stream = FakeStream()
    writer, _ = appender(stream)
    writer.append(ONE)
    stream.delete()
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            monkeypatch.setattr("penstock.replica.outage.SLOW_S", 0.0)
        if pauses > 3:
            until(lambda: bool(caplog.messages))
            writer.end_after(0)

    writer._pause = pause
    with pytest.raises(TimeoutError):
        writer.append(TWO)
    assert caplog.messages == [f"stream fake, 3 of 3 nodes answer: stream not found; {WAITING}"]


def test_a_broker_that_is_started_on_a_full_stream_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.replica.outage.SLOW_S", 0.0)
    monkeypatch.setattr("penstock.replica.outage.TELL_S", 0.0)
    monkeypatch.setattr("penstock.replica.replica.OPEN_S", 0.5)
    replica = Replica(tmp_path / "a", Scripted(FakeStream(), *["full"] * 1000))
    with pytest.raises(TimeoutError, match="stream fake stores nothing: maximum bytes exceeded"):
        replica.disk()
    until(lambda: f"maximum bytes exceeded; {STARTING}" in caplog.text)
    assert WAITING not in caplog.text
    replica.blocks.fates.clear()  # type: ignore[attr-defined]
    replica.disk()
    assert replica._appender is not None and replica._appender._end_at == math.inf, "from now on it waits"


def test_a_short_outage_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("penstock.replica.outage.SLOW_S", math.inf)
    writer, _ = appender(FakeStream(), *["unavailable"] * 5)
    writer.append(ONE)
    assert not caplog.messages


def test_what_landed_is_not_sent_again() -> None:
    writer, blocks = appender(FakeStream(), "answer lost")
    writer.append(ONE)
    assert (blocks.tries, writer.unknown) == (1, 1)


def test_another_brokers_block_ends_it_for_good() -> None:
    stream = FakeStream()
    writer, blocks = appender(stream, "other")
    for _ in range(2):
        with pytest.raises(FencedError, match="another broker"):
            writer.append(ONE)
    assert blocks.tries == 1, "it does not even try again"
    assert stream.blocks == {1: ANOTHERS}


def test_who_wrote_and_is_no_broker_is_not_called_one() -> None:
    stream = FakeStream()
    writer, _ = appender(stream)
    stream.append(b"hello", 0)
    with pytest.raises(FencedError, match=r"no broker has written to .*: block 1 is no block of a journal") as told:
        writer.append(ONE)
    assert "another broker" not in str(told.value)


def test_another_brokers_block_that_was_purged_ends_it_too() -> None:
    stream = FakeStream()
    writer, _ = appender(stream)
    stream.append(b"another's", 0)
    stream.append(b"another's", 1)
    stream.purge(2)
    with pytest.raises(FencedError):
        writer.append(ONE)


def test_without_a_quorum_it_waits_until_it_is_told_to_end() -> None:
    stream = FakeStream()
    blocks = Scripted(stream, *["lost"] * 1000)
    writer = Appender(blocks, 0, 7, pause=lambda: writer.end_after(0) if blocks.tries == 20 else None)
    with pytest.raises(TimeoutError, match="not known") as ended:
        writer.append(ONE)
    assert describe(ended.value).endswith("is not known"), "without the words of a number of the system"
    assert blocks.tries == 21, "one more after it was told"
    with pytest.raises(TimeoutError):
        writer.append(TWO)
    assert not stream.blocks, "after an outcome that is not known nothing may follow"


CUTS: dict[str, tuple[list[str], list[int], list[int]]] = {
    "a server takes less than the one before": (["lost"], [80], [80, 80, 40]),
    "each takes less than the one before": (["lost", "stored", "lost", "lost"], [80, 60, 50], [80, 50, 50, 20]),
    "a server takes more": (["answer lost", "lost"], [80, 300], [200]),
    "the whole block was stored, and the answer was lost": (["answer lost"], [80], [200]),
    "the whole block lands when its first part is sent": (["late"], [80], [200]),
    "a part lands when a shorter one is sent": (["lost", "late"], [80, 30], [80, 30, 30, 30, 30]),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_block_is_cut_as_the_connection_takes_it_and_stored_once(case: str) -> None:
    """Also where it may be there already as it was cut for another connection."""
    fates, sizes, stored = CUTS[case]
    stream = FakeStream()
    writer, blocks = appender(stream, *fates)
    blocks.sizes = list(sizes)
    assert writer.append(ONE) == 1
    begun = writer.last
    assert writer.append(TWO) == begun + 1
    found = [(sequence, decode(data, "here")) for sequence, data in stream.blocks.items()]
    assert [len(block.data) for _, block in found] == [*stored, len(TWO.data)]
    assert list(chains(found)) == [(1, ONE), (begun + 1, TWO)]


def test_a_part_of_anothers_block_ends_it_too() -> None:
    stream = FakeStream()
    writer, blocks = appender(stream, "lost", "stored", "other")
    blocks.sizes = [80]
    with pytest.raises(FencedError, match="block 2 is not ours"):
        writer.append(ONE)


@pytest.mark.parametrize("loss", ["blocks", "the last segment, by a purge"])
def test_a_loss_is_noticed_by_the_first_store_after_the_pause(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is stored on top of it before what was lost is put back."""
    monkeypatch.setattr("penstock.replica.appender.CHECK_S", 0.0)
    stream = FakeStream()
    writer, _ = appender(stream)
    writer.newest = writer.append(ONE)
    for _ in range(3):
        writer.append(TWO)
    if loss == "blocks":
        del stream.blocks[2]
    else:
        stream.purge(stream.last + 1)
    with pytest.raises(LostBlocksError):
        writer.append(TWO)
    assert stream.last == 4
