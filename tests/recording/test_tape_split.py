"""A part of a recording has its size, whatever comes at once; a part that is damaged, missing or misplaced is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.journal import Entry, Journal, repair
from penstock.recording.span import Span, messages, reader
from penstock.recording.story import parts, read_story
from penstock.recording.tape import Plan, Tape
from penstock.replay import Script
from tests.cli.command import run

SECOND_NS = 1_000_000_000
BEGIN_NS = 1_700_000_000 * SECOND_NS


def recorded(directory: Path, count: int = 100) -> Path:
    """A recording in parts of 20 messages, one message a second."""
    tape = Tape(Plan(directory, {"t": "shm:/x"}, split_bytes=20_000))
    for piece in tape.pieces([Entry("t", bytes(1000), timestamp_ns=BEGIN_NS + n * SECOND_NS) for n in range(count)]):
        tape.commit(piece, sum(len(entry.payload) for entry in piece))
    tape.end({"messages": count})
    return directory


def read(directory: Path, span: Span | None = None) -> list[int]:
    """The second of each message."""
    journals = [reader(folder) for folder in parts(directory)]
    try:
        found = messages(journals, None, span or Span(None, None))
        return [(message.timestamp_ns - BEGIN_NS) // SECOND_NS for message in found]
    finally:
        for journal in journals:
            journal.close()


def lose_segments(part: Path) -> None:
    for log in part.glob("*.log"):
        log.unlink()


def played(directory: Path) -> tuple[int, str]:
    done = run("play", str(directory), "--speed", "0", "--map", f"*=journal:{directory}-copy#t")
    return done.returncode, done.stderr


def test_what_comes_at_once_goes_into_parts_of_the_size(tmp_path: Path) -> None:
    made = recorded(tmp_path / "rec")
    assert len(parts(made)) == 5 and read(made) == list(range(100)) and not read_story(made).missing()


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_part_without_its_segments_ends_what_reads_the_recording(tmp_path: Path, number: int) -> None:
    part = recorded(tmp_path / "rec") / f"0000{number}"
    lose_segments(part)
    with pytest.raises(CorruptionError, match=f"{part}: positions 1 to 22 are damaged.*journal repair {part}"):
        read(tmp_path / "rec")
    with Script(tmp_path / "rec") as script, pytest.raises(CorruptionError, match="positions 1 to 2"):
        list(script.inputs({"t": "shm:/x"}))
    code, told = played(tmp_path / "rec")
    assert code == 1 and f"{part}: positions 1 to 2" in told
    assert f"cannot be read: 22 (penstock journal verify {part})" in told
    repair(part)
    assert "damaged messages were cut out by a repair: 22" in read_story(tmp_path / "rec").missing()
    assert read(tmp_path / "rec") == [n for n in range(100) if n // 20 != number - 1]


def test_a_part_without_its_segments_is_no_matter_to_a_span_elsewhere(tmp_path: Path) -> None:
    lose_segments(recorded(tmp_path / "rec") / "00003")
    assert read(tmp_path / "rec", Span(None, BEGIN_NS + 15 * SECOND_NS)) == list(range(15))
    assert read(tmp_path / "rec", Span(BEGIN_NS + 85 * SECOND_NS, None)) == list(range(85, 100))
    for span in (Span(BEGIN_NS + 50 * SECOND_NS, None), Span(None, BEGIN_NS + 45 * SECOND_NS)):
        with pytest.raises(CorruptionError):
            read(tmp_path / "rec", span)


@pytest.mark.parametrize("topics", [None, ["t"]])
def test_a_recording_that_has_lost_all_segments_is_not_empty(tmp_path: Path, topics: list[str] | None) -> None:
    tape = Tape(Plan(tmp_path / "rec", {"t": "shm:/x"}))
    tape.commit([Entry("t", b"1"), Entry("t", b"2")], 2)
    tape.end({})
    lose_segments(tmp_path / "rec")
    with pytest.raises(CorruptionError, match="positions 1 to 4 are damaged: all segment files are missing"):
        Script(tmp_path / "rec", topics)
    code, told = played(tmp_path / "rec")
    assert code == 1 and "positions 1 to 4 are damaged" in told
    repair(tmp_path / "rec")
    assert read_story(tmp_path / "rec").missing() == ["damaged messages were cut out by a repair: 4"]


def test_a_part_without_its_frontier_is_refused_as_a_recording_of_one_part(tmp_path: Path) -> None:
    part = recorded(tmp_path / "rec") / "00003"
    (part / "frontier").unlink()
    with pytest.raises(CorruptionError, match=f"{part}/frontier is missing; run: penstock journal verify {part}"):
        parts(tmp_path / "rec")
    code, told = played(tmp_path / "rec")
    assert code == 1 and f"penstock journal repair {part}" in told
    repair(part)
    assert read(tmp_path / "rec") == list(range(100)) and not read_story(tmp_path / "rec").missing()


def test_a_part_that_is_just_being_made_is_not_refused(tmp_path: Path) -> None:
    part = recorded(tmp_path / "rec") / "00006"
    part.mkdir()
    shutil.copy(tmp_path / "rec" / "00001" / "penstock-journal", part)
    assert read(tmp_path / "rec") == list(range(100))


def test_a_missing_last_part_is_told(tmp_path: Path) -> None:
    shutil.rmtree(recorded(tmp_path / "rec") / "00005")
    story = read_story(tmp_path / "rec")
    assert not story.ended
    assert story.missing() == ["the end is missing: the last part that is there says that another one follows"]
    assert not read_story(tmp_path / "rec" / "00004").missing(), "it was asked for alone"
    code, told = played(tmp_path / "rec")
    assert code == 0 and "the end is missing" in told


def test_swapped_parts_are_told(tmp_path: Path) -> None:
    made = recorded(tmp_path / "rec")
    (made / "00002").rename(made / "kept")
    (made / "00005").rename(made / "00002")
    (made / "kept").rename(made / "00005")
    expected = "its parts are mixed up: 00002 holds part 00005, 00005 holds part 00002"
    assert read_story(made).missing() == [expected]


def test_a_copy_of_a_part_in_the_place_of_another_is_told(tmp_path: Path) -> None:
    made = recorded(tmp_path / "rec")
    shutil.rmtree(made / "00003")
    shutil.copytree(made / "00002", made / "00003")
    assert read_story(made).missing() == ["its parts are mixed up: 00003 is a copy of 00002"]


def test_recordings_of_their_own_side_by_side_are_not_mixed_up(tmp_path: Path) -> None:
    for number in (1, 2):
        tape = Tape(Plan(tmp_path / f"0000{number}", {"t": "shm:/x"}))
        tape.commit([Entry("t", b"1")], 1)
        tape.end({})
    assert not read_story(tmp_path).missing()


def test_damage_that_nobody_repaired_is_not_called_a_repair(tmp_path: Path) -> None:
    with Journal(tmp_path / "rec", segment_bytes=65536) as journal:
        for _ in range(3):
            journal.append("t", bytes(65536))
    sorted((tmp_path / "rec").glob("*.log"))[1].unlink()
    verify = f"penstock journal verify {tmp_path / 'rec'}"
    assert read_story(tmp_path / "rec").missing() == [f"damaged or missing messages that cannot be read: 1 ({verify})"]
    code, told = played(tmp_path / "rec")
    assert code == 1 and "are damaged (" in told and "repair:" not in told
    repair(tmp_path / "rec")
    assert read_story(tmp_path / "rec").missing() == ["damaged messages were cut out by a repair: 1"]
