"""A client of a broker at a port of another kind is told so at once, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock import RefusedError
from penstock.broker import Client

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
