"""Every request has exactly one answer, whatever it is and however it is refused; and answers are what a broker says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import AsyncClient, Client, Limits, Server, Subscriber
from penstock.broker.client.dialogue import Dialogue
from penstock.broker.client.link import MAY_WAIT, RETRY_S
from penstock.broker.protocol import _DATA_VERBS, VERBS
from penstock.errors import ClosedError, PenstockError, ProtocolError, RefusedError
from penstock.journal import Journal
from tests.broker.conftest import Wire, loaded, until
from tests.broker.test_disk_failures import Failing

#: verb: requests that are served, and requests that are refused; each is (bytes, number of requests)
SERVED: dict[str, list[tuple[bytes, int]]] = {
    "PUB": [(b"PUB t 1\nx", 1), (b"PUB t 1\nxPUB t 1\ny", 2), (b"PUB t 1 id=a\nxPUB t 1 id=a\nx", 2),
            (b"PUB t 1 delay_ms=60000\nxPUB u 1 delay_ms=60000\ny", 2)],
    "STAGE": [(b"STAGE a t 1\nxSTAGE a t 1\ny", 2)],
    "LOAD": [(loaded("a", "t", b"x"), 1), (loaded("a", "t", b"x") * 3, 3)],
    "COMMIT": [(b"STAGE b t 1\nxCOMMIT b staged=1\n", 2)],
    "ABORT": [(b"ABORT a\n", 1)],
    "SUB": [(b"SUB new topics=none\n", 1)],
    "UNSUB": [(b"SUB q topics=none\nUNSUB q\n", 2)],
    "CREDIT": [(b"CREDIT q 5\n", 0)],
    "ACK": [(b"ACK q 5\n", 0), (b"ACK q 5 confirm\n", 1)],
    "NACK": [(b"NACK q 5\n", 0)],
    "QUEUE": [(b"QUEUE r topics=none\n", 1)],
    "SEEK": [(b"SEEK spare from_position=1\n", 1)],
    "PURGE": [(b"PURGE spare\n", 1)],
    "PAUSE": [(b"PAUSE spare\n", 1)],
    "RESUME": [(b"RESUME spare\n", 1)],
    "DELETE": [(b"DELETE spare\n", 1)],
    "REDRIVE": [(b"REDRIVE spare\n", 1)],
    "LIST": [(b"LIST\n", 1)],
    "STATS": [(b"STATS\n", 1)],
    "PEERS": [(b"PEERS t\n", 1)],
    "SCHEMA": [(b"SCHEMA t\n", 1), (b"SCHEMA t all\n", 1), (b"SCHEMA t 1 eyJkZWZpbml0aW9uIjp7fSwiZW5jb2RpbmciOiJqc29uIiwibmFtZSI6IlgifQ==\nSCHEMA t 1 eyJkZWZpbml0aW9uIjp7fSwiZW5jb2RpbmciOiJqc29uIiwibmFtZSI6IlgifQ==\n", 2)],
    "FETCH": [(b"FETCH 1 5\n", 1)],
    "PING": [],  # the end of each of these
}  # fmt: skip
REFUSED: dict[str, list[tuple[bytes, int]]] = {
    "PUB": [(b"PUB t 2000\n" + bytes(2000), 1), (b"PUB t 1 nonsense=1\nxPUB t 1 nonsense=1\nx", 2), (b"PUB t 1 id=\nx", 1),
            (b"PUB t 1 delay_ms=60000\nx" * 3, 3), (b"PUB fifth 1\nxPUB fifth 1\ny", 2), (b"PUB t 900\n" + bytes(900), 1)],
    "STAGE": [(b"".join(b"STAGE a t 900\n" + bytes(900) for _ in range(6)), 6), (b"STAGE $ t 1\nxSTAGE $ t 1\ny", 2)],
    "LOAD": [(b"LOAD a 3\nabc", 1), (loaded("a", "fifth", b"x") * 2, 2), (loaded("a", "t", bytes(900)) * 6, 6)],
    "COMMIT": [(b"COMMIT\n", 1), (b"COMMIT a missing\n", 1), (b"COMMIT b\n", 1),
               (b"STAGE c t 1\nxCOMMIT c staged=2\n", 2), (b"COMMIT c staged=x\n", 1)],
    "ABORT": [(b"ABORT\n", 1)],
    "SUB": [(b"SUB\n", 1), (b"SUB $q\n", 1), (b"SUB q nonsense=1\n", 1), (b"SUB held\n", 1)],
    "UNSUB": [(b"UNSUB none\n", 1)],
    "QUEUE": [(b"QUEUE\n", 1), (b"QUEUE q topics=a..b\n", 1), (b"QUEUE spare create topics=other\n", 1)],
    "SEEK": [(b"SEEK none from_position=1\n", 1), (b"SEEK spare from_position=1 from_time_ns=1\n", 1)],
    "PURGE": [(b"PURGE none\n", 1)],
    "PAUSE": [(b"PAUSE none\n", 1)],
    "RESUME": [(b"RESUME none\n", 1)],
    "DELETE": [(b"DELETE none\n", 1), (b"DELETE held\n", 1)],
    "REDRIVE": [(b"REDRIVE none\n", 1)],
    "PEERS": [(b"PEERS *\n", 1)],
    "SCHEMA": [(b"SCHEMA *\n", 1), (b"SCHEMA t 1\n", 1), (b"SCHEMA t 5 eyJkZWZpbml0aW9uIjp7fSwiZW5jb2RpbmciOiJqc29uIiwibmFtZSI6IlgifQ==\n", 1), (b"SCHEMA t 1 nonsense\n", 1)],
    "FETCH": [(b"FETCH x 1\n", 1)],
}  # fmt: skip


def test_the_tables_name_every_verb() -> None:
    assert set(SERVED) == {*VERBS, *_DATA_VERBS} - {"HELLO", "BYE", "SHUTDOWN"}


def count_answers(connection: Wire) -> int:
    """How many requests were answered before the PONG."""
    answered = 0
    while (line := connection.line()) != "PONG":
        verb, _, rest = line.partition(" ")
        if verb == "DATA":
            size = int(rest) + 1
            while len(connection.buffer) < size:
                connection.buffer += connection.socket.recv(65536)
            connection.buffer = connection.buffer[size:]
        first, dash, last = rest.partition("-")
        many = int(rest) if verb == "STAGED" else int(last) - int(first) + 1 if verb == "OK" and dash else 1
        answered += many
    return answered


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("data", "requests", "refused"),
    [(data, number, False) for cases in SERVED.values() for data, number in cases]
    + [(data, number, True) for cases in REFUSED.values() for data, number in cases],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else None,
)  # fmt: skip
def test_each_request_has_one_answer(
    serve: Callable[..., Server], data: bytes, requests: int, refused: bool, version: int
) -> None:
    limits = Limits(max_message_bytes=1000, max_staged_bytes=4000, max_delayed=2, max_topics=8)
    full = refused and data.startswith(b"PUB t 900")
    server = serve(limits=limits, max_message_bytes=1000)
    with Client(port=server.port) as other:
        other.queue("spare", topics="none")
        for topic in ("t", "u", "third"):
            other.publish(topic, b"1")
        holder = other.subscribe("held", topics="none", exclusive=True)
        if refused:
            limits.max_topics = 3
        limits.quota_bytes = 1 if full else 0
        connection = Wire(server.port).send(b"HELLO %d\n" % version)
        assert connection.line().startswith(f"HELLO {version} ")
        connection.send(data + b"\nPING\n" if b"\n" in data[:-1] and not data.endswith(b"\n") else data + b"PING\n")
        assert count_answers(connection) == requests
        connection.close()
        holder.close()


@pytest.mark.parametrize("version", [1, 2])
def test_each_request_has_one_answer_when_the_commit_fails(serve: Callable[..., Server], version: int) -> None:
    disk = Failing()
    server = serve(disk=disk)
    connection = Wire(server.port).send(b"HELLO %d\n" % version)
    connection.line()
    connection.send(b"QUEUE q topics=t\nPING\n")
    assert count_answers(connection) == 1
    disk.write_error = errno.ENOSPC
    connection.send(b"PUB t 1\na" * 7 + b"PUB t 1 id=x\nb" * 3 + b"QUEUE r topics=t\nSUB s topics=t\nPURGE q\nLIST\nZ")
    told: list[str] = []
    while len(told) < 14:
        told.append(connection.line())
        if told[-1].startswith("DATA"):
            connection.line()
    assert [line.split()[0] for line in told] == ["ERR"] * 14 or told[-1].startswith("DATA")
    disk.write_error = 0
    assert connection.send(b"\n").closed().startswith(b"ERR closing unknown verb")


def test_a_refused_stage_shifts_no_other_answer(tmp_path: Path) -> None:
    async def talk() -> None:
        server = Server(tmp_path / "broker", 0, limits=Limits(max_staged_bytes=3000)).start()
        async with AsyncClient(port=server.port, timeout=60) as client:
            staged, published, ponged, made = await asyncio.gather(
                client.stage("tx", "t", [b"x" * 2000] * 3),
                client.publish("t", b"A"),
                client.ping(),
                client.queue("q", topics="t"),
                return_exceptions=True,
            )
            assert isinstance(staged, RefusedError) and (published, ponged, made) == (1, None, None)
            await asyncio.to_thread(server.close)
            again = Server(tmp_path / "broker", server.port).start()
            assert [await client.publish("t", b"B"), await client.publish("t", b"C")] == [2, 3]
        await asyncio.to_thread(again.close)

    asyncio.run(talk())
    with Journal(tmp_path / "broker", mode="read") as journal:
        assert [bytes(message) for message in journal.read_many(1, 10)] == [b"A", b"B", b"C"]


# --- positions after a reconnect


def told(dialogue: Dialogue, data: bytes) -> None:
    dialogue.scanner.feed(data)
    while dialogue.step():
        pass


def test_positions_after_a_lost_confirm() -> None:
    dialogue = Dialogue()
    dialogue.connected()
    told(dialogue, b"HELLO 2 journal=x last=0\n")
    pending = dialogue.publish("t", [b"a"] * 10)
    dialogue.disconnected()
    dialogue.connected()
    told(dialogue, b"HELLO 2 journal=x last=4 positions=1-4\n")
    told(dialogue, b"OK 7-12\n")
    assert pending.result() == (1, 12)
    pending = dialogue.publish("t", [b"a"] * 3)
    dialogue.disconnected()
    dialogue.connected()
    told(dialogue, b"HELLO 2 journal=x last=13 positions=1-4,7-13,20-21\n")
    assert pending.result() == (13, 21)
    pending = dialogue.publish("t", [b"a"] * 3)
    dialogue.disconnected()
    dialogue.connected()
    told(dialogue, b"HELLO 1 journal=x last=16\n")
    assert pending.result() == (None, None), "an older broker does not tell them"


def test_an_older_broker_is_greeted_as_it_wants() -> None:
    dialogue = Dialogue()
    dialogue.connected()
    assert bytes(dialogue.outgoing() or b"").startswith(b"HELLO 2 ")
    pending = dialogue.ask("PING")
    told(dialogue, b"ERR closing this broker speaks version 1: HELLO 1\n")
    dialogue.disconnected()
    dialogue.connected()
    assert bytes(dialogue.outgoing() or b"").startswith(b"HELLO 1 ")
    told(dialogue, b"HELLO 1 journal=x\nPONG\n")
    assert pending.result() == ("PONG", "")


# --- a server that lies


def lying(answers: list[bytes]) -> int:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            for answer in answers:
                file.readline()
                connection.sendall(answer)
            file.read()

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


HELLO = b"HELLO 2 journal=x last=0\n"


@pytest.mark.parametrize(
    ("answers", "act"),
    [
        ([b"HELLO 2 journal=x last=abc\n"], lambda client: client.ping()),
        ([b"HELLO 2 journal=x max_message_bytes=-1\n"], lambda client: client.ping()),
        ([b"HELLO\n", b"PONG\n"], lambda client: client.ping()),
        ([b"HELLO 2\n", b"PONG\n"], lambda client: client.ping()),
        ([b"HELLO x journal=x\n", b"PONG\n"], lambda client: client.ping()),
        ([HELLO, b"ERR\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"ERR\n"], lambda client: client.ping()),
        ([b"HELLO 2 journal=x last=1 positions=7-3\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"OK abc\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"OK 7-3\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"OK 1-9\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"OK\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"PONG\n"], lambda client: client.publish("t", b"x")),
        ([HELLO, b"STAGED abc\n"], lambda client: client.stage("t", "t", [b"x"])),
        ([HELLO, b"STAGED 9\n"], lambda client: client.stage("t", "t", [b"x"])),
        ([HELLO, b"OK\n"], lambda client: client.stage("t", "t", [b"x"])),
        ([HELLO, b"OK abc\n"], lambda client: client.purge("q")),
        ([HELLO, b"OK\n"], lambda client: client.purge("q")),
        ([HELLO, b"DATA 3\nabc\n"], lambda client: client.queues()),
        ([HELLO, b"DATA 2\n{}\n"], lambda client: client.queues()),
        ([HELLO, b"DATA 2\n[]\n"], lambda client: client.statistics()),
        ([HELLO, b"OK\n"], lambda client: client.queues()),
        ([HELLO, b"OK 5\n"], lambda client: client.queue("q")),
        ([HELLO, b"PEERS 1\n"], lambda client: client.peers("t")),
        ([HELLO, b"COMMITTED x-y\n"], lambda client: client.commit("t")),
        ([HELLO, b"OK\n"], lambda client: client.ping()),
        ([HELLO, b"HELLO 2 journal=x\n"], lambda client: client.ping()),
        ([HELLO, b"\xff\xfe\n"], lambda client: client.ping()),
        ([HELLO, b"MSG q t 1 1 1 1 x\n"], lambda client: client.ping()),
    ],
    ids=lambda value: repr(value[-1])[2:40] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("reconnect", [True, False])
def test_a_malformed_answer_is_a_protocol_error(
    answers: list[bytes], act: Callable[[Client], Any], reconnect: bool
) -> None:
    with Client(port=lying(answers), timeout=60, reconnect=reconnect) as client, pytest.raises(ProtocolError):
        act(client)


@pytest.mark.parametrize("wrong", [b"MSG q t x 1 1 1 1\nx\n", b"WHAT 1\n", b"DATA x\n"])
def test_a_subscriber_leaves_a_connection_that_breaks_the_protocol(wrong: bytes) -> None:
    """It goes on with another one, or says why it does not."""
    with (
        Subscriber("127.0.0.1", lying([HELLO, b"OK\n" + wrong]), queue="q", reconnect=False) as subscriber,
        pytest.raises(ClosedError, match="invalid answer of the broker"),
    ):
        subscriber.read(60)
    again = threading.Event()

    def serve(listener: socket.socket) -> None:
        for answer in (b"OK\n" + wrong, b"OK\nMSG q t 1 1 1 1 4\ngood\n"):
            connection, _ = listener.accept()
            with connection.makefile("rb") as file:
                for line in (HELLO, answer):
                    file.readline()
                    connection.sendall(line)
                if b"good" in answer:
                    again.wait(60)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with Subscriber("127.0.0.1", listener.getsockname()[1], queue="q") as subscriber:
            message = subscriber.read(60)
            again.set()
            assert message is not None and bytes(message) == b"good"
        thread.join(60)


def test_a_broker_that_keeps_breaking_the_protocol_is_asked_ever_more_seldom() -> None:
    """It greets each time, which is no reason to hurry."""
    connections: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while len(connections) < 6:
                connections.append(listener.accept()[0])
                with connections[-1].makefile("rb") as file:
                    for line in (HELLO, b"OK\nWHAT 1\n"):
                        file.readline()
                        connections[-1].sendall(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with Subscriber("127.0.0.1", listener.getsockname()[1], queue="q") as subscriber:
            until(lambda: subscriber.read(0.05) is None and len(connections) >= 5)
            assert subscriber._link._pause > 8 * RETRY_S[0]
    for connection in connections:
        connection.close()


def test_who_waits_in_vain_is_told_what_the_broker_said() -> None:
    """Until the broker has answered something, also while there is another connection."""
    with Client(port=1) as client:
        dialogue = client._dialogue
        dialogue.connected()
        told(dialogue, HELLO + b"ERR closing no room: try again\n")
        dialogue.disconnected()
        dialogue.connected()
        told(dialogue, HELLO)
        assert client._link.silence(3).endswith("within 3 s; it closed the connection before: no room: try again")
        dialogue.ask("PING")
        told(dialogue, b"PONG\n")
        assert client._link.silence(3).endswith(f"did not answer within 3 s; {MAY_WAIT}")


def test_at_the_quota_many_publishes_under_way_are_refused_at_once(tmp_path: Path) -> None:
    async def publish() -> list[Any]:
        async with AsyncClient(port=server.port, timeout=60) as client:
            found = await asyncio.gather(*(client.publish("t", b"x") for _ in range(200)), return_exceptions=True)
            await client.ping()
            return [*found, client.connections]

    with Server(tmp_path / "broker", 0, limits=Limits(quota_bytes=1)).start() as server:
        *found, connections = asyncio.run(publish())
    assert all(isinstance(error, PenstockError) and "quota" in str(error) for error in found)
    assert connections < 10


def test_nothing_waits_for_another_answer(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.ping()
        until(lambda: client._dialogue.idle)


@pytest.mark.parametrize("topics", [b"\xff", b"a..b", b"a*", b">.a"])
def test_topics_that_cannot_be_are_refused_before_they_are_used(serve: Callable[..., Server], topics: bytes) -> None:
    """Also where the queue exists and messages wait in it, which are counted by the new topics."""
    server = serve()
    wire = Wire(server.port).send(b"HELLO 1\nQUEUE q topics=t\nPUB t 3\nabc\n")
    assert [wire.line().split()[0] for _ in range(3)] == ["HELLO", "OK", "OK"]
    wire.send(b"QUEUE q topics=" + topics + b"\nPING\n")  # the message is stored by now
    refused, alive = wire.line(), wire.line()
    assert refused.startswith("ERR bad_name") and alive.startswith("PONG"), (refused, alive)
    assert server.internal_errors == 0
    wire.socket.close()
