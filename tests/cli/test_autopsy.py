"""``penstock autopsy`` as a user runs it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.cli.command import environment, run

PROGRAM = """
import os, signal, sys
import penstock
publisher = penstock.publisher(sys.argv[1])
publisher.publish(b"the last\\nwords")
os.kill(os.getpid(), signal.SIGKILL)
"""


def own(folder: Path) -> dict[str, str]:
    """A state directory and a shared one: processes that others kill meanwhile are deaths too."""
    (folder / "shared").mkdir(0o700, exist_ok=True)
    return {"XDG_STATE_HOME": str(folder), "PENSTOCK_SHM_DIR": str(folder / "shared")}


def test_a_killed_process_is_found_by_its_channel_and_by_its_pid(tmp_path: Path) -> None:
    address = f"shm:/autopsy-{uuid.uuid4().hex[:12]}"
    state = own(tmp_path)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, address], env=environment(**state))
    assert program.wait(120) == -signal.SIGKILL
    assert run("shm", "clean", **state).returncode == 0
    done = run("autopsy", address, **state)
    assert done.returncode == 0, done.stderr
    assert (
        f"pid {program.pid} (python" in done.stdout
        and "found dead" in done.stdout
        and "the last\\nwords" in done.stdout  # in one line
    )
    assert "#1 of 14 bytes" in done.stdout
    (death,) = json.loads(run("autopsy", str(program.pid), "--json", **state).stdout)["deaths"]
    (member,) = death["members"]
    assert (death["pid"], member["channel"], member["messages"]) == (program.pid, address.removeprefix("shm:"), 1)
    assert base64.b64decode(member["beginning_base64"]) == b"the last\nwords"


def test_where_nothing_is_known_that_is_said(tmp_path: Path) -> None:
    done = run("autopsy", "shm:/nobody-ever", **own(tmp_path))
    assert done.returncode == 1 and "nothing is known of a dead member of shm:/nobody-ever" in done.stderr
    assert f"{tmp_path}/penstock/deaths" in done.stderr
    done = run("autopsy", "--json", "shm:/nobody-ever", **own(tmp_path))
    assert done.returncode == 1 and json.loads(done.stdout) == {"deaths": [], "damaged": 0, "problem": None}


def test_a_process_that_lives_is_told_and_secrets_are_not(tmp_path: Path) -> None:
    done = run("autopsy", "broker://127.0.0.1:5000/topic?token=secret", **own(tmp_path))
    assert done.returncode == 1 and "broker://127.0.0.1:5000/topic" in done.stderr and "secret" not in done.stderr
    done = run("autopsy", str(os.getpid()), **own(tmp_path))
    assert done.returncode == 1 and f"pid {os.getpid()}" in done.stderr and "is alive" in done.stderr


def test_a_handle_of_any_reach_is_found_by_its_address(tmp_path: Path) -> None:
    state = own(tmp_path)
    store = f"journal:{tmp_path}/store"
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, f"{store}#orders"], env=environment(**state))
    assert program.wait(120) == -signal.SIGKILL
    for subject in (f"{store}#orders", store, "store#ord", str(program.pid)):
        done = run("autopsy", subject, **state)
        assert done.returncode == 0 and f"published at {store}#orders: 1" in done.stdout, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.endswith(" (penstock)") or "(python" in first.rpartition(" by ")[2], (
        first
    )  # no arguments of the finder
    assert run("autopsy", "journal:/elsewhere", **state).returncode == 1


def test_where_deaths_are_not_written_down_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text("a file where the folder should be")
    done = run("autopsy", **own(tmp_path))
    assert done.returncode == 1 and f"{tmp_path}/penstock/deaths cannot be written" in done.stderr


def test_damaged_records_and_handles_that_were_not_kept_are_told(tmp_path: Path) -> None:
    state = own(tmp_path)
    name = f"/autopsy-{uuid.uuid4().hex[:12]}"
    many = PROGRAM.replace("os.kill(", "more = [penstock.publisher(f'{sys.argv[1]}/{n}') for n in range(30)]\nos.kill(")
    program = subprocess.Popen([sys.executable, "-c", many, f"shm:{name}"], env=environment(**state))
    assert program.wait(120) == -signal.SIGKILL
    assert run("shm", "clean", **state).returncode == 0
    done = run("autopsy", "shm:/another", **state)
    assert done.returncode == 1 and f"not kept: 6 of pid {program.pid}" in done.stderr
    file = tmp_path / "penstock" / "deaths"
    file.write_bytes(file.read_bytes()[:16384] + os.urandom(31 * 16384))
    done = run("autopsy", str(program.pid), **state)
    assert done.returncode == 0 and "6 more handles" in done.stdout and "31 of 32 records" in done.stderr, done.stderr
    found = json.loads(run("autopsy", "--json", **state).stdout)
    assert (len(found["deaths"]), found["damaged"], found["problem"]) == (1, 31, None)
