"""What a replay stores, where that fails, and what it says when it does not go on."""

from __future__ import annotations

import errno
import itertools
import logging
import sys
import threading
from pathlib import Path

import pytest

from penstock._core.gateway import GatewayMessage
from penstock.clock import VirtualClock, using
from penstock.errors import InvalidArgument, PenstockError, StateError
from penstock.journal import Entry, Journal
from penstock.replay import Output, ProgramTarget, Rule, Script, first_difference, replay, watchdog


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


@pytest.mark.parametrize("there", [False, True], ids=["a new folder", "an empty folder"])
@pytest.mark.parametrize("call", ["append", "__init__"])
def test_an_output_in_which_nothing_could_be_stored_is_not_made(
    call: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(Journal, call)

    def full(journal: Journal, *arguments: object, **options: object) -> None:
        if call == "__init__":
            original(journal, *arguments, **options)
            journal.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    if there:
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(Journal, call, full)
    with pytest.raises(OSError, match="No space"), Output(tmp_path / "out") as output:
        output.published("it", GatewayMessage(b"x", {}))
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if there else [])


def test_an_output_that_ended_before_anything_was_stored_is_not_complete(tmp_path: Path) -> None:
    """As one whose process was killed: a complete one says so, also where nothing was published."""
    Journal(tmp_path / "killed").close()
    with Output(tmp_path / "good"):
        pass
    for pair in (("killed", "killed"), ("killed", "good"), ("good", "killed")):
        with pytest.raises(PenstockError, match="killed is not complete"):
            first_difference(*(tmp_path / name for name in pair))


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


def test_where_a_source_stands_still_that_the_replay_waits_for_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, stands, moments = threading.Event(), threading.Event(), itertools.count()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    def it_stands_here() -> None:
        stands.set()
        assert told.wait(60)

    def progress() -> int:
        return -1 if stands.is_set() else next(moments)

    heard = Heard()
    watchdog.log.addHandler(heard)
    monkeypatch.setattr(watchdog, "TELL_AFTER_S", 0.01)
    try:
        with using(VirtualClock()) as clock, watchdog.watched(progress, lambda: clock.turn):
            clock.thread(it_stands_here, "a source").start()
            clock.advance(0)
            assert clock.turn is None
    finally:
        watchdog.log.removeHandler(heard)
    assert told.is_set() and it_stands_here.__name__ in caplog.text


def test_a_program_whose_timers_go_round_in_a_loop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["penstock.replay.target"], "MAX_AT_ONCE", 1000)  # a function hides its name
    with Journal(tmp_path / "rec") as journal:
        journal.commit([Entry("speed", b"x", timestamp_ns=at) for at in (10**18, 2 * 10**18)])
    (tmp_path / "program.py").write_text(
        "from penstock import clock\ndef again():\n    clock.call_later(0, again)\nclock.call_later(1, again)\n"
    )
    target = ProgramTarget(tmp_path / "program.py", ("bus:out",))
    with Script(tmp_path / "rec") as script:
        sources = target.sources(script.topics, {}, None)
        with pytest.raises(StateError, match=r"more than 1000 timers at one moment.*program.py:2, in again"):
            replay(target, script.inputs(sources), script.times_ns(sources))
