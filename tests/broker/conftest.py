from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import Client, Server
from penstock.broker.ranges import encode_entry, encode_head

LONG = 30.0
TOKENS = """
[[token]]
name = "north"
token = "secret-north"
publish = ["sensors.north.>"]
subscribe = ["sensors.>"]
queues = ["north-*"]

[[token]]
name = "root"
sha256 = "{digest}"
publish = [">"]
subscribe = [">"]
manage = true
statistics = true
shutdown = true
"""


class Wire:
    """A bare socket that speaks lines: what nc is."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LONG)
        self.buffer = b""

    def send(self, data: bytes) -> Wire:
        self.socket.sendall(data)
        return self

    def exactly(self, data: bytes) -> None:
        """The next bytes are these."""
        while len(self.buffer) < len(data):
            more = self.socket.recv(65536)
            assert more, f"closed after {self.buffer!r}, before {data!r}"
            self.buffer += more
        assert self.buffer[: len(data)] == data
        self.buffer = self.buffer[len(data) :]

    def line(self) -> str:
        while b"\n" not in self.buffer:
            more = self.socket.recv(65536)
            assert more, f"closed after {self.buffer!r}"
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()

    def stored(self, first: int, last: int) -> None:
        """A row of PUBs is answered, by one OK or by several: as many as the broker took turns."""
        at = first
        while at <= last:
            answer = self.line()
            begin, _, end = answer.removeprefix("OK ").partition("-")
            assert answer.startswith("OK ") and int(begin) == at, answer
            at = int(end or begin) + 1
        assert at == last + 1, answer

    def hello(self, options: str = "") -> Wire:
        self.send(f"HELLO 1 {options}".encode() + b"\n")
        assert self.line().startswith("HELLO 1 journal=")
        return self

    def nothing(self, seconds: float = 0.2) -> None:
        """Nothing comes. An absence can only be watched for a while."""
        assert not self.buffer
        self.socket.settimeout(seconds)
        with pytest.raises(TimeoutError):
            raise AssertionError(f"unexpected {self.socket.recv(65536)!r}")
        self.socket.settimeout(LONG)

    def closed(self) -> bytes:
        """What still comes until the server closes."""
        found = self.buffer
        try:
            while more := self.socket.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        return found

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts brokers on the test's directory; all are closed at the end."""
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        server = Server(options.pop("directory", tmp_path / "broker"), options.pop("port", 0), **options).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS.format(digest=hashlib.sha256(b"secret-root").hexdigest()))
    path.chmod(0o600)
    return path


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture
def wire(server: Server) -> Iterator[Callable[[], Wire]]:
    """Opens bare connections to the broker."""
    opened: list[Wire] = []

    def connect() -> Wire:
        opened.append(Wire(server.port))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(port=server.port) as opened:
        yield opened


def loaded(transaction: str, topic: str, data: bytes) -> bytes:
    """LOAD of a range with one message."""
    text = encode_head(1, [topic]) + encode_entry(0, len(data), 0, 0, 0) + data
    return f"LOAD {transaction} {len(text)}\n".encode() + text + b"\n"


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until something is so; fails after LONG."""
    deadline = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never: {what or condition}"
        time.sleep(0.005)
    return found
