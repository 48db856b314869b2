"""At least once: tried again, dead letters, a broker's queue; bounds, time to live, named outputs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock import InvalidArgument
from penstock._core import counters_read
from penstock.broker import Client, Server
from penstock.channel import Overflow
from penstock.gateway import (
    AddLinkError,
    ConfigurationError,
    Delivery,
    Event,
    Filter,
    Gateway,
    GatewayMessage,
    LinkOptions,
    Module,
    Policy,
    QueueOptions,
    Restart,
)
from penstock.gateway.broker import Ending
from penstock.gateway.configuration import parse
from penstock.gateway.endpoint import MAX_DONE, _BrokerQueue
from penstock.gateway.errors import give_back
from penstock.gateway.worker import Deadline
from tests.gateway.conftest import Collector, Passer, eventually
from tests.gateway.delivery import (
    AGAIN,
    ALO,
    Backlogged,
    Fails,
    OneByOne,
    marked,
    say,
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


# ---- again


def test_what_fails_is_tried_again_and_others_go_on(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("b", Fails)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, AGAIN)
    gateway.start()
    b = gateway.module("b")
    say(gateway, "a", b"1", b"bad", b"2")
    mark = marked(gateway, "a")
    eventually(lambda: b.got == [b"1", b"2"] and b.tried.count(b"bad") > 3)
    assert not mark.handled(), "one of them is still tried"
    assert not gateway.broker.worker_of(b).idle
    b.well.set()
    eventually(mark.handled)
    assert b.got == [b"1", b"2", b"bad"]


class AtSecond(Collector):
    """Handles a message at its second try, and what is bad never."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[bytes] = set()

    def receive(self, message: GatewayMessage) -> None:
        if bytes(message) == b"bad" or bytes(message) not in self.tried:
            self.tried.add(bytes(message))
            raise RuntimeError("not yet")
        super().receive(message)


def test_those_put_aside_are_tried_while_one_is_tried_in_its_place(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.worker.MAX_ASIDE", 3)
    for name, kind in (("a", Collector), ("b", AtSecond)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, AGAIN)
    wanted = [b"%d" % n for n in range(50)]
    say(gateway, "a", *wanted[:3], b"bad", *wanted[3:])
    gateway.start()
    b = gateway.module("b")
    eventually(lambda: sorted(b.got) == sorted(wanted))


def test_ordered_holds_the_others_back(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("b", Fails)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02, ordered=True))
    gateway.start()
    b = gateway.module("b")
    say(gateway, "a", b"1", b"bad", b"2")
    eventually(lambda: b.tried.count(b"bad") > 3)
    assert b.got == [b"1"]
    b.well.set()
    eventually(lambda: b.got == [b"1", b"bad", b"2"])


def test_a_batch_that_fails_is_tried_again_together(gateway: Gateway) -> None:
    class Many(Collector):
        tries = 0

        def receive_many(self, messages: Any) -> None:
            self.tries += 1
            if self.tries < 4:
                raise OSError("not yet")
            self.got += [bytes(message) for message in messages]

    for name, kind in (("a", Collector), ("b", Many)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, AGAIN)
    say(gateway, "a", b"1", b"2", b"3")
    gateway.start()
    eventually(lambda: gateway.module("b").got == [b"1", b"2", b"3"])


def test_a_message_of_a_batch_that_is_given_back_comes_again_in_a_batch_of_one(gateway: Gateway) -> None:
    class Many(Module):
        """Has no ``receive`` of its own."""

        def start(self) -> None:
            self.batches: list[list[bytes]] = []

        def receive_many(self, messages: Any) -> None:
            self.batches.append([bytes(message) for message in messages])
            if len(self.batches) < 3:
                give_back(self, OSError("not yet"), *(message for message in messages if bytes(message) == b"bad"))

    for name, kind in (("a", Collector), ("b", Many)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, AGAIN)
    say(gateway, "a", b"1", b"bad", b"2")
    gateway.start()
    b = gateway.module("b")
    eventually(lambda: len(b.batches) == 3)
    assert b.batches == [[b"1", b"bad", b"2"], [b"bad"], [b"bad"]]
    eventually(lambda: gateway.broker.info(b).handled == 3)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


