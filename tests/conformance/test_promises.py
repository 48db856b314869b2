"""What a durable publisher promises when a call returns: kept, on disk, and found by who joins afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import CorruptionError, InvalidArgument, RefusedError

from .reaches import Reach
from .reading import LONG

pytestmark = pytest.mark.needs("durable")


def test_retention_keeps_the_newest_message_whatever_its_size(reach: Reach, tmp_path: Path) -> None:
    kept = {"durable": tmp_path / "kept", "latest": True}
    publisher: Any = reach.publisher(**kept, retain_bytes="1M", segment_bytes="1M")
    publisher.publish_many([bytes(10_000)] * 1500)
    publisher.set(b"the state")
    publisher.close()
    reach.publisher(**kept)
    assert bytes(reach.subscriber().receive(LONG)) == b"the state"


def test_what_retention_removed_before_the_start_is_counted(reach: Reach, tmp_path: Path) -> None:
    publisher: Any = reach.publisher(durable=tmp_path / "kept", retain_bytes="256K", segment_bytes="64K")
    for _ in range(100):
        publisher.publish_many([bytes(10_000)] * 3)
        publisher.flush()
    publisher.journal.retain()
    subscriber = reach.subscriber(start=1)
    first = subscriber.receive(LONG)
    assert first.ordinal > 200
    assert subscriber.ledger.dropped == {"gap": first.ordinal - 1}


def test_damage_is_told_to_who_reads_the_past(reach: Reach, tmp_path: Path) -> None:
    before: Any = reach.publisher(durable=tmp_path / "kept", segment_bytes="64K")
    for _ in range(60):
        before.publish_many([bytes(10_000)] * 3)
        before.flush()
    before.close()
    segments = sorted((tmp_path / "kept").glob("*.log"))
    assert len(segments) > 3
    os.truncate(segments[1], 30_000)
    reach.publisher(durable=tmp_path / "kept")
    subscriber = reach.subscriber(start="first")
    count = 0
    with pytest.raises((CorruptionError, RefusedError), match="damaged"):
        while subscriber.read(LONG) is not None:
            count += 1
    assert 0 < count < 60


@pytest.mark.parametrize("how", ["durable_wait", "flush"])
def test_who_joins_after_it_returned_gets_the_last_value(reach: Reach, tmp_path: Path, how: str) -> None:
    waits = how == "durable_wait"
    publisher: Any = reach.publisher(durable=tmp_path / "kept", history=3, durable_wait=waits)
    for number in range(20):
        publisher.publish(b"%d" % number)
        if not waits:
            publisher.flush()
        with reach.subscriber() as subscriber:
            last = range(max(0, number - 2), number + 1)
            assert [int(bytes(subscriber.receive(LONG))) for _ in last] == list(last)
            assert subscriber.read(0) is None


def test_flush_raises_where_a_commit_of_another_thread_failed(
    reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.publisher(reach.address, durable=tmp_path / "kept") as publisher:
        journal: Any = publisher.journal
        commit = journal.commit_staged
        begun, fails = threading.Event(), threading.Event()

        def full() -> None:
            monkeypatch.setattr(journal, "commit_staged", commit)
            begun.set()
            assert fails.wait(LONG)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(journal, "commit_staged", full)
        publisher.publish(b"lost")
        assert begun.wait(LONG)
        threading.Timer(0.05, fails.set).start()
        with pytest.raises(OSError, match="full"):
            publisher.flush()
        publisher.flush()  # it was told


@pytest.mark.parametrize(
    "options",
    [
        {"retain_bytes": "much"}, {"retain_bytes": float("nan")}, {"retain_bytes": -1}, {"retain_bytes": 1.5},
        {"retain_bytes": []}, {"retain_age_s": "soon"}, {"retain_age_s": float("nan")}, {"retain_age_s": float("inf")},
        {"retain_age_s": 0}, {"retain_age_s": []}, {"segment_bytes": 10**30}, {"segment_bytes": 1.5},
        {"durable_wait": "yes"}, {"durable_wait": None}, {"history": 3, "history_bytes": float("nan")},
        {"history": 3, "history_bytes": 1.5}, {"history": 3, "history_bytes": 10**30},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_at_opening(reach: Reach, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=list(options)[-1]):
        penstock.publisher(reach.address, durable=tmp_path / "kept", **options)
    with penstock.publisher(reach.address, durable=tmp_path / "kept"):
        pass  # nothing of it is left open


def test_a_reader_that_keeps_up_loses_nothing_of_what_is_flushed(
    reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.durable_publisher.KEEP_UP_S", LONG)  # a loaded machine makes the reader slow, not the promise wrong
    publisher: Any = reach.publisher(durable=tmp_path / "kept")
    subscriber = reach.subscriber()
    assert publisher.wait_ready(1, LONG)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(int(bytes(subscriber.receive(LONG))) for _ in range(500)))
    thread.start()
    publisher.publish_many([b"%d" % number for number in range(500)])
    publisher.flush()
    thread.join(LONG)
    assert found == list(range(500))


@pytest.mark.parametrize("wait", [True, False])
def test_a_directory_that_was_removed_is_told(reach: Reach, tmp_path: Path, wait: bool) -> None:
    publisher: Any = reach.publisher(durable=tmp_path / "kept", durable_wait=wait)
    publisher.publish(b"1")
    publisher.flush()
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(OSError, match="was removed"):
        publisher.publish(b"2")
        publisher.flush()
    with contextlib.suppress(OSError):
        publisher.close()
