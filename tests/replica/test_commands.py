"""The commands of a replicated broker as a user runs them: what cannot be right is said at once, with what to do."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.broker import Client
from penstock.cli import broker, doctor
from penstock.cli.group import _with_usable_numbers
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import Journal
from penstock.replica import JetStream
from penstock.replica.cluster import Cluster
from penstock.replica.stream import Target, tls_context
from tests.cli import command

from .conftest import LONG
from .fake_blocks import FakeStream
from .test_refill import fill, opened

NOBODY = "nats://127.0.0.1:1/x"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands; those that still run at the end are killed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str) -> subprocess.Popen[str]:
            process = command.start(*arguments)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def said_by(process: subprocess.Popen[str], words: str) -> str:
    """The line of standard error that has these words; waits for it."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"it ended without a word of {words!r}")


def ended(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> int:
    process.send_signal(number)
    process.communicate(timeout=LONG)
    return process.returncode


WRONG = {
    "--lease needs --standby": ["--lease", "3"],
    "--seed needs --store": ["--seed"],
    "--store-authority needs --store": ["--store-authority", "/dev/null"],
    "--store-certificate needs --store": ["--store-certificate", "/dev/null", "--store-key", "/dev/null"],
    "--store-key needs --store": ["--store-key", "/dev/null"],
    "--no-sync does not go with --store": ["--no-sync", "--store", NOBODY],
    "goes with a certificate": ["--store-key", "/dev/null", "--store", NOBODY],
    "/dev/null is no certificate in PEM form": ["--store-authority", "/dev/null", "--store", NOBODY],
    "a/b is no name of a stream": ["--store", "nats://127.0.0.1/a/b"],
}


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    for words, options in WRONG.items():
        done = CliRunner().invoke(broker.app, [str(tmp_path / "b"), "0", *options])
        assert isinstance(done.exception, InvalidArgument) and words in str(done.exception)
    assert not (tmp_path / "b").exists()
    done = CliRunner().invoke(doctor.app, ["--store", "foo"])
    assert isinstance(done.exception, InvalidArgument), "wrong usage, not a check that failed"
    for option in ("--store-monitor", "--store-authority", "--store-certificate", "--store-key"):
        done = CliRunner().invoke(doctor.app, [option, "/dev/null"])
        assert isinstance(done.exception, InvalidArgument) and option in str(done.exception)
    with pytest.raises(InvalidArgument, match="--lease nan is not a number"):
        _with_usable_numbers(lambda **_: None)(lease=float("nan"))


def test_what_a_leader_could_not_be_started_with_is_refused_before_it_stands_by(
    tmp_path: Path, free_ports: list[int]
) -> None:
    missing = str(tmp_path / "missing")
    wrong = {
        "reachable from other machines": ["--host", "0.0.0.0"],
        "missing": ["--tokens", missing],
        "No such file": ["--certificate", missing],
        "key= goes with certificate=": ["--key", missing],
        "client_authority= goes with certificate=": ["--client-authority", missing],
        "--quota 'much' is no size": ["--quota", "much"],
        "keep 'long' is no size": ["--keep", "long"],
    }
    for words, options in wrong.items():
        arguments = [str(tmp_path / "b"), str(free_ports[0]), "--store", NOBODY, "--standby", *options]
        ran = command.run("broker", *arguments, timeout=LONG)  # nobody is at NOBODY: one that is content waits there
        assert ran.returncode in (1, 2) and words in ran.stderr, (options, ran.stderr)
        assert "trying again" not in ran.stderr
    assert not (tmp_path / "b").exists()


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path) -> None:
    for words in (["broker", ""], ["broker", "backup", "", "x"], ["cluster", ""], ["broker", "b", "--tokens", ""]):
        ran = command.run(*words, cwd=tmp_path)
        assert ran.returncode == 2 and "is empty: name a file or directory" in ran.stderr, ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
