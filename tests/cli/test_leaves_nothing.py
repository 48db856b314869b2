"""Nothing is left when the demo or a run of the tests ends, by itself or by a signal: no process, no file in shared
memory. A port that somebody listens on has a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .command import HERE, environment

ROOT = Path(__file__).parents[2]
MARK = "PENSTOCK_TEST_FAMILY"
LONG = 200.0
pytestmark = pytest.mark.timeout(600)


def family(mark: str) -> list[str]:
    """Processes that have inherited the mark, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().decode(errors='replace')[:100]}")
            except OSError:
                continue
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of shared memory for the program under test alone."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-leaves-", dir=parent) as name:
        yield Path(name)


def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def files(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("moment", ["starting", "flowing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_demo(moment: str, number: signal.Signals, shared: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [*HERE, "demo", "--forever", "--no-spark", "--directory", str(tmp_path / "data")]
    variables = environment(PENSTOCK_SHM_DIR=str(shared), **{MARK: mark})
    with (tmp_path / "printed").open("w") as printed:
        demo = subprocess.Popen(command, env=variables, stdout=printed, stderr=printed)
    try:
        role = "store" if moment == "starting" else "edge"
        eventually(lambda: list((tmp_path / "data").glob(f"*/{role}.log")))
        demo.send_signal(number)
        demo.wait(LONG)
    finally:
        demo.kill()
        demo.wait()
    eventually(lambda: not family(mark))
    assert files(shared) == [], (tmp_path / "printed").read_text()


def test_a_demo_that_is_killed(shared: Path, tmp_path: Path) -> None:
    """Its parts end by themselves; the files of who was killed go with the next one who looks."""
    mark = uuid.uuid4().hex
    variables = environment(PENSTOCK_SHM_DIR=str(shared), **{MARK: mark})
    command = [*HERE, "demo", "--forever", "--no-spark", "--directory", str(tmp_path / "data")]
    demo = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: list((tmp_path / "data").glob("*/edge.log")))
    finally:
        demo.kill()
        demo.wait()
    eventually(lambda: not family(mark))
    look = [*HERE, "ls", "--json"]
    assert subprocess.run(look, env=variables, capture_output=True, timeout=LONG, check=False).returncode == 0
    assert files(shared) == []


def test_tests_that_are_interrupted(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    command += ["tests/tcp", "tests/shm", "tests/cli/test_rooms.py"]
    variables = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "printed").open("w") as printed:
        tests = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=printed, stderr=printed, process_group=0
        )
    try:
        eventually(lambda: "." in (tmp_path / "printed").read_text())
        os.killpg(tests.pid, signal.SIGINT)  # as a terminal does
        assert tests.wait(LONG) == 2, (tmp_path / "printed").read_text()
    finally:
        tests.kill()
        tests.wait()
    eventually(lambda: not family(mark))
    parents = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    assert [path for parent in parents for path in parent.glob(f"penstock-test-{tests.pid}-*")] == []
