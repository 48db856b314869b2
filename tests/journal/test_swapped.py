"""Another directory in the place of an open journal's is left as it is: its files are another journal's."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.journal import Journal

SEGMENT = 65536


def fill(journal: Journal, mark: bytes, count: int = 40) -> None:
    for _ in range(count):
        journal.append("t", mark * 10_000)


def state(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_nothing_is_written_to_or_removed_from_a_directory_that_took_its_place(tmp_path: Path) -> None:
    here, other, moved = tmp_path / "here", tmp_path / "other", tmp_path / "moved"
    with Journal(other, segment_bytes=SEGMENT) as journal:
        fill(journal, b"o")
    before = state(other)
    with Journal(here, segment_bytes=SEGMENT, retain_bytes=3 * SEGMENT) as journal:
        fill(journal, b"a", 10)
        journal.retain()  # waits for the sealing of a segment, which had begun before the move
        here.rename(moved)
        other.rename(here)
        fill(journal, b"b")
        with contextlib.suppress(OSError):
            journal.retain()
        with contextlib.suppress(OSError):
            journal.compact()
    assert state(here) == before
    with Journal(moved, mode="read") as reader:
        assert reader.frontier == 51 and bytes(reader.read(50)) == b"b" * 10_000


def test_a_directory_that_comes_back_is_written_on(tmp_path: Path) -> None:
    here, moved = tmp_path / "here", tmp_path / "moved"
    with Journal(here, segment_bytes=SEGMENT) as journal:
        fill(journal, b"a")
        journal.retain()
        here.rename(moved)
        here.mkdir()
        fill(journal, b"b")
        assert not list(here.iterdir())
        here.rmdir()
        moved.rename(here)
        segments = len(list(here.glob("*.log")))
        fill(journal, b"c")
        assert len(list(here.glob("*.log"))) > segments
    with Journal(here, mode="read") as reader:
        assert reader.frontier == 121 and bytes(reader.read(120)) == b"c" * 10_000
