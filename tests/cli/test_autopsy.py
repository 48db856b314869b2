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
publisher.publish(b"the last words")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_is_found_by_its_channel_and_by_its_pid(tmp_path: Path) -> None:
    address = f"shm:/autopsy-{uuid.uuid4().hex[:12]}"
    state = {"XDG_STATE_HOME": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, address], env=environment(**state))
    assert program.wait(120) == -signal.SIGKILL
    assert run("shm", "clean", **state).returncode == 0
    done = run("autopsy", address, **state)
    assert done.returncode == 0, done.stderr
    assert f"pid {program.pid} (python" in done.stdout and "found dead" in done.stdout and "the last words" in done.stdout
    assert "#1 of 14 bytes" in done.stdout
    (death,) = json.loads(run("autopsy", str(program.pid), "--json", **state).stdout)["deaths"]
    (member,) = death["members"]
    assert (death["pid"], member["channel"], member["messages"]) == (program.pid, address.removeprefix("shm:"), 1)
    assert base64.b64decode(member["beginning_base64"]) == b"the last words"


def test_where_nothing_is_known_that_is_said(tmp_path: Path) -> None:
    done = run("autopsy", "shm:/nobody-ever", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1 and "nothing is known of a dead member of shm:/nobody-ever" in done.stderr
    done = run("autopsy", "--json", "shm:/nobody-ever", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1 and json.loads(done.stdout) == {"deaths": []}


def test_what_cannot_be_known_is_told(tmp_path: Path) -> None:
    for subject in ("tcp://127.0.0.1:5000", "broker://127.0.0.1:5000/topic?token=secret", "camera"):
        done = run("autopsy", subject, XDG_STATE_HOME=str(tmp_path))
        assert done.returncode == 2 and "shared memory" in done.stderr and "secret" not in done.stderr
    done = run("autopsy", str(os.getpid()), XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1 and f"pid {os.getpid()}" in done.stderr and "is alive" in done.stderr


def test_where_deaths_are_not_written_down_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text("a file where the folder should be")
    done = run("autopsy", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1 and f"{tmp_path}/penstock cannot be written" in done.stderr
