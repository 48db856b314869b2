"""``penstock replay`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.journal import Entry, Journal
from tests.cli.command import run

BEGIN_NS = 1_700_000_000_000_000_000
PROGRAM = """
import json
from penstock import clock
from penstock.bus import CallbackSubscriber, named_bus
bus = named_bus("speed")
out = named_bus("out").publisher()

def took(message):
    speed, ordinal = json.loads(bytes(message))["speed"], message.ordinal
    clock.call_later(0.25, lambda: tell(speed * 2, ordinal))

def tell(twice, ordinal):
    out.publish(json.dumps({"twice": twice, "at": clock.time_ns(), "ordinal": ordinal}).encode())

subscriber = CallbackSubscriber(took, ids=(0,))
bus.add(subscriber)
"""
GATEWAY = {
    "modules": [
        {"name": "tick", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"},
         "args": {"period_s": 0.3}},
        {"name": "twice", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Transform"},
         "args": {"assign": [".twice = .speed * 2"]}},
    ],
    "links": [{"source": "shm:/speed", "sink": "twice"}, {"source": "twice", "sink": "shm:/out"}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Journal(tmp_path / "rec") as journal:
        journal.commit(
            Entry("speed", json.dumps({"speed": n}).encode(), timestamp_ns=BEGIN_NS + n * 100_000_000) for n in range(50)
        )
    (tmp_path / "gateway.json").write_text(json.dumps(GATEWAY))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_two_replays_are_equal_whatever_the_seed_of_hashes(folder: Path) -> None:
    for out, seed in (("out1", "1"), ("out2", "77")):
        done = run("replay", "rec", "--into", "gateway.json", "-o", out, cwd=folder, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        assert "replayed 50 messages of 4.9 s" in done.stdout
    done = run("replay", "--verify", "out1", "out2", "--json", cwd=folder)
    assert done.returncode == 0 and json.loads(done.stdout) == {"equal": True, "messages": 117}


def test_a_difference_is_shown_with_code_4(folder: Path) -> None:
    run("replay", "rec", "--into", "gateway.json", "-o", "out1", cwd=folder)
    run("replay", "rec", "--into", "gateway.json", "-o", "out2", "--for", "2s", cwd=folder)
    done = run("replay", "--verify", "out1", "out2", cwd=folder)
    assert done.returncode == 4 and "differs in" in done.stdout
    assert json.loads(run("replay", "--verify", "out1", "out2", "--json", cwd=folder).stdout)["equal"] is False


def test_a_rule_is_broken_and_its_inputs_can_be_replayed(folder: Path) -> None:
    done = run("replay", "rec", "--into", "gateway.json", "--bisect", "value.twice < 80", "-o", "least", cwd=folder)
    assert done.returncode == 4, done.stderr
    assert '"speed": 40' in done.stdout and "1 of 41 inputs are needed" in done.stdout
    done = run("replay", "least", "--into", "gateway.json", "--rule", "value.twice < 80", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["inputs"] == 1 and found["message"]["topic"] == "twice"
    assert found["message"]["time_ns"] == BEGIN_NS + 40 * 100_000_000
    assert len([one for one in found["before"] if one["topic"] == "tick"]) == 3  # from the begin of the whole drive on
    done = run("replay", "rec", "--into", "gateway.json", "--rule", "value.twice < 800", cwd=folder)
    assert done.returncode == 0 and "holds" in done.stdout


def test_a_program_on_buses_is_replayed_the_same_way_twice(folder: Path) -> None:
    for out in ("out1", "out2"):
        done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", "-o", out, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert run("replay", "--verify", "out1", "out2", cwd=folder).returncode == 0
    with Journal(folder / "out1", mode="read") as journal:
        first = journal.read_many(1, 2)[1]
        assert json.loads(bytes(first)) == {"twice": 2, "at": BEGIN_NS + 350_000_000, "ordinal": 2}
        assert first.timestamp_ns == BEGIN_NS + 350_000_000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("rec",), "--into"),
        (("rec", "--into", "gateway.json", "--clock", "atomic"), "virtual"),
        (("rec", "--into", "gateway.json", "--rule", "value.speed <"), "expected"),
        (("rec", "--into", "gateway.json", "--rule", "size < 1", "--bisect", "size < 1"), "not both"),
        (("rec", "--into", "program.py"), "--capture"),
        (("rec", "--into", "gateway.json", "--capture", "bus:out"), "--capture"),
        (("rec", "--into", "gateway.json", "--map", "speed=engine"), "engine"),
        (("rec", "--verify", "a", "b"), "--verify"),
        (("nowhere", "--into", "gateway.json"), "no recording"),
    ],
)
def test_what_cannot_be_is_told(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    done = run("replay", *arguments, cwd=folder)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_what_has_no_source_is_left_out_and_said(folder: Path) -> None:
    with Journal(folder / "rec") as journal:
        journal.append("other", b"x")
    done = run("replay", "rec", "--into", "gateway.json", cwd=folder)
    assert done.returncode == 0 and "left out, no source has them: other" in done.stderr


def test_threads_of_a_program_are_refused(folder: Path) -> None:
    (folder / "program.py").write_text("import penstock\nsub = penstock.subscriber('bus:speed', on_message=print)\n")
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == 1 and "on_message= (in a thread of its own) cannot be replayed" in done.stderr


def test_modules_in_processes_are_refused_by_name(folder: Path) -> None:
    module = {"name": "far", "loader": {"name": "process", "entrypoint": {"class": "x:Y"}}}
    (folder / "far.json").write_text(json.dumps({"modules": [module], "links": []}))
    done = run("replay", "rec", "--into", "far.json", cwd=folder)
    assert done.returncode == 1 and "far (process)" in done.stderr and "--map" in done.stderr