def test_a_standby_reads_its_tokens_at_a_signal_and_leads_with_the_old_ones_if_they_are_wrong(
    tmp_path: Path, free_ports: list[int], start: Start
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text('[[token]]\nname = "a"\ntoken = "secret"\npublish = [">"]\n')
    with Cluster(tmp_path / "nodes", 1) as cluster:
        cluster.connect().close()
        options = ["--store", cluster.address, "--standby", "--tokens", str(tokens)]
        first = start("broker", str(tmp_path / "a"), str(free_ports[0]), *options)
        assert first.stdout is not None and first.stdout.readline().startswith("listening")
        second = start("broker", str(tmp_path / "b"), str(free_ports[1]), *options)
        said_by(second, f"{free_ports[0]} leads")
        tokens.write_text("oops [")
        second.send_signal(signal.SIGHUP)
        assert "Expected '='" in said_by(second, "not read again, the old ones stay")
        first.kill()
        with Client(port=free_ports[1], token="secret", timeout=LONG) as client:
            client.publish("t", b"kept")
        assert ended(second) == 0


@pytest.mark.timeout(120)
def test_damage_that_a_broker_finds_at_its_start_is_taken_from_the_stream(tmp_path: Path, start: Start) -> None:
    """Also in a segment that is not the last one, which are not all read at each start."""
    directory = tmp_path / "b"

    def begin() -> tuple[subprocess.Popen[str], int]:
        begun = start("broker", str(directory), "0", "--store", cluster.address, "--quota", "8MiB")
        assert begun.stdout is not None
        return begun, int(begun.stdout.readline().rpartition(":")[2])

    with Cluster(tmp_path / "nodes", 1) as cluster:
        cluster.connect().close()
        process, port = begin()
        with Client(port=port, timeout=LONG) as client:
            client.queue("q", topics="t")
            for _ in range(3):
                client.publish_many("t", [bytes(20_000)] * 50)
        assert ended(process) == 0
        first, *more = sorted(directory.glob("*.log"))
        assert more
        data = bytearray(first.read_bytes())
        data[30_000] ^= 8
        first.write_bytes(data)
        process, port = begin()
        with Client(port=port, timeout=LONG) as client, client.subscribe("q") as consumer:
            assert [len(bytes(consumer.receive(timeout=LONG))) for _ in range(150)] == [20_000] * 150
        assert f"{first.name} was damaged (1 message" in said_by(process, "is taken from stream")
        assert ended(process) == 0


def test_nobody_listens_is_said_while_it_is_tried(tmp_path: Path, free_ports: list[int], start: Start) -> None:
    for words in (["replica", str(tmp_path / "a")], ["broker", str(tmp_path / "b"), str(free_ports[0]), "--standby"]):
        process = start(*words, "--store", NOBODY)
        line = said_by(process, "trying again")
        assert "no NATS server answers at 127.0.0.1:1: Connection refused" in line and "quorum" not in line
        assert ended(process, signal.SIGHUP) == 128 + signal.SIGHUP, "it was not at its work yet"


def test_a_damaged_copy_is_fetched_not_repaired(tmp_path: Path) -> None:
    stream = FakeStream()
    with opened(tmp_path / "a", stream) as journal:
        fill(journal, 1)
    (log,) = (tmp_path / "a").glob("*.log")
    data = bytearray(log.read_bytes())
    data[9_000] ^= 1
    log.write_bytes(data)
    done = command.run("journal", "verify", str(tmp_path / "a"))
    assert done.returncode == 4 and "2 places are damaged; penstock replica" in done.stderr
    with pytest.raises(RefusedError, match="copy of a replicated"):
        Journal(tmp_path / "a")


@pytest.mark.timeout(120)
def test_a_cluster_in_any_directory_and_one_at_a_time(tmp_path: Path, free_ports: list[int], start: Start) -> None:
    """Also what the commands say of a stream that is not there, and which broker leads."""
    place = tmp_path / 'n\u00f6des und "so"'
    with Cluster(place, 1) as cluster:
        cluster.connect().close()
        with pytest.raises(RefusedError, match=r"a cluster runs on .* already \(process \d+\)"):
            Cluster(place, 1).start()
        missing = cluster.address.replace("/penstock", "/other")
        follower = start("replica", str(tmp_path / "f"), "--store", missing)
        assert "there is no stream other there; penstock broker DIRECTORY --store" in said_by(follower, "trying again")
        leader = start("broker", str(tmp_path / "b"), "0", "--store", missing)
        assert leader.stdout is not None and follower.stdout is not None
        assert "listening" in leader.stdout.readline() and "following" in follower.stdout.readline()
        assert (ended(follower, signal.SIGHUP), ended(leader)) == (0, 0)
        check_leader(cluster, tmp_path, free_ports, start)


@pytest.mark.timeout(120)
def test_streams_of_others_and_copies_that_cannot_be_are_refused_at_once(tmp_path: Path, free_ports: list[int]) -> None:
    with Cluster(tmp_path / "nodes", 1, token="sesame") as cluster:
        theirs = cluster.address.replace("/penstock", "/theirs")
        owner = JetStream(Target.parse(theirs, None, "sesame"), limits={"subjects": ["orders.>"]})
        with contextlib.closing(owner):
            with pytest.raises(InvalidArgument, match="belongs to something else"):
                owner.open_patiently()
            owner.client.request("orders.one", b"of somebody else", timeout=LONG)
        port = str(free_ports[0])
        secret = {"PENSTOCK_STORE_TOKEN": "sesame", "timeout": LONG}
        for words in (["replica", "f"], ["broker", "b", port], ["broker", "b", port, "--standby"]):
            done = command.run(*words, "--store", theirs, cwd=tmp_path, **secret)  # type: ignore[arg-type]
            assert done.returncode == 2 and "stream theirs belongs to something else: its subjects are orders.>" in done.stderr, done.stderr
        found = command.run("doctor", "--store", theirs, **secret)  # type: ignore[arg-type]
        assert "belongs to something else" in found.stdout and "repairs the stream" not in found.stdout
        with contextlib.closing(JetStream(Target.parse(theirs, None, "sesame"))) as blocks:
            names = blocks._ask("STREAM.NAMES", {})["streams"]
        assert "theirs_lead" not in names
        three = cluster.address.replace("/penstock", "/new").replace("?replicas=1", "")
        done = command.run("broker", "b", port, "--store", three, cwd=tmp_path, **secret)  # type: ignore[arg-type]
        assert done.returncode == 2 and "add ?replicas=1" in done.stderr
        done = command.run("replica", "f", "--store", theirs, cwd=tmp_path, timeout=LONG)
        assert done.returncode == 1 and "give its token (PENSTOCK_STORE_TOKEN" in done.stderr
        found = command.run("doctor", "--store", theirs, timeout=LONG)
        assert "Authorization Violation" in found.stdout and "start it" not in found.stdout


def check_leader(cluster: Cluster, place: Path, ports: list[int], start: Start) -> None:
    """Doctor tells which broker leads, and when none does; what a broker has, no other one of the group takes."""
    words = [str(place / "s"), str(ports[0]), "--store", cluster.address, "--standby", "--lease", "1"]
    leader = start("broker", *words)
    assert leader.stdout is not None and "listening" in leader.stdout.readline()
    refused = CliRunner().invoke(broker.app, words)
    assert "each broker of a group needs its own" in str(refused.exception)
    refused = CliRunner().invoke(broker.app, [words[0], str(ports[1]), *words[2:]])
    assert f"written by process {leader.pid}; others may only read" in str(refused.exception)
    done = CliRunner().invoke(doctor.app, ["--store", cluster.address])
    assert f"the broker at 127.0.0.1:{ports[0]} leads" in done.output
    assert ended(leader, signal.SIGTERM) == 0
    done = CliRunner().invoke(doctor.app, ["--store", cluster.address])
    assert "no broker holds the lease" in done.output


def test_names_and_keys_that_cannot_be_right() -> None:
    for address in ("nats://h/a/b", "nats://h:1/a/b", "nats://u:p@h/a/b"):
        with pytest.raises(InvalidArgument, match="a/b is no name of a stream"):
            Target.parse(address)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tls_context(Path("/nowhere"), None, None)


def test_a_server_that_accepts_and_says_nothing_is_told_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.replica.stream.SLOW_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        blocks = JetStream(Target.parse(f"nats://127.0.0.1:{silent.getsockname()[1]}/x"), answer_s=0.05)
        monkeypatch.setattr("penstock.replica.client.CONNECT_S", 0.2)
        with pytest.raises(TimeoutError, match="no NATS server answers"):
            blocks.patiently(blocks.describe, 0.0)
        assert caplog.messages == ["stream x has not answered yet; trying again"]
        blocks.close()
