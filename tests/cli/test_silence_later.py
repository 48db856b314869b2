"""``sub`` after its first message: why nothing comes any more, once a silence; publishers that match a pattern later."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import penstock
from penstock import _core
from penstock.cli.sources import Losses, Reader, Source
from penstock.cli.target import expanded
from penstock.errors import RefusedError, UnreachedError
from penstock.printable import printable
from penstock.types.fields import Values

from .command import run, start

Process = subprocess.Popen[str]
NO_END = ("-n", "0", "--rate", "50", "--wait", "0")


@contextlib.contextmanager
def running(*words: str) -> Iterator[Process]:
    """A command that is killed at the end of the block."""
    process = start(*words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def line(process: Process, error: bool = False) -> str:
    stream = process.stderr if error else process.stdout
    assert stream is not None
    return stream.readline()


def told(process: Process, words: str) -> str:
    """The first line on standard error with these words; on a slow machine one about an earlier silence may precede."""
    found = line(process, error=True)
    while words not in found:
        assert found, f"it ended without a line on {words!r}"
        found = line(process, error=True)
    return found


def rest_of_errors(process: Process) -> str:
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[1]


def killed(publisher: Process) -> str:
    publisher.kill()
    publisher.communicate(timeout=60)
    return "nobody publishes"


def stopped(publisher: Process) -> str:
    publisher.send_signal(signal.SIGSTOP)
    return f"process {publisher.pid} is stopped (kill -CONT {publisher.pid})"


def ended(publisher: Process) -> str:
    publisher.send_signal(signal.SIGINT)
    publisher.communicate(timeout=60)
    return "nobody publishes"


@pytest.mark.parametrize("end", [killed, stopped, ended])
def test_shm_says_once_why_nothing_comes_any_more(end: Callable[[Process], str]) -> None:
    name = f"shm:/later-{uuid.uuid4().hex[:8]}"
    with running("pub", name, "x", *NO_END) as publisher, running("sub", name, "--wait") as listening:
        assert line(listening) == "x\n"
        said = end(publisher)
        assert told(listening, "nothing comes").startswith(f"penstock: {name}: nothing comes: {said}")
        assert rest_of_errors(listening) == ""


def test_each_silence_is_told() -> None:
    name = f"shm:/later-{uuid.uuid4().hex[:8]}"
    with running("sub", name) as listening:
        for body in ("first", "second"):
            with running("pub", name, body, *NO_END):
                while line(listening) != f"{body}\n":
                    pass
            told(listening, "nothing comes: nobody publishes")


@pytest.mark.parametrize("end", [killed, stopped])
def test_tcp_says_why_nothing_comes_any_more(end: Callable[[Process], str]) -> None:
    address = f"tcp://127.0.0.1:{port()}"
    with running("pub", address, "x", *NO_END) as publisher, running("sub", address, "--wait") as listening:
        assert line(listening) == "x\n"
        said = end(publisher)
        found = told(listening, "nothing comes")
        assert found.startswith(f"penstock: {address}: nothing comes: ")
        assert (said if end is stopped else "refused") in found


def test_broker_says_why_nothing_comes_any_more(tmp_path: Path) -> None:
    number = port()
    at = f"127.0.0.1:{number}"
    with running("broker", str(tmp_path / "j"), str(number)) as broker:
        assert at in line(broker)
        with running("sub", f"broker://{at}/t") as listening, running("pub", f"broker://{at}/t", "x", *NO_END):
            assert line(listening) == "x\n"
            broker.kill()
            broker.communicate(timeout=60)
            assert f"broker://{at}/t: nothing comes: no connection" in told(listening, "nothing comes")


def test_a_broker_that_goes_before_the_first_message_is_told(tmp_path: Path) -> None:
    """It was said before that nothing came yet, which is another silence."""
    number = port()
    at = f"127.0.0.1:{number}"
    with running("broker", str(tmp_path / "j"), str(number)) as broker:
        assert at in line(broker)
        with running("sub", f"broker://{at}/t?queue=q") as listening:
            told(listening, "nothing came yet")
            broker.kill()
            broker.communicate(timeout=60)
            assert f"broker://{at}/t?queue=q: nothing comes: no connection" in told(listening, "nothing comes")
            with running("broker", str(tmp_path / "j"), str(number)) as again:
                assert at in line(again)
                assert run("pub", f"broker://{at}/t", "x").returncode == 0
                assert line(listening) == "x\n"


def test_a_reader_tries_on_where_its_broker_was_not_reached(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    class Unreached:
        ledger = penstock.Ledger(0, 0)
        answers: ClassVar[list[object]] = [UnreachedError("no connection"), [penstock.Message(b"x")]]

        def read_many(self, most: int, timeout: float) -> object:
            found = self.answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    handle: Any = Unreached()
    source = Source("a", "a", handle, Values(handle), Losses(handle, False), b"", 0)
    assert Reader([source], lambda message, _: bytes(message), None, "").run(1, None, False)
    assert capfdbinary.readouterr().out == b"x"


def test_a_slow_publisher_is_no_silence() -> None:
    name = f"shm:/slow-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        publisher.publish(b"x")
        done = run("sub", name, "--timeout", "2.5")
        assert done.stdout == "x\n"
        assert len(done.stderr.splitlines()) == 1 and "nothing came for 2.5 s" in done.stderr


def test_one_of_several_sources_that_ends_is_named() -> None:
    stem = f"shm:/several-{uuid.uuid4().hex[:8]}"
    with running("pub", f"{stem}/a", "a", *NO_END), running("sub", f"{stem}/a", f"{stem}/b") as listening:
        with running("pub", f"{stem}/b", "b", *NO_END):
            while line(listening) != f"{stem}/b: b\n":
                pass
        told(listening, f"{stem}/b: nothing comes: nobody publishes")


def test_a_publisher_that_matches_a_pattern_later_joins() -> None:
    stem = f"shm:/cam-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"{stem}/front") as front, running("sub", f"{stem}/*", "-n", "2") as listening:
        front.publish(b"one")
        assert line(listening) == f"{stem}/front: one\n"
        with penstock.publisher(f"{stem}/late") as late:
            late.publish(b"two")
            assert line(listening) == f"{stem}/late: two\n"
            assert listening.wait(60) == 0


def test_wait_waits_for_the_first_that_matches_a_pattern() -> None:
    stem = f"shm:/cam-{uuid.uuid4().hex[:8]}"
    with running("sub", f"{stem}/*", "--wait", "-n", "1") as listening:
        told(listening, f"nobody on this machine publishes to anything like {stem}/*; waiting")
        with penstock.publisher(f"{stem}/front") as front:
            front.publish(b"one")
            assert line(listening) == f"{stem}/front: one\n"


def test_a_pattern_for_nothing_is_told_and_wait_waits_for_it() -> None:
    stem = f"shm:/cam-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"{stem}/front") as front:
        patterns = [f"{stem}/f*", f"{stem}/r*"]
        with pytest.raises(RefusedError, match=r"anything like .*/r\*; start the publisher, or give --wait to keep trying"):
            expanded(patterns, False)
        with pytest.raises(RefusedError, match=r"anything like .*/r\*$"):
            expanded(patterns)  # a command that has no --wait
        with running("sub", *patterns, "--wait", "-n", "2") as listening:
            told(listening, f"nobody on this machine publishes to anything like {stem}/r*; waiting")
            front.publish(b"one")
            assert line(listening) == f"{stem}/front: one\n"
            with penstock.publisher(f"{stem}/rear") as rear:
                rear.publish(b"two")
                assert line(listening) == f"{stem}/rear: two\n"
                assert listening.wait(60) == 0


def test_what_comes_later_is_no_part_of_what_was_there(tmp_path: Path) -> None:
    stem = f"shm:/cam-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"{stem}/front") as front:
        front.publish(b"one")
        done = run("sub", f"{stem}/*", "-e", "--wait")
        assert (done.returncode, done.stdout) == (0, f"{stem}/front: one\n")


def stored(folder: Path) -> dict[str, int]:
    """How many messages a finished recording has of each topic."""
    from penstock.journal.commands import info

    return {topic.name: topic.messages for topic in info(folder).topics if topic.name != "_recording"}


def recorded(recording: Process, folder: Path, topic: str) -> None:
    """Waits until a running recording has a message of a topic."""
    from penstock.journal import Journal

    while True:
        assert recording.poll() is None
        with contextlib.suppress(penstock.PenstockError, OSError), Journal(folder, mode="read") as journal:
            if topic in journal.topics:
                return
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["pattern", "all"])
def test_a_recording_takes_what_fits_later_and_waits_for_the_first(what: str, tmp_path: Path) -> None:
    stem = uuid.uuid4().hex[:8]
    words = ["--all"] if what == "all" else [f"shm:/{stem}/*"]
    folder = tmp_path / "run"
    with running("record", *words, "-o", str(folder), "--wait") as recording:
        if what == "pattern":  # with --all another test may publish
            assert f"anything like shm:/{stem}/*; waiting" in line(recording, error=True)
        with penstock.publisher(f"shm:/{stem}/first", latest=True) as first:
            first.publish(b"1")
            recorded(recording, folder, f"{stem}.first")
            with penstock.publisher(f"shm:/{stem}/late", latest=True) as late:
                late.publish(b"2")
                recorded(recording, folder, f"{stem}.late")
        recording.send_signal(signal.SIGINT)
        assert recording.wait(60) == 0
    found = stored(folder)
    assert (found[f"{stem}.first"], found[f"{stem}.late"]) == (1, 1)
    from penstock.recording.story import read_story

    assert read_story(folder).addresses[f"{stem}.late"] == f"shm:/{stem}/late"


def test_two_addresses_of_one_topic_are_recorded_apart(tmp_path: Path) -> None:
    stem = f"shm:/{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"{stem}/a/b") as one, penstock.publisher(f"{stem}/a.b") as two:
        one.publish(b"1")
        two.publish(b"2")
        done = run("record", f"{stem}/*", "-o", str(tmp_path / "run"), "-n", "2")
    topic = f"{stem[5:]}.a.b"
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "run") == {topic: 1, f"{topic}.2": 1}
    assert f"{stem}/a/b is recorded as {topic}.2" in done.stderr
    assert run("record", f"{stem}/x", f"{stem}/y", "-o", str(tmp_path / "no"), "--as", "t", "--as", "t").returncode == 2


def test_a_found_address_that_cannot_be_recorded_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    stem, folder = uuid.uuid4().hex[:8], tmp_path / "run"
    bad = [f"shm:/{stem}/\u202e{n}" for n in (1, 2)]
    with penstock.publisher(f"shm:/{stem}/a", latest=True) as one, penstock.publisher(bad[0]):
        one.publish(b"1")
        with running("record", f"shm:/{stem}/*", "-o", str(folder), "--json") as recording:
            recorded(recording, folder, f"{stem}.a")
            with penstock.publisher(bad[1]), penstock.publisher(f"shm:/{stem}/b", latest=True) as late:
                late.publish(b"2")
                recorded(recording, folder, f"{stem}.b")
                told(recording, f"{printable(bad[1])}: ")
            recording.send_signal(signal.SIGINT)
            out, _ = recording.communicate(timeout=60)
        assert recording.returncode == 1
        refused = run("record", f"shm:/{stem}/a", bad[0], "-o", str(tmp_path / "no"))
    assert set(json.loads(out)["errors"]) == set(bad)
    assert stored(folder) == {f"{stem}.a": 1, f"{stem}.b": 1}
    assert refused.returncode == 2 and not (tmp_path / "no").exists()


def test_a_found_address_that_cannot_be_opened_is_told_and_the_others_are_recorded(tmp_path: Path) -> None:
    stem = uuid.uuid4().hex[:8]
    bad = f"shm:/{stem}/bad"  # a file that is no channel, as one that this user may not open
    file = Path(_core.counters_directory(), f"%2F{stem}%2Fbad.channel")
    file.write_bytes(bytes(8192))
    counters = _core.Counters("shm", "publisher", bad.removeprefix("shm:"))
    try:
        with penstock.publisher(f"shm:/{stem}/a", latest=True) as one:
            one.publish(b"1")
            done = run("record", f"shm:/{stem}/*", "-o", str(tmp_path / "run"), "-n", "1")
            read = run("sub", f"shm:/{stem}/*", "-n", "1")
        assert done.returncode == 1 and f"{bad}: " in done.stderr, done.stderr
        assert stored(tmp_path / "run") == {f"{stem}.a": 1}
        assert (read.returncode, read.stdout) == (0, f"shm:/{stem}/a: 1\n") and f"{bad}: not read: " in read.stderr
        for words in ([f"shm:/{stem}/a", bad], [f"{bad}*"]):
            refused = run("record", *words, "-o", str(tmp_path / "no"))
            assert refused.returncode == 1 and not (tmp_path / "no").exists(), "written by hand, or nothing else is there"
    finally:
        counters.close()
        file.unlink()


def test_nothing_but_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    stem = uuid.uuid4().hex[:8]
    with penstock.publisher(f"shm:/{stem}/\u202ex"):
        done = run("record", f"shm:/{stem}/*", "-o", str(tmp_path / "run"))
    assert done.returncode == 2 and "topic" in done.stderr and not (tmp_path / "run").exists()


def test_a_recording_says_when_a_publisher_is_gone(tmp_path: Path) -> None:
    name = f"shm:/{uuid.uuid4().hex[:8]}"
    words = ("record", name, "-o", str(tmp_path / "run"))
    with running("pub", name, "x", *NO_END) as publisher, running(*words) as recording:
        recorded(recording, tmp_path / "run", name[5:])
        said = killed(publisher)
        assert f"{name}: nothing comes: {said}" in told(recording, "nothing comes")
