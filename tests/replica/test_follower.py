"""A follower's directory is the broker's, block by block; damage is mended from the stream."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, StateError
from penstock.journal import Journal
from penstock.journal.layout import decode_segment_header
from penstock.journal.verify import verify
from penstock.replica.block import decode
from penstock.replica.follower import Follower

from .fake_blocks import FakeBlocks, FakeStream
from .test_model import Model, contents
from .test_refill import fill, opened


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


def test_readers_see_what_the_broker_has_as_it_comes(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
        with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
            with Journal(tmp_path / "b", mode="read") as reader, reader.follow(1) as subscriber:
                for number in range(40):  # over several segments
                    journal.append(f"t{number % 3}", b"%d" % number + bytes(9_000))
                    assert follower.step() >= 1
                    assert follower.position == journal.frontier
                assert contents(reader) == contents(journal)
                found = []
                while len(found) < 43:
                    message = subscriber.read(30)
                    assert message is not None
                    found.append((message.position, message.channel, message.ordinal, message.stored_ns))
            assert found == [(m.position, m.channel, m.ordinal, m.stored_ns) for m in everything(journal)]
            assert follower.step() == 0
            *sealed, active = sorted((tmp_path / "b").glob("*.log"))
            headers = [decode_segment_header(path.read_bytes()[:4096], path.name) for path in (*sealed, active)]
            assert len(sealed) > 3 and [header.seal is None for header in headers] == [False] * len(sealed) + [True]
    assert not verify(tmp_path / "b")


def everything(journal: Journal) -> list:  # type: ignore[type-arg]
    found = []
    start = 1
    while batch := journal.read_many(start, 4096):
        found += list(batch)
        start += len(batch)
    return found


def test_a_transaction_in_parts_is_seen_at_its_end_or_never(tmp_path: Path, stream: FakeStream) -> None:
    journal = opened(tmp_path / "a", stream)
    fill(journal, 2)
    with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
        transaction = journal.transaction()
        transaction.append("t", b"part 1")
        transaction.spill(roll=False)
        transaction.append("t", b"part 2")
        follower.step()
        with Journal(tmp_path / "b", mode="read") as reader:
            assert len(contents(reader)) == 2
            transaction.commit()
            follower.step()
            assert len(contents(reader)) == 4
            dropped = journal.transaction()
            dropped.append("t", b"never")
            dropped.spill(roll=False)
            follower.step()
            journal.close()
            with opened(tmp_path / "a", stream) as journal:
                journal.append("t", b"after")
                follower.step()
                assert contents(reader) == contents(journal)


def test_it_goes_on_where_it_was_within_a_chain_and_a_group(tmp_path: Path, stream: FakeStream) -> None:
    journal = opened(tmp_path / "a", stream)
    fill(journal, 2)
    transaction = journal.transaction()
    transaction.append("t", b"part 1")
    transaction.spill(roll=False)
    Follower(tmp_path / "b", FakeBlocks(stream)).close()
    transaction.append("t", b"part 2")
    transaction.commit()
    journal._disk._appender.blocks.max_bytes = 4096  # type: ignore[attr-defined]
    journal.append("t", bytes(20_000))
    whole = FakeStream()
    whole.blocks, whole.last = stream.blocks, stream.last
    for last in range(4, whole.last + 1):
        stream.last, stream.blocks = last, {at: data for at, data in whole.blocks.items() if at <= last}
        with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
            stream.last, stream.blocks = whole.last, whole.blocks
            follower.step()
            with Journal(tmp_path / "b", mode="read") as reader:
                assert contents(reader) == contents(journal)
        stream.last = last
        ended = (tmp_path / "b").rename(tmp_path / f"b{last}")
        assert not verify(ended)
    journal.close()


def test_it_frees_what_the_stream_has_no_more(
    tmp_path: Path, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.replica.follower.TRIM_S", 0)
    journal = opened(tmp_path / "a", stream, retain_queues=True)
    with journal, Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
        fill(journal)
        follower.step()
        assert journal.retain(passed=20)
        follower.step()
        with Journal(tmp_path / "b", mode="read") as reader:
            assert (reader.first, contents(reader)) == (journal.first, contents(journal))


def test_a_damaged_file_is_mended(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
        oldest = min((tmp_path / "b").glob("*.log"))
        flip(oldest, 20_000)
        assert follower.check() == [oldest.name]
        assert follower.check() == []
        flip(oldest, 20_000)
    with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
        assert follower.mended == [oldest.name]
        with Journal(tmp_path / "b", mode="read") as reader:
            assert contents(reader) == before
    assert not verify(tmp_path / "b")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_what_cannot_be_followed_is_said(tmp_path: Path, stream: FakeStream) -> None:
    with pytest.raises(StateError, match="start its broker first"):
        Follower(tmp_path / "b", FakeBlocks(stream))
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 2)
        with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
            fill(journal, 3)
            del stream.blocks[stream.last - 1]
            with pytest.raises(CorruptionError, match="is missing"):
                follower.step()


def test_no_damaged_batch_is_taken(tmp_path: Path, stream: FakeStream) -> None:
    """Neither by the checksum of its block, nor by its own where the block's is right."""
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 1)
        with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
            journal.append("t", b"body")
            block = decode(stream.blocks[stream.last], "here")
            for at in range(len(block.data)):
                data = bytearray(block.data)
                data[at] ^= 1
                stream.blocks[stream.last] = replace(block, data=bytes(data)).encode()
                before = follower.applied
                with pytest.raises(CorruptionError):
                    follower.step()
                follower.applied = before
                assert follower.position == 2
            for data in (b"", b"PBAT", block.data[:-8], block.data * 2):
                stream.blocks[stream.last] = replace(block, data=bytes(data)).encode()
                with pytest.raises(CorruptionError):
                    follower.step()
                follower.applied = before
            stream.blocks[stream.last] = block.encode()
            follower.step()
            with Journal(tmp_path / "b", mode="read") as reader:
                assert contents(reader) == contents(journal)


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_of_brokers_that_come_and_go(seed: int, tmp_path: Path) -> None:
    model = Model(tmp_path, seed)
    chance = random.Random(seed)
    while not model.confirmed:
        model.step()
    follower = Follower(tmp_path / "follower", FakeBlocks(model.stream))
    for _ in range(60):
        model.step()
        if chance.random() < 0.5:
            follower.step()
        if chance.random() < 0.1:
            follower.close()
            follower = Follower(tmp_path / "follower", FakeBlocks(model.stream))
    for number in list(model.open):
        model.kill(number)
    model.start(99, trouble=0.0)
    follower.step()
    with Journal(tmp_path / "follower", mode="read") as reader:
        assert contents(reader) == contents(model.open[99][1])
    model.kill(99)
    follower.close()
    assert not verify(tmp_path / "follower")
