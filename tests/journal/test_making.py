"""Making and ending: whoever comes first makes the journal; closing gives everything back; segments take what they hold."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock.journal import Journal

PROGRAM = """
import sys, penstock
with penstock.{kind}(sys.argv[1]) as handle:
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("first", ["publisher", "subscriber"])
def test_two_processes_at_once(tmp_path: Path, first: str) -> None:
    kinds = ["publisher", "subscriber"] if first == "publisher" else ["subscriber", "publisher"]
    for round_ in range(4):
        address = f"journal:{tmp_path / str(round_)}#t"
        children = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(kind=kind), address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for kind in kinds
        ]  # fmt: skip
        for child in children:
            out, err = child.communicate(timeout=60)
            assert (child.returncode, out) == (0, "up\n"), err


def test_threads_of_one_process(tmp_path: Path) -> None:
    for round_ in range(30):
        address = f"journal:{tmp_path / str(round_)}#t"
        failures: list[BaseException] = []

        def opened(kind: str, address: str = address, failures: list[BaseException] = failures) -> None:
            try:
                getattr(penstock, kind)(address).close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=opened, args=(kind,)) for kind in ("publisher", "subscriber", "subscriber")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


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
