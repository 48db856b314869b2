"""Clients that vanish without a word: noticed within the time, their queues taken over, nothing lost."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from penstock.broker import AsyncClient, Client, ConnectionLimits, Server, liveness
from penstock.errors import RefusedError
from tests.broker.conftest import LONG, Wire, until

TCP_REPAIR = 19


def vanish(wire: Wire) -> None:
    """Without FIN or RST, as in a power cut."""
    try:
        wire.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("TCP_REPAIR needs CAP_NET_ADMIN")
    wire.socket.close()


def consumed(server: Server, queue: str) -> None:
    until(lambda: queue in server.broker.queues and server.broker.queues[queue].consumers)


def test_who_comes_back_after_a_power_cut_is_in_and_loses_nothing(serve: Callable[..., Server]) -> None:
    server = serve()
    first = Wire(server.port).send(b"SUB edge\n")
    consumed(server, "edge")
    vanish(first)
    again = Wire(server.port).send(b"SUB edge\n")
    until(lambda: len(server.connections) == 1, "the dead one was found out, the new one is in")
    Wire(server.port).send(b"PUB 5\nfirstPUB 6\nsecond")
    again.exactly(b"firstsecond")
    again.close()


def test_what_was_written_to_a_dead_peer_is_not_lost(serve: Callable[..., Server]) -> None:
    server = serve()
    first = Wire(server.port).send(b"SUB edge\n")
    consumed(server, "edge")
    vanish(first)
    with Client(port=server.port) as client:
        client.publish("default", b"first")  # written to a socket whose peer is gone
        again = Wire(server.port).send(b"SUB edge\n")
        again.exactly(b"first")
        again.close()


@pytest.mark.parametrize(
    ("name", "subscribe"),
    [("raw", b"SUB raw\n"), ("none", b"HELLO 1\nSUB none topics=default ack=none\n")],
    ids=["raw", "none"],
)
def test_messages_are_taken_when_the_peers_tcp_has_them(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, name: str, subscribe: bytes
) -> None:
    server = serve()
    wire = Wire(server.port).send(subscribe)
    consumed(server, name)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.broker.connection.unacknowledged_bytes", lambda _: 1 << 40)
        with Client(port=server.port) as client:
            client.publish("default", b"under way")
            until(lambda: b"under way" in wire.socket.recv(65536, socket.MSG_PEEK))
            assert server.broker.queues[name].state.outstanding == 1, "the network may still lose it"
    until(lambda: server.broker.queues[name].state.outstanding == 0)
    wire.close()


def test_a_living_client_keeps_its_queue(serve: Callable[..., Server]) -> None:
    server = serve()
    holder = Wire(server.port).send(b"SUB edge\n")
    consumed(server, "edge")
    assert Wire(server.port).send(b"SUB edge\n").closed() == b""
    with Client(port=server.port) as client:
        with client.subscribe("alone", topics="t", exclusive=True), pytest.raises(RefusedError, match="exclusive"):
            client.subscribe("alone", topics="t")
        client.publish("default", b"x")
    holder.exactly(b"x")
    holder.close()


def test_a_peer_that_misses_its_probe_is_dropped_for_a_newcomer(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        holder = client.subscribe("alone", topics="t", exclusive=True, ack="manual", reconnect=False)
        client.publish("t", b"x")
        assert holder.read(LONG) is not None
        monkeypatch.setattr(liveness, "since_heard_s", lambda _: 1e9)  # the network eats everything
        with client.subscribe("alone", topics="t", exclusive=True) as newcomer:
            assert bytes(newcomer.read(LONG) or b"") == b"x", "what the dead one held comes again"
        holder.close()


def test_a_silent_peer_is_dropped_and_a_slow_one_is_not(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(connection_limits=ConnectionLimits(keepalive_s=1.0))
    slow = Wire(server.port)
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.hello().send(b"SUB q topics=t credit=65536\n")
    assert slow.line() == "OK"
    with Client(port=server.port) as client:
        client.publish_many("t", [bytes(65536)] * 100)  # more than the buffers between take
        deaf = next(found for found in server.connections.values() if found.session.subscriptions)
        until(lambda: liveness.unacknowledged_bytes(deaf.socket) > 0)
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 4.0)  # an absence can only be watched for a while
        assert deaf.descriptor in server.connections, "it reads nothing, but it is there"
        monkeypatch.setattr(liveness, "since_heard_s", lambda _: 1e9)
        until(lambda: deaf.descriptor not in server.connections)
    slow.close()


def test_a_client_notices_that_its_broker_is_gone(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        with client.subscribe("q", keepalive_s=1.0) as consumer:
            before = consumer._link.connections
            monkeypatch.setattr(liveness, "since_heard_s", lambda _: 1e9)
            monkeypatch.setattr(liveness, "unacknowledged_bytes", lambda _: 1)
            assert consumer.read(2.5) is None
            until(lambda: consumer.read(0.1) is None and consumer._link.connections > before)


def test_an_asyncio_client_notices_that_its_broker_is_gone(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    async def talk() -> None:
        async with AsyncClient(port=server.port, keepalive_s=1.0) as client:
            await client.ping()
            monkeypatch.setattr(liveness, "since_heard_s", lambda _: 1e9)
            monkeypatch.setattr(liveness, "unacknowledged_bytes", lambda _: 1)
            deadline = time.monotonic() + LONG
            while client.connections < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            await client.ping()

    asyncio.run(talk())
