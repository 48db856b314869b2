"""A follower's directory is the broker's, block by block; damage is mended from the stream."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError, describe
from penstock.journal import Journal
from penstock.journal.layout import decode_segment_header
from penstock.journal.verify import verify
from penstock.replica import Replica, refill
from penstock.replica.block import decode
from penstock.replica.client import UnansweredError
from penstock.replica.follower import Follower, follow
from penstock.replica.stream import Bounds, StreamError

from .conftest import LONG, until
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


def test_damage_in_the_segment_that_is_being_written_is_found_too(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal, Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
        fill(journal, 3)
        follower.step()
        assert follower.check() == []
        newest = max((tmp_path / "b").glob("*.log"))
        flip(newest, 5_000)
        assert follower.check() == [newest.name]
        assert follower.check() == []
        journal.append("t", b"goes on")
        assert follower.step() == 1
        with Journal(tmp_path / "b", mode="read") as reader:
            assert contents(reader) == contents(journal)
    assert not verify(tmp_path / "b")


@pytest.mark.parametrize("what", ["all", "log", "older", "index", "frontier", "marker"])
def test_what_is_removed_while_it_follows_is_made_again_and_named(
    what: str, tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
            assert follower.look() == []
            logs = sorted((tmp_path / "b").glob("*.log"))
            assert len(logs) > 1
            paths = {"log": logs[-1], "older": logs[0], "index": logs[-1].with_suffix(".index")}
            paths |= {"frontier": tmp_path / "b" / "frontier", "marker": tmp_path / "b" / "penstock-journal"}
            if what == "all":
                shutil.rmtree(tmp_path / "b")
            else:
                paths[what].unlink()
            journal.append("t", b"goes on")
            follower.step()
            gone = follower.look()
            assert gone and "was removed or replaced" in caplog.text
            assert len(caplog.messages) == 1 and set(gone) <= set(follower.mended), "told once"
            assert follower.look() == []
            journal.append("t", b"and on")
            follower.step()
            with Journal(tmp_path / "b", mode="read") as reader:
                assert contents(reader) == contents(journal)
    assert not verify(tmp_path / "b")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def garble(path: Path) -> None:
    path.write_bytes(b"?" * path.stat().st_size)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"?" * 100)


WRONG = [
    (kind, change)
    for kind in ("oldest.log", "oldest.index", "last.log", "last.index", "frontier", "penstock-journal")
    for change in (remove, garble)
] + [("last.log", lengthen)]


@pytest.mark.parametrize(("kind", "change"), WRONG)
def test_whatever_was_wrong_is_mended_and_named(
    tmp_path: Path,
    stream: FakeStream,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    change: Callable[[Path], None],
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    Follower(tmp_path / "b", FakeBlocks(stream)).close()
    assert not caplog.messages, "a new copy is no damage"
    logs = sorted((tmp_path / "b").glob("*.log"))
    which, _, suffix = kind.partition(".")
    wrong = logs[0 if which == "oldest" else -1].with_suffix(f".{suffix}") if suffix else tmp_path / "b" / kind
    change(wrong)
    with Follower(tmp_path / "b", FakeBlocks(stream)), Journal(tmp_path / "b", mode="read") as reader:
        assert contents(reader) == before
    assert len(caplog.messages) == 1 and wrong.name in caplog.text
    assert not verify(tmp_path / "b")
    Follower(tmp_path / "b", FakeBlocks(stream)).close()
    assert len(caplog.messages) == 1


def test_a_copy_that_is_only_behind_is_not_called_damaged(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        for count in (3, 3, 30):  # in the same segment, and over several
            fill(journal, count)
            with Follower(tmp_path / "b", FakeBlocks(stream)) as follower:
                assert follower.position == journal.frontier and not follower.mended
    assert not caplog.messages


def test_another_journals_marker_is_not_made_again(tmp_path: Path, stream: FakeStream) -> None:
    opened(tmp_path / "a", stream).close()
    with opened(tmp_path / "other", FakeStream()) as journal:
        fill(journal, 1)
    (tmp_path / "other" / "penstock-journal").unlink()
    with pytest.raises(InvalidArgument, match="is not a journal"):
        Follower(tmp_path / "other", FakeBlocks(stream))


def test_another_journal_in_the_place_of_its_directory_is_left_as_it_is(tmp_path: Path, stream: FakeStream) -> None:
    other, place, moved = tmp_path / "other", tmp_path / "b", tmp_path / "moved"
    with Journal(other, segment_bytes=65_536) as journal:
        fill(journal, 3)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
        with Follower(place, FakeBlocks(stream)) as follower:
            follower._look_at = float("inf")  # what happens before it is noticed
            place.rename(moved)
            other.rename(place)
            for number in range(40):  # over several segments
                journal.append("t", b"%d" % number + bytes(9_000))
            follower.step()
            with pytest.raises(InvalidArgument, match="not touched"):
                follower.look()
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        assert not verify(moved)
        with Journal(moved, mode="read") as reader:
            assert contents(reader) == contents(journal)


@pytest.mark.parametrize("work", ["refill", "check"])
def test_what_takes_the_place_of_its_directory_while_it_works_is_left_as_it_is(
    work: str, tmp_path: Path, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another journal, with segments of the same names."""
    other, place, moved = tmp_path / "other", tmp_path / "b", tmp_path / "moved"
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        with Journal(other, segment_bytes=65_536) as another:
            fill(another)
        before = {path.name: path.read_bytes() for path in other.iterdir()}

        def swap() -> None:
            place.rename(moved)
            other.rename(place)

        if work == "refill":
            fetch = refill._fetch

            def fetch_elsewhere(*arguments: Any) -> Path:
                if not moved.exists():
                    swap()
                return fetch(*arguments)

            monkeypatch.setattr(refill, "_fetch", fetch_elsewhere)
            Follower(place, FakeBlocks(stream)).close()
        else:
            with Follower(place, FakeBlocks(stream)) as follower:
                oldest = min(place.glob("*.log")).name
                swap()
                flip(moved / oldest, 5_000)
                assert follower.check() == [oldest]
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        assert not verify(moved)
        with Journal(moved, mode="read") as reader:
            assert contents(reader) == contents(journal)


