"""Whose figures these are: names too long for the counters, tails that are no readers, times that outlive a monitor."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import penstock
from penstock import _core
from penstock.broker import Client, Server
from penstock.observe import health
from penstock.observe.explain import explain
from penstock.observe.memory import TAIL, seen, tailing
from penstock.observe.rates import Rate
from penstock.observe.snapshot import Block, live, matching
from penstock.observe.topology import graph
from penstock.observe.watcher import Look, State, Watcher, summary

from .test_watcher import SECOND, block

LONG = "journal:/" + "/".join("d" * 40 for _ in range(20)) + "#topic"


def looks(*blocks: Block) -> State:
    return State(1, tuple(Look(b, Rate(1.0), health.Verdict("ok")) for b in blocks))


def test_no_address_follows_from_a_name_that_has_no_room() -> None:
    """A tail of it would open another channel."""
    name = LONG.removeprefix("journal:")
    other = name.replace("/d", "/x", 12)
    counters = [_core.Counters("journal", "subscriber", text) for text in (name, other)]
    mine = [b for b in live() if b.pid == os.getpid() and b.name_cut]
    assert len(mine) == 2 and {b.address for b in mine} == {""}
    assert len({b.place for b in mine}) == len({b.channel for b in mine}) == 2, "two channels, not one"
    assert matching(mine, LONG) == [b for b in mine if b.name == _core.counters_name(name)], "it is found by its whole name"
    assert matching(mine, LONG + "2") == []
    del counters


def test_a_cut_name_is_not_taken_apart() -> None:
    link = block(room="gateway", kind="link", name="a…b -> c [00]", name_cut=True)
    bridge = block(room="bridge", kind="bridge", name="shm:/a…b -> shm:/c?x [00]", name_cut=True, index=1)
    made = graph(looks(link, bridge))
    assert {node["label"] for node in made["nodes"] if node["type"] == "channel"} == {f"bridge:{bridge.name}"}


def test_a_tail_is_no_reader() -> None:
    address = f"shm:/tail-{os.getpid()}"
    with penstock.publisher(address, slots=32) as publisher, penstock.subscriber(address):
        with tailing():
            tail = penstock.subscriber(address, max_active_messages=1)
        with tail:
            publisher.publish(b"x")
            found = {b.kind: b for b in matching(seen(), address)}
            assert set(found) == {"publisher", "subscriber", TAIL} and found["publisher"].peers == 1
            state = looks(*found.values())
            assert summary(state)["handles"] == 2 and summary(state)["delivered_hz"] == 1.0
            assert {node["type"] for node in graph(state)["nodes"]} == {"channel", "publisher", "subscriber"}
            lossy = dataclasses.replace(found[TAIL], dropped={"overflow": 3})
            assert health.judge(lossy, Rate(1.0, dropped={"overflow": 3})).word == "ok"
            assert not any("tail" in finding.text for finding in explain(address, watch_s=0))
        with penstock.subscriber(address):
            assert len(of_kind(address, "subscriber")) == 2, "only what was opened meanwhile is a tail"


def of_kind(address: str, kind: str) -> list[Block]:
    return [b for b in matching(seen(), address) if b.kind == kind]


def test_a_tail_of_a_broker_is_neither_reader_nor_queue(tmp_path: Path) -> None:
    with Server(tmp_path / "b", 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t"
        with tailing():
            tail = penstock.subscriber(address)
        with tail, penstock.publisher(address) as publisher:
            publisher.publish(b"x")
            assert tail.read(30) is not None
            kinds = [b.kind for b in seen() if b.pid == os.getpid() and b.room == "broker"]
            assert "queue" not in kinds and "subscriber" not in kinds


def test_a_tail_of_the_network_is_not_among_the_peers_of_its_publisher() -> None:
    with penstock.publisher("tcp://127.0.0.1:0") as publisher:
        address = publisher.address
        with tailing():
            tail = penstock.subscriber(address)
        with tail, penstock.subscriber(address) as reader:
            while len(publisher.subscribers) < 2:
                time.sleep(0.01)
            (found,) = of_kind(address, "publisher")
            assert found.peers == 1, (reader, found)


def test_since_when_nothing_is_taken_outlives_the_monitor() -> None:
    quiet = block(lag=4, delivered=7, matched=11, last_ns=2 * SECOND, opened_ns=SECOND, read_ns=100 * SECOND)
    for _ in range(2):
        monitor = Watcher(lambda: [quiet])
        monitor.look()
        (found,) = monitor.look().looks
        assert found.verdict.reasons == ("4 messages wait and none was taken for 98 s",)


def test_what_is_not_known_is_not_said() -> None:
    """A handle that counts and records no time: the monitor has only its own."""
    quiet = block(lag=4, delivered=7, matched=11, opened_ns=SECOND, read_ns=100 * SECOND)
    idle = block(delivered=7, matched=7, opened_ns=SECOND, read_ns=100 * SECOND, index=1)
    monitor = Watcher(lambda: [quiet, idle])
    monitor.look()
    found, still = monitor.look().looks
    assert found.verdict.reasons == ("4 messages wait and none was taken since the monitor began",)
    assert still.verdict.reasons == ("no message since the monitor began",)


def test_queues_links_and_readers_of_journals_record_when_they_moved(tmp_path: Path) -> None:
    address = f"journal:{tmp_path}/j#t"
    began = time.time_ns()
    with penstock.publisher(address) as publisher, penstock.subscriber(address, start="first") as reader:
        publisher.publish(b"x")
        assert reader.read(30) is not None
        (found,) = of_kind(address, "subscriber")
        assert found.last_ns >= began
    with Server(tmp_path / "b", 0).start() as server, Client(port=server.port) as client:
        client.queue(f"work-{os.getpid()}", topics="t")
        client.publish("t", b"x")
        with client.subscribe(f"work-{os.getpid()}") as consumer:
            assert consumer.read(30) is not None
            (queue,) = [b for b in live() if b.kind == "queue" and b.name == f"work-{os.getpid()}"]
            assert queue.last_ns >= began


def test_a_reader_far_behind_the_end_of_a_journal_is_late(tmp_path: Path) -> None:
    address = f"journal:{tmp_path}/j#t"
    with penstock.publisher(address) as publisher, penstock.subscriber(address) as reader:
        publisher.publish_many([b"x"] * 15_000)
        (found,) = of_kind(address, "subscriber")
        assert found.lag == 15_000 and health.judge(found, Rate()).word == "late"
        assert len(reader.read_many(5000, 30)) == 5000
        assert of_kind(address, "subscriber")[0].lag == 10_000
        while len(reader.read_many(5000, 0)):
            pass
        assert of_kind(address, "subscriber")[0].lag == 0


def test_a_reader_of_a_journal_that_is_gone_has_no_lag(tmp_path: Path) -> None:
    place = str(tmp_path / "gone")
    counters = _core.Counters("journal", "subscriber", f"{place}#t")
    counters.set("position", 7)
    assert [b.lag for b in seen() if b.address == f"journal:{place}#t"] == [0]
    counters.close()


def test_a_queue_without_consumers_is_said_to_have_none() -> None:
    queue = block(room="broker", kind="queue", name="work", depth=3, read_ns=60 * SECOND)
    assert health.judge(queue, Rate()).reasons == ("3 messages wait and it has no consumer",)
    assert health.judge(dataclasses.replace(queue, depth=1), Rate()).reasons == ("1 message waits and it has no consumer",)
    busy = dataclasses.replace(queue, peers=2)
    assert health.judge(busy, Rate()).reasons == ("3 messages wait and none was taken for 59 s",)


def test_a_slow_module_is_not_called_stuck() -> None:
    waiting = block(room="gateway", kind="module", name="slow", depth=9, delivered=1, matched=1, read_ns=60 * SECOND)
    assert health.judge(waiting, Rate()).word == "idle", "its gateway says when it is stuck"
    assert health.judge(dataclasses.replace(waiting, state="stuck in receive"), Rate()).word == "stuck"


def test_the_queue_of_a_slow_module_is_not_called_stuck() -> None:
    """It moves by batches: between two of them nothing leaves it, and its gateway says when the module is stuck."""
    full = block(
        room="bus", kind="queue", name="gateway-0123456789ab?subscriber=0123456789ab/slow", depth=64, capacity=64,
        delivered=64, matched=128, last_ns=SECOND, read_ns=60 * SECOND,
    )  # fmt: skip
    assert health.judge(full, Rate()).word == "idle"
    assert health.judge(dataclasses.replace(full, name="plain?subscriber=slow"), Rate()).word == "stuck"