STRANGE = {
    "nul": (ValueError("a\0b"), r"ValueError: a\x00b"),
    "escape": (ValueError("\x1b[31mred\x07"), r"ValueError: \x1b[31mred\x07"),
    "surrogate": (ValueError("\ud800"), r"ValueError: \ud800"),
    "unreadable": (Unreadable(), "Unreadable: its text cannot be read"),
    "long": (ValueError("x" * 5_000_000), f"ValueError: {'x' * 500}..."),
}


class Strange(Collector):
    """Fails with the error that a message names."""

    def receive(self, message: GatewayMessage) -> None:
        super().receive(message)
        if bytes(message).decode() in STRANGE:
            raise STRANGE[bytes(message).decode()][0]


@pytest.mark.parametrize("loader", ["python", "process"])
def test_an_error_may_have_any_text_and_its_message_becomes_a_dead_letter(gateway: Gateway, loader: str) -> None:
    for name in ("a", "dead"):
        gateway.add_module(name, Collector)
    gateway.add_module("b", "tests.gateway.test_delivery:Strange", loader=loader)
    gateway.add_link("a", "b", None, LinkOptions(delivery=ALO, max_tries=2, backoff_s=0.01), error="dead")
    gateway.start()
    say(gateway, "a", *[name.encode() for name in STRANGE])
    eventually(lambda: len(gateway.module("dead").got) == len(STRANGE))
    told = {bytes(message).decode(): message.properties["error"] for message in gateway.module("dead").messages}
    assert told == {name: text for name, (_, text) in STRANGE.items()}


@pytest.mark.parametrize("ordered", [False, True])
def test_after_max_tries_it_goes_to_the_error_link_with_the_reason(gateway: Gateway, ordered: bool) -> None:
    for name, kind in (("a", Collector), ("b", Fails), ("dead", Collector)):
        gateway.add_module(name, kind)
    options = LinkOptions(delivery=ALO, max_tries=3, backoff_s=0.01, ordered=ordered)
    gateway.add_link("a", "b", None, options, error="dead")
    gateway.start()
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: gateway.module("dead").got == [b"bad"])
    assert gateway.module("b").tried.count(b"bad") == 3
    properties = gateway.module("dead").messages[0].properties
    assert properties["error"] == "OSError: not well"
    assert (properties["error-module"], properties["error-source"], properties["error-tries"]) == ("b", "a", "3")
    eventually(lambda: gateway.module("b").got == [b"1"])


def test_a_removal_ends_the_tries(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("b", Fails)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, LinkOptions(delivery=ALO, backoff_s=30, ordered=True))
    gateway.start()
    b = gateway.module("b")
    worker = gateway.broker.worker_of(b)
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: b.tried == [b"bad"])
    gateway.remove_module("b", drain=False, timeout=60)
    assert worker.lost + worker.queue.ledger.lost == 2
    assert gateway.abandoned == []


# ---- a broker's queue


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "broker", 0).start()
    yield server
    server.close()


def test_a_queue_is_acknowledged_when_handled(server: Server) -> None:
    where = f"broker://127.0.0.1:{server.port}/t.>?queue=night"
    count = 600
    with Client(port=server.port) as client:
        client.queue("night", topics="t.>")
        for n in range(count):
            client.publish("t.a", b"%d" % n)
    got: set[bytes] = set()

    def run(until: int, timeout: float) -> None:
        gateway = Gateway()
        gateway.add_module("sink", Slow)
        gateway.add_link(where, "sink")
        gateway.start()
        sink = gateway.module("sink")
        eventually(lambda: len(got | set(sink.got)) >= until)
        gateway.destroy(timeout)
        got.update(sink.got)

    run(50, 0)
    assert 50 <= len(got) < count, "it ended before all was handled"
    run(count, 60)


