"""Runs the tests as several processes beside each other: ``suite.py [MARKERS...] -- ARGUMENTS OF PYTEST``.

One process for each expression of markers, without any for each of ``ALL``: the tests mostly wait for programs, JVMs
and disks. Each run has a directory of shared memory of its own, and ports are free ones, so they do not meet. What the
first prints is shown as it comes, what the others print after it. The code is that of the first process that failed.
Ctrl-C ends all of them, a second Ctrl-C kills them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: All tests but those of tests/stress.
ALL = (
    "not (spark or contract or kills or programs or servers or clusters or gateways or records)",
    "(contract or kills) and not spark",
    "servers and not spark",
    "clusters and not spark",
    "gateways and not spark",
    "records",
    "programs and not spark",
    "spark and not torture",
)
CLEAN_UP_S = 30.0
NONE_COLLECTED = 5  # pytest's code: the arguments name only tests of other processes


def start(markers: str, arguments: list[str], output: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "--ignore", "tests/stress", "-m", markers, *arguments]
    # Compiled once, also where the environment asks for no compiled files: the tests start some thousand programs.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    errors = subprocess.STDOUT if output is not None else None
    # In a group of its own: a terminal's Ctrl-C reaches it once, through `end`. A second one would break off what it
    # cleans up.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0
    )


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt each process and wait for its clean-up; at a second Ctrl-C kill them with what they started."""
    try:
        while living := [process for process in running if process.poll() is None]:
            for process in living:
                process.send_signal(signal.SIGINT)
            # Again if it goes on for so long: a test may have taken the interrupt for its own.
            deadline = time.monotonic() + CLEAN_UP_S
            for process in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                remove_folders(process.pid)


def remove_folders(pid: int) -> None:
    """Those that tests/conftest.py made for a run that was killed."""
    for parent in (Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108
        for kind in ("", "state-"):
            for folder in parent.glob(f"penstock-test-{kind}{pid}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def run(open_files: contextlib.ExitStack) -> int:
    at = sys.argv.index("--")
    parts, arguments = sys.argv[1:at] or ALL, sys.argv[at + 1 :]
    # A run in the background of a shell has Ctrl-C ignored. SIGHUP: the terminal is closed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    print(f"running {len(parts)} processes of tests beside each other; what the others print comes last", flush=True)
    outputs = [None, *(open_files.enter_context(tempfile.TemporaryFile()) for _ in parts[1:])]  # noqa: SIM115
    running: list[subprocess.Popen[bytes]] = []
    try:
        for markers, output in zip(parts, outputs, strict=True):
            running.append(start(markers, arguments, None if output is None else output.fileno()))
        for process in running:
            process.wait()
    except KeyboardInterrupt:
        end(running)
    for markers, output in zip(parts[1:], outputs[1:], strict=True):
        assert output is not None
        output.seek(0)
        print(f"\n---- {markers}", flush=True)
        sys.stdout.buffer.write(output.read())
    codes = [process.returncode for process in running if process.returncode != NONE_COLLECTED]
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    failed = next((code for code in codes if code), 0 if codes else NONE_COLLECTED)
    return failed if failed >= 0 else 128 - failed  # ended by a signal, as a shell says it


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        sys.exit(run(stack))
