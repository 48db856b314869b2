"""What a consumer has said before it goes counts, whatever was sent to it and not read."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

import pytest

from penstock.broker import Client, Server
from penstock.broker.protocol import VERBS, Protocol
from penstock.broker.queue import Queue
from tests.broker.conftest import LONG, Wire, until

COUNT, READ = 3_000, 500


def begun(client: Client, queue: str) -> int:
    """The first position of messages that fill more than the buffers between broker and consumer take at once."""
    client.queue(queue, topics="t")
    return client.publish_many("t", [bytes(1000)] * COUNT)[0]


@pytest.mark.parametrize("mode", ["manual", "read", "next"])
def test_what_was_acknowledged_before_close_is_done(server: Server, client: Client, mode: str) -> None:
    for round_ in range(8):
        queue = f"{mode}-{round_}"
        first = begun(client, queue)
        with client.subscribe(queue, ack=mode) as consumer:
            for _ in range(READ):
                message = consumer.read(LONG)
                assert message is not None
                if mode == "manual":
                    consumer.ack(message)
        until(lambda queue=queue: not server.broker.queues[queue].consumers)
        assert server.broker.queues[queue].state.floor - first == READ
        with client.subscribe(queue, ack="manual") as consumer:
            again = consumer.read(LONG)
            assert again is not None and again.position == first + READ
            if mode != "manual":
                assert consumer.deliveries(again) == 1, "what was sent ahead and not read is no delivery"


def test_what_is_due_again_goes_first_however_short_a_turn_is(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = Queue.pump
    monkeypatch.setattr(Queue, "pump", lambda queue, now, _, exhausted: pump(queue, now, lambda: True, exhausted))
    first = begun(client, "q")
    with client.subscribe("q", ack="manual") as consumer:
        assert consumer.read(LONG) is not None
    until(lambda: not server.broker.queues["q"].consumers)
    with client.subscribe("q", ack="manual") as consumer:
        found = [consumer.read(LONG) for _ in range(20)]
    assert [message and message.position for message in found] == list(range(first, first + 20))


def test_acknowledgements_of_a_client_that_was_killed_count(server: Server, client: Client) -> None:
    """Its kernel resets the connection, as there is something unread; what had come before that is still there."""
    for round_ in range(8):
        queue = f"killed-{round_}"
        first = begun(client, queue)
        wire = Wire(server.port)
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        wire.hello().send(f"SUB {queue} credit={COUNT}\n".encode())
        assert wire.line() == "OK"
        until(lambda queue=queue: server.broker.queues[queue].state.in_flight >= READ)
        wire.send(b"".join(b"ACK %s %d\n" % (queue.encode(), first + number) for number in range(READ)))
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.close()
        until(lambda queue=queue: not server.broker.queues[queue].consumers)
        assert server.broker.queues[queue].state.floor - first == READ


@pytest.mark.parametrize("hello", [b"SUB q\n", b"HELLO 2\nSUB q topics=default ack=none\n"], ids=["raw", "none"])
def test_a_consumer_that_resets_with_much_under_way_is_gone(server: Server, client: Client, hello: bytes) -> None:
    wire = Wire(server.port)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    wire.send(hello)
    until(lambda: "q" in server.broker.queues and server.broker.queues["q"].consumers)
    client.publish_many("default", [bytes(10_000)] * 1000)
    until(lambda: any(found.unacknowledged for found in server.connections.values()))
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()
    until(lambda: len(server.connections) == 1, "the client's own is left")
    assert client.queues()[0]["depth"] > 0, "what its TCP had not acknowledged is not done"


def test_a_consumer_whose_broker_stands_still_closes_all_the_same(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("q", topics="t")
    consumer = client.subscribe("q")
    monkeypatch.setattr("penstock.broker.client.link.FAREWELL_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Server, "_read", lambda *_: None)  # it takes nothing in any more
        consumer.close()
    assert consumer.closed


def test_nobody_works_for_the_questions_of_a_client_that_is_gone(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        client.queue(f"q{number}", topics="t")
    wire = Wire(server.port)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.hello().send(b"LIST\n" * 3000)
    until(lambda: any(connection.paused() for connection in server.connections.values()))
    asked: list[int] = []
    ask = Protocol.list_queues
    monkeypatch.setitem(
        VERBS, "LIST", replace(VERBS["LIST"], method=lambda *rest: asked.append(1) or ask(*rest))  # type: ignore[func-returns-value]
    )
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()
    until(lambda: len(server.connections) == 1)
    assert len(asked) < 100


def test_nothing_is_waited_for_from_a_consumer_that_has_ended_and_then_reset(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(server.port).send(b"SUB q\n")
    until(lambda: "q" in server.broker.queues and server.broker.queues["q"].consumers)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.broker.connection.unacknowledged_bytes", lambda _: 1)  # of the last message
        client.publish("default", b"x")
        wire.exactly(b"x")
        consumer = next(found for found in server.connections.values() if found.session.subscriptions)
        wire.socket.shutdown(socket.SHUT_WR)
        until(lambda: consumer.ending and consumer.unacknowledged, "its acknowledgement is waited for")
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.close()
        until(lambda: consumer.descriptor not in server.connections, "none will come")
        assert client.queues()[0]["depth"] == 1