class Slow(Collector):
    def receive(self, message: GatewayMessage) -> None:
        time.sleep(0.001)
        super().receive(message)


@pytest.mark.parametrize("how", ["destroyed", "removed"])
def test_what_is_lost_at_the_second_hop_comes_again(server: Server, how: str) -> None:
    where = f"broker://127.0.0.1:{server.port}/t.>?queue=night"
    count = 600
    with Client(port=server.port) as client:
        client.queue("night", topics="t.>")
        for n in range(count):
            client.publish("t.a", b"%d" % n)
    got: set[bytes] = set()
    for until, timeout in ((50, 0.0), (count, 60.0)):
        gateway = Gateway()
        for name, kind in (("pass", Passer), ("slow", Slow)):
            gateway.add_module(name, kind, queue=QueueOptions(depth=128))
        gateway.add_link(where, "pass")
        gateway.add_link("pass", "slow", None, AGAIN)
        gateway.start()
        slow = gateway.module("slow")
        eventually(lambda: len(got | set(slow.got)) >= until)  # noqa: B023
        if until < count and how == "removed":
            gateway.pause("pass")  # what it takes after the removal has nowhere to go
            gateway.remove_module("slow", drain=False, timeout=60)
        gateway.destroy(timeout)
        got.update(slow.got)
        assert until == count or len(got) < count, "it ended before all was handled"


def test_handled_messages_do_not_come_again(server: Server) -> None:
    where = f"broker://127.0.0.1:{server.port}/t.>?queue=night"
    with Client(port=server.port) as client:
        client.queue("night", topics="t.>")
        for n in range(500):
            client.publish("t.a", b"%d" % n)
    for wanted in (500, 1):
        with Gateway() as gateway:
            gateway.add_module("sink", Collector)
            gateway.add_link(where, "sink")
            gateway.start()
            sink = gateway.module("sink")
            if wanted == 1:
                with Client(port=server.port) as client:
                    client.publish("t.a", b"new")
            eventually(lambda: len(sink.got) == wanted)  # noqa: B023
            assert gateway.destroy(60)
            assert sink.got[-1] == (b"499" if wanted == 500 else b"new")


def test_what_waits_for_a_sink_longer_than_the_ack_time_out_is_handled_once(server: Server) -> None:
    where = f"broker://127.0.0.1:{server.port}/t.>?queue=night"
    with Client(port=server.port) as client, Gateway() as gateway:
        client.queue("night", topics="t.>", ack_timeout_s=0.2)
        contents = [b"bad %d" % n for n in range(40)]
        for content in contents:
            client.publish("t.a", content)
        gateway.add_module("sink", Fails)
        gateway.add_link(where, "sink", None, AGAIN)
        gateway.start()
        sink = gateway.module("sink")
        eventually(lambda: client.queues()[0]["redelivered"] >= 120)
        assert gateway.broker.worker_of(sink).waiting <= 40
        sink.well.set()
        eventually(lambda: len(sink.got) == 40)
        assert gateway.destroy(60)
        assert client.queues()[0]["depth"] == 0
        assert sorted(sink.got) == sorted(contents)


@dataclass(frozen=True)
class Delivered:
    """A message as a broker delivers it."""

    position: int
    deliveries: int = 1
    timestamp_ns: int = 0


class Deliveries:
    """A subscriber of a broker's queue that gives what it was told to."""

    def __init__(self) -> None:
        self.coming: deque[list[Delivered]] = deque()
        self.told: list[tuple[str, int]] = []

    def read_many(self, most: int, timeout: float) -> list[Delivered]:
        return self.coming.popleft() if self.coming else []

    def deliveries(self, message: Delivered) -> int:
        return message.deliveries

    def ack_many(self, batch: list[Delivered], begin: int, end: int) -> None:
        self.told += [("ack", message.position) for message in batch[begin:end]]

    def nack(self, message: Delivered, *, delay_s: float) -> None:
        self.told.append(("nack", message.position))


