"""The journal on a disk that loses, reorders and tears what was not synced: what was acknowledged is there, whole.

``python -m tests.journal.test_power_cut SECONDS [SEED]`` goes on with fresh seeds for so long and prints each that fails.
"""

from __future__ import annotations

import errno
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.journal import Journal, layout
from penstock.journal.upkeep import Full
from tests.journal.simulated_disk import SimulatedDisk

SEGMENT_BYTES = 65536
Message = tuple[str, bytes]


class Run:
    """What was asked of a journal: acknowledged messages by position, and what may or may not be there after them."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.acknowledged: list[Message] = []
        self.attempted: list[list[Message]] = []  # batches that failed; any one of them may be there
        self.steps = 0  # transactions acknowledged, each with a state record

    def message(self) -> Message:
        size = self.chance.choice([0, 1, 7, 64, 64, 500, 3000, 9000])
        if self.chance.random() < 0.02:
            size = 150_000
        return f"topic.{self.chance.randrange(6)}", self.chance.randbytes(min(size, 4096)) * (1 + size // 4096)

    def snapshot(self) -> list[tuple[int, bytes]]:
        return [(1, self.steps.to_bytes(8, "little"))]

    def seal_later(self, journal: Journal) -> None:
        """Segments are sealed while appending goes on: here after some more batches, or when the next roll waits for it."""
        upkeep, held = journal._upkeep, list[Full]()

        def wait() -> None:
            while held:
                upkeep._work(held.pop(0))

        upkeep.begin, upkeep.wait = held.append, wait  # type: ignore[method-assign]

    def work(self, journal: Journal, batches: int) -> None:
        """Append until done or until the disk says no."""
        journal.on_snapshot(self.snapshot)
        self.seal_later(journal)
        for _ in range(batches):
            if self.chance.random() < 0.3:
                journal._upkeep.wait()
            batch = [self.message() for _ in range(self.chance.choice([1, 1, 1, 2, 5, 20]))]
            self.attempted = [batch]
            try:
                with journal.transaction() as transaction:
                    spills = self.chance.choice([0, 0, 0, 0.3, 1])
                    for topic, data in batch:
                        transaction.append(topic, data)
                        if self.chance.random() < spills:
                            transaction.spill()
                            assert journal.frontier == len(self.acknowledged) + 1
                    transaction.state(1, (self.steps + 1).to_bytes(8, "little"))
            except OSError as error:
                if error.errno == errno.ENOSPC and not journal.writer.failed:
                    self.attempted = []
                    continue  # nothing of it was stored, and the next may be
                raise
            assert transaction.first == len(self.acknowledged) + 1
            self.acknowledged += batch
            self.attempted = []
            self.steps += 1
            assert journal.frontier == len(self.acknowledged) + 1

    def check(self, journal: Journal) -> None:
        """Everything acknowledged is there; of what was not, a whole batch or nothing."""
        assert not journal.recovery.damage, journal.recovery
        found: list[Message] = []
        at = 1
        while at < journal.frontier:
            batch, at = journal.read_from(at, 1000)
            found += [(str(message.channel), bytes(message)) for message in batch]
        assert len(found) == journal.frontier - 1
        assert found[: len(self.acknowledged)] == self.acknowledged
        extra = found[len(self.acknowledged) :]
        assert not extra or extra in self.attempted, f"{len(extra)} messages that were never asked for as one batch"
        states = [int.from_bytes(data, "little") for _, data in journal.state_records()]
        steps = self.steps + bool(extra)
        assert (states[-1] if states else 0) == steps, (states, steps)
        self.acknowledged, self.steps, self.attempted = found, steps, []
        ordinals: dict[str, int] = {}
        for topic, _ in found:
            ordinals[topic] = ordinals.get(topic, 0) + 1
        for topic, count in ordinals.items():
            assert journal.find_ordinal(topic, count) is not None
            assert journal.find_ordinal(topic, count + 1) is None
        damage = journal.verify()
        assert not damage, damage


def open_on(directory: Path, disk: SimulatedDisk | None = None, sync: bool = True) -> Journal:
    return Journal(directory, segment_bytes=SEGMENT_BYTES, disk=disk, sync=sync)


def frontier_word(directory: Path) -> int:
    path = directory / layout.FRONTIER_NAME
    return layout.FRONTIER_COPY.unpack_from(path.read_bytes(), layout.FRONTIER_COPIES[0])[1] if path.exists() else 1


def power_cut_run(seed: str, root: Path, *, cut_at: int | None, mode: str, batches: int = 25, lives: int = 3) -> int:
    """Work, cut, look, and go on with what is left, several times over. Gives the operations of the first life."""
    run = Run(seed)
    directory = root / "0"
    directory.mkdir()
    operations = 0
    for life in range(lives):
        at = cut_at if life == 0 else run.chance.randrange(1, 150)
        disk = SimulatedDisk(directory, run.chance, cut_at=at)
        journal = None
        try:
            journal = open_on(directory, disk)
            if life:
                run.check(journal)
            run.work(journal, batches)
        except (OSError, PenstockError):
            assert disk.dead, "only the power cut may fail"
        finally:
            if journal is not None:
                disk.dead = True
                journal.close()
        operations = operations or disk.operations
        following = root / str(life + 1)
        disk.cut(following, mode)
        seen = frontier_word(directory) - 1
        assert seen <= len(run.acknowledged) + sum(map(len, run.attempted)), "readers saw what was not committed"
        directory = following
        probe = root / "probe"
        shutil.copytree(directory, probe)
        with open_on(probe) as journal:
            checked = Run(seed)
            checked.acknowledged, checked.attempted, checked.steps = run.acknowledged, run.attempted, run.steps
            checked.check(journal)
            assert journal.frontier > seen or seen == 0, "what a reader has seen is gone"
            position = journal.append("after", b"after")
            assert position == len(checked.acknowledged) + 1
            assert bytes(journal.read(position)) == b"after"
        shutil.rmtree(probe)
    return operations


@pytest.mark.parametrize("mode", ["lost", "kept", "random"])
def test_the_power_is_cut_at_every_operation(tmp_path: Path, seed: int, mode: str) -> None:
    (tmp_path / "whole").mkdir()
    total = power_cut_run(f"{seed}", tmp_path / "whole", cut_at=None, mode=mode, lives=1)
    step = max(1, total // 25)
    for at in range(1 + seed % step, total + 1, step):
        root = tmp_path / f"{at}"
        root.mkdir()
        power_cut_run(f"{seed}", root, cut_at=at, mode=mode, lives=2)
        shutil.rmtree(root)


def failing_run(seed: str, root: Path) -> None:
    """Syncs fail and the disk fills up at random; after a failed sync the journal is opened again, then power is cut."""
    run = Run(seed)
    chance = random.Random(seed + "fail")
    directory = root / "0"
    directory.mkdir()
    rates = {"sync": chance.choice([0, 0.02, 0.1]), "write": chance.choice([0, 0.02, 0.1])}
    calm = False

    def fail(operation: str, name: str) -> int:
        if calm or not name.endswith((".log", ".index", ".sums", ".new")) or chance.random() >= rates.get(operation, 0):
            return 0
        return errno.EIO if operation == "sync" else errno.ENOSPC

    disk = SimulatedDisk(directory, run.chance, fail=fail)
    for _ in range(6):
        journal = None
        try:
            journal = open_on(directory, disk)
            run.check(journal)
            run.work(journal, 15)
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ENOSPC), error
            if journal is not None and journal.writer.failed:  # nothing is acknowledged until it is opened again
                with pytest.raises(OSError):
                    journal.append("more", b"more")
        finally:
            if journal is not None:
                journal.close()
    calm = True
    disk.cut(root / "1", "random")
    for place in (root / "1", directory):
        with open_on(place) as journal:
            checked = Run(seed)
            checked.acknowledged, checked.attempted, checked.steps = run.acknowledged, run.attempted, run.steps
            checked.check(journal)


def test_syncs_fail_and_the_disk_fills_up(tmp_path: Path, seed: int) -> None:
    for turn in range(12):
        root = tmp_path / str(turn)
        root.mkdir()
        failing_run(f"{seed}-{turn}", root)
        shutil.rmtree(root)


def test_the_simulated_disk_has_teeth(tmp_path: Path, seed: int) -> None:
    """A journal that does not sync loses what it acknowledged, and the check sees it."""
    run = Run(f"{seed}")
    directory = tmp_path / "0"
    directory.mkdir()
    disk = SimulatedDisk(directory, run.chance)
    with open_on(directory, disk, sync=False) as journal:
        run.work(journal, 10)
    disk.cut(tmp_path / "1", "lost")
    with pytest.raises((AssertionError, PenstockError)), open_on(tmp_path / "1") as journal:
        run.check(journal)


def main(seconds: float, first: int | None) -> int:
    """Fresh seeds until the time is over."""
    end = time.monotonic() + seconds
    logging.disable()
    seed = random.SystemRandom().randrange(2**32) if first is None else first
    print(f"first seed: {seed}")
    runs = failures = 0
    while time.monotonic() < end:
        root = Path(tempfile.mkdtemp(prefix="penstock-power-cut-"))
        try:
            if runs % 3 == 2:
                failing_run(f"{seed}", root)
            else:
                cut = random.Random(seed).randrange(1, 250)
                power_cut_run(f"{seed}", root, cut_at=cut, mode=("random", "kept")[runs % 2])
        except BaseException as error:
            failures += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"seed {seed} kind {runs % 3}: line {where.lineno}: {type(error).__name__}: {str(error)[:300]}")
            if isinstance(error, KeyboardInterrupt) or first is not None:
                raise
        finally:
            shutil.rmtree(root, ignore_errors=True)
        seed += 1
        runs += 1
    print(f"{runs} runs, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
