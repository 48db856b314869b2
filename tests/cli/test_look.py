"""``ls``, ``info``, ``top``, ``hz``, ``bw``: what they print is what other processes counted."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.monitor.handles import Handles

from .command import run


@pytest.fixture
def name() -> str:
    return f"/test-look-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def handles(name: str) -> Iterator[Handles]:
    with Handles() as running:
        running.do(
            f"open shm publisher {name}", f"add {name}/publisher matched 120", f"add {name}/publisher delivered 120",
            f"add {name}/publisher bytes 12000", f"set {name}/publisher last_ns now",
            f"open shm subscriber {name}", f"add {name}/subscriber matched 120", f"add {name}/subscriber delivered 100",
            f"drop {name}/subscriber overflow 15", f"set {name}/subscriber depth 5", f"set {name}/subscriber capacity 8",
            f"set {name}/subscriber lag 7",
        )  # fmt: skip
        yield running


def test_ls_prints_every_handle(handles: Handles, name: str) -> None:
    done = run("ls", f"shm:{name}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(str(handles.pid) in line for line in lines[1:])
    publisher, subscriber = lines[1].split(), lines[2].split()
    assert publisher[:2] == [f"shm:{name}", "publisher"] and "120" in publisher and "12" in publisher
    assert "100" in subscriber and "15" in subscriber and "7" in subscriber


def test_ls_json_balances(handles: Handles, name: str) -> None:
    records = [json.loads(line) for line in run("ls", f"shm:{name}", "--json").stdout.splitlines()]
    by_kind = {record["kind"]: record for record in records}
    assert by_kind["subscriber"]["dropped"]["overflow"] == 15
    assert by_kind["subscriber"]["in_flight"] == 120 - 100 - 15
    assert by_kind["publisher"]["address"] == f"shm:{name}"


def test_ls_of_nothing() -> None:
    assert "nobody" in run("ls", "shm:/test-nothing-of-this-name").stdout


def test_info_shows_the_books(handles: Handles, name: str) -> None:
    done = run("info", f"shm:{name}")
    assert done.returncode == 0, done.stderr
    assert "matched 120 = delivered 100 + dropped 15 + expired 0 + in flight 5" in done.stdout
    assert "15 overflow" in done.stdout


def test_top_json_and_plain(handles: Handles, name: str) -> None:
    done = run("top", "--count", "2", "--every", "0.2", "--match", name, "--json")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    assert {row["kind"]: row["lost"] for row in looks[-1]["rows"]} == {"publisher": 0, "subscriber": 15}
    assert f"shm:{name}" in run("top", "--count", "1", "--every", "0.1", "--match", name).stdout


def test_hz_and_bw_count_what_was_added(handles: Handles, name: str) -> None:
    from .command import start

    running = start("hz", f"shm:{name}", "--count", "3", "--every", "0.5", "--window", "60", "--json")
    for _ in range(10):
        handles.do(f"add {name}/publisher matched 10", f"add {name}/publisher bytes 100")
    assert running.stdout is not None
    first = json.loads(running.stdout.readline())
    for _ in range(10):
        handles.do(f"add {name}/publisher matched 10", f"add {name}/publisher bytes 100")
    out, _ = running.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    counted = last["messages_hz"] * last["window_s"]
    assert 100 - 1e-6 <= counted <= 200 + 1e-6 and abs(counted / 10 - round(counted / 10)) < 1e-6
    assert last["bytes_hz"] == pytest.approx(10 * last["messages_hz"])
    assert first["of"] == "1 publisher"
    assert "messages/s" in run("hz", f"shm:{name}", "--count", "1", "--every", "0.1").stdout
    assert "a message" in run("bw", f"shm:{name}", "--count", "1", "--every", "0.1").stdout


def test_rates_of_nobody_are_refused() -> None:
    done = run("hz", "shm:/test-nothing-of-this-name")
    assert done.returncode == 1 and "nobody" in done.stderr
