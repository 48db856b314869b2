"""``penstock lake``: archive without Spark, look, verify, compact, clean."""

from __future__ import annotations

import json
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
