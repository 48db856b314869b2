"""The HELLO mode on the wire: replies in order, bad input, many connections, clients that do not read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from penstock.broker import Client, ConnectionLimits, Limits, Server

from .conftest import Wire, until


def test_replies_come_in_the_order_asked(wire: Callable[[], Wire]) -> None:
    connection = wire().hello()
    connection.send(b"PUB a 1\nxPUB a 1\ny\nPING\nPUB b 1\nzQUEUE q topics=a\nPEERS a\nPUB a 0\nPING\n")
    connection.stored(1, 2)
    assert [connection.line() for _ in range(6)] == ["PONG", "OK 3", "OK", "PEERS 1 0", "OK 4", "PONG"]


def test_a_confirm_covers_a_row(wire: Callable[[], Wire]) -> None:
    connection = wire().hello()
    connection.send(b"".join(b"PUB t 3\n%03d" % i for i in range(500)))
    confirmed = 0
    while confirmed < 500:
        first, _, last = connection.line().removeprefix("OK ").partition("-")
        assert int(first) == confirmed + 1
        confirmed = int(last or first)


@pytest.mark.parametrize(
    "line",
    [
        "SUB", "SUB q nonsense=1", "SUB q credit=-1", "SUB q credit=x", "SUB " + "n" * 300, "QUEUE q topics=a..b",
        "QUEUE q topics=>.a", "QUEUE q topics=", "QUEUE $own", "PURGE none", "DELETE none",
        "SEEK none from_position=1", "REDRIVE none", "PAUSE none", "RESUME none", "FETCH x 5", "FETCH 1", "FETCH 1 5 topics=$delayed", "COMMIT",
        "COMMIT a b c", "UNSUB q", "PEERS *", "SUB q from_ordinal=1 topics=a.>", "SUB q ack=maybe",
        "QUEUE q ttl_ms=99999999999999999999",
    ],
)  # fmt: skip
def test_what_is_refused_is_told_and_the_connection_goes_on(wire: Callable[[], Wire], line: str) -> None:
    connection = wire().hello().send(line.encode() + b"\nPING\n")
    assert connection.line().startswith("ERR "), line
    assert connection.line() == "PONG"


@pytest.mark.parametrize(
    "data",
    [
        b"NOVERB\n", b"PUB t\n", b"PUB t -5\n", b"PUB t abc\n", b"PUB t 99999999999\n", b"PUB a..b 1\nx", b"PUB * 1\nx",
        b"PUB $own 1\nx", b"PUB \xff\xfe 1\nx", b"HELLO 1\n", b"\n", b"\0\0\0\0\n", b"x" * 100_000, b"STAGE t x\n",
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_closes_with_a_reason(wire: Callable[[], Wire], client: Client, data: bytes) -> None:
    told = wire().hello().send(data).closed()
    assert told.startswith(b"ERR closing ") and told.count(b"\n") == 1
    client.publish("t", b"others go on")


def test_hello_of_another_version(wire: Callable[[], Wire]) -> None:
    assert wire().send(b"HELLO 2\n").line().startswith("HELLO 2 journal=")
    assert wire().send(b"HELLO 3\n").closed().startswith(b"ERR closing this broker speaks versions 1 and 2")


@pytest.mark.parametrize("line", ["ACK q 5", "ACK q 5-9 11", "NACK q 5", "CREDIT q 5"])
def test_what_has_no_answer_has_none_when_there_is_nothing_to_do(wire: Callable[[], Wire], line: str) -> None:
    assert wire().hello().send(line.encode() + b"\nPING\n").line() == "PONG"


@pytest.mark.parametrize("line", ["ACK q x", "ACK q", "NACK q -1", "NACK q 1 delay=3", "CREDIT q", "CREDIT q x"])
def test_what_has_no_answer_closes_when_it_is_malformed(wire: Callable[[], Wire], line: str) -> None:
    told = wire().hello().send(line.encode() + b"\nPING\n").closed()
    assert told.startswith(b"ERR closing ") and told.count(b"\n") == 1


def test_too_large_is_refused_and_passed_over(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(max_message_bytes=1000))
    connection = Wire(server.port)
    assert "max_message_bytes=1000" in connection.send(b"HELLO 1\n").line()
    connection.send(b"PUB t 5000\n" + b"x" * 5000 + b"\nPUB t 1000\n" + b"y" * 1000)
    assert connection.line().startswith("ERR too_large ")
    assert connection.line() == "OK 1"
    connection.close()


def test_a_client_that_never_reads_costs_nobody(server: Server, client: Client, wire: Callable[[], Wire]) -> None:
    deaf = wire()
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.hello().send(b"SUB deaf topics=t credit=65536\n")
    until(lambda: "deaf" in server.broker.queues)
    client.queue("good", topics="t")
    with client.subscribe("good") as good:
        body = b"x" * 10_000
        for _ in range(20):
            client.publish_many("t", [body] * 100)
        count = 0
        while count < 2000:
            count += len(good.read_many(1000, 30))
        held = max(connection.outbox.pending_bytes for connection in server.connections.values())
        assert held < 4 << 20, "output is bounded"
    deaf_summary = next(entry for entry in client.queues() if entry["queue"] == "deaf")
    assert deaf_summary["depth"] == 2000


def test_a_client_that_never_reads_its_confirms_is_not_read_from(server: Server, wire: Callable[[], Wire]) -> None:
    deaf = wire().hello()
    deaf.send(b"".join(b"QUEUE q%d topics=t\n" % number for number in range(50)) + b"LIST\n" * 20_000)  # 300 MB of answers
    until(lambda: any(connection.paused() for connection in server.connections.values()))
    held = max(connection.outbox.pending_bytes for connection in server.connections.values())
    assert held < 16 << 20
    wire().hello().send(b"PING\n").line()


def test_the_rate_of_a_connection_is_limited(serve: Callable[..., Server]) -> None:
    server = serve(connection_limits=ConnectionLimits(max_rate=200))
    connection = Wire(server.port).hello()
    began = time.monotonic()
    connection.send(b"PUB t 1\nx" * 300 + b"PING\n")
    while connection.line() != "PONG":
        pass
    assert time.monotonic() - began >= 0.4
    connection.close()


def test_the_quota_refuses(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=1_500_000))
    connection = Wire(server.port).hello()
    connection.send(b"PUB t 2000000\n" + b"x" * 2_000_000)
    assert connection.line().startswith("ERR full the disk quota of 1500000 bytes")
    connection.send(b"QUEUE q topics=t\n")
    assert connection.line() == "OK", "only publishing is refused"
    connection.close()


def test_listing_is_json(wire: Callable[[], Wire]) -> None:
    connection = wire().hello().send(b"QUEUE q topics=a,b max_tries=3\nLIST\n")
    assert connection.line() == "OK"
    size = int(connection.line().removeprefix("DATA "))
    text = connection.line()
    assert len(text) == size
    (entry,) = json.loads(text)
    assert (entry["queue"], entry["topics"], entry["max_tries"]) == ("q", ["a", "b"], 3)


ABSURD = "9223372036854775807"


@pytest.mark.parametrize(
    "line",
    [
        f"QUEUE new ack_timeout_ms={ABSURD}",
        f"QUEUE new ttl_ms={ABSURD}",
        f"QUEUE new from_position={ABSURD}",
        f"QUEUE new from_time_ns={ABSURD}",
        f"SEEK q from_position={ABSURD}",
        f"FETCH {ABSURD} 1",
        f"FETCH 1 {ABSURD}",
        f"PUB t 0 delay_ms={ABSURD}",
        f"PUB t 0 at_ns={ABSURD}",
        f"PUB t 0 ttl_ms={ABSURD}",
        "QUEUE new dead_letter=$mine max_tries=1",
        "QUEUE new dead_letter=new max_tries=1",
        f"QUEUE {'n' * 250} max_tries=1",
    ],
)
def test_absurd_numbers_and_names_are_refused_where_they_are_said(wire: Callable[[], Wire], line: str) -> None:
    connection = wire().hello().send(b"SUB q topics=t\n")
    assert connection.line() == "OK"
    connection.send(line.encode() + b"\nPING\n")
    assert connection.line().startswith("ERR bad_")
    assert connection.line() == "PONG"


@pytest.mark.parametrize(
    "line", [f"NACK q {ABSURD}", f"NACK q 1 delay_ms={ABSURD}", f"ACK q 1-{ABSURD}", f"CREDIT q {ABSURD}"]
)
def test_absurd_numbers_close_where_there_is_no_answer(wire: Callable[[], Wire], line: str) -> None:
    connection = wire().hello().send(b"SUB q topics=t\n")
    assert connection.line() == "OK"
    assert connection.send(line.encode() + b"\nPING\n").closed().startswith(b"ERR closing ")


def test_the_largest_numbers_are_taken(wire: Callable[[], Wire]) -> None:
    largest = 1 << 62
    connection = wire().hello().send(b"SUB q topics=t credit=%d\n" % largest)
    assert connection.line() == "OK"
    connection.send(b"QUEUE late topics=t from_position=%d ack_timeout_ms=%d\n" % (largest, 10**12))
    connection.send(b"ACK q 1-%d confirm\nNACK q %d delay_ms=%d\n" % (largest, largest, 10**12))
    connection.send(b"PUB t 1 delay_ms=%d\nxPUB t 1 at_ns=%d\nyPING\n" % (10**12, largest))
    assert [connection.line() for _ in range(2)] == ["OK", "OK 0"]
    connection.stored(1, 2)
    assert connection.line() == "PONG"
    connection.send(b"PUB t 1\nz")
    assert connection.line() == "OK 3"
    assert connection.line().split()[:4] == ["MSG", "q", "t", "3"]
