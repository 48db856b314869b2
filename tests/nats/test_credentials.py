"""Credentials files: a server in operator mode lets in who has one, for nats:// handles and for a broker's store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import InvalidArgument, RefusedError
from penstock.nats_credentials import read_credentials
from penstock.replica import JetStream, Replica
from penstock.replica.stream import Target
from tests.cli import command

from .operator_mode import ACCOUNT, Key, Operator
from .test_nats import LONG, Server, wait_until


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def server(tmp_path: Path, operator: Operator) -> Iterator[Server]:
    (tmp_path / "server.conf").write_text(operator.configuration)
    started = Server(tmp_path / "js", "-c", str(tmp_path / "server.conf"))
    yield started
    started.end()


def test_handles_are_let_in_by_a_credentials_file(tmp_path: Path, operator: Operator, server: Server) -> None:
    creds = operator.write_user(tmp_path / "robot.creds")
    place = f"nats://127.0.0.1:{server.port}/a"
    with (
        penstock.subscriber(f"{place}?creds={creds}") as subscriber,
        penstock.publisher(place, creds=str(creds)) as publisher,
    ):
        publisher.publish(b"one")
        assert bytes(subscriber.receive(timeout=LONG)) == b"one"
        operator.write_user(creds)  # a new one takes effect at the next connection
        server.end()
        server.start()
        deadline = time.monotonic() + LONG
        while subscriber.read(timeout=0.1) is None:  # core NATS: what comes before it is connected again is not kept
            assert time.monotonic() < deadline
            publisher.publish(b"two", timeout=LONG)
    stranger = Operator().write_user(tmp_path / "stranger.creds")
    expired = operator.write_user(tmp_path / "expired.creds", exp=1)
    with pytest.raises(RefusedError, match="does not let this client in: nats"):
        penstock.publisher(place)
    for refused in (stranger, expired):
        with pytest.raises(RefusedError, match=rf"let this client in: it refuses the credentials file {refused} \(exp"):
            penstock.publisher(f"{place}?creds={refused}")
    with pytest.raises(InvalidArgument, match="creds=FILE goes without"):
        penstock.publisher(place, creds=str(creds), token="x")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("spoilt", ["mode", "empty", "missing"])
def test_a_file_that_cannot_be_used_for_a_while_delays_the_reconnect_only(
    tmp_path: Path, operator: Operator, server: Server, caplog: pytest.LogCaptureFixture, spoilt: str
) -> None:
    creds = operator.write_user(tmp_path / "robot.creds")
    good = creds.read_text()
    words = {"mode": "others may read it", "empty": "has no JWT of a user", "missing": "No such file"}[spoilt]
    with penstock.publisher(f"nats://127.0.0.1:{server.port}/a", creds=str(creds)) as publisher:
        publisher.publish(b"one")
        if spoilt == "mode":
            creds.chmod(0o644)
        elif spoilt == "empty":
            creds.write_text("")
        else:
            creds.unlink()
        server.end()
        server.start()
        wait_until(lambda: words in caplog.text)
        creds.touch(0o600)
        creds.write_text(good)
        creds.chmod(0o600)
        publisher.publish(b"two", timeout=LONG)
    assert sum(words in record.getMessage() for record in caplog.records) == 1, caplog.text
    assert "never retrieved" not in caplog.text


@pytest.mark.timeout(120)
def test_a_store_is_let_in_by_a_credentials_file(tmp_path: Path, operator: Operator, server: Server) -> None:
    creds = operator.write_user(tmp_path / "robot.creds")
    address = f"nats://127.0.0.1:{server.port}/log?replicas=1"
    with contextlib.closing(JetStream(Target.parse(f"{address}&creds={creds}", None, "not this token"))) as blocks:
        blocks.patiently(blocks.find)
        Replica(tmp_path / "a", blocks).disk()
        assert blocks.bounds().last == 1
        good = creds.read_text()
        creds.write_text("nothing")
        blocks.client.disconnect()
        with pytest.raises(
            ConnectionError, match="has no JWT of a user"
        ):  # which a broker that runs takes for an outage
            blocks.bounds()
        creds.write_text(good)
        assert blocks.bounds().last == 1
    found = command.run("doctor", "--store", f"{address}&creds={creds}", timeout=LONG)
    assert "Authorization" not in found.stdout, found.stdout
    stranger = Operator().write_user(tmp_path / "stranger.creds")
    expired = operator.write_user(tmp_path / "expired.creds", exp=1)
    hints = {address: "?creds=FILE"} | {f"{address}&creds={path}": f"file {path} (exp" for path in (stranger, expired)}
    for wrong, hint in hints.items():
        done = command.run("broker", str(tmp_path / "b"), "0", "--store", wrong, timeout=LONG)
        assert done.returncode == 1 and "Authorization Violation" in done.stderr
        assert hint in " ".join(done.stderr.split()) and ("PENSTOCK_STORE_TOKEN" in done.stderr) == (wrong == address)
    with pytest.raises(InvalidArgument, match="goes without a token"):
        Target.parse(f"nats://token@127.0.0.1/log?creds={creds}")


def test_files_that_are_not_right_are_refused_before_anything_is_sent(tmp_path: Path, operator: Operator) -> None:
    path = operator.write_user(tmp_path / "robot.creds")
    good = path.read_text()
    assert "eyJ" not in repr(read_credentials(path)) and "SU" not in repr(read_credentials(path))
    seed = good.split("SEED-----\n")[1].partition("\n")[0]
    damaged = seed[:20] + ("A" if seed[20] != "A" else "B") + seed[21:]
    wrong = {
        "has no JWT of a user": "anything",
        "has no seed of a user": good.partition("-----BEGIN USER NKEY")[0],
        "its seed is damaged, or not of a user": good.replace(seed, damaged),
        "seed is damaged, or not": good.replace(seed, Key(ACCOUNT).seed),
    }
    for words, text in wrong.items():
        path.write_text(text)
        for parse in (read_credentials, lambda path: Target.parse(f"nats://127.0.0.1:1/x?creds={path}")):
            with pytest.raises(InvalidArgument, match=words):
                parse(path)
    path.write_text(good)
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(InvalidArgument, match=r"others may read it; chmod 600"):
            Target.parse(f"nats://127.0.0.1:1/x?creds={path}")
    with pytest.raises(InvalidArgument, match="creds= is empty"):
        Target.parse("nats://127.0.0.1:1/x?creds=")
    with pytest.raises(FileNotFoundError, match="missing"):
        Target.parse(f"nats://127.0.0.1:1/x?creds={tmp_path / 'missing'}")
