"""Where a journal is: told by who opened it, not by where the one who looks stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import penstock
from penstock.journal import Journal
from penstock.observe.snapshot import live


def test_a_journal_that_was_opened_by_a_relative_path_is_shown_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Journal("kept") as journal:
        journal.append("t", b"1")
        with penstock.journal.Follower(journal, 1):
            monkeypatch.chdir("/")
            shown = {block.address for block in live() if block.pid == os.getpid() and "kept" in block.address}
    assert shown and all(address.startswith(f"journal:{tmp_path}/kept") for address in shown), shown