def test_directories_that_cannot_be_followed_into_are_named(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 2)
    with pytest.raises(InvalidArgument, match="must be UTF-8"):
        Follower(tmp_path / os.fsdecode(b"caf\xe9"), FakeBlocks(stream))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    Follower(tmp_path / "caf\xe9", FakeBlocks(stream)).close()
    (log,) = (tmp_path / "a").glob("*.log")
    log.unlink()
    log.mkdir()
    with pytest.raises(InvalidArgument, match=f"{log} is a directory"):
        Follower(tmp_path / "a", FakeBlocks(stream))
    with (
        Follower(tmp_path / "b", FakeBlocks(stream)),
        pytest.raises(RefusedError, match="being written by this process"),
    ):
        Follower(tmp_path / "b", FakeBlocks(stream))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A partition of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("segment_bytes", [1 << 16, 64 << 20], ids=["of a new segment", "of the segment"])
def test_a_full_disk_is_told_with_its_directory(
    tmp_path: Path, small: Path, stream: FakeStream, segment_bytes: int
) -> None:
    disk = Replica(tmp_path / "a", FakeBlocks(stream)).disk()
    with Journal(tmp_path / "a", disk=disk, segment_bytes=segment_bytes) as journal:
        fill(journal, 1)
        with Follower(small / "f", FakeBlocks(stream)) as follower:
            fill(journal, 200)
            with pytest.raises(OSError) as running:
                follower.step()
        with pytest.raises(OSError) as beginning:
            Follower(small / "f", FakeBlocks(stream))
    for failed in (running, beginning):
        told = describe(failed.value)
        assert told.startswith(f"{small}/f") and "No space left" in told, told


