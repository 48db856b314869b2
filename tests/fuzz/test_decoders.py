"""Every decoder with a few thousand inputs; ``make stress`` gives each a million. ``PENSTOCK_FUZZ=N`` sets how many."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import run, targets

INPUTS = int(os.environ.get("PENSTOCK_FUZZ", "2000"))
SLOW = {"journal-files": 20, "shared-memory": 4, "broker-session": 10}  # files are written for each input


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_decoder(name: str, seed: int) -> None:
    found = run.fuzz(name, INPUTS // SLOW.get(name, 1), seed)
    assert found is None, found


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner sees an error, a crash and a hang."""

    monkeypatch.setattr(run, "HANG_S", 0.5)
    monkeypatch.setattr(run, "keep", lambda *_: None)
    for how, word in ((_raise, "ZeroDivisionError"), (_crash, "ended with -9"), (_hang, "no step")):
        monkeypatch.setattr(targets.Bodies, "decode", how)
        found = run.fuzz("bodies", 10, 1)
        assert found is not None and word in found


def _raise(*_: object) -> None:
    1 / (len(_) - 2)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), 9)


def _hang(*_: object) -> None:
    while True:
        pass
