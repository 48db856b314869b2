"""``penstock foxglove`` as a user runs it."""

from __future__ import annotations

import json
import signal
import socket
import time
import uuid
from pathlib import Path

import pytest

import penstock
from penstock.foxglove.server import Server
from penstock.journal import Journal
from penstock.observe.snapshot import live
from penstock.recording.story import STORY
from tests.cli.command import run, start

from .viewer import Viewer


@pytest.fixture
def name() -> str:
    return f"fox-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(ended_by: signal.Signals) -> None:
    name = f"fox-{uuid.uuid4().hex[:8]}"
    command = start("foxglove", f"shm:/{name}", "--port", "0", "--json")
    try:
        assert command.stdout is not None and command.stderr is not None
        url = json.loads(command.stdout.readline())["url"]
        told = command.stderr.readline()
        assert told == f"penstock: shm:/{name}: nobody publishes there; waiting, and it is shown when somebody does\n"
        with Viewer(int(url.rpartition(":")[2])) as viewer, penstock.publisher(f"shm:/{name}", type=dict) as publisher:
            viewer.until(lambda: viewer.channels.get(f"/{name}", {}).get("schemaName") == "dict")
            viewer.watch(f"/{name}")
            viewer.until(lambda: publisher.publish({"a": 1}) and viewer.bodies(f"/{name}"))
            command.send_signal(ended_by)
            out, errors = command.communicate(timeout=60)
        assert (command.returncode, out, errors) == (0, "", "")
    finally:
        command.kill()
        command.communicate()


def test_it_says_nothing_where_somebody_publishes() -> None:
    name = f"fox-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"shm:/{name}"):
        done = run("foxglove", f"shm:/{name}", "--port", "0", "--seconds", "0.1")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_monitor_and_it_have_ports_of_their_own() -> None:
    from penstock.cli import foxglove, monitor

    assert foxglove.PORT != monitor.PORT


def test_a_recording_is_shown(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.append("a.b", b"{}")
    command = start("foxglove", str(tmp_path / "run"), "--port", "0")
    try:
        assert command.stdout is not None
        line = command.stdout.readline()
        port = int(line.partition("ws://127.0.0.1:")[2].split()[0])
        with Viewer(port) as viewer:
            viewer.watch("/a/b")
            viewer.until(lambda: viewer.bodies("/a/b") == [b"{}"])
    finally:
        command.kill()
        command.communicate()


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.append("a", b"{}")
    both = run("foxglove", str(tmp_path / "run"), "shm:/x")
    assert both.returncode == 2 and "shown alone" in both.stderr
    assert run("foxglove", "shm:/x", "--loop").returncode == 2
    assert run("foxglove", "bus:x").returncode == 2
    assert run("foxglove", str(tmp_path / "none")).returncode == 2


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("shm:/x?nonsense=1", "has no option 'nonsense'"),
        ("foo:/x", "begins with no known reach"),
        ("tcp://127.0.0.1", "not of the form tcp://HOST:PORT"),
        ("shm:", "names nothing"),
        ("", "an address has a scheme"),
    ],
)
def test_an_address_that_can_never_be_is_refused_before_anything_is_served(address: str, told: str) -> None:
    done = run("foxglove", address, "--port", "0", "--seconds", "0")
    assert (done.returncode, done.stdout) == (2, "") and told in done.stderr, done.stderr


def test_a_journal_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    done = run("foxglove", f"journal:{tmp_path / 'none'}#x", "--port", "0", "--seconds", "0.1")
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("foxglove", "shm:/x", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and "Address already in use" in done.stderr and "FoxgloveError" not in done.stderr


def test_a_recorder_that_did_not_end_properly_is_told(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.append(STORY, json.dumps({"event": "started", "addresses": {"shm:/x": "x"}}).encode())
        journal.append("x", b"{}")
    done = run("foxglove", str(tmp_path / "run"), "--port", "0", "--seconds", "0")
    assert done.returncode == 0 and "the recorder did not end properly" in done.stderr


def test_beyond_loopback_only_where_it_is_said_aloud() -> None:
    refused = run("foxglove", "shm:/x", "--host", "0.0.0.0", "--port", "0", "--seconds", "0")
    assert refused.returncode == 2 and "--insecure" in refused.stderr
    done = run("foxglove", "shm:/x", "--host", "0.0.0.0", "--port", "0", "--seconds", "0", "--insecure")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("foxglove", "--port", "0", "--seconds", "1"), ("schema",)])
def test_what_is_neither_a_folder_nor_an_address_is_refused_before_anything_is_opened(words: tuple[str, ...]) -> None:
    done = run(words[0], "nothere", *words[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "penstock: there is no folder 'nothere', and an address has a scheme, as in shm:/nothere\n"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "broker://127.0.0.1:{}/queue"])
def test_where_nobody_answers_is_told_and_the_others_are_shown(address: str, name: str) -> None:
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        where = address.format(taken.getsockname()[1])
        command = start("foxglove", where, f"shm:/{name}", "--port", "0", "--json")
        try:
            assert command.stdout is not None and command.stderr is not None
            url = json.loads(command.stdout.readline())["url"]
            with penstock.publisher(f"shm:/{name}", type=dict), Viewer(int(url.rpartition(":")[2])) as viewer:
                told = f"penstock: {where}: nobody listens at {where.split('/')[2]}; waiting, and it is shown when"
                assert any(line.startswith(told) for line in iter(command.stderr.readline, ""))
                viewer.until(lambda: viewer.channels.get(f"/{name}", {}).get("schemaName") == "dict")
        finally:
            command.kill()
            command.communicate()


def test_what_is_recorded_is_shown_once(name: str, tmp_path: Path) -> None:
    with penstock.publisher(f"shm:/{name}", type=dict) as publisher, Server(port=0) as server:
        recorder = start("record", f"shm:/{name}", "-o", str(tmp_path / "run"))
        journals = f"journal:{tmp_path / 'run'}"
        try:
            deadline = time.monotonic() + 60
            while not any(block.address.startswith(f"{journals}#") for block in live()):
                assert time.monotonic() < deadline
                publisher.publish({"x": 1})
                time.sleep(0.01)
            server.run(seconds=0.1)
            assert [source for source in server.board.topics if name in source or str(tmp_path) in source] == [
                f"shm:/{name}"
            ]
        finally:
            recorder.terminate()
            recorder.communicate()