@pytest.mark.parametrize("segment_bytes", [1 << 16, 64 << 20], ids=["of a new segment", "of the segment"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["the same one", "the next one"])
def test_what_it_could_not_write_on_a_full_disk_is_nobody_elses(
    tmp_path: Path,
    small: Path,
    stream: FakeStream,
    caplog: pytest.LogCaptureFixture,
    segment_bytes: int,
    goes_on: bool,
) -> None:
    """When there is room it goes on, and calls nothing of it damage."""
    disk = Replica(tmp_path / "a", FakeBlocks(stream)).disk()
    with Journal(tmp_path / "a", disk=disk, segment_bytes=segment_bytes) as journal:
        fill(journal, 1)
        with Follower(small / "f", FakeBlocks(stream)) as follower:
            fill(journal, 20)
            filler = small / "filler"
            with contextlib.suppress(OSError), filler.open("wb", 0) as file:
                file.write(bytes(1 << 20))
            os.truncate(filler, filler.stat().st_size - 100_000)
            for _ in range(2):  # as who stands by tries on
                with pytest.raises(OSError, match=r"No space|not written"):
                    follower.step()
            filler.unlink()
            if goes_on:
                follower.step()
        with Follower(small / "f", FakeBlocks(stream)) as follower, Journal(small / "f", mode="read") as reader:
            assert contents(reader) == contents(journal) and not follower.mended
    assert not caplog.messages
    assert not verify(small / "f")


def test_what_a_leader_could_not_write_on_a_full_disk_is_called_so(
    small: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    """In the directory of a broker that led, and follows now: the stream never had it."""
    disk = Replica(small / "a", FakeBlocks(stream)).disk()
    with Journal(small / "a", disk=disk) as journal:
        with pytest.raises(OSError, match="not written"):
            for _ in range(1000):
                journal.append("t", os.urandom(100_000))
        kept = contents(journal)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
    with Follower(small / "a", FakeBlocks(stream)), Journal(small / "a", mode="read") as reader:
        assert contents(reader) == kept
    assert "ended with a write that was broken off, as by a full disk" in caplog.text
    assert "after its end" not in caplog.text


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


def test_it_waits_until_the_broker_has_put_the_stream_right(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended(Exception):
        pass

    class Ending(FakeBlocks):
        def bounds(self) -> Bounds:
            if ended.is_set():
                raise Ended
            return super().bounds()

    def run() -> None:
        with contextlib.suppress(Ended), follow(tmp_path / "c", Ending(stream)) as late:
            late.run()

    def follow_on() -> None:
        with contextlib.suppress(Ended):
            follower.run()

    ended = threading.Event()
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
    follower = Follower(tmp_path / "b", Ending(stream))
    stream.append(b"garbage", stream.last)
    threads = [threading.Thread(target=target) for target in (run, follow_on)]
    for thread in threads:
        thread.start()
    until(lambda: sum("no block of a journal" in text for text in caplog.messages) >= 2, "both have told")
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 2)
        frontier = journal.frontier
    for name in ("b", "c"):
        place = tmp_path / name
        until(lambda place=place: (place / "frontier").exists() and read_frontier(place) == frontier, "it goes on")  # type: ignore[misc]
    ended.set()
    for thread in threads:
        thread.join(LONG)
    follower.close()


def read_frontier(directory: Path) -> int:
    with Journal(directory, mode="read") as reader:
        return reader.frontier


class Interrupted(FakeBlocks):
    """What ``bounds`` does next: raise the exception, call the function, or answer."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__(stream)
        self.next: list[Exception | Callable[[], object] | None] = []

    def bounds(self) -> Bounds:
        event = self.next.pop(0) if self.next else None
        if isinstance(event, Exception):
            raise event
        if event is not None:
            event()
        return super().bounds()


class EndedError(Exception):
    """The test is over."""


def test_it_goes_on_whatever_the_stream_says_meanwhile(tmp_path: Path, stream: FakeStream) -> None:
    """Lost blocks that the broker puts back, refusals, and no answer while the stream is read anew."""
    blocks = Interrupted(stream)
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 5)
        with Follower(tmp_path / "b", blocks) as follower:
            kept = dict(stream.blocks)

            def lose_last() -> None:
                del stream.blocks[stream.last]
                stream.last -= 1

            def lose_one() -> None:
                del stream.blocks[stream.last - 1]

            def put_back() -> None:
                stream.blocks |= kept
                stream.last = max(stream.blocks)

            blocks.next = [lose_last, UnansweredError("lost"), put_back, StreamError("refused")]
            blocks.next += [lambda: (fill(journal, 3), kept.update(stream.blocks)), lambda: fill(journal, 2)]
            blocks.next += [lambda: (fill(journal, 3), kept.update(stream.blocks), lose_one()), None, None, put_back]
            blocks.next += [None, None, EndedError()]
            with pytest.raises(EndedError):
                follower.run(0)
            assert follower.position == journal.frontier
            with Journal(tmp_path / "b", mode="read") as reader:
                assert contents(reader) == contents(journal)
    assert not verify(tmp_path / "b")


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
