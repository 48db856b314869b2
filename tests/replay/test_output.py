"""What a replay stores, where that fails, and what it says when it does not go on."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest

from penstock._core.gateway import GatewayMessage
from penstock.errors import InvalidArgument, PenstockError
from penstock.journal import Journal
from penstock.replay import Output, Rule, first_difference, watchdog


def test_an_output_that_cannot_be_stored_is_no_fault_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    large = GatewayMessage(bytes(5 << 20), {})
    with pytest.raises(OSError, match="No space"), Output(tmp_path / "out") as output:
        output.published("it", large)
        monkeypatch.setattr(Journal, "commit", full)
        output.published("it", large)  # nothing is raised where a module publishes
        output.left("it", large)
        assert output.error is not None and output.messages == 2
    monkeypatch.undo()
    with pytest.raises(PenstockError, match="not complete"):
        first_difference(tmp_path / "out", tmp_path / "out")


def test_a_folder_is_made_when_there_is_something_to_store(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Output(tmp_path / "out"):
        raise KeyError
    assert not (tmp_path / "out").exists()
    with Output(str(tmp_path / "out")):  # a text is a path too
        pass
    assert first_difference(str(tmp_path / "out"), tmp_path / "out") == (None, 0)
    with pytest.raises(InvalidArgument, match="a list of topics"):
        Rule("size < 3", "to.engine")  # type: ignore[arg-type]


def test_where_a_replay_stands_still_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    heard = Heard()
    watchdog.log.addHandler(heard)
    monkeypatch.setattr(watchdog, "TELL_AFTER_S", 0.01)
    try:
        with watchdog.watched(lambda: "the same"):
            assert told.wait(60)
            told.clear()
            assert not told.wait(0.1)
    finally:
        watchdog.log.removeHandler(heard)
    assert f"{__file__}:" in caplog.text and test_where_a_replay_stands_still_is_told_once.__name__ in caplog.text
