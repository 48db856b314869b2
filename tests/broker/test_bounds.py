"""Bounds on what clients make grow: the disk by transactions too, topics, delayed messages."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any

import pytest

from penstock._core.broker import Scanner, batch_names
from penstock.broker import Client, Limits, Server, store, words
from penstock.broker.fetch import RangeClient
from penstock.broker.ranges import ENTRY
from penstock.broker.unfinished import Unfinished
from penstock.errors import RefusedError

from .conftest import LONG, Wire, until


def test_a_transaction_past_the_quota_is_refused_and_stays_staged(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=1_500_000))
    with Client(port=server.port) as client:
        client.stage("job", "t", [b"x" * 1_000_000] * 2)
        with pytest.raises(RefusedError, match="the disk quota of 1500000 bytes"):
            client.commit("job")
        assert server.broker.store.next == 1
        server.limits.quota_bytes = 10_000_000
        assert client.commit("job") == (1, 2, False)


def test_a_loaded_range_past_the_quota_is_refused(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(quota_bytes=1_500_000))
    with RangeClient(port=server.port) as client:
        client.load("job", ["t"], ENTRY.pack(0, 0, 0, 0, 2_000_000, 0, 0, 0, 0), b"x" * 2_000_000)
        with pytest.raises(RefusedError, match="quota"):
            client.commit("job")
    assert server.broker.store.next == 1


def test_topics_have_a_bound(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(max_topics=3))
    with Client(port=server.port) as client:
        assert [client.publish(topic, b"x") for topic in "abc"] == [1, 2, 3]
        with pytest.raises(RefusedError, match="3 topics, the most allowed"):
            client.publish("d", b"x")
        assert client.publish("a", b"x") == 4
        assert client.stage("job", "b", [b"x"]) == 1
        assert client.commit("job") == (5, 5, False)
    with RangeClient(port=server.port) as bulk:
        bulk.load("more", ["d"], ENTRY.pack(0, 0, 0, 0, 1, 0, 0, 0, 0), b"x")
        with pytest.raises(RefusedError, match="3 topics, the most allowed"):
            bulk.commit("more")
    server.close()
    server = serve(limits=Limits(max_topics=3))
    wire = Wire(server.port).hello().send(b"PUB c 1\nxPUB d 1\nxSTAGE job d 1\nxPING\n")
    assert wire.line() == "OK 6"
    for _ in range(2):
        assert wire.line().startswith("ERR limit there are 3 topics, the most allowed")
    assert wire.line() == "PONG"
    wire.close()


def test_delayed_messages_have_a_bound(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(max_delayed=3))
    late = b"PUB t 1 delay_ms=3600000\nx"
    wire = Wire(server.port).hello().send(late * 3)
    wire.stored(1, 3)
    assert wire.send(late * 2).line().startswith("ERR full more than 3 messages would be delayed")
    assert wire.line().startswith("ERR full")
    assert wire.send(b"PUB t 1\nx").line() == "OK 4"
    wire.close()
    server.close()
    wire = Wire(serve(limits=Limits(max_delayed=3)).port).hello().send(late)
    assert wire.line().startswith("ERR full"), "known after a restart"
    wire.close()


def test_refused_topics_are_forgotten_when_they_are_many() -> None:
    """A connection that publishes to ever new topics that it may not have costs no more than one that may."""
    scanner = Scanner("hello", 1000)
    for number in range(65_537):
        scanner.refuse(f"t{number}")
    scanner.feed(b"PUB t65536 1\nxPUB t0 1\nx")
    events = [scanner.next() for _ in range(2)]
    assert [event and event[0] for event in events] == [words.REFUSED, words.NEW_TOPIC]


def test_a_batch_names_its_own_topics_alone() -> None:
    """What one publish costs does not grow with the topics that its connection has named before."""
    scanner = Scanner("hello", 1000)
    for name in "abc":
        scanner.allow(name)
    for lines, names, channels in (
        (b"PUB a 1\nx", ("a",), "a"),
        (b"PUB c 1\nxPUB b 1\nxPUB c 1\nx", ("c", "b"), "cbc"),
        (b"PUB c 1\nxPUB b 1\nx", ("c", "b"), "cb"),
        (b"PUB b 1\nx", ("b",), "b"),
    ):
        scanner.feed(lines)
        event = scanner.next()
        assert event is not None and event[2] is not None
        assert batch_names(event[2]) == names and [message.channel for message in event[2]] == list(channels)
    scanner.forget_topics()
    scanner.allow("d")
    scanner.feed(b"PUB d 1\nx")
    event = scanner.next()
    assert event is not None and event[2] is not None and batch_names(event[2]) == ("d",)


def test_many_topics_of_one_connection_cost_no_more_than_of_many(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    told: list[str] = []
    notify = server.broker._notify
    monkeypatch.setattr(server.broker, "_notify", lambda topic, first: (told.append(topic), notify(topic, first)))
    with Client(port=server.port) as client:
        for number in range(50):
            client.publish(f"t{number}", b"x")
    assert told == [f"t{number}" for number in range(50)]


def test_patterns_with_wildcards_have_a_bound(serve: Callable[..., Server]) -> None:
    """Each new topic is compared with each of them; names without are looked up, so there may be thousands."""
    server = serve()
    many = [f"a.*.{number}" for number in range(257)]
    names = [f"b.{number}" for number in range(5000)]
    wire = Wire(server.port).hello()

    def declared(topics: list[str]) -> str:
        return wire.send(f"QUEUE q topics={','.join(topics)}\n".encode()).line()

    with Client(port=server.port) as client, RangeClient(port=server.port) as bulk:
        with pytest.raises(RefusedError, match="at most 256 patterns with wildcards"):
            bulk.fetch(1, topics=many)
        assert declared(many) == "ERR limit at most 256 patterns with wildcards stand together"
        assert declared([*names, *many[:256]]) == "OK"
        assert declared([f"c.*.{number}" for number in range(257)]).startswith("ERR limit ")
        for topic in ("b.4999", "b.5000", "a.x.255", "a.x.256", "b", "b.4999.x"):
            client.publish(topic, topic.encode())
        assert [item.payload for item in bulk.fetch(1, topics=[*names, "a.*.255"])] == [b"b.4999", b"a.x.255"]
        with client.subscribe("q") as consumer:
            assert [bytes(consumer.receive(timeout=LONG)) for _ in range(2)] == [b"b.4999", b"a.x.255"]
    wire.close()


def test_rows_of_names_are_remembered_up_to_a_bound(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CACHED_NAMES", 100)
    server = serve()
    journal: Any = server.broker.store
    with RangeClient(port=server.port) as bulk, Client(port=server.port) as client:
        for number in range(30):
            bulk.fetch(1, topics=[f"a{number}.{part}" for part in range(9)])
            client.publish(f"t{number % 3}", b"x")
            assert sum(map(len, list(journal._filters))) <= 100 and sum(map(len, list(journal._ids))) <= 100


def test_who_begins_messages_keeps_nobody_out(serve: Callable[..., Server]) -> None:
    """Large messages that are begun and not finished hold all the room there is, whether a little comes or nothing."""
    limits = Limits(max_message_bytes=1 << 20, max_unfinished_bytes=4 << 20)
    server = serve(limits=limits, max_message_bytes=1 << 20)
    wires = [Wire(server.port).hello().send(b"PUB t 1048576\n" + bytes(1_040_000)) for _ in range(4)]
    until(lambda: server._unfinished.total > 4_100_000)
    with Client(port=server.port, timeout=LONG) as client:
        for number in range(3):
            assert client.publish("t", bytes(1_000_000)) == number + 1
    gone, *_ = select.select([wire.socket for wire in wires], [], [], LONG)
    told = [wire.closed() for wire in wires if wire.socket in gone]
    assert told and all(line.startswith(b"ERR closing no room: messages that have begun") for line in told)
    for wire in wires:
        wire.close()


def test_where_there_is_no_room_those_go_that_bring_the_least() -> None:
    found: Unfinished[str] = Unfinished()
    assert found.slowest("a", 0.0) is None
    for peer in "abc":
        found.note(peer, 1_000_000, 0.0)
    found.note("small", 1000, 0.0)
    assert found.total == 3_001_000
    assert found.slowest("b", 0.5) == "b", "all have just begun: the last one"
    found.note("a", 1_000_001, 1.5)  # a little comes, or nothing
    found.note("c", 3_000_000, 1.5)
    found.note("c", 4_000_000, 2.6)
    found.note("a", 1_000_002, 2.6)
    assert found.slowest("c", 2.6) == "b"
    found.forget("b")
    assert found.slowest("c", 2.6) == "a", "not the one that goes on, though it holds most"
    found.note("new", 5_000_000, 2.7)
    assert found.slowest("new", 2.7) == "a"
    found.note("a", 0, 2.8)
    assert found.slowest("new", 2.8) == "c", "a message that has just begun is given a second"
    found.note("c", 100_000, 2.9)
    assert found.slowest("c", 2.9) == "c", "another message: it has just begun, too"
    for peer in ("c", "new", "small", "nobody"):
        found.forget(peer)
    assert found.total == 0 and found.slowest("c", 3.0) is None


def test_unfinished_messages_of_all_connections_have_a_bound(serve: Callable[..., Server]) -> None:
    limits = Limits(max_message_bytes=1 << 20, max_unfinished_bytes=4 << 20)
    server = serve(limits=limits, max_message_bytes=1 << 20)
    part = b"PUB t 1000000\n" + bytes(900_000)
    wires = [Wire(server.port).hello() for _ in range(12)]
    for wire in wires:
        with contextlib.suppress(OSError):  # closed by the broker
            wire.send(part)
    until(lambda: len(server.connections) < 12)
    with Client(port=server.port) as client:
        assert client.publish("t", bytes(10_000)) == 1, "small ones go through"
        assert client.statistics()["unfinished_bytes"] <= 4 << 20
        for wire in wires:
            wire.close()
        until(lambda: client.statistics()["unfinished_bytes"] == 0, "all of it is given back")
        assert client.publish("t", bytes(1_000_000)) == 2
