"""A program that ends with open handles, a daemon thread in a wait, or an exception, says nothing of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: How each reach is opened by somebody who closes nothing.
REACHES = {
    "bus": 'publisher, subscriber = penstock.publisher("bus:b"), penstock.subscriber("bus:b")',
    "shm": 'publisher, subscriber = penstock.publisher("shm:/ending"), penstock.subscriber("shm:/ending")',
    "tcp": """publisher = penstock.publisher("tcp://127.0.0.1:0")
subscriber = penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}")
publisher.wait_ready(1, 60)""",
    "journal": 'publisher, subscriber = penstock.publisher("journal:j#t"), penstock.subscriber("journal:j#t")',
    "broker": """from penstock.broker import Server
server = Server("messages", 0).start()
publisher = penstock.publisher(f"broker://127.0.0.1:{server.port}/t")
subscriber = penstock.subscriber(f"broker://127.0.0.1:{server.port}/t?queue=q")""",
}
PROGRAM = """
import threading
import penstock
{opened}
publisher.publish(b"one")
message = subscriber.read(timeout=60)
threading.Thread(target=lambda: subscriber.read(timeout=None), daemon=True).start()
{ending}
"""


def run(reach: str, ending: str, place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_LEAK_WARNINGS"}
    program = PROGRAM.format(opened=REACHES[reach], ending=ending)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=place, env={**environment, **more}, capture_output=True, text=True, timeout=110
    )


@pytest.mark.parametrize("reach", REACHES)
def test_open_handles_and_a_daemon_thread(reach: str, tmp_path: Path) -> None:
    done = run(reach, "", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("reach", REACHES)
def test_an_exception(reach: str, tmp_path: Path) -> None:
    done = run(reach, "raise SystemError('of the program')", tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0].startswith("Traceback") and lines[-1] == "SystemError: of the program"
    assert not done.stdout and "nanobind" not in done.stderr


def test_who_asks_is_told_what_leaked(tmp_path: Path) -> None:
    done = run("tcp", "", tmp_path, PENSTOCK_LEAK_WARNINGS="1")
    assert "nanobind: leaked" in done.stderr
