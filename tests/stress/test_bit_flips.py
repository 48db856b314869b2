"""Ten thousand bits of a journal's files turned over (``--flips N`` for another number), every reader asked each time;
a twentieth as many of the directories that a replicated broker and a follower keep, which the stream mends."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.journal import flips
from tests.replica.fake_blocks import FakeBlocks, FakeStream
from tests.replica.test_model import contents
from tests.replica.test_refill import fill, opened

from penstock.journal import Journal
from penstock.journal.verify import verify
from penstock.replica.follower import Follower
from penstock.torture.scene import flip


@pytest.mark.timeout(0)
def test_flipped_bits(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    flips.make(tmp_path / "made")
    count = request.config.getoption("--flips") or 10_000
    assert flips.wrong_answers(tmp_path / "made", tmp_path / "work", seed, count) == []


@pytest.mark.timeout(0)
@pytest.mark.parametrize("whose", ["broker", "follower"])
def test_flipped_bits_of_a_copy_are_mended(
    whose: str, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    def follow(directory: Path, stream: FakeStream) -> Follower:
        return Follower(directory, FakeBlocks(stream))

    open_copy: Callable[[Path, FakeStream], Journal | Follower] = opened if whose == "broker" else follow
    stream = FakeStream()
    with opened(tmp_path / "broker", stream) as journal:
        fill(journal)
        before = contents(journal)
    follow(tmp_path / "follower", stream).close()
    work = tmp_path / "work"
    chance = random.Random(seed)
    for _ in range((request.config.getoption("--flips") or 10_000) // 20):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tmp_path / whose, work)
        flip([path for path in work.iterdir() if path.is_file()], chance)
        anew = FakeStream()
        anew.blocks, anew.first, anew.last = dict(stream.blocks), stream.first, stream.last
        open_copy(work, anew).close()
        with Journal(work, mode="read") as journal:
            assert contents(journal) == before
        assert not verify(work)
