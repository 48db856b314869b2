"""A streaming query killed with SIGKILL, driver, JVM and workers: started again it loses nothing and writes nothing twice."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

pytest.importorskip("pyspark")

from penstock.journal import Journal

DRIVER = Path(__file__).with_name("spark_driver.py")
pytestmark = [pytest.mark.spark, pytest.mark.torture, pytest.mark.timeout(1800)]


def start(tmp_path, how):
    arguments = [str(tmp_path / "source"), str(tmp_path / "target"), str(tmp_path / "checkpoint"), how]
    return subprocess.Popen([sys.executable, str(DRIVER), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def kill_all(process):
    """The driver, its JVM and every Python worker at once, as a power cut would."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        psutil.wait_procs([member for member in family if isinstance(member, psutil.Process)], timeout=60)
    process.wait(60)
    process.stdout.close()


def write_on(path, stop):
    """A writer that never rests, until told."""
    number = 0
    with Journal(path, segment_bytes=1 << 18) as journal:
        while not stop.is_set() or number < 6000:
            journal.append_many(f"topic{number % 3}", [f"{number + step}".encode().ljust(60, b".") for step in range(40)])
            number += 40
            stop.wait(0.005 if number < 12_000 else 0.5)


def everything(path):
    found, position = [], 1
    with Journal(path, mode="read") as journal:
        while position < journal.frontier:
            batch = journal.read_many(position, 100_000)
            found += [(message.channel, bytes(message)) for message in batch]
            position = batch[len(batch) - 1].position + 1
    return found


def test_killed_again_and_again(tmp_path, kills, seed):
    source = random.Random(seed)
    Journal(tmp_path / "source", segment_bytes=1 << 18).close()
    stop = threading.Event()
    writer = threading.Thread(target=write_on, args=(tmp_path / "source", stop))
    writer.start()
    try:
        for _ in range(3 if kills is None else kills):
            process = start(tmp_path, "follow")
            wanted = source.randint(1, 6)
            for line in process.stdout:
                wanted -= line.startswith("batch")
                if wanted <= 0:
                    break
            threading.Event().wait(source.uniform(0, 0.5))  # anywhere within a batch
            assert process.poll() is None, "the query ended before it was killed"
            kill_all(process)
    finally:
        stop.set()
        writer.join()
    process = start(tmp_path, "finish")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and output.strip().endswith("done"), output
    expected, got = everything(tmp_path / "source"), everything(tmp_path / "target")
    assert len(got) == len(set(got)), f"{len(got) - len(set(got))} messages were written twice"
    assert set(got) == set(expected), f"{len(set(expected) - set(got))} messages were lost"
    for topic in ("topic0", "topic1", "topic2"):
        assert len([row for row in got if row[0] == topic]) == len([row for row in expected if row[0] == topic])
    shutil.rmtree(tmp_path / "target.staging", ignore_errors=True)
