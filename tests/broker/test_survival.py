"""What goes wrong with one client or one message is never the end of all, and holds up nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock._core.broker import QueueState
from penstock.broker import AsyncClient, Client, Server, Subscriber
from penstock.broker.queue import NO_DEADLINE
from penstock.errors import ClosedError
from penstock.journal import Journal
from tests.broker.conftest import LONG, Wire, until
from tests.broker.test_security import certificate


def spoil(server: Server, directory: Path, data: bytes) -> None:
    """Damages the stored message that begins with ``data``."""
    (path,) = [path for path in directory.glob("*.log") if data in path.read_bytes()]
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, b"?", path.read_bytes().index(data))
    os.close(file)


def state_of(server: Server, queue: str) -> str:
    return str(server.broker.queues[queue].counters.snapshot()["state"])


def test_clients_that_reset_before_the_handshake_end_nothing(serve: Callable[..., Server], tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    server = serve(certificate=chain, key=key)
    for number in range(50):
        rude = socket.create_connection(("127.0.0.1", server.port), LONG)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 2:
            rude.send(b"?")
        rude.close()
    with Client(port=server.port, tls=chain) as client:
        client.ping()


def test_a_damaged_message_stops_its_queue_and_nothing_else(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.queue("other", topics="u")
        positions = [client.publish("t", b"message-%d" % i) for i in range(4)]
        spoil(server, tmp_path / "broker", b"message-2")
        with client.subscribe("q") as consumer, client.subscribe("other") as unharmed:
            assert [bytes(consumer.read(LONG) or b"") for _ in range(2)] == [b"message-0", b"message-1"]
            until(lambda: "damaged" in state_of(server, "q"), "the queue says why it stands still")
            client.publish("u", b"goes on")
            assert bytes(unharmed.read(LONG) or b"") == b"goes on"
            client.seek("q", position=positions[3])
            assert bytes(consumer.read(LONG) or b"") == b"message-3"


def test_a_damaged_message_that_is_due_again_holds_up_no_other(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish("late", b"delayed-0", delay_s=0.3)
        for i in range(3):
            client.publish("t", b"message-%d" % i)
        consumer = client.subscribe("q", ack="manual")
        for _ in range(3):
            assert consumer.read(LONG) is not None
        spoil(server, tmp_path / "broker", b"message-1")
        spoil(server, tmp_path / "broker", b"delayed-0")
        consumer.close()
        with client.subscribe("q", ack="manual") as again:
            assert [bytes(again.read(LONG) or b"") for _ in range(2)] == [b"message-0", b"message-2"]
            until(lambda: "damaged" in state_of(server, "q"))
        client.queue("r", topics="v")
        client.publish("v", b"after", delay_s=0.3)  # after the damaged one was due
        with client.subscribe("r") as unharmed:
            assert bytes(unharmed.read(LONG) or b"") == b"after"


def test_who_needs_no_acknowledgement_is_done_with_what_comes_again_too(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"%d" % i for i in range(100)])
        with Subscriber(port=server.port, queue="q", ack="manual") as consumer:
            got = 0
            while got < 100:
                got += len(consumer.read_many(100, LONG))
            client.ping()
    server.close()
    server = serve()
    wire = Wire(server.port)
    wire.hello().send(b"SUB q credit=10 ack=none\n")
    assert wire.line() == "OK"
    for i in range(100):
        assert wire.line().startswith(f"MSG q t {i + 1} ")
        wire.exactly(b"%d\n" % i)
    until(lambda: server.broker.queues["q"].state.outstanding == 0, "all of it is done")
    wire.close()


def test_deadlines_in_any_order() -> None:
    state = QueueState(1)
    state.look_from(10)
    for position in (1, 2, 3, 4):
        state.put_back(position, 0, 0)
    assert state.redeliver(1, 7, NO_DEADLINE)  # to one who needs no acknowledgements
    assert state.redeliver(2, 8, 1000)
    assert state.redeliver(3, 8, 50)  # after its time-out was made shorter, or the clock set back
    assert state.redeliver(4, 8, 2000)
    assert state.next_time_ns == 50
    assert state.expire(49) == 0
    assert state.expire(60) == 1 and [position for position, _ in state.due(60, 10)] == [3]
    assert state.redeliver(3, 8, 100) and state.acknowledge(8, 3, 3) == 1
    assert state.expire(1000) == 1 and state.expire(3000) == 1
    assert [position for position, _ in state.due(3000, 10)] == [2, 4]
    assert state.acknowledge(0, 1, 9) == 3 and state.next_time_ns > 1 << 62


def test_a_reader_that_is_heard_keeps_what_waits_behind() -> None:
    state = QueueState(1)
    state.look_from(10)
    for position in range(1, 7):
        state.put_back(position, 0, 0)
        assert state.redeliver(position, 8 if position != 4 else 9, 100)
    assert state.acknowledge(8, 1, 1) == 1
    state.heard(8, 1, 1, 150)
    assert state.expire(100) == 1 and state.due(100, 10) == [(4, 1)], "only what another holds, of whom nothing was heard"
    assert state.acknowledge(8, 3, 3) == 1
    state.heard(8, 3, 3, 190)  # 2 is passed over: somebody is at it
    assert state.expire(189) == 0 and state.in_flight == 3
    assert state.acknowledge(8, 5, 5) == 1
    state.heard(8, 5, 5, 250)
    assert state.expire(200) == 1 and [position for position, _ in state.due(200, 10)] == [4, 2], "2 had its time"
    assert state.expire(249) == 0 and state.expire(250) == 1, "6 waits as long as its reader is heard, and no longer"
    state.heard(8, 5, 5, 300)
    state.drop_consumer(8, 260)
    assert state.redeliver(6, 8, 270) and state.expire(270) == 1, "another reader under the same number is not heard yet"


def test_closing_ends_what_tasks_wait_for() -> None:
    async def ask_and_close() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = AsyncClient(port=silent.getsockname()[1], timeout=10 * LONG)
            asked = [asyncio.create_task(client.ping()) for _ in range(3)]
            await asyncio.sleep(0)
            client.close()
            for task in asked:
                with pytest.raises(ClosedError):
                    await asyncio.wait_for(task, LONG)

    asyncio.run(ask_and_close())


def test_a_publisher_goes_on_when_its_broker_ends_gracefully(serve: Callable[..., Server], tmp_path: Path) -> None:
    """What comes in while the broker waits for its consumers is not stored, and sent again to the next one."""
    server = serve(drain_s=LONG)
    with Client(port=server.port, timeout=LONG) as client, ThreadPoolExecutor() as pool:
        client.queue("q", topics="t")
        client.publish("t", b"first")
        with client.subscribe("q", ack="manual") as consumer:
            assert bytes(consumer.receive(timeout=LONG)) == b"first"
            server.stop()
            until(lambda: server.draining)
            publishing = pool.submit(client.publish_many, "t", [b"second", b"third"])
            until(lambda: publishing.done() or len(server.connections) == 1)  # that of the consumer
        server.close()
        server = serve(port=server.port)
        first, last = publishing.result(LONG)
        assert last == first + 1
        client.publish("t", b"fourth")
    server.close()
    with Journal(tmp_path / "broker", mode="read") as journal:
        stored = [bytes(message) for message in journal.read_many(1, 100) if message.channel == "t"]
    assert stored == [b"first", b"second", b"third", b"fourth"]
