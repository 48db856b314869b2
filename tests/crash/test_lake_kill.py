"""The archive killed at every step, again and again, and read afterwards by readers that are not ours: every row once.

A driver is a process of its own that ends itself by SIGKILL at a named step of its work, in turn; beside it another one
archives the same journal, and a third compacts. No Spark: the steps are the same with it. ``--kills`` sets how many;
without it once at each step.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest

pytest.importorskip("deltalake")

from penstock.journal import Journal
from penstock.spark import lake
from tests.spark.journals import extend, make
from tests.spark.test_lake import as_made, read_by_others, rows_of

DRIVER = """
import os, signal, sys
from penstock.spark import lake
from penstock.spark.lake import delta, files

step, number, do, journal, directory = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
left = [number]

def dies(name):
    if name == step:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

delta.step = dies
if step == "in a task":
    real = files.write_file
    def write_file(*arguments):
        dies(step)
        return real(*arguments)
    files.write_file = write_file
if do == "archive":
    lake.archive(None, journal, directory, most_messages=150, compact_files=4)
else:
    lake.compact(None, directory, 2)
"""
STEPS = ("in a task", "files written", "before commit", "after commit", "after sync", "merged")


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_every_row_is_there_once_whatever_dies(tmp_path, kills, seed):
    dice = random.Random(seed)
    made = make(tmp_path / "j", 300)
    died = dict.fromkeys(STEPS, 0)
    wanted = kills or len(STEPS)
    while sum(died.values()) < wanted:
        with Journal(tmp_path / "j", sync=False) as journal:
            made += extend(journal, dice.randrange(1, 600))
        step = STEPS[sum(died.values()) % len(STEPS)]
        arguments = [str(tmp_path / "j"), str(tmp_path / "lake")]
        first = [sys.executable, "-c", DRIVER, step, str(dice.randrange(1, 3)), "archive", *arguments]
        others = [
            [sys.executable, "-c", DRIVER, "none", "1", "archive", *arguments],
            [sys.executable, "-c", DRIVER, dice.choice(STEPS), "1", "compact", *arguments],
        ]
        running = [subprocess.Popen(first)]
        if dice.random() < 0.3 and (tmp_path / "lake").exists():
            running += [subprocess.Popen(command) for command in others]
        codes = [process.wait() for process in running]
        died[step] += codes[0] == -signal.SIGKILL
        assert set(codes) <= {0, -signal.SIGKILL}, codes
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    for reader, positions in read_by_others(tmp_path / "lake").items():
        assert positions == list(range(1, len(made) + 1)), reader
    assert as_made(rows_of(tmp_path / "lake")) == made
    found = lake.verify(tmp_path / "lake", deep=True)
    assert found.problems == []
    print(died, f"{found.version} versions, {len(found.orphans)} leftovers")
