"""What a program says while it starts is shown only where the start fails; what it says later is passed on."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from penstock.cli.exits import Terminated
from penstock.cli.pipeline import _interruption, _stop

PROGRAM = """
import subprocess, sys, threading
from penstock.cli.held import held_back

def say(text):
    subprocess.run(["sh", "-c", f"echo {text} >&2"], check=True)

try:
    with held_back():
        say("starting")
        child = subprocess.Popen(["sh", "-c", "read line; echo $line >&2"], stdin=subprocess.PIPE, text=True)
        print("ours", file=sys.stderr)
        if "fails" in sys.argv:
            raise ValueError("no")
except ValueError:
    child.kill()
    child.wait()
    sys.exit("failed")
say("after")
child.communicate("passed on\\n")
for thread in threading.enumerate():
    if thread.daemon:
        thread.join(30)
"""


def told(*arguments: str) -> tuple[int, list[str]]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return run.returncode, run.stderr.splitlines()


def test_a_start_that_succeeds_is_quiet_and_what_comes_later_is_passed_on() -> None:
    assert told() == (0, ["after", "passed on"])


def test_a_start_that_fails_tells_all() -> None:
    code, lines = told("fails")
    assert code == 1 and lines == ["starting", "ours", "failed"]


def test_a_signal_is_found_below_what_failed_because_of_it() -> None:
    def interrupted(kind: type[BaseException]) -> BaseException:
        try:
            try:
                raise kind
            finally:
                raise KeyError("an answer that nobody waits for")
        except KeyError as error:
            return error

    assert isinstance(_interruption(interrupted(Terminated)), Terminated)
    assert isinstance(_interruption(interrupted(KeyboardInterrupt)), KeyboardInterrupt)
    assert _interruption(interrupted(ValueError)) is None and isinstance(_interruption(Terminated()), Terminated)


class _Gone:
    """A session whose JVM has ended by the same signal."""

    def stop(self) -> None:
        warnings.warn("unable to shut down", RuntimeWarning, stacklevel=2)
        raise ConnectionRefusedError


def test_ending_a_jvm_that_is_gone_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    _stop(_Gone())  # type: ignore[arg-type]
    assert not recwarn.list
