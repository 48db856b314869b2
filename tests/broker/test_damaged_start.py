"""A broker whose last segment is not whole: what nobody was told of is cut off, what was confirmed is never left out
without a word, and the error names the one command that mends it."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import Client, Server
from penstock.errors import CorruptionError
from tests.broker.conftest import LONG


def fill(server: Server) -> None:
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        for number in range(5):
            client.publish("t", b"%d" % number * 5000)
    server.close()


def log_of(directory: Path) -> Path:
    (found,) = directory.glob("*.log")
    return found


def overwrite(path: Path, offset: int, data: bytes = b"XXXX") -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def damage_message(directory: Path) -> None:
    log = log_of(directory)
    overwrite(log, log.read_bytes().find(b"2" * 3000) + 100)


def damage_last(directory: Path) -> None:
    log = log_of(directory)
    overwrite(log, log.read_bytes().find(b"4" * 3000) + 100)


def cut_last(directory: Path) -> None:
    log = log_of(directory)
    os.truncate(log, log.read_bytes().find(b"4" * 3000) + 100)


def damage_queue(directory: Path) -> None:
    log = log_of(directory)
    overwrite(log, log.read_bytes().find(b'"topics"'))


def damage_header(directory: Path) -> None:
    overwrite(log_of(directory), 10)


def counts(server: Server) -> list[tuple[str, Any]]:
    with Client(port=server.port) as client:
        return [(entry["queue"], entry["depth"]) for entry in client.queues()]


def test_what_lies_behind_the_last_commit_is_cut_off_and_told(
    serve: Callable[..., Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(serve())
    log = log_of(tmp_path / "broker")
    end = len(log.read_bytes().rstrip(b"\0"))
    overwrite(log, (end + 7) // 8 * 8 + 64, b"half a batch" * 30)
    with caplog.at_level(logging.WARNING, "penstock.journal"):
        assert counts(serve()) == [("q", 5)]
    assert "bytes that were never confirmed" in caplog.text


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (damage_message, [("q", 4)]),
        (damage_last, [("q", 4)]),
        (cut_last, [("q", 4)]),
        (damage_queue, []),
        (damage_header, [("q", 5)]),
    ],
)
def test_damage_in_what_was_confirmed_is_refused_until_it_is_mended(
    serve: Callable[..., Server], tmp_path: Path, harm: Callable[[Path], None], left: list[tuple[str, int]]
) -> None:
    fill(serve())
    harm(tmp_path / "broker")
    for _ in range(2):  # whoever starts it again finds the same
        with pytest.raises(CorruptionError, match="keeps all that is whole") as refused:
            Server(tmp_path / "broker", 0)
    command = re.search("penstock (journal repair .*) keeps all that is whole", str(refused.value))
    assert command is not None and str(refused.value).count("penstock journal") == 1
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *shlex.split(command[1])], capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0 and "damaged:" in done.stdout
    server = serve()
    assert counts(server) == left
    with Client(port=server.port) as client:
        assert client.publish("t", b"more") == 6
