"""One process that fills its disk repeatedly (``python -m penstock.torture.full DIRECTORY ROUNDS SEED WAY``).

``small``: the directory is on a small file system; a second file takes what room is left. ``quota``: no file may grow
beyond a limit (for machines where nothing can be mounted). What happened is printed as one line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.journal import Journal
from penstock.torture import record

SEGMENT_BYTES = 128 << 10
ROUNDS_A_JOURNAL = 20  # then a fresh journal, so that the small disk suffices for any number of rounds


class SmallDisk:
    """A second file leaves little room on the file system, or is removed."""

    def __init__(self, directory: Path) -> None:
        self.ballast = directory / "ballast"

    def fill(self, room_bytes: int) -> None:
        """Leave about ``room_bytes`` free."""
        state = os.statvfs(self.ballast.parent)
        size = max(0, state.f_bavail * state.f_frsize - room_bytes)
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while size > 0:
                    size -= file.write(bytes(min(size, 1 << 20)))
            except OSError as error:  # a segment being sealed took some of the room meanwhile: the disk is full anyway
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Make room again."""
        self.ballast.unlink(missing_ok=True)


class Quota:
    """A limit on the size of this process's files."""

    def __init__(self, _: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG

    def fill(self, room_bytes: int) -> None:
        """Limit files to less than the size of a segment."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes % SEGMENT_BYTES, resource.RLIM_INFINITY))

    def free(self) -> None:
        """Remove the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Rounds:
    """The counts of all rounds."""

    def __init__(self, directory: Path, seed: int, way: str) -> None:
        self.directory = directory
        self.chance = random.Random(seed)
        self.disk: SmallDisk | Quota = SmallDisk(directory) if way == "small" else Quota(directory)
        self.counts: dict[str, Any] = dict.fromkeys(
            ("confirmed", "refused", "unclear", "lost", "wrong", "stuck", "opened while full", "not opened"), 0
        )
        self.texts: list[str] = []

    def run(self, rounds: int) -> None:
        """Run all rounds, with a fresh journal every ``ROUNDS_A_JOURNAL``."""
        while rounds > 0:
            place = self.directory / "journal"
            self.one_journal(place, min(rounds, ROUNDS_A_JOURNAL))
            shutil.rmtree(place)
            rounds -= ROUNDS_A_JOURNAL

    def one_journal(self, place: Path, rounds: int) -> None:
        """Fill the disk, check, free it, go on; at the end check that everything confirmed is there, in order."""
        confirmed: list[int] = []
        sequence = 0
        journal = Journal(place, segment_bytes=SEGMENT_BYTES)
        for _ in range(rounds):
            self.disk.fill(self.chance.randrange(4096, 4 * SEGMENT_BYTES))
            sequence = self.until_refused(journal, confirmed, sequence)
            self.check(journal, confirmed)
            if self.chance.random() < 0.5:
                journal = self.reopen(journal, place, confirmed)
            else:
                self.disk.free()
            sequence += 1
            try:
                journal.append("torture", record.make(1, sequence))
                confirmed.append(sequence)
            except (OSError, PenstockError) as error:
                self.counts["stuck"] += 1
                self.texts.append(f"after there was room again: {error!r}")
                journal.close()
                journal = Journal(place, segment_bytes=SEGMENT_BYTES)
        journal.close()
        with Journal(place, mode="read") as found:
            self.check(found, confirmed)
            self.counts["wrong"] += len(found.verify()) if hasattr(found, "verify") else 0
        self.counts["confirmed"] += len(confirmed)

    def until_refused(self, journal: Journal, confirmed: list[int], sequence: int) -> int:
        """Append until an append fails, three times in a row; returns the last number used."""
        refused = 0
        for _ in range(100_000):
            sequence += 1
            try:
                journal.append("torture", record.make(1, sequence, 4096))
            except OSError as error:
                clear = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
                self.counts["refused" if clear else "unclear"] += 1
                self.texts.append("" if clear else repr(error))
                refused += 1
                if refused == 3:
                    break
            except PenstockError as error:
                self.counts["unclear"] += 1
                self.texts.append(repr(error))
                break
            else:
                confirmed.append(sequence)
        return sequence

    def reopen(self, journal: Journal, place: Path, confirmed: list[int]) -> Journal:
        """Close, reopen on the full disk (which may fail with a clear error), then reopen with room."""
        journal.close()
        try:
            with Journal(place, segment_bytes=SEGMENT_BYTES) as again:
                self.counts["opened while full"] += 1
                self.check(again, confirmed)
        except OSError:
            self.counts["not opened"] += 1
        self.disk.free()
        return Journal(place, segment_bytes=SEGMENT_BYTES)

    def check(self, journal: Journal, confirmed: list[int]) -> None:
        """Check that everything confirmed is there, once, in order, byte for byte, and nothing that was refused."""
        stored: list[int] = []
        position = 1
        while len(batch := journal.read_many(position, 4096)) > 0:
            for message in batch:
                found = record.look(bytes(message))
                self.counts["wrong"] += found is None
                stored.append(found[1] if found else 0)
            position = (batch[-1].position or 0) + 1
        if stored != confirmed:
            self.counts["lost"] += len(set(confirmed) - set(stored))
            self.counts["wrong"] += len(set(stored) - set(confirmed)) + (stored != sorted(set(stored)))


def main(directory: str, rounds: str, seed: str, way: str) -> None:
    """Run and print the counts."""
    made = Rounds(Path(directory), int(seed), way)
    made.run(int(rounds))
    texts = sorted({text for text in made.texts if text})[:5]
    print(json.dumps({**made.counts, "texts": texts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
