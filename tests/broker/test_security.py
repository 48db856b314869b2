"""Where it listens, who may do what, TLS, and the life of the process."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Limits, Server
from penstock.errors import ClosedError, InvalidArgument, RefusedError

from .conftest import LONG, Wire, until


def test_it_listens_on_loopback_alone_unless_told(tmp_path: Path, tokens: Path) -> None:
    with pytest.raises(InvalidArgument, match="--insecure"):
        Server(tmp_path / "a", 0, host="0.0.0.0")
    with Server(tmp_path / "a", 0) as server:
        assert server.host == "127.0.0.1"
    Server(tmp_path / "a", 0, host="0.0.0.0", insecure=True).close()
    Server(tmp_path / "a", 0, host="0.0.0.0", tokens=tokens).close()


def test_tokens_off_loopback_without_tls_are_warned_of(
    tmp_path: Path, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = certificate(tmp_path)
    Server(tmp_path / "a", 0, tokens=tokens).close()
    Server(tmp_path / "a", 0, host="0.0.0.0", tokens=tokens, certificate=chain, key=key).close()
    assert "in clear" not in caplog.text
    Server(tmp_path / "a", 0, host="0.0.0.0", tokens=tokens).close()
    assert "tokens travel in clear to 0.0.0.0; give --certificate" in caplog.text


def test_rights_per_topic_and_verb(serve: Callable[..., Server], tokens: Path) -> None:
    server = serve(tokens=tokens)
    with Client(port=server.port, token="secret-root") as root, Client(port=server.port, token="secret-north") as north:
        assert north.publish("sensors.north.temp", b"1") == 1
        with pytest.raises(RefusedError, match="not yours"):
            north.publish("sensors.south.temp", b"2")
        assert north.publish("sensors.north.temp", b"3") == 2
        with pytest.raises(RefusedError, match="not yours"):
            north.subscribe("other", topics="sensors.>")
        with pytest.raises(RefusedError, match="not yours"):
            north.subscribe("north-1", topics="secrets.>")
        with north.subscribe("north-1", topics="sensors.>", from_position=1) as consumer:
            assert consumer.read(LONG) is not None
        for refused in (lambda: north.purge("north-1"), north.queues, north.statistics, north.shutdown):
            with pytest.raises(RefusedError):
                refused()
        assert root.purge("north-1") >= 0
        assert root.publish("anything", b"x") == 3


@pytest.mark.parametrize("token", [None, "wrong", "secret-north2"])
def test_strangers_are_sent_away(serve: Callable[..., Server], tokens: Path, token: str | None) -> None:
    server = serve(tokens=tokens)
    with Client(port=server.port, token=token) as client, pytest.raises(RefusedError, match=r"token"):
        client.ping()
    raw = Wire(server.port)
    raw.send(b"SUB q\n")
    assert raw.closed() == b""
    raw.close()


def test_a_token_that_was_taken_away(serve: Callable[..., Server], tokens: Path) -> None:
    server = serve(tokens=tokens)
    with Client(port=server.port, token="secret-north", reconnect=False) as client:
        client.publish("sensors.north.x", b"1")
        tokens.write_text(tokens.read_text().replace('publish = ["sensors.north.>"]', "publish = []"))
        server.reload()
        until(lambda: (rights := server.tokens.rights("secret-north")) is not None and not rights.publish)
        with pytest.raises(RefusedError):
            client.publish("sensors.north.x", b"2")
        tokens.write_text(tokens.read_text().replace("secret-north", "another"))  # the token itself
        server.reload()
        until(lambda: server.tokens.rights("secret-north") is None and not server.connections)
        with pytest.raises((RefusedError, ClosedError)):
            client.ping()
    with Client(port=server.port, token="secret-north") as late, pytest.raises(RefusedError):
        late.ping()


@pytest.mark.parametrize(
    "text",
    [
        "[[token]]\nname = 1",
        "[[token]]",
        "x = 1",
        "[[token]]\ntoken='a'\nnope=1",
        "{",
        "[[token]]\nsha256='zz'",
        "[[token]]\ntoken=''",
        "[[token]]\ntoken='a b'",
        "[[token]]\ntoken='a'\npublish=[5]",
        "[[token]]\ntoken='a'\npublish=['']",
        "[[token]]\ntoken='a'\nsubscribe=['sensors.a*']",
        "[[token]]\ntoken='a'\n[[token]]\ntoken='a'",
    ],
)
def test_a_bad_file_of_tokens_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidArgument, match=r"tokens\.toml"):
        Server(tmp_path / "a", 0, tokens=path)
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod"):
        Server(tmp_path / "a", 0, tokens=path)


def certificate(tmp_path: Path, name: str = "server") -> tuple[Path, Path]:
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    chain, secret = tmp_path / f"{name}-chain.pem", tmp_path / f"{name}-key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, secret


def test_tls(serve: Callable[..., Server], tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    server = serve(certificate=chain, key=key)
    big = bytes(range(256)) * 20_000
    with Client(port=server.port, tls=chain) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"%d" % i for i in range(3000)])
        client.publish("t", big)
        with client.subscribe("q") as consumer:
            assert [bytes(consumer.read(LONG) or b"") for _ in range(3000)] == [b"%d" % i for i in range(3000)]
            assert bytes(consumer.read(LONG) or b"") == big
    with (
        Client(port=server.port, tls=True, timeout=0.5) as client,
        pytest.raises(Exception, match=r"verif|answer|conn"),
    ):
        client.ping()
    plain = Wire(server.port)
    plain.send(b"HELLO 1\n")
    assert b"HELLO" not in plain.closed()
    plain.close()


@pytest.mark.parametrize("wrong", ["certificate", "client_authority"])
@pytest.mark.parametrize("there", [True, False])
def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, wrong: str, there: bool) -> None:
    chain, key = certificate(tmp_path)
    bad = tmp_path / "bad.pem"
    if there:
        bad.write_text("no certificate")
    files = {"certificate": chain, "key": key, wrong: bad}
    with pytest.raises((OSError, InvalidArgument), match=r"bad\.pem"):
        Server(tmp_path / "d", 0, **files)


def test_client_certificates(serve: Callable[..., Server], tmp_path: Path) -> None:
    """A known one is served; an unknown one, and none, get nothing."""
    chain, key = certificate(tmp_path)
    known, unknown = certificate(tmp_path, "known"), certificate(tmp_path, "unknown")
    server = serve(certificate=chain, key=key, client_authority=known[0])
    for shown in (unknown, None):
        stranger = Client(port=server.port, tls=with_certificate(chain, shown), reconnect=False)
        with stranger, pytest.raises(ClosedError, match="no connection to the broker"):
            stranger.publish("t", b"x")
    assert server.broker.store.next == 1 and not any(c.session.hello for c in list(server.connections.values()))
    with Client(port=server.port, tls=with_certificate(chain, known)) as client:
        assert client.publish("t", b"x") == 1


def with_certificate(authority: Path, shown: tuple[Path, Path] | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    if shown is not None:
        context.load_cert_chain(*shown)
    return context


def test_at_the_quota_a_raw_client_is_not_read_from(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=1))
    raw = Wire(server.port)
    raw.send(b"PUB 3\nabc")
    until(lambda: len(server._paused) == 1)
    assert server.broker.store.next == 1
    server.limits.quota_bytes = 1 << 30
    until(lambda: server.broker.store.next == 2)
    raw.close()


def run_command(directory: Path, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "broker", str(directory), "0", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on 127.0.0.1:"), process.communicate()[1]
    return process, int(line.rpartition(":")[2])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_gracefully(tmp_path: Path, number: signal.Signals) -> None:
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(tmp_path / "notify"))
    notices.settimeout(LONG)
    process, port = run_command(tmp_path / "journal", NOTIFY_SOCKET=str(tmp_path / "notify"))
    assert b"READY=1" in notices.recv(1000)
    with Client(port=port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"x"] * 100)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 0, errors
    assert b"STOPPING=1" in notices.recv(1000)
    notices.close()
    with Server(tmp_path / "journal", 0).start() as server, Client(port=server.port) as client:
        assert client.queues()[0]["depth"] == 100


def test_the_command_reads_tokens_again(tmp_path: Path, tokens: Path) -> None:
    process, port = run_command(tmp_path / "journal", "--tokens", str(tokens))
    try:
        with Client(port=port, token="new", timeout=LONG) as client, pytest.raises(RefusedError):
            client.ping()
        tokens.write_text(tokens.read_text() + '\n[[token]]\ntoken = "new"\npublish = [">"]\n')
        process.send_signal(signal.SIGHUP)

        def works() -> bool:
            with Client(port=port, token="new", timeout=LONG) as client:
                try:
                    return bool(client.publish("t", b"x"))
                except RefusedError:
                    return False

        until(works)
    finally:
        process.terminate()
        process.communicate(timeout=LONG)


def test_a_second_broker_on_the_same_directory_is_refused(serve: Callable[..., Server], tmp_path: Path) -> None:
    serve()
    with pytest.raises(RefusedError, match=str(os.getpid())):
        Server(tmp_path / "broker", 0)
