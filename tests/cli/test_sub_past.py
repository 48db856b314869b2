"""``penstock sub --start``: the past of a publisher that goes on publishing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import penstock
from tests.cli.command import run
from tests.conformance.reaches import unique


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_end_of_the_past_is_found_while_more_is_published(scheme: str, tmp_path: Path) -> None:
    where = f"shm:/{unique('past')}" if scheme == "shm" else "tcp://127.0.0.1:0"
    with penstock.publisher(where, durable=str(tmp_path / "kept")) as publisher:
        if scheme == "tcp":
            where = f"tcp://127.0.0.1:{publisher.port}"  # type: ignore[attr-defined]
        publisher.publish_many([b"%d" % number for number in range(500)])
        publisher.flush()
        ending = threading.Event()

        def go_on() -> None:
            number = 500
            while not ending.is_set():
                publisher.publish(b"%d" % number)
                number += 1
                time.sleep(0.002)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            done = run("sub", where, "--start", "first", "-e")
        finally:
            ending.set()
            thread.join()
    found = [int(line) for line in done.stdout.split()]
    assert done.returncode == 0, done.stderr
    assert found == list(range(len(found))) and len(found) >= 500


@pytest.mark.parametrize("option", ["--from", "--since"])
def test_options_of_reaches_that_keep_messages_point_to_start(option: str) -> None:
    done = run("sub", "shm:/past", option, "5")
    assert done.returncode == 2 and "--start" in done.stderr
