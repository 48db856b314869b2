"""Protocol version 0, byte for byte, with peers that know nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import tcp

from .plain import LONG, REQUEST, PlainPublisher, PlainSubscriber, payload


@pytest.fixture
def publisher() -> Iterator[tcp.Publisher]:
    with tcp.Publisher() as opened:
        yield opened


@pytest.fixture
def plain() -> Iterator[PlainPublisher]:
    opened = PlainPublisher()
    yield opened
    opened.close()


def test_our_publisher_to_a_plain_subscriber(publisher: tcp.Publisher) -> None:
    peer = PlainSubscriber(publisher.port)
    assert peer.socket.recv(13) == REQUEST  # the answer has the same bytes as the request
    assert publisher.wait_ready(1, LONG)
    publisher.publish(b"one")
    publisher.publish(b"")
    publisher.send([b"two", bytearray(b"three"), memoryview(b"four")])
    big = bytes(range(256)) * 4096
    publisher.publish(big)
    assert [peer.frame() for _ in range(4)] == [
        (12, 0, b"", b"one"),
        (12, 0, b"", b""),
        (12, 0, b"", b"twothreefour"),
        (12, 0, b"", big),
    ]
    peer.close()


def test_a_request_of_a_later_version_gets_0(publisher: tcp.Publisher) -> None:
    peer = PlainSubscriber(publisher.port, REQUEST[:-1] + b"\x07")
    assert peer.frame() == (12, 1, b"", b"\x00")
    peer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(bytes.fromhex("1000 01 00 0100000000000000 aabbccdd 00"), id="larger header"),
        pytest.param(bytes.fromhex("0300 01"), id="header of 3 bytes, no data"),
        pytest.param(bytes.fromhex("0500 01 ff 01 00"), id="half a data_size"),
        pytest.param(bytes.fromhex("0c00 01 ff 0100000000000000 00"), id="reserved bits set"),
        pytest.param(bytes.fromhex("0c00 09 00 0200000000000000 abcd") + REQUEST, id="unknown type first"),
        pytest.param(bytes.fromhex("0c00 01 00 0300000000000000 00 0102"), id="longer handshake"),
    ],
)
def test_requests_that_the_rules_allow(publisher: tcp.Publisher, request_bytes: bytes) -> None:
    peer = PlainSubscriber(publisher.port, request_bytes)
    assert peer.frame() == (12, 1, b"", b"\x00")
    assert publisher.wait_ready(1, LONG)
    publisher.publish(b"data")
    assert peer.frame() == (12, 0, b"", b"data")
    peer.close()


def test_our_subscriber_of_a_plain_publisher(plain: PlainPublisher) -> None:
    with tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", plain.port)
        connection, request = plain.accept()
        assert request[:4] == b"\x0c\x00\x01\x00" and request[12:17] == b"\x00PNSK", "a plain header, then fields"
        connection.sendall(payload(b"one") + payload(b"") + payload(b"three", header_size=300))
        messages = [subscriber.read(LONG) for _ in range(3)]
        assert [bytes(message) for message in messages if message is not None] == [b"one", b"", b"three"]
        assert [message.ordinal for message in messages if message is not None] == [1, 2, 3]
        assert all(message is not None and message.source is session for message in messages)
        assert messages[0] is not None and messages[0].channel == f"tcp://127.0.0.1:{plain.port}"
        connection.close()


def test_a_plain_request_is_13_bytes(plain: PlainPublisher) -> None:
    with tcp.Subscriber(extended=False) as subscriber:
        subscriber.add_session("127.0.0.1", plain.port)
        connection, request = plain.accept()
        assert request == REQUEST
        connection.close()


def test_frames_that_the_rules_allow(plain: PlainPublisher) -> None:
    """Unknown types are skipped whole, reserved bits ignored, left-out fields read as 0, one byte at a time."""
    stream = (
        payload(b"first")
        + payload(b"x" * 70_000, kind=77)
        + payload(b"reserved", reserved=255)
        + payload(b"", kind=1)
        + bytes.fromhex("0200")  # a header that leaves out everything: an empty payload
        + bytes.fromhex("0500 00 00 03")
        + b"abc"
        + payload(b"last", header_size=65535)
    )
    want = [b"first", b"reserved", b"", b"abc", b"last"]
    with tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", plain.port)
        connection, _ = plain.accept()
        connection.sendall(stream)
        for step in (1, 7, 12, 13, 1000):
            if step == 1:  # the long ones byte by byte would only be slow
                for i in range(17):
                    connection.sendall(payload(b"first")[i : i + 1])
                continue
            for i in range(0, len(stream), step):
                connection.sendall(stream[i : i + step])
        found = []
        while len(found) < 5 + 1 + 4 * 5:
            message = subscriber.read(LONG)
            assert message is not None
            found.append(bytes(message))
            del message
        assert found == want + [b"first"] + want * 4
        connection.close()


def test_more_than_was_asked_for_is_refused(plain: PlainPublisher) -> None:
    with tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", plain.port, max_reconnects=0)
        connection, _ = plain.accept(REQUEST[:-1] + b"\x01")
        assert not session.wait_connected(LONG)
        assert "version 1" in (session.last_error or "")
        assert connection.recv(1) == b""
        connection.close()
