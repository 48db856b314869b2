"""Another directory in the place of an open journal's is left as it is: its files are another journal's."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.journal import Journal
from penstock.journal.disk import Disk
from penstock.journal.verify import verify

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


def test_a_journal_goes_on_where_the_working_directory_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Journal("here", segment_bytes=SEGMENT, retain_bytes=3 * SEGMENT) as journal:
        fill(journal, b"a", 10)
        monkeypatch.chdir(tmp_path)
        fill(journal, b"b")
        journal.retain()
        assert journal.first > 1
        assert bytes(journal.read(50)) == b"b" * 10_000
    assert not (tmp_path / "here").exists() and not verify(tmp_path / "a" / "here")


def test_a_reader_goes_on_where_the_directory_was_moved_to(tmp_path: Path) -> None:
    here, other, moved = tmp_path / "here", tmp_path / "other", tmp_path / "moved"
    with Journal(other, segment_bytes=SEGMENT) as journal:
        fill(journal, b"o")
    with Journal(here, segment_bytes=SEGMENT) as journal:
        fill(journal, b"a", 20)
        with Journal(here, mode="read") as reader:
            here.rename(moved)
            other.rename(here)
            assert {bytes(reader.read(position))[:1] for position in range(1, 21)} == {b"a"}
            moved.rename(tmp_path / "elsewhere")
            fill(journal, b"b", 20)
            assert [bytes(reader.read(position))[:1] for position in (20, 21, 40)] == [b"a", b"b", b"b"]


def test_a_directory_that_comes_back_is_written_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, moved = tmp_path / "here", tmp_path / "moved"
    with Journal(here, segment_bytes=SEGMENT) as journal:
        fill(journal, b"a")
        journal.retain()
        journal._trouble._period_s = math.inf
        here.rename(moved)
        here.mkdir()
        fill(journal, b"b")
        assert not list(here.iterdir())
        assert sum("cannot begin a new segment" in text for text in caplog.messages) == 1, "not at each commit"
        here.rmdir()
        moved.rename(here)
        segments = len(list(here.glob("*.log")))
        fill(journal, b"c")
        assert len(list(here.glob("*.log"))) > segments
    with Journal(here, mode="read") as reader:
        assert reader.frontier == 121 and bytes(reader.read(120)) == b"c" * 10_000


class Moving(Disk):
    """Calls ``move`` before the first operation of that kind on a file whose name ends so."""

    def __init__(self, operation: str, end: str, native: bool) -> None:
        self.native = native
        self.move: Callable[[], None] | None = None
        self._awaited = operation, end

    def _ask(self, operation: str, path: Path) -> None:
        if self.move is not None and self._awaited[0] == operation and path.name.endswith(self._awaited[1]):
            move, self.move = self.move, None
            move()

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._ask("create", path)
        return super().create(path, mode)

    def open(self, path: Path) -> int:
        self._ask("open", path)
        return super().open(path)

    def rename(self, old: Path, new: Path) -> None:
        self._ask("rename", new)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._ask("remove", path)
        super().remove(path)


@pytest.mark.parametrize("native", [True, False], ids=["native", "through-the-disk"])
@pytest.mark.parametrize(
    ("operation", "end"),
    [
        ("create", ".topics"), ("open", ".log"), ("open", ".sums"),  # a segment is sealed
        ("create", ".log.new"), ("create", ".index"), ("rename", ".log"),  # one begins
        ("remove", ".log"), ("remove", ".index"),  # one is freed
    ],
)  # fmt: skip
def test_work_that_had_begun_goes_on_where_the_directory_was_moved_to(
    tmp_path: Path, operation: str, end: str, native: bool
) -> None:
    here, other, moved = tmp_path / "here", tmp_path / "other", tmp_path / "moved"
    with Journal(other, segment_bytes=SEGMENT) as journal:
        fill(journal, b"o")  # as large as the other's, so that segments of both have the same names
    before = state(other)

    def move() -> None:
        here.rename(moved)
        other.rename(here)

    disk = Moving(operation, end, native)
    with Journal(here, segment_bytes=SEGMENT, retain_bytes=3 * SEGMENT, disk=disk) as journal:
        fill(journal, b"a", 10)
        disk.move = move
        fill(journal, b"b", 30)
        with contextlib.suppress(OSError):
            journal.retain()
        assert disk.move is None, "it was moved"
        read = [bytes(journal.read(position))[:1] for position in range(journal.first, 41)]
        assert read == ([b"a"] * 10 + [b"b"] * 30)[journal.first - 1 :]
    assert state(here) == before
    assert not verify(moved)
    with Journal(moved, mode="read") as reader:
        assert reader.frontier == 41 and bytes(reader.read(40)) == b"b" * 10_000


GROWING = """
import sys
from pathlib import Path
from penstock.journal import Journal

place = Path(sys.argv[1])
Journal(place / "other").close()
size = 40 << 20
with Journal(place / "here", segment_bytes=65536, sync=False) as journal:
    journal.append("t", bytes(size))
    assert len(journal.read(1)) == size
    (place / "here").rename(place / "moved")
    (place / "other").rename(place / "here")
    for position in (2, 3):  # no segment begins: the log grows beyond what a reader has mapped
        journal.append("t", b"x" * size)
        assert bytes(journal.read(position)) == b"x" * size
"""


def test_a_log_that_grows_beyond_its_mapping_is_mapped_again_not_what_has_its_name(tmp_path: Path) -> None:
    """In a process of its own: a file of that name that is shorter would be a bus error."""
    done = subprocess.run([sys.executable, "-c", GROWING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