def read(queue: Any, subscriber: Deliveries, *batch: Delivered) -> list[Delivered]:
    subscriber.coming.append([*batch])
    got: list[Delivered] = queue.read_many(100, 0)
    return got


def test_a_copy_of_a_message_that_is_held_is_left_out() -> None:
    subscriber = Deliveries()
    queue = _BrokerQueue(subscriber)
    first, second = Delivered(1), Delivered(2)
    again = [replace(one, deliveries=2) for one in (first, second)]
    batch = read(queue, subscriber, first, second, again[0])
    assert batch == [first, second], "one copy came with them"
    subscriber.coming += [[again[0]], [again[1]]]
    assert read(queue, subscriber, Delivered(3)) == [Delivered(3)], "copies alone do not end the read"
    queue.nack_many(batch, 0, 1)
    assert read(queue, subscriber, *again) == again[:1], "what was returned is to come again"
    other = Delivered(2, timestamp_ns=1)
    assert read(queue, subscriber, other) == [other], "a broker that took over has given the position again"


def test_a_copy_of_a_message_that_was_acknowledged_is_acknowledged() -> None:
    subscriber = Deliveries()
    queue = _BrokerQueue(subscriber)
    one, held = Delivered(1), Delivered(2)
    batch = read(queue, subscriber, one, held)
    assert read(queue, subscriber, replace(held, deliveries=2)) == []
    queue.ack_many(batch, 0, 1)
    assert read(queue, subscriber, replace(one, deliveries=2)) == []
    assert subscriber.told == [("ack", 1), ("ack", 1)]
    assert read(queue, subscriber, one) == [one], "its first delivery again: the queue was set back by a user"


def test_single_messages_are_looked_at_only_while_copies_come() -> None:
    subscriber = Deliveries()
    queue = _BrokerQueue(subscriber)
    held = read(queue, subscriber, Delivered(0))
    for position in range(1, 2 * MAX_DONE):
        if position == 10:
            assert read(queue, subscriber, Delivered(0, deliveries=2)) == []
        if position == 20:
            assert queue._held is not None, "0 is held, and has been sent again"
            queue.ack_many(held, 0, 1)
        queue.ack_many(read(queue, subscriber, Delivered(position)), 0, 1)
    assert queue._held is None
    assert not queue._open
    assert not queue._done


def test_a_broker_that_is_not_there_yet_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server(tmp_path / "first", 0).start() as before:
        port = before.port
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sink", Collector)
        gateway.add_link(f"broker://127.0.0.1:{port}/t?queue=q", "sink")
        gateway.add_link("source", f"broker://127.0.0.1:{port}/t")
        gateway.start()
        assert "is waited for" in caplog.text
        say(gateway, "source", b"early")
        with Server(tmp_path / "second", port).start():
            eventually(lambda: b"early" in gateway.module("sink").got or say(gateway, "source", b"early"))
            gateway.destroy(60)


# ---- outputs, bounds, time to live


class Sorter(Module):
    def receive(self, message: GatewayMessage) -> None:
        self.publish(message, output="rejected" if bytes(message).startswith(b"bad") else "")


def test_named_outputs(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("sorter", Sorter), ("good", Collector), ("bad", Collector)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "sorter")
    gateway.add_link("sorter", "good")
    gateway.add_link("sorter.rejected", "bad")
    gateway.start()
    say(gateway, "a", b"1", b"bad", b"2")
    eventually(lambda: gateway.module("good").got == [b"1", b"2"] and gateway.module("bad").got == [b"bad"])
    assert gateway.module("bad").messages[0].channel == "sorter.rejected"
    assert {line.name: line.sources for line in gateway.module_list()}["bad"] == ("sorter",)
    gateway.remove_link("sorter.rejected", "bad")
    say(gateway, "a", b"bad", b"3")
    eventually(lambda: gateway.module("good").got[-1] == b"3")
    assert gateway.module("bad").got == [b"bad"]
    with pytest.raises(AddLinkError, match="no module"):
        gateway.add_link("nobody.rejected", "bad")
    gateway.remove_module("sorter")
    assert [link.ends for link in gateway.links()] == []


