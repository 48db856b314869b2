"""Ctrl-C, SIGTERM and SIGHUP in the midst of the commands that go on until they are told to end (but `pipeline --every`, which needs
a JVM): no trace, the right code, nothing left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

import penstock
from penstock._core import counters_read
from penstock.journal import Journal
from penstock.recording.story import read_story

from .command import HERE, environment

DONE, INTERRUPTED = 0, 130
#: These read their files again on SIGHUP.
RELOAD = ("broker", "run")

#: Command line, exit code after Ctrl-C, and what shows that it is in the midst of its work: ``handle`` (it has opened
#: one), ``line`` (it has printed one) or ``told`` (it has printed one to stderr; a handle may be there before it runs).
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
    "run": (["run", "{folder}/gateway.json"], DONE, "told"),
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
    outputs = {name: process.stderr if COMMANDS[name][2] == "told" else process.stdout for name, process in started.items()}
    for output in outputs.values():
        assert output is not None
        os.set_blocking(output.fileno(), False)
    while waiting:
        publisher.publish(b"tick")
        pids = {block["pid"] for block in counters_read()}
        for name in list(waiting):
            process = started[name]
            assert process.poll() is None, (name, process.communicate())
            if process.pid in pids if COMMANDS[name][2] == "handle" else _line_of(outputs[name]):
                waiting.discard(name)
        assert time.monotonic() < deadline, f"not in the midst of their work: {waiting}"
        time.sleep(0.05)


def _line_of(output: IO[str] | None) -> bool:
    assert output is not None
    try:
        return bool(os.read(output.fileno(), 1 << 16))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["ctrl-c", "sigterm", "sighup"])
def test_every_long_command_ends_cleanly(running: dict[str, subprocess.Popen[str]], number: signal.Signals) -> None:
    ended = {name: process for name, process in running.items() if number != signal.SIGHUP or name not in RELOAD}
    for process in ended.values():
        process.send_signal(number)
    wrong = {}
    for name, process in ended.items():
        out, err = process.communicate(timeout=60)
        code = COMMANDS[name][1] and 128 + number  # what ends well by the one ends well by the others
        if process.returncode != code or "Traceback" in err + out or "Error" in err:
            wrong[name] = (process.returncode, err)
    assert not wrong
    mine = {process.pid for process in ended.values()}
    assert not [block for block in counters_read() if block["pid"] in mine]


def test_record_whose_terminal_is_closed_writes_its_end(tmp_path: Path) -> None:
    live = f"shm:/test-hangup-{uuid.uuid4().hex[:8]}"
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with penstock.publisher(live, slots=64, slot_size=64) as publisher:
        process = subprocess.Popen(
            [*HERE, "record", live, "-o", str(tmp_path / "run")], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment(TERM="xterm"), start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        try:
            os.close(theirs)
            shown, deadline = b"", time.monotonic() + 30
            while b"recording: 1" not in shown:
                assert time.monotonic() < deadline, shown
                publisher.publish(b"tick")
                if select.select([ours], [], [], 0.05)[0]:
                    shown += os.read(ours, 1 << 16)
            os.close(ours)  # the kernel sends SIGHUP, and writing to the terminal fails from now on
            assert process.wait(60) == DONE
        finally:
            process.kill()
            process.wait()
    assert read_story(tmp_path / "run").missing() == []


def test_nohup_is_left_alone(tmp_path: Path) -> None:
    live = f"shm:/test-nohup-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(live, slots=64, slot_size=64) as publisher:
        words = ["nohup", *HERE, "sub", live, "--count", "2"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
            try:
                assert publisher.wait_ready(1, 60)
                publisher.publish(b"one")
                assert process.stdout is not None
                assert process.stdout.readline() == b"one\n"
                process.send_signal(signal.SIGHUP)
                publisher.publish(b"two")
                assert process.stdout.readline() == b"two\n"
                assert process.wait(60) == DONE
            finally:
                process.kill()


def test_ctrl_c_inside_text_that_is_run_ends_with_the_code_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(
        "from penstock.cli.exits import ending\n"
        "with ending():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        raise SystemExit(7)\n"
    )
    ended = subprocess.run([HERE[0], "-m", "stopped"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")
