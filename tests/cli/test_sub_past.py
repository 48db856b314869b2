"""``penstock sub --start``: the past of a publisher that goes on publishing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock
from tests.cli.command import run, start
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


@pytest.mark.parametrize("words", [["-e"], ["--from", "end", "-e"]])
def test_the_end_of_what_is_there_is_found_while_more_is_published(words: list[str]) -> None:
    where = f"shm:/{unique('live')}"
    with penstock.publisher(where, slots=16) as publisher:
        ending = threading.Event()

        def go_on() -> None:
            number = 0
            while not ending.is_set():
                publisher.publish(b"%d" % number)
                number += 1
                time.sleep(0.002)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            done = run("sub", where, *words, timeout=120)
        finally:
            ending.set()
            thread.join()
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) <= (0 if "end" in words else 16)


PUBLISH = """
import sys, time, penstock
with penstock.publisher("tcp://127.0.0.1:0", durable=sys.argv[1]) as publisher:
    publisher.publish_many([b"%05d " % n + b"x" * 10_000 for n in range(6000)])
    publisher.flush()
    print(publisher.port, flush=True)
    time.sleep(600)
"""


def test_a_publisher_that_goes_in_the_midst_of_the_past_is_no_end(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PUBLISH, str(tmp_path / "kept")], stdout=subprocess.PIPE) as publisher:
        assert publisher.stdout is not None
        port = int(publisher.stdout.readline())
        command = [sys.executable, "-m", "penstock", "sub", f"tcp://127.0.0.1:{port}", "--start", "first", "-e"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sub:
            assert sub.stdout is not None and sub.stderr is not None
            lines = [sub.stdout.readline() for _ in range(100)]
            publisher.kill()  # most of it was not sent: nobody reads on
            lines += sub.stdout.readlines()
            told = sub.stderr.read().decode()
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
    assert 100 < len(lines) < 6000
    assert sub.returncode == 1
    assert f"its publisher is gone after {len(lines)} of the 6000 messages that were there" in told


def test_a_publisher_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    where = f"shm:/{unique('later')}"
    with start("sub", where, "--start", "first", "--wait", "--count", "2") as sub:
        time.sleep(0.5)
        assert sub.poll() is None, "it waits"
        with penstock.publisher(where, durable=tmp_path / "kept") as publisher:
            publisher.publish_many([b"1", b"2"])
            out, errors = sub.communicate(timeout=60)
    assert (sub.returncode, out) == (0, "1\n2\n"), errors


def ahead_ns() -> int:
    """The clock of a publisher that is wrong by an hour."""
    return time.time_ns() + 3600 * 10**9


@pytest.mark.parametrize("words", ["--from start", "--last 3", "--since 20m"])
def test_the_end_of_a_journal_is_a_position_and_no_time_of_its_publisher(words: str, tmp_path: Path) -> None:
    where = f"journal:{tmp_path}/kept#a"
    with penstock.publisher(where) as publisher:
        publisher.publish(b"ahead", timestamp_ns=ahead_ns())
        publisher.publish(b"now")
    done = run("sub", where, *words.split(), "-e")
    assert (done.returncode, done.stdout) == (0, "ahead\nnow\n"), done.stderr


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_end_of_a_past_is_no_time_of_its_publisher(scheme: str, tmp_path: Path) -> None:
    where = f"shm:/{unique('ahead')}" if scheme == "shm" else "tcp://127.0.0.1:0"
    with penstock.publisher(where, durable=str(tmp_path / "kept")) as publisher:
        if scheme == "tcp":
            where = f"tcp://127.0.0.1:{publisher.port}"  # type: ignore[attr-defined]
        publisher.publish(b"ahead", timestamp_ns=ahead_ns())
        publisher.publish(b"now")
        publisher.flush()
        done = run("sub", where, "--start", "first", "-e")
    assert (done.returncode, done.stdout) == (0, "ahead\nnow\n"), done.stderr
