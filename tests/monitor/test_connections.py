"""Connections to the monitor: silent, slow and unread ones end, and keep nobody out."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import ClosedError, InvalidArgument

pytest.importorskip("starlette")

from penstock.monitor import connections, server
from penstock.monitor.service import Service

from .test_server import certificate_of, get

HEAD = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(every_s=0.2, allow_actions=True) as running:
        running.start()
        yield running


def connected(service: Service, data: bytes = b"") -> socket.socket:
    peer = urllib.parse.urlsplit(service.url)
    assert peer.hostname is not None
    connection = socket.socket()
    connection.settimeout(30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read stays with the server
    connection.connect((peer.hostname, peer.port or 0))
    connection.sendall(data)
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the server ends the connection, before anything of it is read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(30_000))


@pytest.mark.parametrize("head", [b"", HEAD + b"X-Slow: "])
def test_a_head_that_does_not_come_ends_the_connection(
    service: Service, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with connected(service, head) as slow:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if head:
                    slow.sendall(b"a")  # a byte now and then is no head
                if select.select([slow], [], [], 0.05)[0] and slow.recv(100) == b"":
                    return
            except OSError:
                return
    raise AssertionError("the server waits for ever")


def test_a_handshake_that_does_not_come_ends_the_connection(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    certificate, key = certificate_of("127.0.0.1", tmp_path)
    with Service(certificate=certificate, key=key) as page:
        page.start()
        with connected(page) as silent:
            assert is_cut_off(silent)


def test_a_request_that_is_served_has_no_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    with connected(service, HEAD + b"\r\n") as stream:
        read = stream.makefile("rb")
        assert sum(line.startswith(b"data: {") for line in (read.readline() for _ in range(40))) > 2


def test_silent_connections_keep_nobody_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    with contextlib.ExitStack() as opened:
        stream = opened.enter_context(connected(service, HEAD + b"\r\n"))
        assert stream.recv(12) == b"HTTP/1.1 200"
        silent = [opened.enter_context(connected(service)) for _ in range(30)]
        assert get(service.url + "health")[0] == 200
        assert all(is_cut_off(one) for one in silent[:20]), "those that came first give way"
        assert stream.recv(1 << 16), "what is served stays"


def test_where_all_are_served_a_new_one_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(connected(service, HEAD + b"\r\n")) for _ in range(2)]
        assert [stream.recv(12) for stream in streams] == [b"HTTP/1.1 200"] * 2
        with contextlib.suppress(ConnectionResetError):  # cut off even before it was connected
            assert is_cut_off(opened.enter_context(connected(service)))


def test_pages_have_a_bound_and_give_their_place_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PAGES", 2)
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(connected(service, HEAD + b"\r\n")) for _ in range(2)]
        assert [stream.recv(12) for stream in streams] == [b"HTTP/1.1 200"] * 2
        status, body, _ = get(service.url + "api/events")
        assert (status, b"2 pages are open" in body) == (503, True)
        assert get(service.url + "health")[0] == 200
    deadline = time.monotonic() + 30
    while True:
        with connected(service, HEAD + b"\r\n") as stream:
            if stream.recv(12) == b"HTTP/1.1 200":
                return
        assert time.monotonic() < deadline, "the pages are closed, and count for ever"


def test_an_answer_that_nobody_reads_ends_the_connection(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    for second in range(200):
        service.watcher.history.add(float(second), {f"rate/in/{number}": 123456.789 for number in range(1000)})
    with connected(service, b"GET /api/history HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as unread:
        assert is_cut_off(unread)


def test_a_long_answer_is_whole(service: Service) -> None:
    for second in range(50):
        service.watcher.history.add(float(second), {f"rate/in/{number}": 123456.789 for number in range(1000)})
    status, body, headers = get(service.url + "api/history")
    assert (status, len(body)) == (200, int(headers["content-length"]))
    assert len(body) > 4 * server.PIECE_BYTES


@pytest.mark.parametrize(("left", "cut"), [(100, True), (120, True), (60, False)])
def test_who_takes_something_is_not_cut_off(left: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    watched: list[int] = []
    monkeypatch.setattr(connections.Connection, "_cut_off", lambda _: ends.append(1))
    connection = connections.Connection.__new__(connections.Connection)
    connection.transport = type("Transport", (), {"get_write_buffer_size": lambda _: left})()
    connection.loop = type("Loop", (), {"call_later": lambda *given: watched.append(given[-1])})()
    connection._writing_goes_on(100)
    assert (ends, watched) == (([1], []) if cut else ([], [left]))


def test_a_body_that_does_not_come_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.3)
    peer = urllib.parse.urlsplit(service.url)
    assert peer.hostname is not None
    connection = http.client.HTTPConnection(peer.hostname, peer.port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/api/actions/pause")
        connection.putheader("X-Penstock-Action", "1")
        connection.putheader("Content-Length", "60000")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408


@pytest.mark.parametrize(
    "options",
    [
        {"every_s": 0}, {"every_s": -1}, {"every_s": float("nan")}, {"every_s": float("inf")}, {"every_s": 1e-9},
        {"every_s": "often"}, {"every_s": True}, {"port": -1}, {"port": 70000}, {"port": "x"}, {"port": True},
        {"token": 5}, {"token": ""},
    ],
)  # fmt: skip
def test_what_a_monitor_is_told_is_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Service(**options)


def test_an_ended_monitor_says_so() -> None:
    service = Service()
    with service:
        service.start()
    service.close()
    for call in (service.start, service.run):
        with pytest.raises(ClosedError, match="has ended"):
            call()
