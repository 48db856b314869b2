"""Exports are what they say: JSON that every reader takes, CSV whatever a body holds, encodings as they are."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.journal import Entry, Journal

from .command import HERE, environment, run

BODIES = [b'{"n": 1}', b"\xff\x01", b'{"celsius": NaN}', b"1e400", rb'"\ud800"', b"\x1b[2Jgone", b'{"n": 2}', b"[1]"]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with Journal(tmp_path / "kept") as journal:
        journal.commit(Entry("t", body, timestamp_ns=1_000_000_000 + n) for n, body in enumerate(BODIES))
    return tmp_path / "kept"


def strict(line: str) -> Any:
    """What a reader of JSON that knows no NaN makes of it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_json_lines_are_json(kept: Path) -> None:
    out = run("export", str(kept), "--to", "jsonl", "-o", "-").stdout
    assert [strict(line)["payload"] for line in out.splitlines()] == [
        {"n": 1}, {"hex": "ff01"}, '{"celsius": NaN}', "1e400", "\ud800", "\x1b[2Jgone", {"n": 2}, [1],
    ]  # fmt: skip


def test_sub_prints_json(kept: Path) -> None:
    words = ("sub", f"journal:{kept}#t", "--since", "0", "--count", str(len(BODIES)), "--timeout", "30")
    for more in (("--json",), ("--format", "json")):
        lines = run(*words, *more).stdout.splitlines()
        assert len([strict(line) for line in lines]) == len(BODIES)


def test_csv_takes_every_body(kept: Path, tmp_path: Path) -> None:
    done = run("export", str(kept), "--to", "csv", "-o", str(tmp_path / "x.csv"))
    assert done.returncode == 0, done.stderr
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as stream:
        rows = [row["payload"] for row in csv.DictReader(stream)]
    assert len(rows) == len(BODIES) and rows[4] == r"\ud800" and rows[5] == "\x1b[2Jgone"
    piped = run("export", str(kept), "--to", "csv", "-o", "-")
    assert piped.returncode == 0 and len(list(csv.reader(piped.stdout.splitlines()))) == len(BODIES) + 1


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def test_csv_on_a_terminal_cannot_steer_it(kept: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    words = [*HERE, "export", str(kept), "--to", "csv", "-o", "-"]
    subprocess.run(words, stdout=theirs, env=environment(), timeout=60, check=True)
    shown = os.read(ours, 1 << 16)
    assert rb"\x1b[2Jgone" in shown and b"\x1b" not in shown


def test_the_summary_is_not_in_the_data(kept: Path) -> None:
    done = run("export", str(kept), "--to", "jsonl", "-o", "-", "--json")
    assert len(done.stdout.splitlines()) == len(BODIES)
    assert json.loads(done.stderr) == {"file": "-", "messages": len(BODIES)}


def test_mcap_calls_json_only_what_is_a_json_object(kept: Path, tmp_path: Path) -> None:
    reading = pytest.importorskip("mcap.reader")
    assert run("export", str(kept), "--to", "mcap", "-o", str(tmp_path / "x.mcap")).returncode == 0
    with (tmp_path / "x.mcap").open("rb") as stream:
        found = [(c.topic, c.message_encoding, m.data) for _, c, m in reading.make_reader(stream).iter_messages()]
    assert [data for _, _, data in found] == BODIES and {topic for topic, _, _ in found} == {"t"}
    objects = [data for _, encoding, data in found if encoding == "json"]
    assert objects == [b'{"n": 1}', b'{"n": 2}']
    assert {encoding for _, encoding, _ in found} == {"json", "application/octet-stream"}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "mcap"])
def test_a_time_before_1970_is_exported_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    with Journal(tmp_path / "old") as journal:
        journal.commit([Entry("t", b"after", timestamp_ns=1), Entry("t", b"before", timestamp_ns=-1)])
    told = run("export", str(tmp_path / "old"), "--to", kind, "-o", str(tmp_path / "out"))
    if kind == "mcap":  # its times are unsigned
        assert told.returncode == 2 and "message 2 (topic t)" in told.stderr and "before 1970" in told.stderr
        assert "Traceback" not in told.stderr and not (tmp_path / "out").exists()
    else:
        assert told.returncode == 0 and (tmp_path / "out").stat().st_size


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "mcap"])
def test_a_file_that_is_there_stays_until_the_whole_is_written(kind: str, tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path / 'run'}#a") as publisher:
        publisher.publish_many([b"x" * 50_000] * 100)
    kept = tmp_path / f"kept.{kind}"
    kept.write_text("before")
    none = run("export", str(tmp_path / "run"), "--to", kind, "-o", str(kept), "--topic", "nope.*")
    assert none.returncode == 2 and "no topic matches nope.*" in none.stderr
    command = ["bash", "-c", f"ulimit -f 2; trap '' XFSZ; exec {' '.join(HERE)} export run --to {kind} -o {kept}"]
    cut = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert cut.returncode == 1, cut.stderr
    assert f"{kept}: " in cut.stderr and "large" in cut.stderr
    assert kept.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "run"]
    done = run("export", str(tmp_path / "run"), "--to", kind, "-o", str(kept))
    assert done.returncode == 0 and kept.stat().st_size > 1000
