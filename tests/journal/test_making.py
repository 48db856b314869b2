"""Making and ending: its writer makes the journal; closing gives everything back; segments take what they hold."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

import penstock
from penstock.journal import Journal


def test_a_real_writer_is_not_waited_for(tmp_path: Path) -> None:
    with Journal(tmp_path / "log"), pytest.raises(penstock.RefusedError, match="written by this process"):
        Journal(tmp_path / "log")


def test_closing_gives_every_descriptor_back_at_once(tmp_path: Path) -> None:
    """Without the garbage collector: a program that opens many journals must not wait for it."""
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for mode in ("write", "write", "read", "read"):
            journal = Journal(tmp_path / "j", mode=mode, segment_bytes=65536)
            if mode == "write":
                for _ in range(40):
                    journal.append("t", bytes(4000))
            message = journal.read(1)
            journal.close()
            assert bytes(message) == bytes(4000), "messages read stay valid"
            del journal, message
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_small_segments_take_no_more_room_than_they_hold(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        for _ in range(100):
            journal.append("t", bytes(4000))
    logs = sorted((tmp_path / "j").glob("*.log"))
    assert len(logs) > 3 and all(path.stat().st_size < 2 * 65536 for path in logs)
