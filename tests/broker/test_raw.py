"""The compatible mode: the reference's protocol to the byte, under any segmentation."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Server

from .conftest import Wire, until


def settled(server: Server, queue: str, consumers: int = 1) -> None:
    """The broker has taken note: raw clients get no reply to wait for."""
    until(lambda: queue in server.broker.queues and len(server.broker.queues[queue].consumers) == consumers)


def test_the_session_of_the_reference(wire: Callable[[], Wire]) -> None:
    connection = wire().send(b"SUB Hello\nPUB 6\nWorld\n")
    connection.exactly(b"World\n")
    connection.nothing()


def test_no_reply_to_anything(wire: Callable[[], Wire], server: Server) -> None:
    connection = wire().send(b"SUB q\n")
    settled(server, "q")
    connection.nothing()
    other = wire().send(b"PUB 3\nabc")
    connection.exactly(b"abc")
    other.nothing()
    other.send(b"BYE\n")
    assert other.closed() == b""


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_any_segmentation(wire: Callable[[], Wire], server: Server, step: int) -> None:
    connection = wire().send(b"SUB q\n")
    settled(server, "q")
    payloads = [b"", b"\n", b"PUB 3\n", bytes(range(256)), b"x" * 300, b"BYE\n"]
    stream = b"".join(
        b"PUB %d%s\n%s%s" % (len(p), b" \r" * (i % 2), p, b"\n" * (i % 3 == 0)) for i, p in enumerate(payloads)
    )
    publisher = wire()
    for at in range(0, len(stream), step):
        publisher.send(stream[at : at + step])
    connection.exactly(b"".join(payloads))
    connection.nothing()


def test_a_thousand_in_one_segment(wire: Callable[[], Wire], server: Server) -> None:
    connection = wire().send(b"SUB q\n" + b"".join(b"PUB %d\n%d" % (len(str(i)), i) for i in range(1000)))
    connection.exactly(b"".join(b"%d" % i for i in range(1000)))


def test_random_segmentation(wire: Callable[[], Wire], server: Server, seed: int) -> None:
    chooser = random.Random(seed)
    connection = wire().send(b"SUB q\n")
    settled(server, "q")
    payloads = [chooser.randbytes(chooser.choice([0, 1, 10, 1000, 70_000])) for _ in range(200)]
    stream = b"".join(b"PUB %d\n%s%s" % (len(p), p, chooser.choice([b"", b"\n"])) for p in payloads)
    # a payload that begins with a newline after the optional one is part of the data, so all of it must arrive
    publisher = wire()
    at = 0
    while at < len(stream):
        size = chooser.choice([1, 5, 100, 10_000, 300_000])
        publisher.send(stream[at : at + size])
        at += size
    connection.exactly(b"".join(payloads))


@pytest.mark.parametrize(
    "line",
    [
        b"NO\n", b"PUB -1\n", b"PUB x\n", b"PUB\n", b"PUB +\n", b"PUB +-3\n", b"PUB 99999999999999999999\n", b"PUB 4294967297\n",
        b"SUB\n", b"SUB a\nSUB b\n", b"SUB \t \n", b"\n", b"pub 1\nx",
        b"\x00\x01\x02\x03\n", b"x" * 10_000, b"BYE now\n", b"? default\n", b"! x\n", b"# x\n",
    ],
)  # fmt: skip
def test_errors_close(wire: Callable[[], Wire], server: Server, line: bytes) -> None:
    bystander = wire().send(b"SUB bystander\n")
    settled(server, "bystander")
    assert wire().send(line).closed() == b""
    wire().send(b"PUB 2\nok")
    bystander.exactly(b"ok")


@pytest.mark.parametrize(
    "line",
    [b"PUB  3\n", b"PUB\t3\n", b"PUB3\n", b"PUB 3 x\n", b"PUB 3;\n", b"PUB +3\n", b"PUB \t +3 \r\n", b"PUB 003\n"],
)
def test_lengths_as_the_reference_reads_them(wire: Callable[[], Wire], server: Server, line: bytes) -> None:
    connection = wire().send(b"SUB q\n")
    settled(server, "q")
    wire().send(line + b"abc" + b"PUB 2\nde")
    connection.exactly(b"abcde")


@pytest.mark.parametrize(
    ("line", "queue"),
    [
        (b"SUB  q\n", "q"), (b"SUB\tq\n", "q"), (b"SUBq\n", "q"), (b"SUB q\t\r\n", "q"),
        (b"SUB q x\n", "compatible.q%20x"), (b"SUB a..b\n", "compatible.a%2E%2Eb"), (b"SUB .a\n", "compatible.%2Ea"),
        (b"SUB *\n", "compatible.%2A"), (b"SUB >\n", "compatible.%3E"), (b"SUB $1\n", "compatible.%241"),
        (b"SUB \xff\xfe\n", "compatible.%FF%FE"), (b"SUB $dead.pay\n", "compatible.%24dead%2Epay"),
    ],
)  # fmt: skip
def test_queue_names_as_the_reference_reads_them(
    wire: Callable[[], Wire], server: Server, line: bytes, queue: str
) -> None:
    connection = wire().send(line)
    until(lambda: server.broker.queues)
    (found,) = server.broker.queues
    assert found == queue
    wire().send(b"PUB 1\nx")
    connection.exactly(b"x")


def test_odd_names_survive_a_restart_and_reach_no_dead_letters(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("pay", topics="t", max_tries=1)
        client.publish("t", b"secret")
        with client.subscribe("pay", ack="manual") as consumer:
            message = consumer.read(30)
            assert message is not None
            consumer.nack(message)
            until(lambda: "pay.dead" in server.broker.queues)
    odd = Wire(server.port).send(b"SUB $dead.pay\n")
    until(lambda: len(server.broker.queues) == 3)
    odd.nothing()
    odd.close()
    long = Wire(server.port).send(b"SUB " + b"\xff" * 255 + b"\n")
    until(lambda: len(server.broker.queues) == 4)
    long.close()
    Wire(server.port).send(b"PUB 4\nkept").close()
    until(lambda: server.broker.store.next > 3)
    server.close()
    server = serve()
    for name in (b"$dead.pay", b"\xff" * 255):
        wire = Wire(server.port).send(b"SUB " + name + b"\n")
        wire.exactly(b"kept")
        wire.close()


def test_names_of_255_bytes_and_utf8(wire: Callable[[], Wire], server: Server) -> None:
    for name in (b"n" * 255, "Grüße-\u6c34".encode()):
        connection = wire().send(b"SUB %s\n" % name)
        settled(server, name.decode())
        wire().send(b"PUB 1\nx")
        connection.exactly(b"x")
        connection.close()


def test_a_queue_collects_with_nobody_connected(wire: Callable[[], Wire], server: Server) -> None:
    first = wire().send(b"SUB q\n")
    settled(server, "q")
    first.close()
    settled(server, "q", 0)
    publisher = wire()
    for i in range(2000):
        publisher.send(b"PUB 5\n%05d" % i)
    wire().send(b"SUB q\n").exactly(b"".join(b"%05d" % i for i in range(2000)))


def test_one_client_a_queue(wire: Callable[[], Wire], server: Server, client: Client) -> None:
    first = wire().send(b"SUB q\n")
    settled(server, "q")
    assert wire().send(b"SUB q\n").closed() == b""
    hello = wire().hello().send(b"SUB q\n")
    assert hello.line().startswith("ERR busy ")
    wire().send(b"PUB 1\nx")
    first.exactly(b"x")
    first.close()
    settled(server, "q", 0)
    wire().send(b"SUB q\n").nothing()


def test_a_new_queue_starts_after_its_first_sub(wire: Callable[[], Wire], client: Client) -> None:
    client.publish("default", b"before")
    connection = wire().send(b"SUB late\nPUB 5\nafter")
    connection.exactly(b"after")


def test_what_was_partly_written_is_sent_again_from_its_start(wire: Callable[[], Wire], server: Server) -> None:
    message = bytes(range(256)) * (1 << 16)  # 16 MiB: more than socket buffers hold
    first = wire().send(b"SUB q\n")
    settled(server, "q")
    wire().send(b"PUB %d\n" % len(message) + message)
    assert first.socket.recv(1000)
    first.close()
    settled(server, "q", 0)
    wire().send(b"SUB q\n").exactly(message)


def test_shutdown_ends_the_server(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    connection = Wire(server.port)
    connection.send(b"SUB q\nPUB 3\nabc").exactly(b"abc")
    connection.send(b"PUB 4\nlastSHUTDOWN\n")
    assert connection.closed() == b"last"
    until(lambda: server._thread is not None and not server._thread.is_alive())
    again = serve()
    late = Wire(again.port)
    late.send(b"SUB q\nPUB 1\nx").exactly(b"x")
    late.close()
    connection.close()


def test_a_publish_that_never_completes_leaves_nothing(
    wire: Callable[[], Wire], client: Client, server: Server
) -> None:
    queue = wire().send(b"SUB q\n")
    settled(server, "q")
    before = client.statistics()["next"]
    broken = wire().send(b"PUB 1000000\n" + b"x" * 500_000)

    def held() -> int:
        return sum(connection.scanner.held_bytes for connection in list(server.connections.values()))

    until(lambda: held() >= 500_000)
    broken.close()
    until(lambda: held() == 0, "its memory is given back")
    client.publish("default", b"y")
    queue.exactly(b"y")
    assert client.statistics()["next"] == before + 1


def test_an_empty_directory_is_made_and_a_strange_one_refused(tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "file").write_text("mine")
    with pytest.raises(Exception, match="strange"):
        Server(strange, 0)
    assert [path.name for path in strange.iterdir()] == ["file"]
    with Server(tmp_path / "new", 0) as server:
        assert server.port


def test_names_of_any_length_are_queues_of_their_own(server: Server, wire: Callable[[], Wire]) -> None:
    names = [b"n" * 300, b"n" * 301, b"$" * 300, b"a b" * 200, b"compatible.%241", b"$1"]
    consumers = [wire().send(b"SUB " + name + b"\n") for name in names]
    until(lambda: sum(len(queue.consumers) for queue in list(server.broker.queues.values())) == len(names))
    assert len(server.broker.queues) == len(names)
    wire().send(b"PUB 1\nx")
    for consumer in consumers:
        consumer.exactly(b"x")


def test_hello_comes_before_anything_else(wire: Callable[[], Wire]) -> None:
    assert wire().send(b"PUB 1\nxHELLO 1\nPING\n").closed() == b""
