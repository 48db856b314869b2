"""The log: what PENSTOCK_LOG=debug tells, and that nothing is told, or paid for, without it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from penstock import tcp
from penstock.tcp.joining import Joining
from penstock.tcp.log import BURST, logger

from .plain import LONG

PROGRAM = """
import socket
from penstock import tcp
with tcp.Publisher(overflow="drop_newest", depth=4, token="secret-word") as publisher:
    with tcp.Subscriber(token="secret-word") as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, 30)
        publisher.publish(b"one")
        assert subscriber.read(30) == b"one"
        while not publisher.ledger.lost:
            publisher.publish(bytes(30_000))
        with socket.create_connection(("127.0.0.1", publisher.port)) as stranger:
            stranger.sendall(bytes(20))
            try:
                while stranger.recv(100):
                    pass
            except ConnectionError:
                pass
        wrong = tcp.Subscriber(token="another-word")
        assert not wrong.add_session("127.0.0.1", publisher.port, max_reconnects=0).wait_connected(30)
        wrong.close()
"""


def run(level: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_LOG"}
    if level is not None:
        environment["PENSTOCK_LOG"] = level
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=LONG * 2
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_debug_tells_of_connections_handshakes_and_drops() -> None:
    text = run("debug")
    for part in (
        "publisher listens at tcp://127.0.0.1:",
        "connection from 127.0.0.1:",
        "joined, extended",
        "connected, extended",
        "messages dropped for 127.0.0.1:",
        "closed: header_size",
        "closed: wrong token",
        "has gone (",
        "publisher at tcp://127.0.0.1:",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "secret-word" not in text and "another-word" not in text


def test_who_is_refused_while_the_publisher_closes_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, fail = threading.Event(), Joining._fail

    def fail_in_the_midst_of_closing(joining: Joining, error: BaseException) -> None:
        refused.set()
        while not publisher.closed:
            time.sleep(0.001)
        fail(joining, error)

    monkeypatch.setattr(Joining, "_fail", fail_in_the_midst_of_closing)
    publisher = tcp.Publisher(token="secret-word")
    with caplog.at_level("WARNING", "penstock.tcp"), tcp.Subscriber(token="another-word") as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port, max_reconnects=0)
        assert refused.wait(LONG)
        publisher.close()
        assert "closed: wrong token" in caplog.text


def test_the_reason_is_logged_before_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a publisher that is closed as soon as the peer sees the end would take it for its own doing."""
    descriptors: list[int] = []
    failed = tcp.Publisher.failed

    def look(publisher: tcp.Publisher, joining: Joining, error: BaseException) -> None:
        descriptors.append(joining._socket.fileno())
        failed(publisher, joining, error)

    monkeypatch.setattr(tcp.Publisher, "failed", look)
    with tcp.Publisher() as publisher, socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as stranger:
        stranger.sendall(bytes(20))
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b""
    assert len(descriptors) == 1 and descriptors[0] >= 0


@pytest.mark.parametrize("level", [None, "nonsense", "error"])
def test_without_it_nothing_is_told_of_what_goes_well(level: str | None) -> None:
    text = run(level)
    assert "connection" not in text and "joined" not in text and "dropped" not in text


class Forbidden:
    """A logger that the thread which publishes and reads may not ask anything."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()

    def __getattr__(self, name: str) -> object:
        assert threading.current_thread() is not self.thread, f"logger.{name} was used for a message"
        return getattr(logger, name)  # the handshake is told of by the executor's threads


@pytest.mark.parametrize("size", [64, 5_000, 100_000])
def test_a_message_costs_no_look_at_the_log(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The paths of messages are native; not even a level is asked for."""
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        with monkeypatch.context() as patched:
            for module in ("publisher", "subscriber", "session", "executor"):
                patched.setattr(sys.modules[f"penstock.tcp.{module}"], "logger", Forbidden())
            for _ in range(100):
                publisher.publish(bytes(size))
                assert subscriber.read(LONG) is not None
        assert not logger.isEnabledFor(10)


def test_who_closes_without_a_byte_is_told_of_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "penstock.tcp"), tcp.Publisher() as publisher:
        socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG).close()
        with socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as peer:
            peer.sendall(b"P")
        end = time.monotonic() + LONG
        while len(told := [r for r in caplog.records if "before its handshake" in r.getMessage()]) < 2:
            assert time.monotonic() < end, caplog.text
            time.sleep(0.01)
    assert sorted(record.levelname for record in told) == ["DEBUG", "WARNING"]


def test_warnings_of_one_handle_are_throttled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "penstock.tcp"), tcp.Publisher() as publisher:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as peer:
                peer.sendall(bytes(20))  # no header
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(1) == b""
    told = [record.getMessage() for record in caplog.records if "cannot be" in record.getMessage()]
    assert 1 <= len(told) <= BURST
    assert "more warnings were suppressed" in caplog.text, "the rest is told as a number"