def test_named_outputs_of_a_process(gateway: Gateway) -> None:
    for name in ("a", "good", "bad"):
        gateway.add_module(name, Collector)
    gateway.add_module("sorter", "tests.gateway.test_delivery:Sorter", loader="process")
    for ends in (("a", "sorter"), ("sorter", "good"), ("sorter.rejected", "bad")):
        gateway.add_link(*ends)
    gateway.start()
    say(gateway, "a", b"1", b"bad", b"2")
    eventually(lambda: gateway.module("good").got == [b"1", b"2"] and gateway.module("bad").got == [b"bad"])
    assert dict(gateway.module("bad").messages[0].properties) == {}


@pytest.mark.parametrize("bound", [{"max_messages": 3}, {"max_bytes": 30}])
def test_a_link_has_bounds_of_its_own(gateway: Gateway, bound: dict[str, int]) -> None:
    for name in ("a", "b", "sink"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "sink", None, LinkOptions(overflow=Overflow.DROP_NEWEST, **bound))
    gateway.add_link("b", "sink")
    say(gateway, "a", *[b"%010d" % n for n in range(10)])
    say(gateway, "b", *[b"b"] * 10)
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: len(sink.got) == 13)
    assert sink.got[:3] == [b"%010d" % n for n in range(3)]
    say(gateway, "a", b"again")
    eventually(lambda: sink.got[-1] == b"again", "room comes back")


def test_what_a_bound_keeps_out_is_counted_apart_from_what_a_filter_does(gateway: Gateway) -> None:
    for name in ("a", "sink"):
        gateway.add_module(name, Collector)
    bound = LinkOptions(max_messages=3, overflow=Overflow.DROP_NEWEST)
    gateway.add_link("a", "sink", Filter(properties={"unit": "C"}), bound)
    for unit in "CCCCCFF":
        gateway.module("a").publish(b"x", {"unit": unit})

    def counted() -> dict[str, Any]:
        blocks = counters_read()
        return next(b["dropped"] for b in blocks if (b["pid"], b["name"]) == (os.getpid(), "a -> sink"))

    for _ in range(2):  # the bound of a link that is no more is remembered
        ledger = gateway.broker.info(gateway.module("sink")).ledger
        assert dict(ledger.dropped) == {"filtered": 2, "overflow": 2}
        assert ledger.balanced
        gateway.broker.count_links()
        assert counted() == {"filtered": 2, "overflow": 2}
        gateway.broker.add_link(gateway.module("a"), gateway.module("sink"), None, LinkOptions(max_messages=5))
    gateway.start()


def test_a_publisher_waits_for_room_on_its_link(gateway: Gateway) -> None:
    for name in ("a", "sink"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "sink", None, LinkOptions(max_messages=2))
    publisher = threading.Thread(target=say, args=(gateway, "a", *[b"%d" % n for n in range(50)]), daemon=True)
    publisher.start()
    eventually(lambda: gateway.broker.info(gateway.module("sink")).waiting == 2)
    assert publisher.is_alive()
    gateway.start()
    publisher.join(60)
    assert not publisher.is_alive()
    eventually(lambda: gateway.module("sink").got == [b"%d" % n for n in range(50)])


def test_what_a_worker_has_taken_and_not_begun_still_waits_on_its_link(gateway: Gateway) -> None:
    for name in ("a", "sink"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "sink", None, LinkOptions(max_messages=5, overflow=Overflow.DROP_NEWEST))
    sink = gateway.module("sink")
    sink.gate.clear()
    say(gateway, "a", *[b"x"] * 5)
    gateway.start()
    worker = gateway.broker.worker_of(sink)
    eventually(lambda: worker.busy_since is not None and worker.queue.queued == 0, "it has taken all five")
    say(gateway, "a", *[b"y"] * 5)
    assert worker.overflowed == 4, "there is room for one: the one in its hand does not wait"
    sink.gate.set()
    eventually(lambda: sink.got == [b"x"] * 5 + [b"y"])


