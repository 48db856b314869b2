"""A directory is what the stream says, whatever it was before; and a stream that lacks something is not believed."""

from __future__ import annotations

import gc
import os
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, InvalidArgument, PenstockError, RefusedError
from penstock.journal import Journal
from penstock.journal.layout import MARKER_NAME
from penstock.journal.repairs import repair
from penstock.journal.verify import verify
from penstock.replica import FencedError, Replica
from penstock.replica.follower import Follower
from penstock.replica.refill import BOOT_NAME
from penstock.replica.seed import seed
from penstock.replica.stream import Bounds

from .fake_blocks import FakeBlocks, FakeStream
from .test_model import contents

SMALL = 65536


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


def opened(directory: Path, stream: FakeStream, **options: object) -> Journal:
    replica = Replica(directory, FakeBlocks(stream), short_s=0, pause=lambda: None)
    return Journal(directory, disk=replica.disk(), refuse_damage=True, segment_bytes=SMALL, **options)  # type: ignore[arg-type]


def fill(journal: Journal, count: int = 30) -> None:
    for number in range(count):
        journal.append("t", b"%d" % number + bytes(10_000))


def test_an_empty_directory_becomes_the_same_journal(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before, identity = contents(journal), journal.uuid
        places = [(m.ordinal, m.timestamp_ns, m.stored_ns) for m in journal.read_many(1, 5)]
    with opened(tmp_path / "b", stream) as journal:
        assert (contents(journal), journal.uuid) == (before, identity)
        assert [(m.ordinal, m.timestamp_ns, m.stored_ns) for m in journal.read_many(1, 5)] == places
        assert journal.append("t", b"more") == len(before) + 1
    assert not verify(tmp_path / "b")


@pytest.mark.parametrize("at", [None, 3, 17, 30], ids=["missing", "word", "version", "uuid"])
def test_the_marker_of_a_directory_is_mended_where_its_segments_are_of_the_stream(
    at: int | None, tmp_path: Path, stream: FakeStream
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
        before = contents(journal)
    marker = tmp_path / "a" / MARKER_NAME
    good = marker.read_bytes()

    def damage() -> None:
        marker.unlink()
        if at is not None:
            marker.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])

    damage()
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
    damage()
    with Follower(tmp_path / "a", FakeBlocks(stream)) as follower:
        assert follower.position == len(before) + 1
    assert marker.read_bytes() == good
    damage()
    with pytest.raises(PenstockError), opened(tmp_path / "a", another := FakeStream()) as journal:
        fill(journal, 1)
    assert not another.last, "the directory of another journal is left as it is"


