"""A running broker notices that its stream has lost blocks, and puts them back from its directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import Client, Server
from penstock.errors import PenstockError
from penstock.replica import appender
from penstock.replica.block import decode

from .conftest import until
from .fake_blocks import FakeStream
from .test_model import contents
from .test_refill import fill, lose, opened


@pytest.mark.parametrize("what", ["blocks", "tail", "all, by a purge"])
def test_a_running_broker_puts_back_what_was_lost(
    tmp_path: Path, stream: FakeStream, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(appender, "CHECK_S", 0.0)
    monkeypatch.setattr(appender, "SHORT_S", 0.0)
    server = serve(directory=tmp_path / "a")
    sent = 0

    def publish() -> Any:
        """Whether a message was confirmed: what comes while the store is opened again is refused."""
        nonlocal sent
        with contextlib.suppress(PenstockError, OSError), Client(port=server.port) as client:
            client.publish("t", b"%d" % (sent + 1))
            sent += 1
            return True

    for _ in range(5):
        assert publish()
    if what == "all, by a purge":
        stream.purge(stream.last + 1)
    else:
        tail = what == "tail"
        lose(stream, *((stream.last, stream.last) if tail else (4, 5)), tail=tail)
    until(publish)
    until(lambda: publish() and whole(stream, tmp_path), "the stream is whole")
    server.close()
    with opened(tmp_path / "b", stream) as journal:
        assert [body for _, body in sorted(contents(journal).items())] == [b"%d" % n for n in range(1, sent + 1)]


def whole(stream: FakeStream, place: Path) -> bool:
    """Whether an empty directory could be filled from it; the broker goes on with the stream as it was."""
    copy = FakeStream()
    copy.first, copy.last, copy.blocks = stream.first, stream.last, dict(stream.blocks)
    directory = place / f"look{copy.last}"
    try:
        with opened(directory, copy) as journal:
            return len(contents(journal)) > 5
    except PenstockError:
        return False


def test_a_purge_that_takes_older_segments_is_told_once(
    tmp_path: Path, stream: FakeStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker's own retention is not spoken of."""
    monkeypatch.setattr(appender, "CHECK_S", 0.0)
    with opened(tmp_path / "a", stream, retain_queues=True) as journal:
        fill(journal)
        assert journal.retain(passed=10)
        fill(journal, 1)
        assert not caplog.messages
        last = decode(stream.blocks[stream.last], "here").begin_sequence(stream.last)
        stream.purge(last)
        fill(journal, 3)
        assert [f"purged up to block {last - 1}, and not by this broker" in told for told in caplog.messages] == [True]
        assert journal.append("t", b"goes on")
