"""A segment of another journal in a directory: verify names it, repair sets it aside, and nobody takes it for its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.journal import Journal, layout
from penstock.journal.commands import cat
from penstock.journal.repairs import repair
from penstock.journal.verify import verify
from tests.cli import command

SEGMENT = 65536


def make(directory: Path, mark: bytes, count: int = 20) -> list[Path]:
    """A journal of several segments; returns their logs."""
    with Journal(directory, segment_bytes=SEGMENT) as journal:
        for _ in range(count):
            journal.append("t", mark * 10_000)
    return sorted(directory.glob("*.log"))


def marks(directory: Path) -> dict[int, bytes]:
    return {message.position or 0: bytes(message)[:1] for message in cat(directory)}


@pytest.fixture
def other(tmp_path: Path) -> list[Path]:
    return make(tmp_path / "other", b"o")


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_in_the_place_of_an_own_segment_is_set_aside(tmp_path: Path, other: list[Path], place: str) -> None:
    own = make(tmp_path / "own", b"a")
    assert [path.name for path in own] == [path.name for path in other] and len(own) >= 3
    at = {"first": 0, "middle": 1, "last": len(own) - 1}[place]
    first = layout.parse_segment_name(own[at].name)[0]  # type: ignore[index]
    following = layout.parse_segment_name(own[at + 1].name)[0] if place != "last" else 21  # type: ignore[index]
    theirs = other[at].read_bytes()
    own[at].write_bytes(theirs)
    with Journal(tmp_path / "other", mode="read") as journal:
        whose = str(journal.uuid)
    found = verify(tmp_path / "own")
    assert any(item.path == str(own[at]) and f"a segment of journal {whose}" in item.text for item in found), found
    done = command.run("journal", "repair", str(tmp_path / "own"))
    aside = tmp_path / "own" / "aside-1"
    assert f"set aside: {aside / own[at].name}" in done.stdout and whose in done.stdout, done.stdout
    assert f"lost: positions {first} to {following - 1}" in done.stdout, done.stdout
    assert (aside / own[at].name).read_bytes() == theirs, "it is as it was"
    kept = set(range(1, 21)) - set(range(first, following))
    assert marks(tmp_path / "own") == dict.fromkeys(sorted(kept), b"a")
    assert not verify(tmp_path / "own") and repair(tmp_path / "own").whole
    with Journal(tmp_path / "own") as journal:
        assert journal.append("t", b"more") == 21
    repair(aside)  # where it is a journal of its own
    assert set(marks(aside).values()) == {b"o"}
    with Journal(aside, mode="read") as journal:
        assert str(journal.uuid) == whose


@pytest.mark.parametrize("name", ["00000000000000000004-0000.log", "00000000000000000001-0001.log"])
def test_one_beside_all_own_segments_costs_nothing(tmp_path: Path, other: list[Path], name: str) -> None:
    """Between two of them, or as a newer revision of one."""
    make(tmp_path / "own", b"a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "own").glob("*.log")}
    shutil.copy(other[0], tmp_path / "own" / name)
    (damage,) = verify(tmp_path / "own")
    assert damage.path.endswith(name) and damage.last < damage.first
    report = repair(tmp_path / "own")
    assert not report.lost and not report.rewritten and len(report.aside) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "own").glob("*.log")} == before
    assert Path(report.aside[0]).read_bytes() == other[0].read_bytes()
    assert marks(tmp_path / "own") == dict.fromkeys(range(1, 21), b"a") and not verify(tmp_path / "own")


def test_an_own_segment_under_the_name_of_another_position_is_set_aside(tmp_path: Path) -> None:
    own = make(tmp_path / "own", b"a")
    shutil.copy(own[0], tmp_path / "own" / "00000000000000000004-0000.log")
    (damage,) = verify(tmp_path / "own")
    assert damage.text == "this journal's segment from position 1, under a wrong name"
    (aside,) = repair(tmp_path / "own").aside
    assert Path(aside).name == own[0].name and Path(aside).read_bytes() == own[0].read_bytes()
    assert marks(tmp_path / "own") == dict.fromkeys(range(1, 21), b"a") and not verify(tmp_path / "own")


def test_several_are_set_aside_each_in_a_place_of_its_own(tmp_path: Path, other: list[Path]) -> None:
    make(tmp_path / "own", b"a")
    for number, path in enumerate(other):
        shutil.copy(path, tmp_path / "own" / layout.segment_name(100 + number, 0))
    report = repair(tmp_path / "own")
    assert [Path(path).parent.name for path in report.aside] == [f"aside-{n + 1}" for n in range(len(other))]
    assert [Path(path).read_bytes() for path in report.aside] == [path.read_bytes() for path in other]
    assert not report.lost and marks(tmp_path / "own") == dict.fromkeys(range(1, 21), b"a")


def test_where_the_marker_alone_disagrees_it_is_the_marker_that_is_wrong(tmp_path: Path, other: list[Path]) -> None:
    marker = tmp_path / "other" / layout.MARKER_NAME
    good = marker.read_bytes()
    make(tmp_path / "own", b"a", 1)
    shutil.copy(tmp_path / "own" / layout.MARKER_NAME, marker)
    report = repair(tmp_path / "other")
    assert not report.aside and not report.lost and "the marker names journal" in report.damage[0].text
    assert marker.read_bytes() == good and marks(tmp_path / "other") == dict.fromkeys(range(1, 21), b"o")


def test_opening_removes_no_segment_for_a_revision_of_another_journal(tmp_path: Path, other: list[Path]) -> None:
    """A newer revision replaces an older one only if it is of the same journal."""
    make(tmp_path / "own", b"a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    shutil.copy(other[0], tmp_path / "own" / "00000000000000000001-0001.log")
    with pytest.raises(CorruptionError, match=r"a segment of journal .* penstock journal repair .* sets it aside"):
        Journal(tmp_path / "own").close()
    assert {name: (tmp_path / "own" / name).read_bytes() for name in before} == before
    assert len(repair(tmp_path / "own").aside) == 1
    assert marks(tmp_path / "own") == dict.fromkeys(range(1, 21), b"a")


def test_opening_removes_no_segment_for_a_revision_whose_header_is_damaged(tmp_path: Path) -> None:
    own = make(tmp_path / "own", b"a")
    newer = tmp_path / "own" / "00000000000000000001-0001.log"
    data = bytearray(own[0].read_bytes())
    data[20] ^= 1
    newer.write_bytes(data)
    before = own[0].read_bytes()
    Journal(tmp_path / "own").close()
    assert own[0].read_bytes() == before
