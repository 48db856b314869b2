"""Ctrl-C and SIGTERM in the midst of the commands that go on until they are told to end (but `pipeline --every`, which needs
a JVM): no trace, the right code, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import penstock
from penstock._core import counters_read
from penstock.journal import Journal

from .command import HERE, environment

DONE, INTERRUPTED, TERMINATED = 0, 130, 143

#: Command line, exit code after Ctrl-C, and what shows that it is in the midst of its work: ``handle`` (it has opened
#: one) or ``line`` (it has printed one).
COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "sub": (["sub", "{live}"], INTERRUPTED, "handle"),
    "pub": (["pub", "{log}", "x", "--count", "0", "--rate", "50"], DONE, "handle"),
    "hz": (["hz", "{live}", "--every", "0.1"], INTERRUPTED, "line"),
    "bw": (["bw", "{live}", "--every", "0.1"], INTERRUPTED, "line"),
    "delay": (["delay", "{live}", "--every", "0.1"], INTERRUPTED, "line"),
    "top": (["top", "--every", "0.2"], INTERRUPTED, "line"),
    "record": (["record", "{live}", "-o", "{folder}/record"], DONE, "handle"),
    "play": (["play", "{folder}/kept", "--loop", "--map", "t=journal:{folder}/again#t"], DONE, "handle"),
    "bridge": (["bridge", "{live}", "journal:{folder}/bridge#t"], DONE, "handle"),
    "serve": (["serve", "shm:{served}", "cat"], DONE, "handle"),
    "broker": (["broker", "{folder}/broker", "0"], DONE, "line"),
    "run": (["run", "{folder}/gateway.json"], DONE, "handle"),
    "monitor": (["monitor", "--port", "0"], DONE, "line"),
    "journal cat": (["journal", "cat", "{folder}/kept", "--follow"], INTERRUPTED, "line"),
}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of them at once, over one live channel that this process feeds."""
    live = f"shm:/test-interrupt-{uuid.uuid4().hex[:8]}"
    names = {"served": live.removeprefix("shm:") + "-served", "live": live, "log": f"journal:{tmp_path}/log#t", "folder": str(tmp_path)}
    with Journal(tmp_path / "kept") as journal:
        journal.append("t", b"x")
        journal.append("t", b"y")
    loader = {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}
    (tmp_path / "gateway.json").write_text(json.dumps({"modules": [{"name": "tick", "loader": loader}], "links": []}))
    with ExitStack() as stack:
        publisher = stack.enter_context(penstock.publisher(live, slots=64, slot_size=64))
        started = {}
        for name, (words, _, _) in COMMANDS.items():
            # each in a session of its own, as a shell with job control does: Ctrl-C there reaches it alone
            started[name] = subprocess.Popen(
                [*HERE, *(word.format(**names) for word in words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=environment(), start_new_session=True,
            )  # fmt: skip
            stack.callback(_end, started[name])
        _wait_until_busy(started, publisher)
        yield started


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _wait_until_busy(started: dict[str, subprocess.Popen[str]], publisher: penstock.Publisher) -> None:
    waiting = set(started)
    deadline = time.monotonic() + 100
    for name, process in started.items():
        if COMMANDS[name][2] == "line":
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
    while waiting:
        publisher.publish(b"tick")
        pids = {block["pid"] for block in counters_read()}
        for name in list(waiting):
            process = started[name]
            assert process.poll() is None, (name, process.communicate())
            if process.pid in pids if COMMANDS[name][2] == "handle" else _line_of(process):
                waiting.discard(name)
        assert time.monotonic() < deadline, f"not in the midst of their work: {waiting}"
        time.sleep(0.05)


def _line_of(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    try:
        return bool(os.read(process.stdout.fileno(), 1 << 16))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_every_long_command_ends_cleanly(running: dict[str, subprocess.Popen[str]], number: signal.Signals) -> None:
    for process in running.values():
        process.send_signal(number)
    wrong = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=60)
        code = COMMANDS[name][1]
        if code != DONE and number == signal.SIGTERM:  # what ends well by the one ends well by the other
            code = TERMINATED
        if process.returncode != code or "Traceback" in err + out or "Error" in err:
            wrong[name] = (process.returncode, err)
    assert not wrong
    mine = {process.pid for process in running.values()}
    assert not [block for block in counters_read() if block["pid"] in mine]
