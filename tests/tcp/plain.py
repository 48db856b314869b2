"""A peer of plain version 0, written from the byte tables alone: what the reference's programs put on the wire."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("<HBBQ")
REQUEST = bytes.fromhex("0c000100010000000000000000")
LONG = 30.0


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError(f"closed after {len(data)} of {size} bytes: {data!r}")
        data += more
    return data


class PlainSubscriber:
    """Connects, asks, reads frames."""

    def __init__(self, port: int, request: bytes = REQUEST, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), timeout=LONG)
        self.socket.sendall(request)

    def frame(self) -> tuple[int, int, bytes, bytes]:
        """Header size, type, bytes of the header beyond 12, data."""
        size, kind, reserved, length = HEADER.unpack(receive(self.socket, 12))
        assert reserved == 0
        return size, kind, receive(self.socket, size - 12), receive(self.socket, length)

    def close(self) -> None:
        self.socket.close()


class PlainPublisher:
    """Listens, answers, sends whatever it is told."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(LONG)
        self.port: int = self.listener.getsockname()[1]

    def accept(self, answer: bytes = REQUEST) -> tuple[socket.socket, bytes]:
        """A connection that has been answered, and its request."""
        connection, _ = self.listener.accept()
        connection.settimeout(LONG)
        size, _, _, length = HEADER.unpack(head := receive(connection, 12))
        request = head + receive(connection, size - 12 + length)
        connection.sendall(answer)
        return connection, request

    def close(self) -> None:
        self.listener.close()


def payload(data: bytes, header_size: int = 12, kind: int = 0, reserved: int = 0) -> bytes:
    """A frame with a header of any size from 12 up."""
    return HEADER.pack(header_size, kind, reserved, len(data)) + b"\xee" * (header_size - 12) + data
