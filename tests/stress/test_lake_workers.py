"""Spark's Python workers killed while they archive: every row once, for every reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.spark.conftest import spark  # noqa: F401
from tests.spark.journals import make
from tests.spark.test_lake import read_by_others

from penstock.spark import lake


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_workers_that_are_killed_change_no_row(spark, tmp_path):  # noqa: F811
    """Spark's Python workers die in the midst of a round: tasks are run again, or the round fails and is done again."""
    made = make(tmp_path / "j", 60_000, segment_bytes=1 << 20, size=200)
    done = None
    killed = 0
    while done is None:
        archiver = subprocess.Popen(
            [sys.executable, "-m", "penstock", "pipeline", "archive", "--from", str(tmp_path / "j"), "--to",
             str(tmp_path / "lake"), "--master", "local[2,4]", "--set", "most_messages=20000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while archiver.poll() is None:
            for child in psutil.Process(archiver.pid).children(recursive=True):
                with_name = child.name().startswith("python") if child.is_running() else False
                if with_name and killed < 5 and list((tmp_path / "lake").glob("date=*/*.parquet")):
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.02)
        if archiver.returncode == 0:
            done = True
    assert killed
    for reader, positions in {
        "spark": sorted(row.position for row in lake.table(spark, tmp_path / "lake").select("position").collect()),
        **read_by_others(tmp_path / "lake"),
    }.items():
        assert positions == list(range(1, len(made) + 1)), reader
