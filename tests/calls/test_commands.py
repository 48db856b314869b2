"""``penstock call`` and ``penstock serve``, as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.reaches import unique

PENSTOCK = [sys.executable, "-m", "penstock"]


@contextmanager
def serving(address: str, command: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*PENSTOCK, "serve", address, command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "answering calls" in process.stderr.readline()
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert "Traceback" not in told and process.returncode == 0, "a service that was asked to stop has done its work"


def call(*words: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PENSTOCK, "call", *words], input=data, capture_output=True, timeout=100, check=False)


def test_a_command_answers() -> None:
    address = f"shm:/{unique()}"
    with serving(address, "tr a-z A-Z"):
        found = call(address, "hello; echo $HOME", "--wait", "30")
        assert (found.returncode, found.stdout) == (0, b"HELLO; ECHO $HOME")
        found = call(address, "-", data=b"from a pipe\n" * 20_000)
        assert (found.returncode, found.stdout) == (0, b"FROM A PIPE\n" * 20_000)


def test_a_command_that_reads_late_or_not_at_all_gets_its_time() -> None:
    """More than a pipe holds, to a command that looks at it after a while, or never."""
    address = f"shm:/{unique()}"
    with serving(address, "sh -c 'sleep 0.3; wc -c'"):
        assert call(address, "-", "--wait", "30", data=bytes(1_000_000)).stdout.strip() == b"1000000"
    with serving(address, "echo done"):
        assert call(address, "-", "--wait", "30", data=bytes(1_000_000)).stdout == b"done\n"


def test_a_command_that_prints_without_end_is_killed() -> None:
    address = f"shm:/{unique()}"
    with serving(address, "yes"):
        found = call(address, "x", "--wait", "30", "--timeout", "60")
        assert found.returncode == 1 and b"printed more than 64 MiB" in found.stderr


def test_a_command_that_fails_says_so() -> None:
    address = f"shm:/{unique()}"
    with serving(address, "sh -c 'echo broken >&2; exit 3'"):
        found = call(address, "x", "--wait", "30")
        assert found.returncode == 1
        assert b"code 3: broken" in found.stderr and b"Traceback" not in found.stderr


def test_a_command_that_takes_too_long_is_killed() -> None:
    address = f"shm:/{unique()}"
    with serving(address, "sleep 600", "--limit", "0.3"):
        found = call(address, "x", "--wait", "30")
        assert found.returncode == 1 and b"--limit" in found.stderr


def test_what_a_command_has_started_is_killed_too() -> None:
    address = f"shm:/{unique()}"
    with serving(address, "sh -c 'sleep 600; echo x'", "--limit", "0.3"):
        found = call(address, "x", "--wait", "30")
        assert found.returncode == 1 and b"--limit" in found.stderr


def test_time_over_and_nobody_there() -> None:
    address = f"shm:/{unique()}"
    found = call(address, "x")
    assert found.returncode == 1 and b"no server answers" in found.stderr
    with serving(address, "sleep 600"):
        found = call(address, "x", "--wait", "30", "--timeout", "0.2")
        assert found.returncode == 3


def test_no_such_command() -> None:
    found = subprocess.run(
        [*PENSTOCK, "serve", "shm:/x", "no-such-command-here"], capture_output=True, timeout=100, check=False
    )
    assert found.returncode == 2 and b"no-such-command-here" in found.stderr


def test_a_killed_service_leaves_no_command_behind(tmp_path: Path) -> None:
    address, told = f"shm:/{unique()}", tmp_path / "pid"
    command = f"sh -c 'echo $$ > {told}.new; mv {told}.new {told}; exec sleep 1000'"
    with subprocess.Popen([*PENSTOCK, "serve", address, command], stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None and "answering calls" in service.stderr.readline()
        with subprocess.Popen([*PENSTOCK, "call", address, "x", "--wait", "30"], stderr=subprocess.DEVNULL) as caller:
            deadline = time.monotonic() + 60
            while not told.exists():
                assert time.monotonic() < deadline and caller.poll() is None, "the command did not begin"
                time.sleep(0.01)
            service.kill()
    pid = int(told.read_text())
    try:
        while _runs(pid):
            assert time.monotonic() < deadline, "the command runs on without its service"
            time.sleep(0.01)
    finally:
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
