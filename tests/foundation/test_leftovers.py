"""A run of tests that is interrupted leaves nothing behind either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

#: Starts a process whose parent ends at once, as a killed server's children lose theirs.
INTERRUPTED = """
import os, subprocess, sys, time

ORPHAN = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], stdout=2).pid)"


def test_that_waits():
    orphan = subprocess.check_output([sys.executable, "-c", PARENT], text=True).strip()
    folder = os.environ["PENSTOCK_SHM_DIR"]
    open(f"{folder}/left", "w").close()
    with open("told.new", "w") as file:
        print(orphan, folder, file=file)
    os.rename("told.new", "told")
    time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)  # of which its new parent has not heard yet
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
def test_what_an_interrupted_run_started_is_gone_when_it_ends(tmp_path: Path) -> None:
    place = tmp_path / "tests" / "foundation"
    place.mkdir(parents=True)
    (place / "test_waits.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as run:
        told = tmp_path / "told"
        while not told.exists():
            assert run.poll() is None, "the run ended before its test waited"
            time.sleep(0.01)
        orphan, folder = told.read_text().split()
        assert lives(int(orphan)) and Path(folder, "left").exists()
        run.send_signal(signal.SIGINT)
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert not lives(int(orphan))
    assert not Path(folder).exists()
