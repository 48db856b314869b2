"""Figures are right: bytes of every publisher, losses at once, one journal by any path, reasons that hold."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.broker import Server
from penstock.bus import Bus
from penstock.gateway import Filter, Gateway, Module
from penstock.gateway.modules import Sensor
from penstock.observe import health
from penstock.observe.explain import explain
from penstock.observe.memory import seen
from penstock.observe.rates import Rate
from penstock.observe.snapshot import Block, matching

from .test_watcher import block


@contextmanager
def reader(address: str, options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that subscribes and never reads."""
    program = f"import penstock, sys; s = penstock.subscriber({address!r}, {options}); print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        yield process
    finally:
        process.communicate()


def of(address: str, kind: str) -> Block:
    found = [b for b in matching(seen(), address) if b.kind == kind]
    assert len(found) == 1, found
    return found[0]


def test_bytes_of_every_publisher(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server:
        for address in (
            f"bus:bytes-{os.getpid()}", f"shm:/bytes-{os.getpid()}", f"journal:{tmp_path}/j#t",
            f"broker://127.0.0.1:{server.port}/t",
        ):  # fmt: skip
            with penstock.publisher(address) as publisher:
                publisher.publish(b"12345")
                publisher.publish_many([b"1", b"22"])
                with publisher.reserve(2) as draft:
                    draft.write(b"ab")
                assert of(address, "publisher").bytes == 10, address


def test_the_handles_of_the_other_side_of_a_bus_are_its_peers() -> None:
    address = f"bus:peers-{os.getpid()}"
    with penstock.subscriber(address), reader(address, ""), penstock.publisher(address):
        here = {b.kind: b.peers for b in matching(seen(), address) if b.pid == os.getpid()}
        assert (here["publisher"], here["queue"]) == (1, 1), "a bus is one process: those of another are no peers"


def test_when_a_broker_s_publisher_published_last(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t"
        with penstock.publisher(address) as publisher:
            assert of(address, "publisher").last_ns == 0
            publisher.publish(b"1")
            assert of(address, "publisher").last_ns > of(address, "publisher").opened_ns


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_bytes_of_a_bus(mode: str) -> None:
    name = f"whole-{os.getpid()}-{mode}"
    with Bus(name, mode=mode) as bus, bus.publisher(0) as publisher:
        publisher.publish(b"12345")
        publisher.publish_many([b"1", b"22"])
        bus.flush()
        assert (of(f"bus:{name}", "bus").delivered, of(f"bus:{name}", "bus").bytes) == (3, 8)


@pytest.mark.parametrize("name", ["short", "x" * 5000, "a%20b"])
def test_a_bus_and_its_handles_are_one_channel(name: str) -> None:
    with penstock.publisher(f"bus:{name}") as publisher, penstock.subscriber(f"bus:{name}"):
        publisher.publish(b"1")
        here = [b for b in seen() if b.room == "bus" and b.pid == os.getpid()]
        long = max(b.opened_ns for b in here if b.kind == "publisher")
        channel = next(b.channel for b in here if b.opened_ns == long)
        kinds = {b.kind for b in here if b.channel == channel}
        assert kinds == {"bus", "publisher", "queue"}, [(b.kind, b.channel) for b in here]


def test_the_address_of_a_queue_s_consumer_names_no_topic_that_nobody_gave(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server:
        at = f"broker://127.0.0.1:{server.port}"
        with penstock.subscriber(f"{at}/t?queue=q"), penstock.subscriber(f"{at}/?queue=q"):
            found = {b.address for b in seen() if b.room == "broker" and b.kind == "subscriber" and b.pid == os.getpid()}
        assert {f"{at}/t?queue=q", f"{at}/?queue=q"} <= found


def test_why_of_a_queue_counts_who_publishes_and_reads_there(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server, contextlib.ExitStack() as stack:
        at = f"broker://127.0.0.1:{server.port}"
        readers = [stack.enter_context(penstock.subscriber(f"{at}/{address}")) for address in ("work.*?queue=q", "other?queue=o")]
        for number, topic in enumerate(("work.a", "work.b", "other"), 1):
            stack.enter_context(penstock.publisher(f"{at}/{topic}")).publish_many([b"x"] * number)
        assert all(reader.read(30) for reader in readers)
        for where, published in (
            ("?queue=q", [1, 2]), ("work.*?queue=q", [1, 2]), ("work.>", [1, 2]), ("work.a", [1]), ("other", [3]),
            ("", [1, 2, 3]), ("?queue=o", [3]), ("?queue=none", []),
        ):  # fmt: skip
            told = [finding.text for finding in explain(f"{at}/{where}", watch_s=0.0)]
            counts = [int(count) for text in told for count in re.findall(r"publishes: (\d+) messages?", text)]
            assert sorted(counts) == published, (where, told)
        told = [finding.text for finding in explain(f"{at}/work.>", watch_s=0.0)]
        assert any("the queue q: " in text for text in told) and not any("nobody" in text for text in told), told
        told = [finding.text for finding in explain(f"{at}/?queue=o", watch_s=0.0)]
        assert sum("messages wait for" in text for text in told) == 1, "of the reader of o, not of q"


def test_relative_and_absolute_path_are_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with penstock.publisher("journal:j#t") as publisher, penstock.subscriber("journal:./j#t"):
        publisher.publish(b"x")
        for written in ("journal:j#t", f"journal:{tmp_path}/j#t", "journal:j"):
            kinds = {b.kind for b in matching(seen(), written)}
            assert {"publisher", "subscriber"} <= kinds, written
        assert of("journal:j#t", "publisher").peers == 1 and of("journal:j#t", "subscriber").peers == 1
        publisher.publish_many([b"y", b"z"])
        with penstock.publisher("journal:j#other") as other:
            other.publish(b"o")
            assert any(f.text == "it keeps 3 messages of t" for f in explain("journal:j#t"))


def test_lag_beyond_the_slots_is_loss_at_once() -> None:
    name = f"shm:/lag-{os.getpid()}"
    with reader(name, "") as process, penstock.publisher(name, slots=8) as publisher:
        publisher.publish_many([b"x"] * 1000)
        found = of(name, "subscriber")
        assert found.pid == process.pid and found.lost == 992 and found.waiting == 8
        assert found.ledger.balanced or found.in_flight == 0
        grave = [f.text for f in explain(name) if f.grave]
        assert any("lost 992 messages" in text for text in grave), grave


@pytest.mark.parametrize("reads", [0, 1])
def test_one_side_that_is_reliable_loses_and_is_told_so_at_once(reads: int) -> None:
    name = f"shm:/one-side-{os.getpid()}"
    with penstock.publisher(name, slots=8) as publisher, penstock.subscriber(name, reliable=True) as subscriber:
        for _ in range(reads):
            publisher.publish(b"x")
            assert subscriber.read(30) == b"x"
        publisher.publish_many([b"x"] * 1000)
        found = of(name, "subscriber")
        assert found.lost == 992 and found.waiting == 8
        texts = [f.text for f in explain(name, watch_s=0.0)]
        assert any("lost 992 messages" in text for text in texts), texts
        assert any(f"pid {os.getpid()}" in t and "is not reliable: it overwrites" in t for t in texts), texts
        assert subscriber.ledger.lost == 992 and of(name, "subscriber").lost == 992, "nothing counts twice"


@pytest.mark.parametrize("reliable", [False, True])
def test_virtual_channels_lose_at_once_and_each_its_own(reliable: bool) -> None:
    mux = f"/lapped-{os.getpid()}"
    places = [f"shm:{mux}/{letter}?mux={mux}" for letter in "ab"]
    with (
        penstock.publisher(places[0], slots=16) as first,
        penstock.publisher(places[1]) as second,
        penstock.subscriber(places[0], reliable=reliable) as of_first,
        penstock.subscriber(places[1], reliable=reliable) as of_second,
        penstock.subscriber(f"shm:{mux}") as of_all,
    ):

        def figures() -> list[tuple[int, int]]:
            readers = {block.name: block for block in seen() if block.room == "shm" and block.kind == "subscriber"}
            return [(b.lost, b.waiting) for b in (readers[mux + end] for end in ("/a", "/b", ""))]

        assert figures() == [(0, 0)] * 3
        first.publish(b"a")
        assert figures() == [(0, 1), (0, 0), (0, 1)]
        assert of_first.read(30) == b"a" and of_all.read(30) == b"a"
        second.publish_many([b"b"] * 10)
        assert figures() == [(0, 0), (0, 10), (0, 10)]
        first.publish_many([b"a"] * 500)
        assert figures() == [(484, 16), (10, 0), (494, 16)]
        assert any("lost 10 messages" in f.text for f in explain(places[1], watch_s=0.0))
        assert [handle.ledger.lost for handle in (of_first, of_second, of_all)] == [484, 10, 494]
        assert figures() == [(484, 16), (10, 0), (494, 16)], "nothing counts twice"
        assert sum(1 for _ in iter(lambda: of_first.read(0) is not None, False)) == 16 and of_second.read(0) is None
        assert figures()[:2] == [(484, 0), (10, 0)]


@pytest.mark.parametrize("mux", [False, True])
def test_who_keeps_up_has_lost_nothing_at_any_look(mux: bool) -> None:
    place = f"shm:/keeps-up-{os.getpid()}" + (f"?mux=/keeps-up-mux-{os.getpid()}" if mux else "")
    stop = threading.Event()

    def flow() -> None:
        while not stop.is_set():
            publisher.publish_many([b"x"] * 5)
            subscriber.read_many(5, 30)

    with penstock.publisher(place, slots=64) as publisher, penstock.subscriber(place) as subscriber:
        thread = threading.Thread(target=flow)
        thread.start()
        try:
            assert {of(place.partition("?")[0], "subscriber").lost for _ in range(200)} == {0}
        finally:
            stop.set()
            thread.join()


def test_the_books_of_a_reader_that_holds_all_it_may_close() -> None:
    name = f"shm:/holding-{os.getpid()}"
    program = f"""
import penstock, threading
held, subscriber = [], penstock.subscriber({name!r})
def keep():
    while (message := subscriber.read()) is not None:
        held.append(message)
threading.Thread(target=keep, daemon=True).start()
print(1, flush=True)
input()"""
    line = [sys.executable, "-W", "ignore", "-c", program]
    with penstock.publisher(name, slots=8) as publisher:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            end = time.monotonic() + 60
            while (found := of(name, "subscriber")).lost < 100 and time.monotonic() < end:
                publisher.publish(b"x")
                time.sleep(0.001)
            assert found.lost >= 100 and -2 <= found.in_flight <= 8, found  # it may be counting just now
            assert of(name, "subscriber").in_flight >= 0
        finally:
            process.communicate("\n")


@pytest.mark.parametrize("bound", [0, 3])
def test_who_keeps_some_messages_and_could_keep_more_is_no_trouble(bound: int) -> None:
    name = f"shm:/keeping-{os.getpid()}-{bound}"
    options: dict[str, Any] = {"max_active_messages": bound} if bound else {}
    with penstock.publisher(name, slots=64) as publisher, penstock.subscriber(name, **options) as subscriber:
        publisher.publish_many([b"x"] * 3)
        kept = [subscriber.read(30) for _ in range(3)]
        found = of(name, "subscriber")
        assert (found.depth, found.capacity) == (3, subscriber.max_active_messages) == (3, bound or 62)  # type: ignore[attr-defined]
        assert health.judge(found, Rate()).word != "stuck"
        assert not [finding.text for finding in explain(name, watch_s=0.0) if finding.grave]
        publisher.publish(b"one more")
        held = [finding.text for finding in explain(name, watch_s=0.0) if finding.grave and "held" in finding.text]
        assert bool(held) == bool(bound), "who may hold no more does not take what waits"
        del kept


def test_a_reader_that_keeps_a_reliable_publisher_waiting_is_named() -> None:
    name = f"shm:/full-{os.getpid()}"
    with reader(name, "reliable=True") as process, penstock.publisher(name, slots=8, reliable=True) as publisher:
        with pytest.raises(TimeoutError):
            for _ in range(9):
                publisher.publish(b"x", timeout=0.1)  # type: ignore[call-arg]
        grave = [f.text for f in explain(name) if f.grave]
        assert any("8 messages wait for the reliable subscriber" in t and str(process.pid) in t for t in grave), grave


def test_a_reader_that_goes_on_to_lose_is_a_reason_and_one_that_lost_is_not() -> None:
    address = f"shm:/test/losing-{os.getpid()}"
    stop = threading.Event()

    def lose(publisher: Any, subscriber: Any) -> None:
        for _ in range(20):
            publisher.publish(b"x")
        while subscriber.read(0) is not None:
            pass

    def go_on(publisher: Any, subscriber: Any) -> None:
        while not stop.wait(0.01):
            lose(publisher, subscriber)

    with penstock.publisher(address, slots=4) as publisher, penstock.subscriber(address) as subscriber:
        lose(publisher, subscriber)
        assert of(address, "subscriber").lost
        over = [finding for finding in explain(address, watch_s=0.1) if " lost " in finding.text]
        assert len(over) == 1 and not over[0].grave and not over[0].remedy
        thread = threading.Thread(target=go_on, args=(publisher, subscriber))
        thread.start()
        try:
            found = [finding for finding in explain(address, watch_s=60) if " lost " in finding.text]
        finally:
            stop.set()
            thread.join()
        assert len(found) == 1 and found[0].grave and "goes on" in found[0].text
        assert "more slots" in found[0].remedy


def test_what_moves_is_not_stuck() -> None:
    queue = block(kind="queue", room="broker", state="no credit", depth=5)
    assert health.judge(queue, Rate(messages_hz=100.0)).word != "stuck"
    assert health.judge(queue, Rate()).word == "stuck"


def test_an_age_is_never_negative() -> None:
    ahead = block(last_ns=time.time_ns() + 10**12)
    assert ahead.idle_s == 0.0


@pytest.mark.parametrize("linked", [True, False])
def test_a_source_of_a_gateway_counts_what_it_published(linked: bool) -> None:
    class Sink(Module):
        def receive(self, message: Any) -> None:
            pass

    name = f"camera-{os.getpid()}-{linked}"
    with Gateway() as gateway:
        gateway.add_module(name, Sensor, {"rate_per_s": 1000.0, "count": 3})
        gateway.add_module("sink", Sink)
        if linked:
            gateway.add_link(name, "sink", Filter(one_in=2))
        gateway.start()
        end = time.monotonic() + 60
        while sum(b.delivered for b in seen() if b.name == name) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        source = of(f"gateway:{name}", "source")
        assert (source.matched, source.delivered) == (3, 3) and source.bytes >= 3 and source.last_ns > source.opened_ns


def test_a_module_that_gets_messages_is_no_source() -> None:
    """Nor is one that has nothing to do, nor an address that the gateway reads: a subscriber counts that one."""

    class Pass(Module):
        def receive(self, message: Any) -> None:
            self.broker.publish(self, message)

    address = f"shm:/test-source-{os.getpid()}"
    names = [f"{name}-{os.getpid()}" for name in ("pass", "end", "unused")]
    with penstock.publisher(address) as publisher, Gateway() as gateway:
        for name in names:
            gateway.add_module(name, Pass)
        gateway.add_link(address, names[0])
        gateway.add_link(names[0], names[1])
        gateway.start()
        publisher.publish(b"x")
        end = time.monotonic() + 60
        while sum(b.delivered for b in seen() if b.name == names[1]) < 1 and time.monotonic() < end:
            time.sleep(0.01)
        kinds = {b.name: b.kind for b in seen() if b.room == "gateway" and b.kind != "link" and b.pid == os.getpid()}
        assert kinds == dict.fromkeys((*names, address), "module")


def test_addresses_match_by_part_and_by_wildcard() -> None:
    blocks = [block(room="shm", name="/cam/front"), block(room="shm", name="/cam/rear"), block(room="bus", name="cam")]
    assert len(matching(blocks, "cam")) == 3
    assert len(matching(blocks, "shm:/cam/*")) == 2
    assert len(matching(blocks, "shm:/cam/f*")) == 1
    assert len(matching(blocks, "shm:/cam")) == 2


def test_brackets_in_an_address_are_text() -> None:
    blocks = [block(room="shm", name="/a[1]"), block(room="shm", name="/a1")]
    assert [b.name for b in matching(blocks, "shm:/a[1]*")] == ["/a[1]"]
    assert [b.name for b in matching(blocks, "a[1")] == ["/a[1]"]
