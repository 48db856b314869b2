"""A client of a broker at a port of another kind is told so at once, in words; one of a group goes on to the others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import RefusedError
from penstock.broker import Client, Server
from penstock.broker.fetch import RangeClient

LONG = 60.0


def publish(address: str) -> Any:
    return penstock.publisher(address, timeout=LONG)


def subscribe(address: str) -> Any:
    return penstock.subscriber(address, timeout=LONG)


def call(address: str) -> Any:
    with penstock.client(address) as client:
        return client.call(b"x", timeout=LONG)


def ask(address: str) -> Any:
    with Client(port=int(address.split("/")[2].split(":")[1]), timeout=LONG) as client:
        return client.ping()


@pytest.mark.parametrize("use", [publish, subscribe, call, ask])
def test_at_the_port_of_a_publisher(use: Callable[[str], Any]) -> None:
    with penstock.publisher("tcp://127.0.0.1:0", handshake_timeout=2 * LONG) as publisher:
        with pytest.raises(RefusedError, match="published at this port, there is no broker"):
            use(f"broker://127.0.0.1:{publisher.port}/t?queue=q")  # type: ignore[attr-defined]
        with penstock.subscriber(publisher.address) as subscriber:  # type: ignore[attr-defined]
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"others are served")
            assert subscriber.receive(LONG) == b"others are served"


@pytest.mark.parametrize("use", [publish, subscribe])
def test_at_the_port_of_a_server_of_calls(use: Callable[[str], Any]) -> None:
    with penstock.server("tcp://127.0.0.1:0", bytes) as server:
        with pytest.raises(RefusedError, match="answered at this port, there is no broker"):
            use(f"broker://127.0.0.1:{server.port}/t?queue=q")
        with penstock.client(server.address) as client:
            assert client.call(b"others are served", timeout=LONG) == b"others are served"


class _Pages(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["pages", "publisher", "calls"])
def other(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server of another kind."""
    with contextlib.ExitStack() as stack:
        if request.param == "publisher":
            yield stack.enter_context(penstock.publisher("tcp://127.0.0.1:0")).port  # type: ignore[attr-defined]
        elif request.param == "calls":
            yield stack.enter_context(penstock.server("tcp://127.0.0.1:0", bytes)).port
        else:
            pages = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Pages))
            thread = threading.Thread(target=pages.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(pages.shutdown)
            yield pages.server_port


def test_the_others_of_a_group_are_tried(other: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server(tmp_path, 0).start() as broker:
        group = f"127.0.0.1:{other},127.0.0.1:{broker.port}"
        with (
            penstock.publisher(f"broker://{group}/t", timeout=LONG) as publisher,
            penstock.subscriber(f"broker://{group}/t", timeout=LONG) as subscriber,
            Client(group, timeout=LONG) as client,
        ):
            publisher.publish(b"one")
            assert subscriber.receive(LONG) == b"one"
            client.ping()
        with RangeClient(group, timeout=LONG) as reader:
            assert reader.fetch(1, 10).count == 1
    told = [record.message for record in caplog.records if f"127.0.0.1:{other} is no broker" in record.message]
    assert 1 <= len(told) <= 3, "once by each client that comes there"


def test_what_listens_there_is_told_when_none_of_a_group_leads(other: int, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        group = f"127.0.0.1:{nobody.getsockname()[1]},127.0.0.1:{other}"
        with Client(group, timeout=1.0) as client, pytest.raises(TimeoutError) as failed:
            client.ping()
        assert "leads at the moment" in str(failed.value) and f"127.0.0.1:{other}: " in str(failed.value)
        with pytest.raises(ConnectionError, match="leads at the moment"):
            RangeClient(group, timeout=0.1)
