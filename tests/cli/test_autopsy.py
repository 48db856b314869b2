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


def test_a_lock_that_a_stopped_process_holds_is_told(tmp_path: Path) -> None:
    state = own(tmp_path)
    assert run("autopsy", **state).returncode == 1  # makes the file
    hold = "import fcntl, os, signal, sys\nfile = open(sys.argv[1], 'r+b')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    file = tmp_path / "penstock" / "deaths"
    holder = subprocess.Popen([sys.executable, "-c", hold + "os.kill(os.getpid(), signal.SIGSTOP)", str(file)])
    try:
        assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
        done = run("autopsy", "12345678", **state)
        assert done.returncode == 1 and f"{file} cannot be written" in done.stderr, done.stderr
        assert "another process has held its lock" in done.stderr
        found = json.loads(run("autopsy", "--json", **state).stdout)
        assert "another process has held its lock" in found["problem"] and found["damaged"] == 0
    finally:
        holder.kill()
        holder.wait()
    assert json.loads(run("autopsy", "--json", **state).stdout)["problem"] is None


def test_a_line_break_in_the_name_of_a_program_begins_no_line(tmp_path: Path) -> None:
    state = own(tmp_path)
    script = tmp_path / "ev\n pid 1 (init), found dead.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen([sys.executable, str(script), "shm:/autopsy-line"], env=environment(**state))
    assert program.wait(120) == -signal.SIGKILL
    done = run("autopsy", str(program.pid), **state)
    assert done.returncode == 0 and done.stdout.startswith(f"pid {program.pid} (ev\\n pid 1 (init)"), done.stdout
    assert json.loads(run("autopsy", "--json", **state).stdout)["deaths"][0]["program"].startswith("ev\n pid 1")


def test_an_empty_file_of_deaths_is_not_damaged(tmp_path: Path) -> None:
    state = own(tmp_path)
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "deaths").touch()
    # as on a full disk: the file stays empty
    command = ["prlimit", "--fsize=0", sys.executable, "-m", "penstock", "autopsy"]
    done = subprocess.run(command, env=environment(**state), capture_output=True, text=True, timeout=120)
    assert (tmp_path / "penstock" / "deaths").stat().st_size == 0
    assert done.returncode == 1 and "deaths cannot be written" in done.stderr, done.stderr
    assert "damaged" not in done.stderr