def test_a_publisher_waits_at_a_link_no_longer_than_at_its_sink(gateway: Gateway) -> None:
    gateway.add_module("a", Collector)
    gateway.add_module("sink", Collector, queue=QueueOptions(timeout_s=0.05))
    gateway.add_link("a", "sink", None, LinkOptions(max_messages=1))
    told: list[Any] = []
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda _, __, context, ___: told.append(context))
    say(gateway, "a", b"1")
    with pytest.raises(TimeoutError, match="the link to 'sink' was full for"):
        say(gateway, "a", b"2")
    ledger = gateway.broker.info(gateway.module("sink")).ledger
    assert dict(ledger.dropped) == {"overflow": 1}
    assert ledger.balanced
    eventually(lambda: [name for name, _ in told] == ["a"])
    gateway.start()
    eventually(lambda: gateway.module("sink").got == [b"1"])


def test_nobody_hangs_on_a_cycle_whose_link_is_bounded() -> None:
    class Twice(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            if bytes(message) == b"go":
                for content in (b"1", b"2"):
                    try:
                        self.publish(content)
                    except TimeoutError:
                        self.steps.append(f"refused {content!r}")

    with Gateway(cycle_timeout_s=0.05) as gateway:
        gateway.add_module("a", Collector)
        gateway.add_module("twice", Twice)
        gateway.add_link("a", "twice")
        gateway.add_link("twice", "twice", None, LinkOptions(max_messages=1))
        gateway.start()
        say(gateway, "a", b"go")
        twice = gateway.module("twice")
        eventually(lambda: twice.got == [b"go", b"1"])
        assert "refused b'2'" in twice.steps


def test_what_has_waited_too_long_is_dropped_and_counted(gateway: Gateway) -> None:
    for name in ("a", "sink"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "sink", None, LinkOptions(ttl_s=3600))
    now_ns = time.time_ns()
    source = gateway.module("a")
    source.broker.publish(source, GatewayMessage(b"old", timestamp_ns=now_ns - 4000 * 10**9))
    source.broker.publish(source, GatewayMessage(b"new", timestamp_ns=now_ns))
    gateway.start()
    eventually(lambda: gateway.module("sink").got == [b"new"])
    worker = gateway.broker.worker_of(gateway.module("sink"))
    eventually(lambda: worker.expired == 1 and worker.handled == 1)
    ledger = gateway.broker.info(gateway.module("sink")).ledger
    assert (ledger.expired, ledger.delivered, ledger.balanced) == (1, 1, True)
    eventually(lambda: worker.counters.get("matched") == 2)


def test_the_file_says_how_a_link_delivers() -> None:
    modules = [{"name": name, "loader": {"name": "python", "entrypoint": "a.b:C"}} for name in ("a", "b")]
    link = {"source": "a.rejected", "sink": "b", "delivery": "at_least_once", "max_tries": 5, "backoff_s": 1,
            "ordered": True, "ttl_s": 60, "max_messages": 10, "max_bytes": 1000, "overflow": "drop_newest",
            "buffer": "journal:/tmp/x?retain_bytes=1000000", "error": "a"}  # fmt: skip
    found = parse({"modules": modules, "links": [link]}).links[0]
    assert found.options == LinkOptions(ALO, 5, 1.0, 30.0, True, 60.0, 10, 1000, Overflow.DROP_NEWEST)
    assert (found.buffer, found.error) == ("journal:/tmp/x?retain_bytes=1000000", "a")
    for wrong in ({"delivery": "twice"}, {"max_tries": 0}, {"ordered": 1}, {"buffer": "shm:/x"}, {"ttl_s": 0},
                  {"overflow": "drop_oldest"}, {"backoff_s": 100}, {"error": "nobody"}):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"links\[0\]"):
            parse({"modules": modules, "links": [{"source": "a", "sink": "b", **wrong}]})
    with pytest.raises(InvalidArgument):
        LinkOptions(max_bytes=0)


