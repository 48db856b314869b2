"""A journal of version 1 is told apart, and converted with all that it has."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import Journal
from penstock.journal.upgrade import upgrade
from penstock.journal.verify import verify

#: of (position, topic, ordinal, time, data, properties, message id, key) of each of its 603 messages
DIGEST = "bd2dba0e76de4449e310fe43fc606ff2742ac14b559962b5f8e66baefc56c444"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "data/version_1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "v1j"


def digest(journal: Journal) -> tuple[int, str]:
    found, count, at = hashlib.sha256(), 0, 1
    while at < journal.frontier:
        batch, at = journal.read_from(at, 1000)
        for message in batch:
            details = journal.details(message.position or 0)
            values = message.position, message.channel, message.ordinal, message.timestamp_ns, bytes(message)
            more = sorted((message.properties or {}).items()), details.message_id, details.key
            found.update(repr((*values, *more)).encode())
            count += 1
    return count, found.hexdigest()


@pytest.mark.parametrize("mode", ["read", "write"])
def test_opening_an_old_journal_says_what_to_do(old: Path, mode: str) -> None:
    with pytest.raises(InvalidArgument, match=f"version 1; convert it once: penstock journal upgrade {old}"):
        Journal(old, mode=mode)  # type: ignore[arg-type]


def test_everything_is_converted(old: Path) -> None:
    assert upgrade(old) == 3
    with Journal(old, mode="read") as journal:
        assert (journal.frontier, digest(journal)) == (614, (603, DIGEST))
        stored = [message.stored_ns or 0 for at in (1, 249, 487) for message in journal.read_many(at)]
        assert stored == sorted(stored) and len(stored) == 603
        assert [hole.reason for hole in journal.holes].count("compaction") == len(journal.holes) > 0
    assert verify(old) == []
    with Journal(old) as journal:
        assert list(journal.state_records()) == [(7, b"snapshot state"), (9, b"own state")]
        assert "jobs" in journal.queue_states and journal.append("work.a", b"new") == 614
    assert upgrade(old) == 0


def test_a_run_that_was_cut_off_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.journal.disk import Disk

    class Failing(Disk):
        left = 4

        def rename(self, before: Path, after: Path) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "full")
            super().rename(before, after)

    runs = 0
    while True:
        runs += 1
        disk = Failing()
        disk.left = runs
        try:
            upgrade(old, disk=disk)
            break
        except OSError:
            continue
    assert runs > 3
    with Journal(old, mode="read") as journal:
        assert digest(journal) == (603, DIGEST)


def test_a_damaged_one_is_left_as_it_is(old: Path) -> None:
    log = min(old.glob("*.log"))
    data = bytearray(log.read_bytes())
    data[9000] ^= 1
    log.write_bytes(data)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    with pytest.raises(CorruptionError, match="release that wrote it"):
        upgrade(old)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
