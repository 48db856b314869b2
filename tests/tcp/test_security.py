"""TLS and tokens: a wrong one is refused before any data, and told without the secret."""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import penstock
from penstock import tcp

from .plain import LONG, PlainSubscriber
from .tap import Tap
from .test_sessions import eventually


class Authority:
    """Makes certificates for a test."""

    def __init__(self, directory: Path, name: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        self.directory = directory
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.name, self.key.public_key(), authority=True)
        self.path = directory / f"{name}.pem"
        self._write(self.path, self.certificate)

    def _sign(self, subject, public, authority=False):  # type: ignore[no-untyped-def]
        import ipaddress

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _write(self, path: Path, certificate, key=None) -> None:  # type: ignore[no-untyped-def]
        from cryptography.hazmat.primitives import serialization

        data = certificate.public_bytes(serialization.Encoding.PEM)
        if key is not None:
            data += key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        path.write_bytes(data)

    def issue(self, name: str) -> Path:
        """A certificate with its key, in one file."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        path = self.directory / f"{name}-{id(key)}.pem"
        self._write(path, self._sign(subject, key.public_key()), key)
        return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


def server(authority: Authority, client: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("publisher"))
    if client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.path)
    return context


def client(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.path))


def test_tls_carries_everything(authority: Authority) -> None:
    with tcp.Publisher(tls=server(authority)) as publisher, tcp.Subscriber(tls=client(authority)) as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        big = bytes(range(256)) * 20_000  # 5 MB
        sent = [b"x" * (i % 300) for i in range(5000)] + [big]
        publisher.publish_many(sent)
        for data in sent:
            assert subscriber.read(LONG) == data
        assert subscriber.ledger == penstock.Ledger(5001, 5001)


def test_tls_flushes_on_close_and_notices_who_has_gone(authority: Authority) -> None:
    publisher = tcp.Publisher(tls=server(authority))
    with tcp.Subscriber(tls=client(authority)) as subscriber, tcp.Subscriber(tls=client(authority)) as other:
        subscriber.add_session("127.0.0.1", publisher.port)
        other.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(2, LONG)
        other.close()
        eventually(lambda: publisher.subscriber_count == 1)
        publisher.publish_many([bytes(1000)] * 500)
        publisher.close(LONG)
        for _ in range(500):
            message = subscriber.read(LONG)
            assert message is not None and len(message) == 1000


def test_what_passes_is_encrypted(authority: Authority) -> None:
    marker = b"readable on the line"
    for context, readable in ((None, True), (client(authority), False)):
        with (
            tcp.Publisher(tls=server(authority) if context else None) as publisher,
            Tap(publisher.port) as tap,
            tcp.Subscriber(tls=context) as subscriber,
        ):
            subscriber.add_session("127.0.0.1", tap.port)
            assert publisher.wait_ready(1, LONG)
            publisher.publish(marker)
            assert subscriber.read(LONG) == marker
            assert (marker in tap.heard) is readable


def test_a_plain_peer_gets_nothing_from_a_publisher_with_tls(authority: Authority) -> None:
    with tcp.Publisher(tls=server(authority)) as publisher:
        with socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as plain:
            plain.sendall(bytes.fromhex("0c000100010000000000000000") * 10)
            with contextlib.suppress(ConnectionResetError):
                assert b"\x0c\x00\x01" not in plain.recv(1000)  # an alert, or nothing
        assert publisher.subscriber_count == 0


def test_an_unknown_authority_is_refused_by_the_subscriber(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    with tcp.Publisher(tls=server(stranger)) as publisher, tcp.Subscriber(tls=client(authority)) as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port, max_reconnects=0)
        with pytest.raises(penstock.ClosedError):
            subscriber.read(LONG)
        assert "CERTIFICATE_VERIFY_FAILED" in (session.last_error or "")
        assert publisher.subscriber_count == 0


def test_client_certificates(authority: Authority, tmp_path: Path) -> None:
    known, unknown, without = client(authority), client(authority), client(authority)
    known.load_cert_chain(authority.issue("known"))
    unknown.load_cert_chain(Authority(tmp_path, "stranger").issue("unknown"))
    with tcp.Publisher(tls=server(authority, client=True)) as publisher:
        with tcp.Subscriber(tls=known) as subscriber:
            subscriber.add_session("127.0.0.1", publisher.port)
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"for the known")
            assert subscriber.read(LONG) == b"for the known"
        for context in (unknown, without):
            with tcp.Subscriber(tls=context) as subscriber:
                subscriber.add_session("127.0.0.1", publisher.port, max_reconnects=0)
                with pytest.raises(penstock.ClosedError):
                    subscriber.read(LONG)
        eventually(lambda: publisher.subscriber_count == 0)


# --- tokens


def test_the_right_token() -> None:
    with tcp.Publisher(token="secret") as publisher, tcp.Subscriber(token=b"secret") as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x")
        assert subscriber.read(LONG) == b"x"


def test_a_token_never_travels() -> None:
    with (
        tcp.Publisher(token="secret-on-both-sides") as publisher,
        Tap(publisher.port) as tap,
        tcp.Subscriber(token="secret-on-both-sides") as subscriber,
    ):
        subscriber.add_session("127.0.0.1", tap.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"data")
        assert subscriber.read(LONG) == b"data"
        assert b"data" in tap.heard and b"secret" not in tap.heard


@pytest.mark.parametrize(
    ("of_publisher", "of_subscriber", "reason"),
    [
        ("right-one", "wrong-one", "wrong token"),
        ("right-one", None, "asks for a token"),
        (None, "wrong-one", "has no token"),
    ],
)
def test_a_wrong_token_is_refused_and_not_told(
    of_publisher: str | None, of_subscriber: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with tcp.Publisher(token=of_publisher) as publisher, tcp.Subscriber(token=of_subscriber) as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port, max_reconnects=0)
        publisher.publish(b"not for them")
        with pytest.raises(penstock.ClosedError):
            subscriber.read(LONG)
        assert reason in (session.last_error or "")
        assert publisher.subscriber_count == 0
    assert "right-one" not in caplog.text and "wrong-one" not in caplog.text
    assert reason in caplog.text


def test_a_plain_peer_gets_no_data_from_a_publisher_with_a_token() -> None:
    with tcp.Publisher(token="secret") as publisher:
        peer = PlainSubscriber(publisher.port)
        _, kind, _, text = peer.frame()
        assert kind == 3 and b"token" in text
        assert peer.socket.recv(1) == b""
        peer.close()


def test_a_publisher_must_prove_itself_too() -> None:
    """One that answers without knowing the token gets no trust: no replay, no impostor."""
    from penstock.tcp import protocol

    request = protocol.Request(b"secret")
    challenge = protocol.frame(protocol.FrameType.PROOF, b"c" * 16)
    ours = protocol.Extension(identity=b"i" * 16)
    agreement = protocol.handshake(0, ours)
    guess = protocol.prove(b"another", b"publisher", bytes(16), b"c" * 16)
    guessed = protocol.handshake(0, protocol.Extension(identity=b"i" * 16, proof=guess))
    for answer in (protocol.handshake(0), agreement, challenge + agreement, challenge + guessed):
        other = protocol.Request(b"secret")
        with pytest.raises(penstock.RefusedError, match="did not prove"):
            while answer:
                step = other.needs
                other.feed(answer[:step])
                answer = answer[step:]
    assert request.outgoing[:2] == b"\x0c\x00", "the header is the plain one of version 0"


def test_token_needs_the_extension() -> None:
    with pytest.raises(penstock.InvalidArgument, match="extended"):
        tcp.Subscriber(token="x", extended=False)


def test_token_in_an_address() -> None:
    publisher = tcp.Publisher(token="12345")
    with publisher, penstock.subscriber(f"{publisher.address}?token=12345") as subscriber:
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x")
        assert subscriber.read(LONG) == b"x"


@pytest.mark.parametrize("token", ["0123", "1e5", "none", "true", "12_34", "nan", "%00"])
def test_a_secret_is_text_whatever_it_looks_like(token: str) -> None:
    given = unquote(token)
    with penstock.tcp.publisher(f"127.0.0.1:0?token={token}") as publisher:
        with tcp.Subscriber() as without:
            session = without.add_session("127.0.0.1", publisher.port, max_reconnects=0)
            assert not session.wait_connected(LONG) and "token" in str(session.last_error)
        with penstock.tcp.subscriber(f"127.0.0.1:{publisher.port}", token=given):
            assert publisher.wait_ready(1, LONG)


@pytest.mark.parametrize("wrong", [True, "ca.pem", 1])
def test_tls_is_a_context(wrong: Any) -> None:
    with pytest.raises(TypeError, match="SSLContext"):
        tcp.Publisher(tls=wrong).close()
    with pytest.raises(TypeError, match="SSLContext"):
        tcp.Subscriber(tls=wrong).close()
    with pytest.raises(TypeError, match="SSLContext"):
        penstock.subscriber("tcp://127.0.0.1:1?tls=true").close()


def test_an_empty_token_is_refused() -> None:
    for opened in (tcp.Publisher, tcp.Subscriber):
        with pytest.raises(penstock.InvalidArgument, match="empty"):
            opened(token="")
    with pytest.raises(penstock.InvalidArgument, match="empty"):
        penstock.publisher("tcp://127.0.0.1:0?token=")


def test_off_loopback_a_publisher_asks_who_comes() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(penstock.InvalidArgument, match="insecure"):
            tcp.Publisher(0, host).close()
    encrypted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # whoever comes is let in, though nobody else reads along
    with pytest.raises(penstock.InvalidArgument, match="insecure"):
        tcp.Publisher(0, "0.0.0.0", tls=encrypted).close()
    with pytest.raises(penstock.InvalidArgument, match="empty"):
        tcp.Publisher(0, "0.0.0.0", token="").close()
    encrypted.verify_mode = ssl.CERT_REQUIRED
    for allowed in ({"token": "a secret"}, {"insecure": True}, {"tls": encrypted}):
        with tcp.Publisher(0, "0.0.0.0", **allowed) as publisher:  # type: ignore[arg-type]
            assert publisher.port
    with penstock.publisher("tcp://0.0.0.0:0?insecure=true") as publisher_of_an_address:
        assert not publisher_of_an_address.closed
