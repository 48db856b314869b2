"""A million inputs for the protocol and the native scanner: no crash, no unknown error, no memory that grows."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time

import psutil
import pytest

from penstock import tcp
from penstock._core import tcp as native
from penstock.errors import PenstockError
from penstock.tcp.protocol import Answer, Negotiation, Request, handshake

INPUTS = 1_000_000
HEADER = struct.Struct("<HBBQ")
SIZES = (0, 1, 2, 3, 11, 12, 13, 28, 44, 76, 77, 65535)
LENGTHS = (0, 1, 2, 64, 1023, 1024, 1025, 1 << 31, 1 << 62, (1 << 64) - 1)


def make(rng: random.Random) -> bytes:
    """Mostly frames that are nearly right, sometimes noise, cut and flipped."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        choice = rng.random()
        if choice < 0.3:
            parts.append(rng.randbytes(rng.randrange(30)))
        elif choice < 0.5:
            parts.append(handshake(rng.randrange(3)))
        else:
            length = rng.choice(LENGTHS)
            header = HEADER.pack(rng.choice(SIZES), rng.randrange(5), rng.randrange(256), length)
            parts.append(header + rng.randbytes(rng.randrange(40)) + bytes(min(length, 100)))
    data = bytearray(b"".join(parts))
    for _ in range(rng.randrange(3)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data)


@pytest.mark.timeout(0)
def test_a_million_inputs(seed: int) -> None:
    rng = random.Random(seed)
    before = psutil.Process().memory_info().rss
    for number in range(INPUTS):
        data = make(rng)
        native.scan_frames(data, 1024, number % 2 == 0)
        side: Negotiation = Request() if number % 2 else Answer(b"t" if number % 4 else None)
        at = 0
        try:
            while at < len(data):
                step = data[at : at + side.needs]
                at += len(step)
                if side.feed(step) is not None:
                    break
        except PenstockError:
            pass
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.timeout(0)
def test_garbage_over_real_connections(seed: int) -> None:
    """Streams of garbage into a subscriber's native reader, beside a publisher whose messages must all arrive."""
    rng = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0))
    with tcp.Publisher() as publisher, tcp.Subscriber(reconnect_delay=0.001, reconnect_delay_max=0.002) as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        good = subscriber.sessions[0]
        subscriber.add_session("127.0.0.1", listener.getsockname()[1])
        assert publisher.wait_ready(1, 30)
        sent = received = 0
        end = time.monotonic() + 30
        while time.monotonic() < end:
            connection, _ = listener.accept()
            connection.settimeout(5)
            connection.recv(200)
            with contextlib.suppress(OSError):
                connection.sendall(handshake(0) + b"".join(make(rng) for _ in range(20)))
            publisher.publish(b"%d" % sent)
            sent += 1
            connection.close()
            while (message := subscriber.read(0.005)) is not None:
                received += message.source is good
        while received < sent:
            message = subscriber.read(30)
            assert message is not None
            received += message.source is good
    listener.close()
