"""A disk that refuses at an awkward moment: nothing that was acknowledged is lost, nothing leaks, nobody is told a lie."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import weakref
from pathlib import Path

import pytest

from penstock._core import journal as native
from penstock.errors import StateError
from penstock.journal import Journal, recovery
from penstock.journal.disk import Disk
from penstock.journal.layout import BLOCK_BYTES
from penstock.journal.verify import verify

SEGMENT_BYTES = 65536


class RefusingDisk(Disk):
    """Operations named in ``refused`` fail; with ``native`` False the writer's own commits are among them."""

    def __init__(self, native: bool = True) -> None:
        self.native = native
        self.refused: set[str] = set()

    def _ask(self, operation: str) -> None:
        if operation in self.refused:
            raise OSError(errno.EIO if "sync" in operation else errno.ENOSPC, f"refused: {operation}")

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._ask(f"create {path.suffix}")
        return super().create(path, mode)

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        self._ask("write")
        super().write(file, data, zeros, offset)

    def sync_directory(self, path: Path) -> None:
        self._ask("sync directory")
        super().sync_directory(path)


def descriptors(directory: Path) -> int:
    """How many this process has of files in the directory, removed ones too."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(f"{directory}/")
    return found


def test_a_new_segment_whose_name_may_not_be_on_disk_takes_nothing_and_the_old_one_neither(tmp_path: Path) -> None:
    disk = RefusingDisk()
    stored = []
    with Journal(tmp_path / "j", segment_bytes=SEGMENT_BYTES, disk=disk) as journal:
        disk.refused = {"sync directory"}
        with pytest.raises(OSError, match="opened again"):
            while len(stored) < 1000:
                stored.append(journal.append("a", b"%d " % len(stored) * 200))
        assert journal.writer.failed
    assert 10 < len(stored) < 1000
    with Journal(tmp_path / "j", segment_bytes=SEGMENT_BYTES) as journal:
        assert [bytes(journal.read(position)) for position in stored] == [b"%d " % i * 200 for i in range(len(stored))]
        assert journal.append("a", b"next") > stored[-1]
        assert not journal.verify()


def test_segments_that_cannot_be_begun_leave_no_descriptors_behind(tmp_path: Path) -> None:
    for suffix in (".index", ".sums"):
        disk = RefusingDisk()
        with Journal(tmp_path / suffix[1:], segment_bytes=SEGMENT_BYTES, disk=disk) as journal:
            disk.refused = {f"create {suffix}"}
            while journal.writer.end < SEGMENT_BYTES:
                journal.append("a", bytes(4096))
            journal.append("a", b"the first that finds no room for a new segment")
            before = descriptors(tmp_path)
            stored = [journal.append("a", b"%d" % i) for i in range(20)]
            assert descriptors(tmp_path) == before
            disk.refused = set()
            journal.append("a", b"in a new segment")
            assert [bytes(journal.read(position)) for position in stored] == [b"%d" % i for i in range(20)]


def test_a_sum_that_could_not_be_written_leaves_no_hole(tmp_path: Path) -> None:
    """It reads as a wrong one otherwise: what follows it is not written either."""
    with Journal(tmp_path / "j") as journal:
        (sums,) = (
            int(entry.name)
            for entry in Path("/proc/self/fd").iterdir()
            if str(entry.resolve()).endswith(".sums") and str(tmp_path) in str(entry.resolve())
        )
        kept = os.dup(sums)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, sums)
        os.close(full)
        journal.append("a", bytes(3 * BLOCK_BYTES))
        os.dup2(kept, sums)
        os.close(kept)
        journal.append("a", bytes(3 * BLOCK_BYTES))
        assert not journal.writer.sums_whole
    assert not verify(tmp_path / "j")


def test_opening_that_fails_late_lets_the_next_one_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"1")
    before = descriptors(tmp_path)
    for name in ("Reader", "Writer"):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, refuse)
            with pytest.raises(OSError, match="too many"):
                Journal(tmp_path / "j")
        assert descriptors(tmp_path) == before
    with Journal(tmp_path / "j") as journal:
        assert bytes(journal.read(1)) == b"1"


def test_whoever_asks_late_hears_that_the_write_failed_however_often_it_failed_since(tmp_path: Path) -> None:
    disk = RefusingDisk(native=False)
    with Journal(tmp_path / "j", disk=disk) as journal:
        topic = journal.topic_id("a")
        _, _, ticket = journal.writer.stage_all([(topic, b"slow", b"", b"", b"", 0)], [])
        disk.refused = {"write"}
        for _ in range(3000):
            with pytest.raises(OSError, match="not written"):
                journal.append("a", b"quick")
        disk.refused = set()
        assert journal.append("a", b"there is room again") == 1
        with pytest.raises(OSError, match="not written"):
            journal.writer.commit(ticket)


def test_an_ack_that_went_down_with_another_commit_is_stored_by_the_next_flush(tmp_path: Path) -> None:
    disk = RefusingDisk(native=False)
    with Journal(tmp_path / "j", disk=disk) as journal:
        queue = journal.queue("q", topics=["work"])
        gone = journal.queue("gone")
        journal.append("work", b"done")
        message = queue.read(0)
        assert message is not None and queue.ack(message)
        disk.refused = {"write"}
        with pytest.raises(OSError, match="not written"):
            journal.append("other", b"takes the note of the ack with it")
        with pytest.raises(OSError, match="not written"):
            journal.delete_queue(gone.name)
        disk.refused = set()
        queue.flush()
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None
        assert list(journal.queue_states) == ["q"]


def test_a_message_that_cannot_be_buried_now_is_buried_later(tmp_path: Path) -> None:
    disk = RefusingDisk(native=False)
    with Journal(tmp_path / "j", disk=disk) as journal:
        queue = journal.queue("q", topics=["work"], max_tries=1, dead_letter="dead")
        journal.append("work", b"poison")
        message = queue.read(0)
        assert message is not None and queue.nack(message)
        disk.refused = {"write"}
        for _ in range(3):
            with pytest.raises(OSError, match="not written"):
                queue.read(0)
        disk.refused = set()
        assert queue.read(0) is None
        assert [(m.channel, bytes(m)) for m in journal.read_many(1)] == [("work", b"poison"), ("dead", b"poison")]
        queue.flush()
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None and journal.frontier == 3


def test_what_could_not_be_handed_out_was_not_tried(tmp_path: Path) -> None:
    disk = RefusingDisk(native=False)
    with Journal(tmp_path / "j", disk=disk) as journal:
        queue = journal.queue("q", topics=["work"], max_tries=2, ack_timeout_s=600)
        journal.append_many("work", [b"1", b"2"])
        disk.refused = {"write"}
        for _ in range(5):
            with pytest.raises(OSError, match="not written"):
                queue.read_many(2, 0)
        disk.refused = set()
        messages = queue.read_many(2, 0)
        assert [(bytes(message), queue.tries(message)) for message in messages] == [(b"1", 1), (b"2", 1)]


def test_a_function_asked_for_the_state_must_not_write(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=SEGMENT_BYTES) as journal:
        calls = [journal.close, lambda: journal.append("a", b"from within")]

        def state() -> list[tuple[int, bytes]]:
            calls[0]()
            return []

        journal.on_snapshot(state)
        for _ in range(2):
            while journal.writer.end < SEGMENT_BYTES:
                journal.append("a", bytes(4096))
            with pytest.raises(StateError, match="on_snapshot"):
                journal.append("a", b"")
            calls.pop(0)
            if not calls:
                break
        calls.append(lambda: None)
        assert journal.append("a", b"") == journal.frontier - 1


def test_a_segment_that_could_not_be_sealed_is_sealed_and_freed_by_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk may refuse the seal, and then nothing else may come that would try again."""
    sealing = recovery.seal_written

    def refuse(*_: object) -> None:
        monkeypatch.setattr(recovery, "seal_written", sealing)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(tmp_path / "j", retain_queues=True) as journal:
        for number in range(10):
            journal.append("t", b"%d" % number)
        monkeypatch.setattr(recovery, "seal_written", refuse)
        journal.roll(full=False)
        first = journal.frontier
        assert journal.retain(passed=first - 1) == 1
        assert journal.first == first and "cannot seal a segment yet" in caplog.text
        journal.append("t", b"more")
    with Journal(tmp_path / "j") as journal:
        assert (journal.first, bytes(journal.read(first))) == (first, b"more")


class RememberingDisk(RefusingDisk):
    """It keeps its last error, with the frames in which it was raised, as the disk of a replica does."""

    error: OSError | None = None

    def _ask(self, operation: str) -> None:
        try:
            super()._ask(operation)
        except OSError as error:
            self.error = error
            raise


def test_a_failed_journal_whose_disk_keeps_the_error_is_freed(tmp_path: Path) -> None:
    """The writer holds the disk, whose error holds the frames, which hold the journal: the collector must see it all."""

    def failed() -> weakref.ref[Journal]:
        disk = RememberingDisk(native=False)
        with Journal(tmp_path / "j", segment_bytes=SEGMENT_BYTES, disk=disk) as journal:
            journal.append("t", b"stored")
            disk.refused = {"write"}
            with pytest.raises(OSError):
                journal.append("t", b"refused")
            assert disk.error is not None
            return weakref.ref(journal)

    before = descriptors(tmp_path / "j")
    freed = failed()
    gc.collect()
    assert freed() is None
    assert descriptors(tmp_path / "j") == before
