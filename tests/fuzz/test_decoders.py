"""Every decoder with a few thousand inputs; ``make stress`` gives each a million. ``PENSTOCK_FUZZ=N`` sets how many."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.fuzz import run, targets

INPUTS = int(os.environ.get("PENSTOCK_FUZZ", "2000"))
# Files are written for each input.
SLOW = {"journal-files": 20, "shared-memory": 4, "broker-session": 10, "mcap-files": 10, "gateway-yaml": 4, "staged-rows": 5, "death-files": 5}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_decoder(name: str, seed: int) -> None:
    found = run.fuzz(name, INPUTS // SLOW.get(name, 1), seed)
    assert found is None, found


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner sees an error, a crash, a hang and growth."""

    monkeypatch.setattr(run, "keep", lambda *_: None)
    for how, word in ((_raise, "ZeroDivisionError"), (_crash, "ended with -9"), (_hang, "no step")):
        with monkeypatch.context() as patched:
            patched.setattr(targets.Bodies, "decode", how)
            if how is _hang:  # the others may be slow on a busy machine
                patched.setattr(run, "HANG_S", 0.5)
            found = run.fuzz("bodies", 10, 1)
        assert found is not None and word in found
    monkeypatch.setattr(run, "MAX_GROWTH_KIB", 64 << 10)
    monkeypatch.setattr(targets.Bodies, "decode", _grow)
    found = run.fuzz("bodies", 50, 1)
    assert found is not None and "memory grew" in found
    monkeypatch.setattr(targets.Bodies, "decode", _early)
    assert run.fuzz("bodies", 50, 1) is None
    monkeypatch.setattr(targets.Bodies, "decode", _in_another_process)
    monkeypatch.setattr(targets.Bodies, "process_id", property(lambda self: self.child.pid), raising=False)
    monkeypatch.setattr(targets.Bodies, "__init__", _start, raising=False)
    monkeypatch.setattr(targets.Bodies, "close", _end, raising=False)
    found = run.fuzz("bodies", 50, 1)
    assert found is not None and "memory grew" in found


def _raise(*_: object) -> None:
    1 / (len(_) - 2)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), 9)


def _hang(*_: object) -> None:
    while True:
        pass


KEPT: list[bytes] = []
GROWTH = "import sys\nkept = []\nfor line in sys.stdin: kept.append(b'x' * (4 << 20)); print(flush=True)"


def _grow(*_: object) -> None:
    KEPT.append(b"x" * (4 << 20))


def _early(*_: object) -> None:
    if not KEPT:  # with the first of the kept inputs: that much is the baseline
        KEPT.append(b"x" * (100 << 20))


def _start(target: Any) -> None:
    target.child = subprocess.Popen([sys.executable, "-c", GROWTH], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _in_another_process(target: Any, _: bytes) -> None:
    target.child.stdin.write(b"\n")
    target.child.stdin.flush()
    target.child.stdout.readline()


def _end(target: Any) -> None:
    target.child.stdin.close()
    target.child.wait()
