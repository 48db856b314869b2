"""Silence is explained, once and soon; what can never come is refused at once; habits of sub."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock

from .command import HERE, environment, run, start


def test_a_port_that_nobody_listens_at_fails_at_once() -> None:
    done = run("sub", "tcp://127.0.0.1:1")
    assert done.returncode == 1 and "refused" in done.stderr and "--wait" in done.stderr


@pytest.mark.parametrize("words", [("sub", "--timeout", "2"), ("delay", "--every", "0.5", "--timeout", "2"), ("record", "--seconds", "2")])
def test_a_secret_is_asked_with_and_not_printed(words: tuple[str, ...], tmp_path: Path) -> None:
    """Why nothing comes is asked as the address was opened: without its token the broker would refuse the question."""
    from penstock.broker import Server

    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "n"\ntoken = "hush"\npublish = [">"]\nsubscribe = [">"]\nstatistics = true\n')
    tokens.chmod(0o600)
    with Server(tmp_path / "d", 0, tokens=tokens).start() as server:
        where = ["-o", str(tmp_path / "r")] if words[0] == "record" else []
        done = run(words[0], f"broker://hush@127.0.0.1:{server.port}/t", *where, *words[1:])
        assert "nothing came" in done.stderr and "token" not in done.stderr and "hush" not in done.stderr, done.stderr


@pytest.mark.parametrize("what", ["calls", "another token"])
def test_a_refusal_is_told_without_the_advice_to_wait(what: str) -> None:
    """The publisher need not be started, and waiting does not help: something listens there, and said no."""
    opened: Any = penstock.server("tcp://127.0.0.1:0", bytes.upper) if what == "calls" else penstock.tcp.publisher("tcp://127.0.0.1:0", token="one")
    with opened as there:
        done = run("sub", there.address if what == "calls" else f"{there.address}?token=two")
    said = {"calls": "ask it with penstock.client", "another token": "the publisher refused: wrong token"}[what]
    assert done.returncode == 1 and done.stderr.endswith(f"{said}\n") and "--wait" not in done.stderr, done.stderr


def test_a_host_that_nobody_has_fails_at_once() -> None:
    done = run("sub", "tcp://no-such-host.invalid:99")
    assert done.returncode == 1 and "tcp://no-such-host.invalid:99" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["sub bus:x", "pub bus:x hello", "delay bus:x", "call bus:x hello", "serve bus:x -- cat", "record bus:x -o {}/r",
     "bridge bus:x shm:/y", "bridge shm:/y bus:x", "play {}/j --map *=bus:x"],
)  # fmt: skip
def test_a_bus_is_not_for_commands(words: str, tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path}/j#t") as kept:
        kept.publish(b"1")
    done = run(*words.format(tmp_path).split())
    assert done.returncode == 2 and "use shm:/x" in done.stderr, done.stderr
    assert "bus:" not in run(words.partition(" ")[0], "--help").stdout


def test_why_of_a_bus_advises_nothing_that_is_refused() -> None:
    done = run("why", "bus:x")
    assert done.returncode == 4 and "use shm:/x" in done.stdout and "penstock pub" not in done.stdout
    assert "nobody publishes" not in done.stdout


@pytest.fixture
def steady() -> Iterator[str]:
    """A channel with a message every few milliseconds, to the end of the test."""
    name = f"shm:/steady-{uuid.uuid4().hex[:8]}"
    over = threading.Event()
    with penstock.publisher(name) as publisher:

        def publish() -> None:
            while not over.wait(0.005):
                publisher.publish(b"short")

        thread = threading.Thread(target=publish)
        thread.start()
        yield name
        over.set()
        thread.join()


def test_a_filter_that_never_matches_a_steady_stream_is_named(steady: str) -> None:
    listening = start("sub", steady, "--filter", "size > 1000")
    assert listening.stderr is not None
    line = listening.stderr.readline()
    listening.send_signal(signal.SIGINT)
    listening.communicate(timeout=60)
    assert "none passes the filter 'size > 1000'" in line and "short" in line


def test_timeout_holds_for_what_the_filter_keeps_back(steady: str) -> None:
    done = run("sub", steady, "--filter", "size > 1000", "--timeout", "0.5")
    assert done.returncode == 3, done.stderr
    assert "nothing came for 0.5 s" in done.stderr and "none passes the filter 'size > 1000'" in done.stderr
    done = run("sub", steady, "--filter", "size < 1000", "--timeout", "30", "-n", "3")
    assert (done.returncode, done.stdout) == (0, "short\n" * 3)


def test_from_end_begins_with_what_is_new() -> None:
    name = f"shm:/end-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        publisher.publish(b"old")
        listening = start("sub", name, "--from", "end", "-n", "1")
        assert publisher.wait_ready(1, 60)
        publisher.publish(b"new")
        out, err = listening.communicate(timeout=60)
        assert out == "new\n", err
        assert run("sub", name, "-n", "1").stdout == "old\n"


def test_delay_is_of_what_arrives_and_not_of_what_is_kept() -> None:
    name = f"shm:/old-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        publisher.publish(b"old")
        looking = start("delay", name, "-n", "1", "--every", "0.2", "--json")
        assert publisher.wait_ready(1, 60)
        for number in range(3):
            publisher.publish(b"%d" % number)
        out, err = looking.communicate(timeout=60)
        assert json.loads(out)["messages"] == 3, err


def test_record_tells_an_address_that_nobody_answers_at(tmp_path: Path, steady: str) -> None:
    done = run("record", steady, "tcp://127.0.0.1:1", "-o", f"{tmp_path}/two", "-n", "3", "--json")
    assert done.returncode == 1 and "tcp://127.0.0.1:1: " in done.stderr and "refused" in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["messages"] == 3 and "tcp://127.0.0.1:1" in told["errors"]
    done = run("record", "tcp://127.0.0.1:1", "-o", f"{tmp_path}/one")
    assert done.returncode == 1 and "refused" in done.stderr and "--wait" in done.stderr
    assert not (tmp_path / "one").exists()


def test_bridge_tells_an_address_that_nobody_answers_at() -> None:
    done = run("bridge", "tcp://127.0.0.1:1", f"shm:/y-{uuid.uuid4().hex[:8]}")
    assert done.returncode == 1 and "refused" in done.stderr and "--wait" in done.stderr


def test_delay_tells_an_address_that_nobody_answers_at() -> None:
    done = run("delay", "tcp://127.0.0.1:1")
    assert done.returncode == 1 and "refused" in done.stderr and "--wait" in done.stderr


def test_properties_are_checked_before_anybody_is_waited_for() -> None:
    name = f"shm:/nobody-{uuid.uuid4().hex[:8]}"
    done = run("pub", "-p", "a", name, "hi", "--timeout", "60")
    assert done.returncode == 2 and "NAME=VALUE" in done.stderr
    done = run("pub", "-p", "a=b", name, "hi", "--timeout", "60")
    assert done.returncode == 2 and "have no properties" in done.stderr


def test_pub_says_whom_it_waits_for_after_a_second() -> None:
    name = f"shm:/nobody-{uuid.uuid4().hex[:8]}"
    waiting = start("pub", name, "hi", "--timeout", "60")
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, rest = waiting.communicate(timeout=60)
    assert "waiting for 1 subscriber" in line and name in line and "--wait 0" in line and rest == ""


def test_a_topic_that_is_not_there_is_told_at_the_end(tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path}/j#cam.front") as kept:
        kept.publish(b"x")
    done = run("sub", f"journal:{tmp_path}/j#cam.nope", "--last", "2", "-e")
    assert (done.stdout, done.returncode) == ("", 1) and "no topic 'cam.nope'" in done.stderr
    done = run("sub", f"journal:{tmp_path}/j#cam.front", "--from", "end", "-e")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_misspelt_name_is_told_with_the_silence() -> None:
    name = f"shm:/misspelt-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name):
        done = run("sub", name[:-1], "--timeout", "0.2")
        assert done.returncode == 3 and f"{name} is open: was that meant?" in done.stderr


def test_a_closed_output_is_one_sentence() -> None:
    name = f"shm:/closed-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        publisher.publish(b"x")
        done = subprocess.run(
            ["sh", "-c", '"$@" >&-', "sh", *HERE, "sub", name], text=True, capture_output=True, timeout=60,
            env=environment(), check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "standard output" in done.stderr and len(done.stderr.splitlines()) == 1


def test_silence_is_explained_once() -> None:
    name = f"shm:/silent-{uuid.uuid4().hex[:8]}"
    listening = start("sub", name)
    assert listening.stderr is not None
    line = listening.stderr.readline()
    listening.send_signal(signal.SIGINT)
    _, rest = listening.communicate(timeout=60)
    assert f"nobody publishes {name}" in line and rest == ""


def test_a_filter_that_never_matches_is_named() -> None:
    name = f"shm:/filtered-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        listening = start("sub", name, "--filter", "size > 1000")
        assert publisher.wait_ready(1, 60)
        publisher.publish(b"too short")
        assert listening.stderr is not None
        line = listening.stderr.readline()
        listening.send_signal(signal.SIGINT)
        listening.communicate(timeout=60)
        assert "1 came, and none passes the filter 'size > 1000'" in line and "too short" in line


def test_a_full_reliable_channel_ends_pub_in_time_and_says_who_does_not_read() -> None:
    name = f"shm:/full-{uuid.uuid4().hex[:8]}"
    with penstock.subscriber(name, reliable=True):
        done = run("pub", name, "x", "-n", "100", "--wait", "0", "--timeout", "1", "-O", "reliable=true", "-O", "slots=8")
        assert done.returncode == 3 and "wait for the reliable subscriber" in done.stderr, done.stderr


def test_last_from_and_exit_at_the_end(tmp_path: Path) -> None:
    address = f"journal:{tmp_path}/j"
    with penstock.publisher(f"{address}#a") as a, penstock.publisher(f"{address}#b") as b:
        for number in range(50):
            (a if number % 10 else b).publish(b"%d" % number)
    assert run("sub", f"{address}#a", "--last", "2", "-e").stdout.split() == ["48", "49"]
    assert run("sub", f"{address}#b", "--last", "2", "-e").stdout.split() == ["30", "40"]
    assert run("sub", f"{address}#*", "--last", "3", "-e").stdout.split() == ["47", "48", "49"]
    assert run("sub", f"{address}#b", "--last", "99", "-e").stdout.split() == ["0", "10", "20", "30", "40"]
    assert len(run("sub", f"{address}#a", "--from", "start", "-e").stdout.split()) == 45
    done = run("sub", f"{address}#a", "--from", "end", "-e")
    assert (done.stdout, done.returncode) == ("", 0)
    assert run("sub", f"{address}#a", "--from", "soon").returncode == 2
    assert run("sub", f"{address}#a", "--from", "1", "--last", "1").returncode == 2


def test_several_addresses_and_wildcards(tmp_path: Path) -> None:
    stem = f"shm:/many-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"{stem}/a") as a, penstock.publisher(f"{stem}/b") as b:
        listening = start("sub", f"{stem}/*", "--count", "2")
        for publisher, text in ((a, b"one"), (b, b"two")):
            assert publisher.wait_ready(1, 60)
            publisher.publish(text)
        out, err = listening.communicate(timeout=60)
        assert sorted(out.splitlines()) == [f"{stem}/a: one", f"{stem}/b: two"], err
        assert listening.returncode == 0
    assert run("sub", f"{stem}-nobody/*").returncode == 1
    with penstock.publisher(f"journal:{tmp_path}/j#t") as kept:
        kept.publish(b"1")
    done = run("sub", f"journal:{tmp_path}/j#t", f"journal:{tmp_path}/j#u", "--from", "start", "-e", "--json")
    assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == [1]


def test_words_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path}/j#t") as kept:
        kept.publish(b"1")
    done = run("play", f"{tmp_path}/j", "--topic", "nothere", "--map", "*=shm:/x")
    assert done.returncode == 2 and "nothere" in done.stderr
    done = run("pub", f"journal:{tmp_path}/j#t", "x", "-p", "a")
    assert done.returncode == 2 and "NAME=VALUE" in done.stderr


def test_record_all_takes_what_is_published_on_this_machine(tmp_path: Path) -> None:
    name = f"shm:/recorded-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name) as publisher:
        recording = start("record", "--all", "-o", f"{tmp_path}/run", "--json")
        assert publisher.wait_ready(1, 60)
        publisher.publish(b"x")
        deadline = time.monotonic() + 60
        topic = name.removeprefix("shm:/")
        while not _stored(tmp_path / "run", topic) and time.monotonic() < deadline:
            time.sleep(0.02)
        recording.send_signal(signal.SIGINT)
        out, err = recording.communicate(timeout=60)
    assert json.loads(out)["topics"][topic] == 1, err
    assert run("record", "-o", f"{tmp_path}/none").returncode == 2


def _stored(folder: Path, topic: str) -> bool:
    done = run("sub", f"journal:{folder}#{topic}", "--from", "start", "-e") if folder.exists() else None
    return done is not None and "x" in done.stdout


def test_completion_knows_topics_and_addresses(tmp_path: Path) -> None:
    from penstock.cli.target import live_addresses

    name = f"shm:/completed-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name), penstock.publisher(f"journal:{tmp_path}/j#hall.t") as kept:
        kept.publish(b"x")
        assert live_addresses(name[:-3]) == [name]
        assert live_addresses(f"journal:{tmp_path}/j#ha") == [f"journal:{tmp_path}/j#hall.t"]
    assert live_addresses("journal:/nowhere#") == []


def test_a_recording_says_of_what_nothing_comes(tmp_path: Path) -> None:
    with penstock.publisher("shm:/heard") as publisher:
        publisher.publish(b"one")
        done = run("record", "shm:/heard", "shm:/misspelt", "-o", str(tmp_path / "run"), "--seconds", "2.5")
    assert done.returncode == 0
    assert "shm:/misspelt: nothing came yet: nobody publishes" in done.stderr
    assert "shm:/heard: nothing came" not in done.stderr


def test_sizes_and_counts_beyond_reason_are_refused_or_taken_as_all(tmp_path: Path) -> None:
    large = run("pub", "shm:/large", "x", "--wait", "0", "--size", "99999999999")
    assert large.returncode == 2 and "--size" in large.stderr
    with penstock.publisher(f"journal:{tmp_path / 'j'}#t") as publisher:
        publisher.publish_many([b"1", b"2"])
    last = run("sub", f"journal:{tmp_path / 'j'}#t", "--last", "99999999999999999999", "-e")
    assert (last.returncode, last.stdout) == (0, "1\n2\n"), last.stderr