def test_what_was_lost_and_put_back_is_not_told_again(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    """Who fetches all that counts knows that nothing of it is lost, and reads the stream once."""
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
    del stream.blocks[2]
    with opened(tmp_path / "a", stream) as journal:  # puts it back
        fill(journal, 3)
        before = contents(journal)
    stream.blocks[1] = stream.blocks.get(1, b"")  # retention has not purged the gap yet
    stream.first = 1
    assert len(stream.blocks) < stream.last
    caplog.clear()
    with opened(tmp_path / "b", stream) as journal:
        assert contents(journal) == before
    assert "lost" not in caplog.text


def test_a_frontier_that_leads_its_log_is_no_damage(tmp_path: Path, stream: FakeStream) -> None:
    """After a power cut: the frontier was written back, the log was not."""
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
        before = contents(journal)
    (log,) = (tmp_path / "a").glob("*.log")
    os.truncate(log, 5000)
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before


def test_every_segment_is_checked_after_a_restart_of_the_machine(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    oldest = min((tmp_path / "a").glob("*.log"))
    data = bytearray(oldest.read_bytes())
    data[20_000:25_000] = bytes(5000)
    oldest.write_bytes(data)
    (tmp_path / "a" / BOOT_NAME).write_text("another boot")
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
    assert not verify(tmp_path / "a")


def test_what_was_written_and_not_appended_is_wiped(tmp_path: Path, stream: FakeStream) -> None:
    stale = opened(tmp_path / "a", stream)
    fill(stale, 2)
    with opened(tmp_path / "b", stream) as journal:
        with pytest.raises(OSError, match="sync"):
            stale.append("t", b"stale" + bytes(20_000))
        journal.append("t", b"new")
        before = contents(journal)
    assert contents(stale).keys() == {1, 2}, "readers never saw it"
    stale.close()
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
    (log,) = (tmp_path / "a").glob("*.log")
    assert b"stale" not in log.read_bytes()


def test_a_fenced_replica_is_not_opened_again(tmp_path: Path, stream: FakeStream) -> None:
    replica = Replica(tmp_path / "a", FakeBlocks(stream), pause=lambda: None)
    with Journal(tmp_path / "a", disk=replica.disk()) as journal:
        opened(tmp_path / "b", stream).close()
        with pytest.raises(OSError):
            journal.append("t", b"x")
    with pytest.raises(FencedError):
        replica.disk()


def test_the_journal_of_a_fenced_replica_is_freed(tmp_path: Path, stream: FakeStream) -> None:
    """A broker that stands by again after it has led keeps nothing of the time before."""

    def fenced() -> weakref.ref[Journal]:
        replica = Replica(tmp_path / "a", FakeBlocks(stream), pause=lambda: None)
        with Journal(tmp_path / "a", disk=replica.disk()) as journal:
            opened(tmp_path / "b", stream).close()
            with pytest.raises(OSError):
                journal.append("t", b"x")
            assert isinstance(replica.fault, FencedError)
            return weakref.ref(journal)

    freed = fenced()
    gc.collect()
    assert freed() is None


def test_retention_purges_the_stream(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream, retain_queues=True) as journal:
        fill(journal)
        segments = sorted((tmp_path / "a").glob("*.log"))
        assert journal.retain(passed=20) > 0
        first, before = journal.first, contents(journal)
        assert len(sorted((tmp_path / "a").glob("*.log"))) < len(segments)
    assert stream.first > 1
    with opened(tmp_path / "b", stream) as journal:
        assert (journal.first, contents(journal)) == (first, before)


def test_a_missing_block_is_named(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 5)
    del stream.blocks[4]
    with pytest.raises(CorruptionError, match="block 4 of stream fake is missing"):
        opened(tmp_path / "b", stream)


def test_a_damaged_block_is_named(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 5)
    data = bytearray(stream.blocks[4])
    data[-1] ^= 1
    stream.blocks[4] = bytes(data)
    with pytest.raises(CorruptionError, match=r"block 4 of stream fake is damaged.*positions from 2 on"):
        opened(tmp_path / "b", stream)


def lose(stream: FakeStream, first: int, last: int, *, tail: bool = False) -> None:
    """As a cluster whose files are damaged: these blocks are gone, and with ``tail`` their numbers are given again."""
    for sequence in range(first, last + 1):
        del stream.blocks[sequence]
    if tail:
        stream.last = first - 1


LOSSES = {
    "tail": (-2, -1),
    "last": (-1, -1),
    "middle": (7, 12),
    "first": (1, 1),
    "begins": (1, 8),
    "nearly all": (1, -2),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_the_stream_has_lost_is_put_back(tmp_path: Path, stream: FakeStream, loss: str) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before, identity = contents(journal), journal.uuid
    first, last = (number if number > 0 else stream.last + 1 + number for number in LOSSES[loss])
    lose(stream, first, last, tail=loss == "tail")
    if loss not in ("tail", "first"):  # a stream that ends early looks whole; its first block has no message
        with pytest.raises(CorruptionError, match=r"missing|lost|no block"):
            opened(tmp_path / "empty", stream)
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
        journal.append("t", b"more")
    for name in ("b", "a"):
        with opened(tmp_path / name, stream) as journal:
            assert (contents(journal), journal.uuid) == (before | {len(before) + 1: b"more"}, identity)
        assert not verify(tmp_path / name)


def damage_first_segment(directory: Path) -> None:
    """Turn over a bit in the middle of the oldest segment's log."""
    path = sorted(directory.glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_end_that_the_stream_has_passed_already_is_not_believed(tmp_path: Path, stream: FakeStream) -> None:
    """As a node tells it that has lost the lead, or that has just taken it."""
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    damage_first_segment(tmp_path / "a")
    (tmp_path / "a" / BOOT_NAME).unlink()  # every segment is checked
    asked = 0

    class Outdated(FakeBlocks):
        def bounds(self) -> Bounds:
            nonlocal asked
            asked += 1
            return replace(super().bounds(), last=stream.last - 2) if asked < 5 else super().bounds()

    blocks = Outdated(stream)
    replica = Replica(tmp_path / "a", blocks, pause=lambda: None)
    with Journal(tmp_path / "a", disk=replica.disk(), refuse_damage=True) as journal:
        assert contents(journal) == before
    assert asked >= 5 and not verify(tmp_path / "a")
    assert len(stream.blocks) == stream.last, "nothing was put back: nothing was lost"


def test_what_was_lost_is_put_back_though_an_older_segment_is_damaged(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    damage_first_segment(tmp_path / "a")
    lose(stream, stream.last - 1, stream.last, tail=True)
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
    assert not verify(tmp_path / "a")
    with opened(tmp_path / "b", stream) as journal:
        assert contents(journal) == before


def test_a_directory_that_was_not_written_last_puts_nothing_back(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 5)
        before = contents(journal)
    with opened(tmp_path / "b", stream) as journal:
        fill(journal, 2)
        after = contents(journal)
    lose(stream, 4, 5)
    left = dict(stream.blocks)
    with pytest.raises(CorruptionError, match=r"block 4 .* missing.*cannot be restored.*another directory"):
        opened(tmp_path / "a", stream)
    assert stream.blocks == left
    with Journal(tmp_path / "a", mode="read") as reader:
        assert contents(reader) == before, "they are still there"
    with opened(tmp_path / "b", stream) as journal:
        assert contents(journal) == after
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == after


def test_a_copy_that_did_not_come_to_its_end_is_void(tmp_path: Path, stream: FakeStream) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal)
        before = contents(journal)
    lose(stream, 7, 12)
    begun = stream.last
    opened(tmp_path / "a", stream).close()
    for last in range(begun + 1, stream.last - 1):
        cut = FakeStream()
        cut.last, cut.blocks = last, {at: block for at, block in stream.blocks.items() if at <= last}
        with pytest.raises(CorruptionError, match="missing"):
            opened(tmp_path / f"empty{last}", cut)
        shutil.copytree(tmp_path / "a", tmp_path / f"a{last}")
        for name in (f"a{last}", f"b{last}"):
            with opened(tmp_path / name, cut) as journal:
                assert contents(journal) == before


def test_another_journals_directory_is_left_alone(tmp_path: Path, stream: FakeStream) -> None:
    opened(tmp_path / "a", stream).close()
    with Journal(tmp_path / "own") as journal:
        journal.append("t", b"own")
    with pytest.raises(InvalidArgument, match="not touched"):
        opened(tmp_path / "own", stream)
    with pytest.raises(InvalidArgument, match="--seed"):
        opened(tmp_path / "own", FakeStream())
    with Journal(tmp_path / "own", mode="read") as reader:
        assert contents(reader) == {1: b"own"}


def test_a_journal_is_copied_to_an_empty_stream(tmp_path: Path, stream: FakeStream) -> None:
    with Journal(tmp_path / "own", segment_bytes=SMALL) as journal:
        fill(journal)
        before, identity = contents(journal), journal.uuid
    assert seed(tmp_path / "own", FakeBlocks(stream, limits=(30_000,))) > 2
    with opened(tmp_path / "b", stream) as journal:
        assert (contents(journal), journal.uuid) == (before, identity)
        journal.append("t", b"more")
    with opened(tmp_path / "own", stream) as journal:
        assert contents(journal) == before | {len(before) + 1: b"more"}
    assert not verify(tmp_path / "own")
    with pytest.raises(InvalidArgument, match="has blocks already"):
        seed(tmp_path / "own", FakeBlocks(stream))


def test_a_stream_that_was_not_filled_to_its_end_is_refused(tmp_path: Path, stream: FakeStream) -> None:
    with Journal(tmp_path / "own", segment_bytes=SMALL) as journal:
        fill(journal)
    seed(tmp_path / "own", FakeBlocks(stream))
    for last in range(1, stream.last):
        part = FakeStream()
        part.last, part.blocks = last, {number: stream.blocks[number] for number in range(1, last + 1)}
        with pytest.raises(InvalidArgument, match="not filled to its end"):
            opened(tmp_path / "b", part)
        with pytest.raises(InvalidArgument, match="not filled to its end: start the broker with --seed and the name"):
            seed(tmp_path / "own", FakeBlocks(part))
    assert not (tmp_path / "b").exists()


def test_a_copy_of_a_stream_is_written_by_nobody_else(tmp_path: Path, stream: FakeStream) -> None:
    """From its first opening on, whoever made it; what the mark is removed from is a journal again."""
    opened(tmp_path / "leader", stream).close()
    with opened(tmp_path / "leader", stream) as journal:
        journal.append("t", b"one")
    Follower(tmp_path / "follower", FakeBlocks(stream)).close()
    opened(tmp_path / "first time", FakeStream()).close()
    for name in ("leader", "follower", "first time"):
        with pytest.raises(RefusedError, match=r"copy of a replicated broker's log.*--store"):
            Journal(tmp_path / name)
        with pytest.raises(RefusedError, match="copy of a replicated"):
            repair(tmp_path / name)
    (tmp_path / "leader" / BOOT_NAME).unlink()
    with Journal(tmp_path / "leader") as journal:
        assert journal.append("t", b"two") == 2


@pytest.mark.parametrize("rolls", ["neither", "here", "there", "both"])
@pytest.mark.parametrize("open_it", ["leader", "follower"])
def test_whole_messages_that_the_stream_does_not_have_are_put_aside(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture, rolls: str, open_it: str
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / BOOT_NAME).unlink()
    with Journal(tmp_path / "b", segment_bytes=SMALL) as journal:
        for number in range(5):
            journal.append("t", b"own %d" % number + bytes(20_000 if rolls in ("here", "both") else 10))
        own = contents(journal)
    with opened(tmp_path / "a", stream) as journal:
        for number in range(20):
            journal.append("t", b"new %d" % number + bytes(20_000 if rolls in ("there", "both") else 10))
        wanted = contents(journal)
    by = opened(tmp_path / "b", stream) if open_it == "leader" else Follower(tmp_path / "b", FakeBlocks(stream))
    with by, Journal(tmp_path / "b", mode="read") as reader:  # type: ignore[attr-defined]
        assert contents(reader) == wanted
    with Journal(tmp_path / "b" / "aside-1", mode="read") as reader:
        kept = contents(reader)
    assert {position: own[position] for position in range(4, 9)}.items() <= kept.items() <= own.items()
    assert "aside-1" in caplog.text and "that stream fake does not have" in caplog.text and "to 8)" in caplog.text
    assert "damaged" not in caplog.text
    assert not verify(tmp_path / "b")
    opened(tmp_path / "b", stream).close()
    assert not (tmp_path / "b" / "aside-2").exists()


@pytest.mark.parametrize("place", ["over an own one", "between", "before the stream"])
@pytest.mark.parametrize("open_it", ["leader", "follower"])
def test_segments_of_other_journals_are_put_aside_each_as_its_own_journal(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture, place: str, open_it: str
) -> None:
    with opened(tmp_path / "a", stream, retain_queues=True) as journal:
        fill(journal)
        wanted = contents(journal)
        if place == "before the stream":
            assert journal.retain(passed=20) > 0
            wanted = contents(journal)
    logs = sorted((tmp_path / "a").glob("*.log"))
    names = {
        "over an own one": logs[1].name, "between": "00000000000000000004-0000.log",
        "before the stream": "00000000000000000001-0000.log",
    }  # fmt: skip
    theirs = []
    for number, name in enumerate((names[place], "00000000000000000002-0007.log")):
        with Journal(tmp_path / f"other{number}", segment_bytes=SMALL) as other:
            fill(other, 3)
            theirs.append((other.uuid, contents(other)))
        (log,) = (tmp_path / f"other{number}").glob("*.log")
        shutil.copy(log, tmp_path / "a" / name)
    by = opened(tmp_path / "a", stream) if open_it == "leader" else Follower(tmp_path / "a", FakeBlocks(stream))
    with by, Journal(tmp_path / "a", mode="read") as reader:  # type: ignore[attr-defined]
        assert contents(reader) == wanted
    found = []
    for number in (1, 2):
        with Journal(tmp_path / "a" / f"aside-{number}", mode="read") as reader:
            found.append((reader.uuid, contents(reader)))
    assert sorted(found) == sorted(theirs)
    assert all(f"a segment of journal {uuid} from position 1" in caplog.text for uuid, _ in theirs), caplog.text
    assert not verify(tmp_path / "a")
    opened(tmp_path / "a", stream).close()
    assert not (tmp_path / "a" / "aside-3").exists()


def test_messages_that_would_be_lost_are_left_where_they_are_while_the_stream_is_shorter(
    tmp_path: Path, stream: FakeStream
) -> None:
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 3)
    Follower(tmp_path / "b", FakeBlocks(stream)).close()
    (tmp_path / "b" / BOOT_NAME).unlink()
    with Journal(tmp_path / "b") as journal:
        journal.append("t", b"own")
        own = contents(journal)
    with pytest.raises(CorruptionError, match=r"ends at position 3.*up to 4.*lost some, or another program wrote"):
        Follower(tmp_path / "b", FakeBlocks(stream))
    with Journal(tmp_path / "b", mode="read") as reader:
        assert contents(reader) == own


DAMAGES = {  # what is turned over in a log of six messages: the places in it, and what is told
    "header": ([40], r"\(no message\)"),
    "after the header": ([100], r"\(no message\)"),
    "seal": ([520], r"\(no message\)"),
    "after the seal": ([2000], r"\(no message\)"),
    "one message": ([9_000], r"\(1 message, position 1\)"),
    "several messages": ([9_000, 19_000, 50_000], r"\(3 messages, positions 1 to 2, 5\)"),
    "the last commit, which has no message": ([-9], r"\(no message\)"),
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("follows", [False, True], ids=["broker", "follower"])
def test_mended_damage_is_told_as_damage(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture, what: str, follows: bool
) -> None:
    caplog.set_level("INFO", "penstock.replica")
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 6)
        journal.commit(states=[(200, bytes(100))])
        before = contents(journal)
    (path,) = (tmp_path / "a").glob("*.log")
    good = path.read_bytes()
    data, (places, told) = bytearray(good), DAMAGES[what]
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)
    caplog.clear()
    if follows:
        with Follower(tmp_path / "a", FakeBlocks(stream)) as follower:
            assert follower.mended == [path.name]
    else:
        opened(tmp_path / "a", stream).close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(rf"{path.name} was damaged {told}: it is taken from stream fake", record.message), record.message
    assert path.read_bytes() == good and not verify(tmp_path / "a")
    with opened(tmp_path / "a", stream) as journal:
        assert contents(journal) == before
    assert len(caplog.records) == 1, "it is told once"


def test_what_is_only_behind_is_taken_and_no_damage(
    tmp_path: Path, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.replica")
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 20)
    segments = len(list((tmp_path / "a").glob("*.log")))
    caplog.clear()
    opened(tmp_path / "b", stream).close()
    assert caplog.messages == [f"{tmp_path / 'b'}: {segments} segments taken from stream fake"]
