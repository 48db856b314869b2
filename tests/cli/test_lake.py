"""``penstock lake``: archive without Spark, look, verify, compact, clean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.journal import Journal
from penstock.spark import lake

from .command import run as penstock


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    with Journal(tmp_path / "j", sync=False) as made:
        for number in range(200):
            made.append(f"t{number % 3}", b"%d" % number)
    return tmp_path / "j"


def run(*arguments: object) -> tuple[int, str, str]:
    done = penstock("lake", *map(str, arguments))
    return done.returncode, done.stdout, done.stderr


def test_archive_then_every_look_at_it(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    code, out, _ = run("archive", "--from", journal, "--to", place, "--json")
    assert code == 0 and json.loads(out)["rows"] == 200 and json.loads(out)["lag"] == 0
    code, out, _ = run("info", place)
    assert code == 0 and "200 rows" in out and "version 1" in out
    assert json.loads(run("info", place, "--json")[1])["rows"] == 200
    assert [item["version"] for item in json.loads(run("history", place, "--json")[1])] == [1, 0]
    assert "archive" in run("history", place)[1]
    code, out, _ = run("verify", place, "--deep")
    assert code == 0 and "0 problems" in out
    with Journal(journal) as made:
        made.append("t0", b"late")
    assert "1 rows" in run("archive", "--from", journal, "--to", place)[1]
    assert run("compact", place)[1].startswith("1 files written")
    assert run("vacuum", place, "--hours", "1", "--dry-run")[1].strip() == "0 files would go"
    assert lake.info(place).rows == 201


def test_what_is_wrong_is_told(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    run("archive", "--from", journal, "--to", place)
    file = next(place.glob("date=*/*.parquet"))
    file.rename(tmp_path / "kept")
    code, out, _ = run("verify", place)
    assert code == 4 and "is missing: 200 rows" in " ".join(out.split())
    code, _, told = run("info", tmp_path / "nothing")
    assert code == 2 and "is not a lake" in told
    code, _, told = run("archive", "--from", tmp_path / "nothing", "--to", place)
    assert code == 2 and "is not a journal" in told


def test_trim_lets_segments_go(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as made:
        for number in range(3000):
            made.append("t", b"%d" % number + bytes(50))
    before = len(list((tmp_path / "j").glob("*.log")))
    code, out, _ = run("archive", "--from", tmp_path / "j", "--to", tmp_path / "lake", "--trim")
    assert code == 0 and "segments went from the journal" in out
    assert len(list((tmp_path / "j").glob("*.log"))) < before and lake.info(tmp_path / "lake").rows == 3000


def test_arguments_that_cannot_be_meant_are_refused(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    for arguments, text in (
        (("--from", "", "--to", place), "has no name"),
        (("--from", journal, "--to", place, "--topics", ""), "names no topic"),
        (("--from", journal, "--to", place, "--topics", " , "), "names no topic"),
        (("--from", journal, "--to", ""), "this is empty"),
        (("--from", journal, "--to", journal / "sub"), "in the directory of the journal"),
    ):
        code, _, told = run("archive", *arguments)
        assert code == 2 and text in told and len(told.strip().splitlines()) == 1, (arguments, told)
    assert not place.exists() and not (journal / "sub").exists()


def test_a_file_and_a_version_that_are_no_lake_are_told(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    run("archive", "--from", journal, "--to", place)
    for version in ("99", "-1"):
        code, _, told = run("info", place, "--version", version)
        assert code == 2 and f"has no version {version}; its versions are 0 to 1" in told, told
    code, _, told = run("info", __file__)
    assert code == 2 and "is a file; a lake is a directory" in told


def test_compact_names_the_file_that_was_cut(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    run("archive", "--from", journal, "--to", place)
    with Journal(journal) as made:
        made.append("t0", b"late")
    run("archive", "--from", journal, "--to", place)
    file = sorted(place.glob("date=*/*.parquet"))[0]
    file.write_bytes(file.read_bytes()[:-50])
    code, _, told = run("compact", place)
    assert code == 1 and file.name in told and "lake verify" in told


def test_a_journal_restored_from_a_copy_is_refused(journal: Path, tmp_path: Path) -> None:
    place = tmp_path / "lake"
    shutil.copytree(journal, tmp_path / "copy")
    for path, data in ((journal, b"mine"), (tmp_path / "copy", b"other")):
        with Journal(path) as made:
            made.append_many("t0", [data] * 100)
    run("archive", "--from", journal, "--to", place)
    for more in (("--trim",), ("--every", "1s")):
        code, out, told = run("archive", "--from", tmp_path / "copy", "--to", place, *more)
        assert code == 1 and "at position 300 the lake has" in told and not out
        assert len(told.strip().splitlines()) == 1