def test_texts_stand_for_choices_and_wrong_ones_are_refused() -> None:
    assert LinkOptions(delivery="at_least_once", max_messages=1, overflow="drop_newest") == LinkOptions(  # type: ignore[arg-type]
        ALO, max_messages=1, overflow=Overflow.DROP_NEWEST
    )
    assert LinkOptions(delivery="at_least_once").delivery is ALO  # type: ignore[arg-type]
    assert Restart(policy="never").policy is Policy.NEVER  # type: ignore[arg-type]
    assert QueueOptions(overflow="drop_oldest").overflow is Overflow.DROP_OLDEST  # type: ignore[arg-type]
    wrong: list[tuple[Any, dict[str, str]]] = [
        (LinkOptions, {"delivery": "exactly"}),
        (LinkOptions, {"overflow": "bogus"}),
        (LinkOptions, {"overflow": "drop_oldest"}),
        (Restart, {"policy": "sometimes"}),
        (QueueOptions, {"overflow": "bogus"}),
    ]
    for kind, given in wrong:
        with pytest.raises(InvalidArgument, match=next(iter(given))):
            kind(**given)


def test_a_restart_policy_may_be_its_name_alone(gateway: Gateway) -> None:
    gateway.add_module("a", Collector, restart="on_failure")
    assert gateway.supervisor("a").restart == Restart(Policy.ON_FAILURE)
    with pytest.raises(InvalidArgument, match="restart"):
        gateway.add_module("b", Collector, restart="sometimes")
    assert [line.name for line in gateway.module_list()] == ["a"]


