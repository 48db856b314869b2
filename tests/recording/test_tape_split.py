"""A part of a recording has its size, whatever comes at once."""

from __future__ import annotations

from pathlib import Path

from penstock.journal import Entry
from penstock.recording.tape import Plan, Tape


def test_what_comes_at_once_goes_into_parts_of_the_size(tmp_path: Path) -> None:
    tape = Tape(Plan(tmp_path / "rec", {"shm:/x": "t"}, split_bytes=20_000))
    entries = [Entry("t", bytes(1000)) for _ in range(100)]
    for piece in tape.pieces(entries):
        tape.commit(piece, sum(len(entry.payload) for entry in piece))
    tape.end({})
    assert tape.part == 5
