"""Clients that vanish without a word: noticed within the time, their queues taken over, nothing lost."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.broker import AsyncClient, Client, ConnectionLimits, Server, liveness
from penstock.broker.client import link
from penstock.errors import ClosedError, RefusedError
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


def test_what_was_heard_just_before_a_probe_is_no_answer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, heard = 100.004, 100.001
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(liveness, "since_heard_s", lambda _: (int(now * 100) - int(heard * 100)) / 100)  # in ticks
    left, right = socket.socketpair()
    with left, right:
        peer = liveness.Liveness(left, 15.0)
        assert peer.probe() is None
        for now in (100.005, 100.009, 100.013, 100.5, 102.0):  # in the same tick and after it
            assert peer.probe() is None, now
        now = 104.0
        assert peer.probe() is False
        assert peer.probe() is None, "a new probe"
        heard, now = 104.9, 105.0
        assert peer.probe() is True


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
    slow.hello().send(b"SUB q topics=t credit=65536 exclusive\n")
    assert slow.line() == "OK"
    with Client(port=server.port) as client:
        client.publish_many("t", [bytes(65536)] * 100)  # more than the buffers between take
        deaf = next(found for found in server.connections.values() if found.session.subscriptions)
        until(lambda: liveness.unacknowledged_bytes(deaf.socket) > 0)
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 4.0)  # an absence can only be watched for a while
        assert deaf.descriptor in server.connections, "it reads nothing, but it is there"
        until(lambda: not liveness.owes_answer(deaf.socket), "its window is closed")
        monkeypatch.setattr(liveness, "since_heard_s", lambda _: 1e9)  # the kernel asks ever more seldom
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 4.0)
        assert deaf.descriptor in server.connections, "nothing was asked, so nothing is missing"
        with pytest.raises(RefusedError, match="exclusive"):
            client.subscribe("q", topics="t", exclusive=True)
        monkeypatch.setattr(liveness, "owes_answer", lambda _: True)
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
            monkeypatch.setattr(liveness, "owes_answer", lambda _: True)
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
            monkeypatch.setattr(liveness, "owes_answer", lambda _: True)
            deadline = time.monotonic() + LONG
            while client.connections < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            await client.ping()

    asyncio.run(talk())


def test_silence_with_something_under_way_is_noticed_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at three times in the time: whenever the peer vanished between two looks, the time is kept."""
    for offset_s in (0.1, 2.5, 4.9):
        now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: now)  # noqa: B023 (read at each call)
        with socket.socket() as sock:
            watched = liveness.Liveness(sock, 15.0)
        gone_at = now + offset_s
        monkeypatch.setattr(liveness, "owes_answer", lambda _: now > gone_at)  # noqa: B023
        monkeypatch.setattr(liveness, "since_heard_s", lambda _: max(0.0, now - gone_at))  # noqa: B023
        while not watched.silent():
            now += 5.0
        assert 8.0 <= now - gone_at <= 15.0


@pytest.mark.parametrize(("repeats", "owes"), [(0, False), (1, True)])
def test_what_is_sent_again_in_vain_is_owed(monkeypatch: pytest.MonkeyPatch, repeats: int, owes: bool) -> None:
    """Without a route, as when one's own cable is pulled, a repeat does not count as sent: the last data may be as old
    as the last acknowledgement for ever.
    """
    info = bytearray(104)
    info[2] = repeats
    info[24:28] = (1).to_bytes(4, sys.byteorder)  # one segment is not acknowledged
    for since_ms in (44, 52, 56):  # data sent, data received, acknowledged
        info[since_ms : since_ms + 4] = (20_000).to_bytes(4, sys.byteorder)
    monkeypatch.setattr(liveness, "_tcp_info", lambda _: bytes(info))
    with socket.socket() as sock:
        assert liveness.owes_answer(sock) is owes


def test_a_peer_that_is_heard_of_now_and_then_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(liveness, "owes_answer", lambda _: True)
    monkeypatch.setattr(liveness, "since_heard_s", lambda _: now % 9.0)  # every nine seconds
    with socket.socket() as sock:
        watched = liveness.Liveness(sock, 15.0)
    for _ in range(100):
        assert not watched.silent()
        now += 5.0


def test_a_server_without_anything_to_do_looks_in_time(serve: Callable[..., Server]) -> None:
    server = serve(connection_limits=ConnectionLimits(keepalive_s=3.0))
    with Client(port=server.port) as client:
        client.ping()
        until(lambda: server._observed)
        assert server._timeout() <= 1.0


def unanswering() -> socket.socket:
    """A port whose machine answers nothing: the queue of connections that wait to be accepted is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    return listener


def test_a_read_ends_when_no_connection_comes_about(serve: Callable[..., Server]) -> None:
    """The broker's machine vanishes and swallows what is sent to it: connecting is neither refused nor answered."""
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        consumer = client.subscribe("q", timeout=1.0)
    with unanswering() as listener:
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        consumer._link.port = port
        server.close()
        with pytest.raises(ClosedError, match="no connection"), ThreadPoolExecutor(1) as pool:
            pool.submit(consumer.read).result(LONG)
        for filler in fillers:
            filler.close()
    consumer.close()


def test_a_subscriber_has_its_clients_options(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port, timeout=7.0, reconnect=False, keepalive_s=3.0) as client:
        client.queue("q", topics="t")
        with client.subscribe("q") as consumer, client.subscribe("q", reconnect=True, timeout=8.0) as other:
            links = [found._link for found in (consumer, other)]
            told = [(link._reconnect, link._give_up_s, link._keepalive_s) for link in links]
            assert told == [(False, 7.0, 3.0), (True, 8.0, 3.0)]


def test_a_stopped_broker_of_a_group_is_left(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still takes connections and acknowledges what is sent, while another one may lead."""
    monkeypatch.setattr(link, "GROUP_SILENCE_S", 0.5)
    command = [sys.executable, "-m", "penstock", "broker", str(tmp_path / "stopped"), "0"]
    Server(tmp_path / "stopped", 0).close()
    shutil.copytree(tmp_path / "stopped", tmp_path / "second")  # of one journal, as the brokers of a group are
    second = serve(directory=tmp_path / "second")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            group = f"127.0.0.1:{first.stdout.readline().rpartition(':')[2].strip()},127.0.0.1"
            with Client(group, second.port) as asks, Client(group, second.port) as reads, Client(port=second.port) as other:
                other.queue("q", topics="news")
                consumer = reads.subscribe("q", topics="news")
                asks.publish("news", b"to the first")
                message = consumer.read(LONG)
                assert message is not None and bytes(message) == b"to the first"
                first.send_signal(signal.SIGSTOP)
                other.publish("news", b"to the second")
                asks.publish("news", b"asked")
                assert [bytes(one) for one in (consumer.read(LONG), consumer.read(LONG)) if one is not None] == [
                    b"to the second",
                    b"asked",
                ]
        finally:
            first.kill()
