"""What is said of a cluster that cannot be used names the cause and what to do, and doctor can ask where a broker can."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import broker, doctor
from penstock.errors import InvalidArgument, RefusedError, describe
from penstock.journal import Journal
from penstock.replica import JetStream, Replica, health
from penstock.replica.appender import FencedError
from penstock.replica.client import Connection, UnansweredError
from penstock.replica.cluster import server_program
from penstock.replica.seed import seed
from penstock.replica.standby import lease_stream
from penstock.replica.stream import StreamError, Target, tls_context
from tests.tcp.test_security import Authority

from .conftest import LONG, until


@pytest.fixture
def serve_nats(tmp_path: Path, free_ports: list[int]) -> Iterator[Any]:
    """Starts a server of these settings; gives its address."""
    processes = []

    def start(text: str) -> str:
        path = tmp_path / "nats.conf"
        path.write_text(f"listen: 127.0.0.1:{free_ports[0]}\n{text}\n")
        with open(tmp_path / "log", "wb") as log:
            processes.append(subprocess.Popen([server_program(), "-c", str(path)], stdout=log, stderr=log))
        until(lambda: b"Server is ready" in (tmp_path / "log").read_bytes(), "the server is ready")
        return f"nats://127.0.0.1:{free_ports[0]}/x?replicas=1"

    yield start
    for process in processes:
        process.terminate()
        process.wait()


def test_a_cluster_that_asks_for_certificates_is_checked(tmp_path: Path, serve_nats: Any) -> None:
    authority = Authority(tmp_path, "authority")
    own = authority.issue("own")
    files = f'cert_file: "{own}", key_file: "{own}", ca_file: "{authority.path}", verify: true'
    address = serve_nats(f'jetstream {{ store_dir: "{tmp_path}/data" }}\ntls {{ {files} }}')
    blocks = JetStream(Target.parse(address, tls_context(authority.path, own, None)))
    blocks.open()
    blocks.close()
    words = ["--store", address, "--store-authority", str(authority.path)]
    done = CliRunner().invoke(doctor.app, words)
    assert done.exit_code == 4 and "--store-certificate" in done.output and "start it" not in done.output
    done = CliRunner().invoke(doctor.app, [*words, "--store-certificate", str(own), "--store-key", str(own)])
    assert done.exit_code == 0, done.output


def test_a_server_that_does_not_let_in_is_not_called_down(serve_nats: Any) -> None:
    target = Target.parse(serve_nats('authorization { token: "secret" }'))
    with pytest.raises(RefusedError, match=r"Authorization Violation.*PENSTOCK_STORE_TOKEN"):
        Connection(target.servers[0], target.access, 5.0)
    found = next(health.look(target))
    assert "Authorization Violation" in found.text and "PENSTOCK_STORE_TOKEN" in found.remedy


def test_a_server_without_jetstream_is_told(serve_nats: Any) -> None:
    blocks = JetStream(Target.parse(serve_nats("")))
    with pytest.raises(UnansweredError, match=r"127\.0\.0\.1:\d+ has no JetStream"):
        blocks.open()
    blocks.close()


def test_how_many_nodes_answer_is_told(serve_nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.replica.stream.REACH_S", LONG)
    target = Target.parse(serve_nats(""))
    away = ("127.0.0.1", 1)
    assert JetStream(target).reach() == "1 of 1 node answers"
    some = JetStream(replace(target, servers=(away, *target.servers, away)))
    assert some.reach() == "1 of 3 nodes answers (not 127.0.0.1:1, 127.0.0.1:1)"
    assert JetStream(replace(target, servers=(away,) * 3)).reach() == "none of 3 nodes answers"


@pytest.mark.parametrize("more", [(), ("--standby",)], ids=["alone", "standby"])
@pytest.mark.parametrize("wrong", ["messages", "other files", "port", "written"])
def test_a_start_that_is_refused_leaves_nothing_on_the_cluster(
    wrong: str, more: tuple[str, ...], tmp_path: Path, serve_nats: Any, free_ports: list[int]
) -> None:
    address = serve_nats(f'jetstream {{ store_dir: "{tmp_path}/data" }}')
    place = tmp_path / "b"
    with contextlib.ExitStack() as stack:
        if wrong in ("messages", "written"):
            journal = stack.enter_context(Journal(place))
            if wrong == "messages":
                journal.append("t", b"x")
                journal.close()
        elif wrong == "port":
            stack.enter_context(socket.create_server(("127.0.0.1", free_ports[1])))
        else:
            place.mkdir()
            (place / "letter.txt").write_text("mine")
        before = sorted(place.iterdir()) if place.exists() else []
        done = CliRunner().invoke(broker.app, [str(place), str(free_ports[1]), "--store", address, *more])
        said = {
            "messages": "--seed copies them there",
            "other files": "is not a journal (it has 'letter.txt'",
            "port": "in use",
            "written": "is being written by this process",
        }
        assert said[wrong] in str(done.exception), done
        assert (sorted(place.iterdir()) if place.exists() else []) == before
    target = Target.parse(address)
    for blocks in (JetStream(target), lease_stream(target)):
        with pytest.raises(StreamError, match="stream not found"):
            blocks.describe()
        blocks.close()


def test_a_stream_is_made_by_the_first_that_is_fit(tmp_path: Path, serve_nats: Any) -> None:
    target = Target.parse(serve_nats(f'jetstream {{ store_dir: "{tmp_path}/data" }}'))
    with contextlib.closing(JetStream(target)) as first, contextlib.closing(JetStream(target)) as second:
        first.find()
        second.find()
        assert first.bounds().last == second.bounds().last == 0
        Replica(tmp_path / "a", first).disk()
        assert second.bounds().last == 1
        second.make()  # it is there
        assert second.bounds().last == 1


def test_a_journal_is_seeded_to_a_stream_that_is_not_there(tmp_path: Path, serve_nats: Any) -> None:
    target = Target.parse(serve_nats(f'jetstream {{ store_dir: "{tmp_path}/data" }}'))
    with Journal(tmp_path / "a") as journal:
        journal.append("t", b"x")
    with contextlib.closing(JetStream(target)) as blocks:
        blocks.find()
        with pytest.raises(InvalidArgument, match="is not a journal"):
            seed(tmp_path / "nothing", blocks)
        with pytest.raises(StreamError, match="stream not found"):
            blocks.describe()
        assert seed(tmp_path / "a", blocks) == 1
        assert blocks.bounds().last > 1


def test_copies_that_one_server_cannot_have_are_told(tmp_path: Path, serve_nats: Any) -> None:
    target = replace(Target.parse(serve_nats(f'jetstream {{ store_dir: "{tmp_path}/data" }}')), replicas=3)
    blocks = JetStream(target)
    with pytest.raises(InvalidArgument, match=r"add \?replicas=1"):
        blocks.open_patiently()
    blocks.close()


def test_a_certificate_and_a_key_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own, other = authority.issue("own"), authority.issue("other")
    bare = tmp_path / "bare.pem"
    bare.write_text(own.read_text().partition("-----BEGIN PRIVATE")[0])
    with pytest.raises(InvalidArgument, match=r"bare\.pem has no key.*--store-key"):
        tls_context(authority.path, bare, None)
    with pytest.raises(InvalidArgument, match=r"other.*key.*own"):
        tls_context(authority.path, own, other)


def test_an_error_has_no_number_of_the_system_that_is_none() -> None:
    assert describe(FencedError("another broker writes")) == "another broker writes"
    assert describe(ssl.SSLError(1, "certificate verify failed")) == "certificate verify failed"
    assert describe(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
    assert describe(TimeoutError(110, "no answer")) == "no answer (Connection timed out)"