def test_what_is_no_filter_or_no_options_changes_nothing(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    wrong: Any = lambda _: True  # noqa: E731
    with pytest.raises(TypeError, match="Filter"):
        gateway.add_link("a", "b", wrong)
    with pytest.raises(TypeError, match="LinkOptions"):
        gateway.add_link("a", "b", None, wrong)
    assert gateway.links() == []
    gateway.add_link("a", "b")


def test_a_class_is_not_taken_where_a_process_was_asked_for(gateway: Gateway) -> None:
    with pytest.raises(InvalidArgument, match="conftest:Collector"):
        gateway.add_module("p", Collector, loader="process")
    assert gateway.module_list() == []


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_given_up_with_no_error_link_is_lost_and_counted(gateway: Gateway, ordered: bool) -> None:
    for name, kind in (("a", Collector), ("b", Fails)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, LinkOptions(ALO, max_tries=2, backoff_s=0.01, ordered=ordered))
    gateway.start()
    say(gateway, "a", b"bad", b"1")
    mark = marked(gateway, "a")
    eventually(mark.handled, "its source is not to send it again")
    info = gateway.broker.info(gateway.module("b"))
    assert (info.lost, info.handled, info.failed) == (1, 1, 2)
    assert gateway.broker.worker_of(info.handle).counters.snapshot()["dropped"] == {"error": 1}


def test_a_batch_that_fails_at_most_once_is_lost_and_counted(gateway: Gateway) -> None:
    class Many(Collector):
        def receive_many(self, messages: Any) -> None:
            raise OSError("never")

    for name, kind in (("a", Collector), ("b", Many)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b")
    say(gateway, "a", b"1", b"2", b"3")
    gateway.start()
    worker = gateway.broker.worker_of(gateway.module("b"))
    eventually(lambda: worker.taken == 3)
    assert (worker.lost, worker.handled) == (3, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_what_grows_too_old_in_the_batch_in_hand_is_not_handled(gateway: Gateway, fails: bool) -> None:
    old_ns = time.time_ns() + 10**9

    class Slow(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            eventually(lambda: time.time_ns() > old_ns)
            if fails:
                raise OSError("tried again, when it is too old")

    gateway.add_module("a", Collector)
    gateway.add_module("sink", Slow)
    gateway.add_link("a", "sink", None, LinkOptions(ttl_s=3600, delivery=ALO, backoff_s=0.01))
    source = gateway.module("a")
    for content in (b"1", b"2", b"3"):  # in the queue together, so that one batch has them all
        source.broker.publish(source, GatewayMessage(content, timestamp_ns=old_ns - 3600 * 10**9))
    gateway.start()
    sink = gateway.module("sink")
    worker = gateway.broker.worker_of(sink)
    eventually(lambda: worker.taken == 3 and worker.idle)
    assert (sink.got, worker.expired, worker.handled) == ([b"1"], 3 if fails else 2, 0 if fails else 1)


def test_what_a_full_sink_refuses_of_a_brokers_queue_comes_again(server: Server) -> None:
    with Client("127.0.0.1", server.port) as client, Gateway() as gateway:
        gateway.add_module("sink", OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
        gateway.add_link(f"broker://127.0.0.1:{server.port}/night?queue=night", "sink")
        refused = threading.Event()
        gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda *_: refused.set())
        gateway.start()
        for n in range(10):
            client.publish("night", b"%d" % n)
        assert refused.wait(60)
        sink = gateway.module("sink")
        sink.kill()
        eventually(lambda: {*sink.got} == {b"%d" % n for n in range(10)})


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_handled_at_the_second_hop_is_stored_where_its_source_keeps_it(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    gateway = Gateway()
    gateway.add_module("queue", Backlogged, {"many": 20})
    gateway.add_module("between", Passer)
    gateway.add_module("sink", OneByOne)
    gateway.add_link("queue", "between")
    gateway.add_link("between", "sink", None, AGAIN)
    gateway.start()
    if not kept:
        gateway.module("between").publish(b"of its own accord")
    worker = gateway.broker.worker_of(gateway.module("sink"))
    count = 20 if kept else 21
    eventually(lambda: worker.waiting == count)
    monkeypatch.setattr(Ending, "within", lambda _: Ending(Deadline(0), Deadline(60), Deadline(60)))
    assert gateway.destroy(1) is kept, "nothing is lost, or what was its own may be"
    (info,) = (one for one in gateway.modules() if one.name == "sink")
    assert info.stored + info.handled + info.lost == count
    assert (info.stored > 0, info.sources, info.handle) == (kept, ("between",), None)


def test_who_says_how_to_try_again_wants_at_least_once(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Fails)
    gateway.add_link("a", "b", None, LinkOptions(max_tries=3, backoff_s=0.01))
    gateway.start()
    say(gateway, "a", b"bad")
    eventually(lambda: gateway.module("b").tried == [b"bad"] * 3)
    with pytest.raises(InvalidArgument, match="at_least_once"):
        LinkOptions(delivery=Delivery.AT_MOST_ONCE, max_tries=3)


def test_names_that_could_be_outputs_are_refused(gateway: Gateway) -> None:
    gateway.add_module("sorter", Collector)
    gateway.add_module("north.sorter", Collector)
    for name in ("sorter.rejected", "north"):
        with pytest.raises(InvalidArgument, match="outputs"):
            gateway.add_module(name, Collector)
    with pytest.raises(AddLinkError, match="names no output"):
        gateway.add_link("sorter.", "north.sorter")
    loader = {"name": "python", "entrypoint": "tests.gateway.conftest:Collector"}
    modules = [{"name": name, "loader": loader} for name in ("sorter.rejected", "sorter")]
    with pytest.raises(ConfigurationError, match=r"modules\[0\].name: 'sorter.rejected' reads as an output"):
        parse({"modules": modules, "links": []})
    with pytest.raises(ConfigurationError, match=r"links\[0\].source: 'sorter.' names no output"):
        parse({"modules": modules[1:], "links": [{"source": "sorter.", "sink": "sorter"}]})
    with pytest.raises(ConfigurationError, match=r"modules\[0\].stuck_after_s: .* above 0"):
        parse({"modules": [{**modules[1], "stuck_after_s": 0}], "links": []})
