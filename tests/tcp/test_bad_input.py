"""Peers that break the protocol, on purpose or not: they alone are closed, with a reason, a counter and no memory."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import penstock
from penstock import tcp

from .plain import HEADER, LONG, REQUEST, PlainPublisher, PlainSubscriber, payload
from .test_sessions import eventually

HUGE = HEADER.pack(12, 0, 0, 1 << 62)


def errors_of(kind: str, name: str) -> int:
    """The counter of errors, as the monitor sees it."""
    from penstock import _core

    found = [row for row in _core.counters_read() if row["kind"] == kind and row["name"] == name]
    return int(found[0]["errors"])


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(HEADER.pack(12, 1, 0, 1 << 62), id="announces 2^62 bytes"),
        pytest.param(b"\x00\x00" + bytes(20), id="header_size 0"),
        pytest.param(b"\x01\x00" + bytes(20), id="header_size 1"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 1000, id="text"),
        pytest.param(payload(b"data"), id="a payload"),
        pytest.param(payload(b"", kind=9) * 20, id="only unknown types"),
        pytest.param(b"\xff" * 70_000, id="all ones"),
    ],
)
def test_a_publisher_closes_the_offender_alone(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        with socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as peer:
            try:
                peer.sendall(garbage)
                assert peer.recv(100) == b""
            except ConnectionError:
                pass  # closed with unread bytes: a reset
        eventually(lambda: errors_of("publisher", publisher.address) == 1)
        assert "closed:" in caplog.text
        publisher.publish(b"others go on")
        assert subscriber.read(LONG) == b"others go on"


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        pytest.param(HUGE, "max_message_size", id="announces 2^62 bytes"),
        pytest.param(HEADER.pack(12, 77, 0, 1 << 62), "max_message_size", id="2^62 of an unknown type"),
        pytest.param(b"\x00\x00", "header", id="header_size 0"),
        pytest.param(b"\x01\x00", "header", id="header_size 1"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3000, "", id="text"),
    ],
)
def test_a_subscriber_closes_the_offender_alone(garbage: bytes, reason: str) -> None:
    plain = PlainPublisher()
    with tcp.Publisher() as publisher, tcp.Subscriber(reconnect_delay=LONG) as subscriber:
        bad = subscriber.add_session("127.0.0.1", plain.port)
        connection, _ = plain.accept()
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        connection.sendall(payload(b"good") + garbage)
        assert subscriber.read(LONG) == b"good"
        eventually(lambda: subscriber.read(0) is None and not bad.connected)
        assert reason in (bad.last_error or "")
        publisher.publish(b"others go on")
        assert subscriber.read(LONG) == b"others go on"
        assert subscriber.held_bytes < 1 << 20
        connection.close()
    plain.close()


@pytest.mark.parametrize("garbage", [b"\x00\x00", HUGE], ids=["header_size 0", "announces 2^62 bytes"])
def test_a_bad_frame_behind_skipped_ones_ends_the_connection_too(garbage: bytes) -> None:
    """A batch stops before it; the next read tells, and the session connects again."""
    plain = PlainPublisher()
    with tcp.Subscriber(reconnect_delay=0.01, name="skipping") as subscriber:
        subscriber.add_session("127.0.0.1", plain.port)
        first, _ = plain.accept()
        first.sendall(payload(b"good") + payload(b"of no known type", kind=9) + garbage)
        assert list(subscriber.read_many(10, LONG)) == [b"good"]
        assert not subscriber.read_many(10, 0)
        second, _ = plain.accept()
        second.sendall(payload(b"again"))
        assert list(subscriber.read_many(10, LONG)) == [b"again"]
        assert errors_of("subscriber", "skipping") == 1
        first.close()
        second.close()
    plain.close()


def test_a_vchan_id_beyond_its_type_is_a_bad_header() -> None:
    """Ids are int32: one more than the largest stands in the header as 2^31."""
    with tcp.Publisher() as publisher, socket.create_server(("127.0.0.1", 0)) as listener:
        plain_port = listener.getsockname()[1]
        listener.settimeout(LONG)
        with tcp.Subscriber(reconnect_delay=LONG) as subscriber:
            bad = subscriber.add_session("127.0.0.1", plain_port)
            connection, _ = listener.accept()
            with connection, socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as between:
                connection.settimeout(LONG)
                between.sendall(connection.recv(65536))
                connection.sendall(between.recv(65536))
                eventually(lambda: bad.connected)
                frame = struct.pack("<HBBQQqQII", 44, 0, 0, 1, 1, 1, 0, 1 << 31, 0) + b"x"
                connection.sendall(frame)
                eventually(lambda: subscriber.read(0) is None and not bad.connected)
                assert "header" in (bad.last_error or "")


def test_text_instead_of_an_answer() -> None:
    plain = PlainPublisher()
    with tcp.Subscriber(handshake_timeout=0.3) as subscriber:
        session = subscriber.add_session("127.0.0.1", plain.port, max_reconnects=0)
        connection, _ = plain.accept(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
        with pytest.raises(penstock.ClosedError):
            subscriber.read(LONG)
        assert session.last_error
        connection.close()
    plain.close()


def test_memory_grows_only_as_bytes_arrive() -> None:
    plain = PlainPublisher()
    with tcp.Subscriber(max_message_size=4 << 30) as subscriber:
        subscriber.add_session("127.0.0.1", plain.port)
        connection, _ = plain.accept()
        before = psutil.Process().memory_info().rss
        connection.sendall(HEADER.pack(12, 0, 0, 3 << 30) + bytes(1 << 20))
        for _ in range(20):
            assert subscriber.read(0.02) is None
        assert psutil.Process().memory_info().rss - before < 24 << 20
        assert subscriber.held_bytes <= 64 << 20
        connection.close()
    plain.close()


def test_a_message_of_just_the_largest_size_passes() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber(max_message_size=100_000, reconnect_delay=LONG) as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(bytes(100_000))
        message = subscriber.read(LONG)
        assert message is not None and len(message) == 100_000
        publisher.publish(bytes(100_001))
        eventually(lambda: subscriber.read(0) is None and not session.connected)
        assert "max_message_size=100000" in (session.last_error or "")


def test_large_messages_grow_through_every_size() -> None:
    """Past the 16 MiB from which an announcement is believed only as far as bytes have come."""
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        from threading import Thread

        for size in (1, 131_000, 131_072, 1 << 20, (16 << 20) + 1, 50_000_000):
            data = random.Random(size).randbytes(size)
            thread = Thread(target=publisher.publish, args=(data,))
            thread.start()
            message = subscriber.read(LONG)
            thread.join()
            assert message == data
            del message


def test_held_messages_have_a_bound() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber(max_message_size=1 << 20, held_bytes=8 << 20) as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        from threading import Thread

        sent = [bytes([i]) * (1 << 20) for i in range(16)]
        thread = Thread(target=lambda: [publisher.publish(data) for data in sent])
        thread.start()
        held = []
        with pytest.raises(penstock.CapacityError, match="held_bytes"):
            while len(held) < 16:
                held.append(subscriber.read(LONG))
        assert held == sent[: len(held)]
        first = len(held)
        held.clear()
        for data in sent[first:]:  # nothing was lost by it
            assert subscriber.read(LONG) == data
        thread.join()


def test_a_handshake_that_never_comes() -> None:
    with tcp.Publisher(handshake_timeout=0.1) as publisher:
        with socket.create_connection(("127.0.0.1", publisher.port), timeout=LONG) as peer:
            peer.send(REQUEST[:5])
            with contextlib.suppress(ConnectionResetError):  # closed before the bytes were read
                assert peer.recv(1) == b""
        eventually(lambda: errors_of("publisher", publisher.address) == 1)


def test_an_answer_that_never_comes() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with tcp.Subscriber(handshake_timeout=0.1) as subscriber:
        session = subscriber.add_session("127.0.0.1", silent.getsockname()[1], max_reconnects=0)
        with pytest.raises(penstock.ClosedError):
            subscriber.read(LONG)
        assert "no handshake within 0.1 s" in (session.last_error or "")
    silent.close()


def test_10000_connections_that_say_nothing() -> None:
    """From another process. Those that wait longest are closed, a real subscriber still gets in, memory stays flat."""
    count = 10_000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < count + 200:
        pytest.skip(f"this machine allows {hard} descriptors a process; {count + 200} are needed")
    with tcp.Publisher(handshake_timeout=LONG) as publisher:
        before = psutil.Process().memory_info().rss
        program = str(Path(__file__).with_name("silent_connections.py"))
        child = subprocess.Popen(
            [sys.executable, program, str(publisher.port), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == f"{count}\n"
        with tcp.Subscriber() as subscriber:
            subscriber.add_session("127.0.0.1", publisher.port)
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"still served")
            assert subscriber.read(LONG) == b"still served"
        assert publisher.subscriber_count <= 1
        assert psutil.Process().memory_info().rss - before < 60 << 20
        assert len(publisher._joining) <= 1025
        child.communicate("\n", timeout=LONG)


def test_a_peer_that_reads_one_byte_at_a_time() -> None:
    with tcp.Publisher() as publisher:
        peer = PlainSubscriber(publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"abc", b"defg"])
        data = b""
        while len(data) < 13 + 12 + 3 + 12 + 4:
            data += peer.socket.recv(1)
        assert data == REQUEST + payload(b"abc") + payload(b"defg")
        peer.close()


def test_a_peer_that_sends_its_handshake_one_byte_at_a_time() -> None:
    with tcp.Publisher() as publisher:
        peer = PlainSubscriber(publisher.port, b"")
        for i in range(len(REQUEST)):
            if i == len(REQUEST) // 2:  # in the midst of it another one comes, and is served
                with tcp.Subscriber() as subscriber:
                    subscriber.add_session("127.0.0.1", publisher.port)
                    assert publisher.wait_ready(1, LONG)
                    publisher.publish(b"not held up")
                    assert subscriber.read(LONG) == b"not held up"
                eventually(lambda: publisher.subscriber_count == 0)
            peer.socket.sendall(REQUEST[i : i + 1])
            time.sleep(0.001)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"you too")
        assert peer.frame()[1] == 1 and peer.frame()[3] == b"you too"
        peer.close()
