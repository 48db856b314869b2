"""A host that nobody knows is told by its name, in the same words wherever a name is resolved."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.address import parse
from penstock.broker import Client
from penstock.broker.endpoint import listen
from penstock.broker.fetch import RangeClient
from penstock.cli.silence import refuse_nobody
from penstock.errors import InvalidArgument, RefusedError, describe
from penstock.recording.recorder import _reach_broker
from penstock.replica.client import Client as StoreClient
from penstock.resolving import UnresolvedError, resolving
from penstock.tcp.explain import explain, unreached

LONG = 60.0
RESOLVE = socket.getaddrinfo


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Knows neither ``nohost`` nor, at the moment, ``later``; a name such as ``a..b`` never gets so far."""

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "nohost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host == "later":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return RESOLVE(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def raised(act: Callable[[], Any]) -> str:
    with pytest.raises((OSError, penstock.PenstockError)) as found:
        act()
    return describe(found.value)


def subscribed(host: str) -> str:
    with penstock.subscriber(f"tcp://{host}:5000") as subscriber:
        return unreached(subscriber, time.monotonic() + LONG)


def called(host: str) -> str:
    with penstock.client(f"tcp://{host}:5000") as client:
        return raised(lambda: client.call(b"x", timeout=LONG))


def asked(host: str) -> str:
    with Client(host, 5000, timeout=0.2) as client:
        return raised(client.ping)


def asked_of_a_group(host: str) -> str:
    return asked(f"{host}:1,{host}")


def listened_for_pages(host: str) -> str:
    pytest.importorskip("uvicorn", reason="the extra monitor is not installed")
    from penstock.monitor.service import _listen

    return raised(lambda: _listen(host, 5000))


PLACES: dict[str, Callable[[str], str]] = {
    "tcp subscriber": subscribed,
    "tcp publisher": lambda host: raised(lambda: penstock.publisher(f"tcp://{host}:5000", insecure=True)),
    "client of calls": called,
    "server of calls": lambda host: raised(lambda: penstock.server(f"tcp://{host}:5000", bytes, insecure=True)),
    "why": lambda host: next(explain(parse(f"tcp://{host}:5000"))).text,
    "broker": lambda host: raised(lambda: listen(host, 5000)),
    "client of a broker": asked,
    "client of brokers": asked_of_a_group,
    "reader of ranges": lambda host: raised(lambda: RangeClient(host, 5000, timeout=0.2)),
    "recorder": lambda host: raised(lambda: _reach_broker(f"broker://{host}:5000/t", 0.0)),
    "page": listened_for_pages,
    "store": lambda host: raised(StoreClient([(host, 4222)]).connection),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_named_everywhere(place: str) -> None:
    for host in ("nohost", "a..b"):
        told = PLACES[place](host)
        assert f"the host {host} is not known" in told and "rrno" not in told and "nknown error" not in told
    assert "the host later cannot be resolved: Temporary failure" in PLACES[place]("later")


def test_it_is_named_by_nats() -> None:
    pytest.importorskip("nats", reason="nats-py is not installed")
    assert raised(lambda: penstock.subscriber("nats://nohost/s")).endswith("nohost:4222: the host nohost is not known")


def test_a_command_does_not_wait_for_a_broker_that_can_never_answer() -> None:
    with pytest.raises(RefusedError, match="the host nohost is not known"):
        refuse_nobody(parse("broker://nohost:5000/t"))
    refuse_nobody(parse("broker://later:5000/t"))  # which may be resolved in a moment


def test_only_the_numbers_of_the_system_are_explained() -> None:
    assert describe(OSError(socket.EAI_NONAME, "no such name")) == "no such name"
    assert describe(OSError(errno.EIO, "it broke")) == f"it broke ({os.strerror(errno.EIO)})"
    with pytest.raises(UnresolvedError) as found, resolving("x"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert found.value.unknown and found.value.errno == socket.EAI_NONAME and isinstance(found.value, OSError)
    with pytest.raises(InvalidArgument, match="cannot listen at nohost:1: the host nohost is not known"):
        listen("nohost", 1)
