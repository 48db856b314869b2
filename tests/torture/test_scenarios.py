"""Every scenario of ``penstock torture`` with a small count; ``--kills N`` for more, ``--seed S`` to replay."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import torture
from penstock.torture import record, soak, table

#: Those are tests/crash/test_spark_kill.py and tests/stress/test_replica.py.
HERE = [name for name in torture.SCENARIOS if name not in ("spark", "replica", "takeover")]


@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scenario", HERE)
def test_scenario(scenario: str, kills: int | None, seed: int, tmp_path: Path) -> None:
    report = torture.run(scenario, kills or 20, seed, tmp_path)
    print(report.text())
    assert report.passed, report.text()


def test_a_broken_promise_is_told(tmp_path: Path) -> None:
    report = torture.Report("shm", 5, 7, tmp_path)
    assert not report.passed, "no check is no proof"
    report.check("one", 1, True)
    assert report.passed
    report.check("two", "3 lost", False)
    assert not report.passed
    assert "FAIL  two  3 lost" in report.text() and "--seed 7" in report.text()


def test_a_leak_of_descriptors_is_seen_and_a_connection_that_comes_and_goes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaks, settles = (torture.Report("broker", 20, 7, tmp_path) for _ in range(2))
    later = iter([43, 44, 42])
    settles.check_descriptors("clients", [38, 42, 40, *([44] * 17)], lambda: next(later))
    assert settles.passed
    monkeypatch.setattr("penstock.torture.report.SETTLE_S", 0)
    leaks.check_descriptors("clients", list(range(40, 60)), lambda: 60)
    assert not leaks.passed


def test_a_wrong_byte_is_seen() -> None:
    message = record.make(3, 9)
    assert record.look(message) == (3, 9)
    for place in range(4, len(message)):
        damaged = bytearray(message)
        damaged[place] ^= 1
        assert record.look(bytes(damaged)) is None
    assert record.look(b"short") is None


def test_a_soak_sees_what_grows_and_not_what_shakes(seed: int) -> None:
    chance = random.Random(seed)
    grows, shakes = soak.Series(), soak.Series()
    for at in range(100):
        grows.add(at, 1000 + 3 * at + chance.gauss(0, 20))
        shakes.add(at, 1000 + chance.gauss(0, 20) + (5000 if at == 97 else 0))
    assert grows.growth() > soak.GROWTH and grows.rises
    assert shakes.growth() < soak.GROWTH


def test_a_tally_counts_what_is_missing_and_out_of_order(tmp_path: Path) -> None:
    assert record.counts(tmp_path / "none").total == 0
    tally = record.Tally(tmp_path / "tally")
    for sequence in (1, 2, 5, 4, 6):
        tally.add(1, sequence)
    assert record.counts(tmp_path / "tally") == record.Counts(total=5, missing=3, disordered=1, last=6)
    tally.close()


@pytest.mark.timeout(0)
def test_a_short_soak_has_every_reach_and_loses_nothing(seed: int, tmp_path: Path) -> None:
    report = soak.run_soak(0.05, seed, tmp_path)
    arrived = [check for check in report.checks if check.promise.endswith("everything arrives in order")]
    assert {check.promise.split(":")[0] for check in arrived} == {"bus", "shm", "tcp", "journal", "broker"}
    ended = [check for check in report.checks if check.promise == "all end when asked to"]
    ended += [check for check in report.checks if check.promise.endswith("files stay within bounds")]
    assert len(ended) == 3
    assert all(check.held for check in arrived + ended), report.text()  # whether something grows needs more time


def test_torn_log_entries_are_ignored(tmp_path: Path) -> None:
    log = record.Log(tmp_path / "log")
    log.add(1, 2, 3)
    log.add(1, 3, 4)
    log.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b"torn")
    assert list(record.entries(tmp_path / "log")) == [(1, 2, 3), (1, 3, 4)]


def test_the_results_are_written_between_the_marks_of_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    good, bad = (torture.Report(name, 2000, 7, tmp_path, seconds=61.2) for name in ("shm", "tcp"))
    good.check("messages flowed", 1234567, True)
    bad.check("messages flowed", 9, True)
    bad.check("none comes | twice", "3 twice", False)
    table.Table(page).write([good, bad])
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\ncommit: {table.commit()}\ndate: ") and text.endswith("\nafter\n")
    assert "| shm | 2,000 | 7 | 61 | 1,234,567 | all 1 held |\n" in text and "old" not in text
    assert "| tcp | 2,000 | 7 | 61 | 9 | FAILED: none comes / twice (3 twice) |\n" in text
    page.write_text("no marks")
    with pytest.raises(penstock.InvalidArgument, match="has no lines"):
        table.Table(page)
    assert page.read_text() == "no marks"


def test_the_command_gives_json_and_refuses_unknown_rooms() -> None:
    command = [sys.executable, "-m", "penstock", "torture"]
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and "journal" in done.stderr
    done = subprocess.run(
        [*command, "journal", "--kills", "1", "--seed", "5", "--json"], capture_output=True, text=True
    )
    (report,) = json.loads(done.stdout)
    assert done.returncode == 0 and report["seed"] == 5 and all(check["held"] for check in report["checks"])
