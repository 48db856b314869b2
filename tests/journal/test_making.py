"""A subscriber and a publisher that both come first: neither is refused, whoever makes the journal."""

from __future__ import annotations

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
