"""At least once: acknowledged when handled, tried again, dead letters, buffers; bounds, time to live, named outputs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import InvalidArgument
from penstock._core import counters_read
from penstock.broker import Client, Server
from penstock.channel import Overflow
from penstock.cli.run import _row
from penstock.gateway import (
    AddLinkError,
    ConfigurationError,
    Delivery,
    DrainError,
    Event,
    Filter,
    Gateway,
    GatewayMessage,
    LinkOptions,
    Module,
    ModuleError,
    Policy,
    QueueOptions,
    Restart,
)
from penstock.gateway.broker import Ending
from penstock.gateway.configuration import parse
from penstock.gateway.durable import Forwarder
from penstock.gateway.losses import last_loss
from penstock.gateway.marks import Mark
from penstock.gateway.worker import Deadline
from tests.gateway.conftest import Collector, Passer, eventually

ALO = Delivery.AT_LEAST_ONCE
AGAIN = LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


class Fails(Collector):
    """Fails at what begins with "bad" until it is well."""

    def __init__(self) -> None:
        super().__init__()
        self.well = threading.Event()
        self.tried: list[bytes] = []

    def receive(self, message: GatewayMessage) -> None:
        self.tried.append(bytes(message))
        if bytes(message).startswith(b"bad") and not self.well.is_set():
            raise OSError("not well")
        super().receive(message)


class NeverStarts(Collector):
    def start(self) -> None:
        raise OSError("it never starts")


def say(gateway: Gateway, source: str, *contents: bytes) -> None:
    for content in contents:
        gateway.module(source).publish(content)


# ---- marks


def marked(gateway: Gateway, name: str) -> Mark:
    return gateway.broker.mark(gateway.module(name))


def test_a_mark_waits_for_every_sink_and_for_what_they_published(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("b", Passer), ("c", Collector), ("beside", Collector)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, AGAIN)
    gateway.add_link("b", "c", None, AGAIN)
    gateway.add_link("a", "beside")
    gateway.start()
    b, c, beside = (gateway.module(name) for name in ("b", "c", "beside"))
    for module in (b, c, beside):
        module.gate.clear()
    say(gateway, "a", b"1")
    mark = marked(gateway, "a")
    eventually(lambda: gateway.broker.worker_of(b).busy_since is not None)
    assert not mark.handled()
    b.gate.set()
    eventually(lambda: gateway.broker.worker_of(c).busy_since is not None)
    assert not mark.handled(), "what b published inside is not handled"
    c.gate.set()
    eventually(mark.handled)
    beside.gate.set()


def test_a_mark_of_a_cycle_ends(gateway: Gateway) -> None:
    gateway.add_module("a", Passer)
    gateway.add_link("a", "a", None, AGAIN)
    gateway.start()
    say(gateway, "a", b"round and round")
    eventually(marked(gateway, "a").handled)


def test_a_mark_is_lost_with_what_it_waits_for(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "b", None, AGAIN)
    gateway.start()
    b = gateway.module("b")
    b.gate.clear()
    say(gateway, "a", b"1", b"2")
    mark = marked(gateway, "a")
    ending = gateway.broker.worker_of(b).ending
    # Once the removal has begun: before it, b would handle both.
    threading.Thread(target=lambda: ending.wait(60) and b.gate.set()).start()
    gateway.remove_module("b", drain=False, timeout=60)
    assert not mark.handled()
    assert mark.lost


def test_a_mark_finds_a_message_by_whichever_way_it_comes(gateway: Gateway) -> None:
    for name, kind in (("a", Collector), ("b", Passer), ("d", Passer), ("e", Collector)):
        gateway.add_module(name, kind)
    for source, sink in (("a", "b"), ("a", "d"), ("b", "d"), ("d", "e")):
        gateway.add_link(source, sink, None, AGAIN)
    gateway.start()
    b, e = gateway.module("b"), gateway.module("e")
    b.gate.clear()
    say(gateway, "a", b"1")
    mark = marked(gateway, "a")
    eventually(lambda: len(e.got) == 1)
    assert not mark.handled(), "b has it still"
    e.gate.clear()
    b.gate.set()
    eventually(lambda: gateway.broker.worker_of(e).busy_since is not None)
    eventually(lambda: gateway.broker.worker_of(gateway.module("d")).idle)
    assert not mark.handled(), "e has what came by b"
    e.gate.set()
    eventually(mark.handled)


def two_hops(gateway: Gateway) -> None:
    """a -> pass -> last; everything that a says waits at pass."""
    for name, kind in (("a", Collector), ("pass", Passer), ("last", Collector)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "pass", None, AGAIN)
    gateway.add_link("pass", "last", None, AGAIN)
    gateway.start()


def lose_at_the_last_hop(gateway: Gateway, how: str) -> None:
    """What has come to ``last`` by now is lost; ``pass`` goes on."""
    worker = gateway.broker.worker_of(gateway.module("last"))
    if how == "cut":
        worker.cut()
    elif how == "lost in hand":  # as when a process ends
        worker.lose_taken(1)
    elif how == "removed":
        threading.Timer(0.05, gateway.module("last").gate.set).start()
        gateway.remove_module("last", drain=False, timeout=60)
    elif how == "unlinked":
        gateway.remove_link("pass", "last")
    else:
        with pytest.raises(DrainError, match="still had"):
            gateway.remove_module("last", timeout=0.6)


@pytest.mark.parametrize("how", ["cut", "lost in hand", "removed", "unlinked", "removal undone"])
def test_a_mark_that_comes_to_the_second_hop_after_a_loss_is_lost(gateway: Gateway, how: str) -> None:
    two_hops(gateway)
    passer, last = gateway.module("pass"), gateway.module("last")
    last.gate.clear()
    since = last_loss()
    say(gateway, "a", b"1", b"2")
    mark = gateway.broker.mark(gateway.module("a"), since)
    eventually(lambda: gateway.broker.worker_of(last).waiting == 2)
    lose_at_the_last_hop(gateway, how)
    last.gate.set()
    eventually(lambda: gateway.broker.worker_of(passer).idle)
    eventually(lambda: mark.handled() or mark.lost)
    assert mark.lost, "only now it is asked, and the loss was before"


@pytest.mark.parametrize("how", ["lost in hand", "removed", "unlinked"])
def test_an_older_loss_does_not_make_a_mark_lost(gateway: Gateway, how: str) -> None:
    two_hops(gateway)
    lose_at_the_last_hop(gateway, how)
    since = last_loss()
    say(gateway, "a", b"1", b"2")
    eventually(gateway.broker.mark(gateway.module("a"), since).handled)


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


# ---- buffers


def test_a_buffer_keeps_what_a_sink_cannot_take_over_the_end_of_the_gateway(tmp_path: Path) -> None:
    def made() -> Gateway:
        gateway = Gateway()
        for name, kind in (("a", Collector), ("uplink", Fails)):
            gateway.add_module(name, kind)
        gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
        gateway.start()
        return gateway

    gateway = made()
    say(gateway, "a", *[b"bad %d" % n for n in range(300)])
    eventually(lambda: len(gateway.module("uplink").tried) > 10)
    gateway.destroy(1.0)
    gateway = made()
    uplink = gateway.module("uplink")
    uplink.well.set()
    say(gateway, "a", b"new")
    eventually(lambda: len(set(uplink.got)) == 301)
    assert gateway.destroy(60)
    gateway = made()
    say(gateway, "a", b"last")
    eventually(lambda: gateway.module("uplink").got == [b"last"], "what was handled does not come again")
    assert gateway.destroy(60)


def test_a_buffer_is_bounded_and_what_goes_is_counted(tmp_path: Path) -> None:
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        gateway.add_module("uplink", Fails, queue=QueueOptions(depth=4))
        told: list[Any] = []
        gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(context))
        store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
        gateway.add_link("a", "uplink", None, LinkOptions(delivery=ALO, backoff_s=0.01, ordered=True), buffer=store)
        gateway.start()
        uplink = gateway.module("uplink")
        say(gateway, "a", *[b"bad %06d" % n + bytes(4000) for n in range(1000)])
        buffer = next(info for info in gateway.modules() if "buffer" in info.name)
        eventually(lambda: gateway.broker.info(buffer.handle).handled == 1000)
        uplink.well.set()
        say(gateway, "a", b"last")
        eventually(lambda: uplink.got[-1:] == [b"last"])
        lost = gateway.broker.info(buffer.handle).lost
        assert 0 < lost < 1000
        assert len(set(uplink.got)) + lost == 1001


def test_a_buffered_link_is_one_link(gateway: Gateway, tmp_path: Path) -> None:
    for name in ("a", "b", "all"):
        gateway.add_module(name, Collector)
    gateway.add_link("*", "all")
    gateway.add_link("a", "b", buffer=f"journal:{tmp_path / 'store'}")
    gateway.start()
    say(gateway, "a", b"1")
    eventually(lambda: gateway.module("b").got == gateway.module("all").got == [b"1"])
    assert [link.ends for link in gateway.links()] == [("*", "all"), ("a", "b")]
    with pytest.raises(AddLinkError, match="already"):
        gateway.add_link("a", "b", buffer=f"journal:{tmp_path / 'store'}")
    gateway.remove_link("a", "b")
    assert [info.name for info in gateway.modules()] == ["a", "b", "all"]
    say(gateway, "a", b"2")
    eventually(lambda: gateway.module("all").got == [b"1", b"2"])
    assert gateway.module("b").got == [b"1"]


def test_what_is_stored_counts_as_handled_for_who_gave_it(gateway: Gateway, tmp_path: Path) -> None:
    gateway.add_module("a", Collector)
    gateway.add_module("uplink", Fails)
    gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
    gateway.start()
    say(gateway, "a", b"bad")
    eventually(lambda: len(gateway.module("uplink").tried) > 3)
    eventually(marked(gateway, "a").handled, "the journal has it, whatever the uplink does")
    assert gateway.module("uplink").got == []


def _device(tmp_path: Path, **of_link: Any) -> dict[str, Any]:
    loader = {"name": "python", "entrypoint": f"{__name__}:Fails"}
    link = {"source": "a", "sink": "uplink", "backoff_s": 0.01, "buffer": f"journal:{tmp_path / 'store'}", **of_link}
    return {"modules": [{"name": name, "loader": loader} for name in ("a", "uplink")], "links": [link]}


@pytest.mark.parametrize("changed", ["a", "uplink"])
def test_a_reload_that_makes_an_end_of_a_buffered_link_anew_loses_nothing(tmp_path: Path, changed: str) -> None:
    with Gateway(_device(tmp_path)) as gateway:
        gateway.start()
        say(gateway, "a", b"bad 1")
        eventually(lambda: gateway.module("uplink").tried)
        assert gateway.apply(_device(tmp_path), again=[changed]) == [f"~ {changed}"]
        assert [link.ends for link in gateway.links()] == [("a", "uplink")]
        say(gateway, "a", b"bad 2")
        uplink = gateway.module("uplink")
        uplink.well.set()
        eventually(lambda: {b"bad 1", b"bad 2"} <= set(uplink.got), "also what was stored before")


def test_a_reload_that_fails_leaves_a_buffered_link_as_it_was(tmp_path: Path) -> None:
    with Gateway(_device(tmp_path)) as gateway:
        gateway.start()
        say(gateway, "a", b"bad 1")
        eventually(lambda: gateway.module("uplink").tried)
        wanted = _device(tmp_path, max_tries=100)
        wanted["modules"].append({"name": "more", "loader": {"name": "python", "entrypoint": f"{__name__}:NeverStarts"}})
        with pytest.raises(ModuleError, match="never starts"):
            gateway.apply(wanted, again=["uplink"])
        assert [link.ends for link in gateway.links()] == [("a", "uplink")]
        uplink = gateway.module("uplink")
        uplink.well.set()
        say(gateway, "a", b"bad 2")
        eventually(lambda: {b"bad 1", b"bad 2"} <= set(uplink.got))


@pytest.mark.parametrize("removed", ["a", "a.more", "uplink"])
def test_a_buffer_goes_with_an_end_of_its_link_and_keeps_what_it_holds(tmp_path: Path, removed: str) -> None:
    source = "a.more" if removed == "a.more" else "a"
    with Gateway(_device(tmp_path, source=source)) as gateway:
        gateway.start()
        gateway.module("a").publish(b"bad 1", output=source[2:])
        eventually(lambda: gateway.module("uplink").tried)
        gateway.remove_module(removed.partition(".")[0], drain=removed != "uplink")
        assert len(gateway.modules()) == 1
        assert gateway.links() == []
        if removed != "uplink":
            gateway.remove_module("uplink", drain=False)
    with Gateway(_device(tmp_path, source=source)) as gateway:
        gateway.module("uplink").well.set()
        gateway.start()
        eventually(lambda: gateway.module("uplink").got == [b"bad 1"], "nobody took it, so it is still stored")


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


def test_what_a_buffer_keeps_is_not_lost_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [b"bad %d" % n for n in range(20)]
    seen: list[Any] = []
    for well in (False, True):
        gateway = Gateway()
        for name, kind in (("a", Collector), ("uplink", Fails)):
            gateway.add_module(name, kind)
        gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
        uplink = gateway.module("uplink")
        gateway.start()
        if well:
            uplink.well.set()
            eventually(lambda: set(uplink.got) == set(contents))  # noqa: B023
            gateway.destroy(60)
        else:
            say(gateway, "a", *contents)
            eventually(lambda: set(uplink.tried) == set(contents))  # noqa: B023
            gateway.add_event_callback(Event.DESTROYED, lambda *_: seen.extend(gateway.modules()))  # noqa: B023
            with monkeypatch.context() as patch:
                patch.setattr(Ending, "within", lambda _: Ending(Deadline(0), Deadline(60), Deadline(60)))
                assert gateway.destroy(1), "nothing is lost"
    (info,) = (one for one in seen if one.name == "uplink")
    assert (info.stored, info.lost, info.handled, info.waiting) == (20, 0, 0, 0)
    row = _row(info)
    assert (row["received"], row["stored"], row["lost"]) == (0, 20, 0)


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
    assert LinkOptions(delivery="at_least_once", overflow="drop_newest") == LinkOptions(  # type: ignore[arg-type]
        ALO, overflow=Overflow.DROP_NEWEST
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


# ---- a process of its own that fails


class Refuses(Module):
    """In its own process: fails at what begins with "bad" until a file is there; passes on the rest."""

    def receive(self, message: GatewayMessage) -> None:
        if bytes(message).startswith(b"bad") and not Path(str(self.configuration)).exists():
            raise OSError("not well")
        self.publish(message)


class RefusesMany(Refuses):
    def receive_many(self, messages: Any) -> None:
        for message in messages:
            self.receive(message)


def add_refusing(gateway: Gateway, options: LinkOptions, well: Path, kind: str = "Refuses", **more: Any) -> None:
    for name in ("a", "out", "dead"):
        gateway.add_module(name, Collector)
    gateway.add_module("p", f"tests.gateway.test_delivery:{kind}", str(well), loader="process", **more)
    gateway.add_link("a", "p", None, options, error="dead")
    gateway.add_link("p", "out", None, AGAIN)
    gateway.start()


@pytest.mark.parametrize("kind", ["Refuses", "RefusesMany"])
def test_what_fails_in_a_process_is_tried_again(gateway: Gateway, tmp_path: Path, kind: str) -> None:
    add_refusing(gateway, AGAIN, tmp_path / "well", kind)
    bad = [b"bad %d" % n for n in range(20)]
    say(gateway, "a", *bad, b"1")
    mark = marked(gateway, "a")
    worker = gateway.broker.worker_of(gateway.module("p"))
    eventually(lambda: worker.failed > 60 and b"1" in gateway.module("out").got)
    assert not mark.handled()
    assert not worker.idle
    (tmp_path / "well").touch()
    eventually(mark.handled)
    assert set(gateway.module("out").got) == {*bad, b"1"}, "handled is said when all came through"
    assert (worker.lost, gateway.module("dead").got) == (0, [])


def test_after_max_tries_in_a_process_it_goes_to_the_error_link(gateway: Gateway, tmp_path: Path) -> None:
    add_refusing(gateway, LinkOptions(ALO, max_tries=3, backoff_s=0.01), tmp_path / "well")
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: gateway.module("dead").got == [b"bad"])
    properties = gateway.module("dead").messages[0].properties
    assert (properties["error"], properties["error-tries"]) == ("OSError: not well", "3")
    assert (properties["error-module"], properties["error-source"]) == ("p", "a")
    eventually(lambda: gateway.module("out").got == [b"1"])
    assert gateway.broker.worker_of(gateway.module("p")).failed == 3


def test_what_fails_at_most_once_in_a_process_goes_to_the_error_link_or_is_lost(
    gateway: Gateway, tmp_path: Path
) -> None:
    add_refusing(gateway, LinkOptions(), tmp_path / "well")
    say(gateway, "a", b"bad 1")
    eventually(lambda: gateway.module("dead").got == [b"bad 1"])
    gateway.remove_link("p.error", "dead")
    say(gateway, "a", b"bad 2")
    eventually(lambda: gateway.broker.worker_of(gateway.module("p")).lost == 1)


def test_what_fails_in_a_process_that_is_made_anew_is_tried_again(gateway: Gateway, tmp_path: Path) -> None:
    restart = Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=0.05, limit=None)
    add_refusing(gateway, AGAIN, tmp_path / "well", restart=restart)
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: gateway.supervisor("p").restarts > 1)
    (tmp_path / "well").touch()
    eventually(lambda: set(gateway.module("out").got) == {b"bad", b"1"})


class _Backlog:
    """A durable queue that is full from the beginning."""

    def __init__(self, count: int) -> None:
        self.left = deque(range(count))
        self.acked: list[int] = []

    def read_many(self, most: int, timeout: float) -> list[int]:
        if not self.left:
            time.sleep(timeout)
        return [self.left.popleft() for _ in range(min(most, len(self.left)))]

    def ack_many(self, batch: list[int], begin: int, end: int) -> None:
        self.acked += batch[begin:end]

    def nack_many(self, batch: list[int], begin: int, end: int) -> None:
        self.left.extend(batch[begin:end])


class _FromBacklog(Module):
    durable = True

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.backlog = _Backlog(2000)
        self.forwarder = Forwarder(
            self.name, lambda: self.backlog, lambda n: self.publish(b"%d" % n), partial(self.broker.mark, self)
        )

    def start(self) -> None:
        self.forwarder.start()

    def stop(self) -> None:
        self.forwarder.cut()
        self.forwarder.stop()


class _OneByOne(Collector):
    """Takes as many as it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def receive(self, message: GatewayMessage) -> None:
        self.allowed.acquire()
        super().receive(message)

    def kill(self) -> None:
        self.allowed.release(10000)


@pytest.mark.parametrize("depth", [16, 1024])
def test_no_more_than_32_handled_ones_wait_to_be_acknowledged_also_with_a_backlog(depth: int) -> None:
    with Gateway() as gateway:
        gateway.add_module("queue", _FromBacklog)
        gateway.add_module("sink", _OneByOne, queue=QueueOptions(depth=depth))
        gateway.add_link("queue", "sink")
        gateway.start()
        backlog, sink = gateway.module("queue").backlog, gateway.module("sink")
        for handled in range(50, 1001, 50):
            sink.allowed.release(50)
            eventually(lambda n=handled: len(sink.got) == n)  # type: ignore[misc]
            eventually(lambda n=handled: len(backlog.acked) > n - 32)  # type: ignore[misc]
            assert len(backlog.acked) <= handled, "nothing before it was handled"
        sink.kill()
        eventually(lambda: len(backlog.acked) == 2000)
        assert backlog.acked == list(range(2000))


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


def test_links_that_share_a_buffer_are_counted_each_alone(gateway: Gateway, tmp_path: Path) -> None:
    store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
    gateway.add_module("uplink", _OneByOne, queue=QueueOptions(depth=4))
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
        gateway.add_link(name, "uplink", buffer=store)
    gateway.start()
    for n in range(800):
        say(gateway, "a", b"a%d" % n + bytes(2000))
        say(gateway, "b", b"b%d" % n + bytes(2000))
    uplink, buffers = gateway.module("uplink"), [info.handle for info in gateway.modules() if "buffer" in info.name]
    eventually(lambda: all(gateway.broker.info(one).handled == 800 for one in buffers))
    assert sum(gateway.broker.info(one).lost for one in buffers) > 0, "while the uplink takes nothing"
    uplink.kill()
    eventually(lambda: all(one._next == 801 and not one._out for one in buffers))
    for one, link in zip(buffers, (b"a", b"b"), strict=True):
        info = gateway.broker.info(one)
        assert info.lost + sum(content.startswith(link) for content in uplink.got) == 800
        assert info.handled == 800, "stored"


# ---- nothing that a durable source gave is passed over


class _Backlogged(_FromBacklog):
    """Gives ten; with ``many`` in the configuration, so many."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.backlog.left = deque(range((configuration or {}).get("many", 10)))


def test_what_a_full_sink_refuses_is_given_back_and_comes_again(gateway: Gateway) -> None:
    gateway.add_module("queue", _Backlogged)
    gateway.add_module("sink", _OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
    gateway.add_link("queue", "sink")
    refused = threading.Event()
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda *_: refused.set())
    gateway.start()
    assert refused.wait(60)
    queue, sink = gateway.module("queue"), gateway.module("sink")
    sink.kill()
    eventually(lambda: {*sink.got} == {b"%d" % n for n in range(10)} and {*queue.backlog.acked} == {*range(10)})


def test_what_a_full_sink_refuses_of_a_brokers_queue_comes_again(server: Server) -> None:
    with Client("127.0.0.1", server.port) as client, Gateway() as gateway:
        gateway.add_module("sink", _OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
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


class _Unsure(_Backlog):
    """Whose acknowledgements fail once."""

    failed = False

    def ack_many(self, batch: list[int], begin: int, end: int) -> None:
        if not self.failed:
            self.failed = True
            raise OSError("the disk is full")
        super().ack_many(batch, begin, end)


def test_what_was_read_is_published_also_when_an_acknowledgement_fails(gateway: Gateway) -> None:
    gateway.add_module("queue", _FromBacklog)
    gateway.module("queue").backlog = _Unsure(500)
    gateway.add_module("sink", Collector)
    gateway.add_link("queue", "sink")
    gateway.start()
    backlog = gateway.module("queue").backlog
    eventually(lambda: backlog.failed and {*backlog.acked} == {*range(500)})


def test_a_message_that_is_tried_again_keeps_no_other_from_being_acknowledged(gateway: Gateway) -> None:
    gateway.add_module("queue", _Backlogged, {"many": 640})
    gateway.add_module("sink", _FailsAt)
    gateway.add_link("queue", "sink", None, AGAIN)
    gateway.start()
    backlog, sink = gateway.module("queue").backlog, gateway.module("sink")
    eventually(lambda: len(backlog.acked) == 640 - 32)
    assert {*range(640)} - {*backlog.acked} == {*range(32, 64)}, "the bad one's own group"
    sink.well.set()
    eventually(lambda: {*backlog.acked} == {*range(640)})


def test_an_older_one_that_is_tried_again_at_the_second_hop_keeps_nobody(gateway: Gateway) -> None:
    gateway.add_module("queue", _Backlogged, {"many": 64})
    gateway.add_module("between", Passer)
    gateway.add_module("sink", _FailsAt)
    gateway.add_link("queue", "between")
    gateway.add_link("between", "sink", None, AGAIN)
    gateway.start()
    backlog, sink = gateway.module("queue").backlog, gateway.module("sink")
    eventually(lambda: 33 in sink.tried and len(sink.got) == 63)
    backlog.left.extend(range(64, 128))
    eventually(lambda: {*range(64, 128)} <= {*backlog.acked})
    assert not {*range(32, 64)} & {*backlog.acked}
    sink.well.set()
    eventually(lambda: {*backlog.acked} == {*range(128)})


class _FailsAt(Collector):
    """Fails at 33 until it is well."""

    def __init__(self) -> None:
        super().__init__()
        self.well = threading.Event()
        self.tried: set[int] = set()

    def receive(self, message: GatewayMessage) -> None:
        self.tried.add(int(bytes(message)))
        if bytes(message) == b"33" and not self.well.is_set():
            raise OSError("not well")
        super().receive(message)


def test_what_a_full_sink_refuses_of_a_process_is_not_taken_for_handled(gateway: Gateway) -> None:
    gateway.add_module("queue", _Backlogged)
    gateway.add_module("mapper", "penstock.gateway.modules:PropertyMapper", {"set": {"a": "b"}}, loader="process")
    gateway.add_module("sink", _OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
    gateway.add_link("queue", "mapper")
    gateway.add_link("mapper", "sink", None, AGAIN)
    refused = threading.Event()
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda *_: refused.set())
    gateway.start()
    assert refused.wait(60)
    queue, sink = gateway.module("queue"), gateway.module("sink")
    assert queue.backlog.acked == []
    sink.kill()
    eventually(lambda: {*sink.got} == {b"%d" % n for n in range(10)} and {*queue.backlog.acked} == {*range(10)})


class _Hung(Collector):
    """Takes nothing: it hangs until it is given up, and refuses then what it has in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up = False
        self.given_up = threading.Event()

    def receive(self, message: GatewayMessage) -> None:
        if not self.up:
            self.given_up.wait()
            raise OSError("not handled")
        super().receive(message)

    def kill(self) -> None:
        self.given_up.set()


def test_a_shared_buffers_books_balance_over_restarts(tmp_path: Path) -> None:
    store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
    workers = []
    for run in range(4):
        with Gateway() as gateway:
            gateway.add_module("uplink", _Hung, queue=QueueOptions(depth=4))
            uplink = gateway.module("uplink")
            uplink.up = run == 3
            for name in ("a", "b"):
                gateway.add_module(name, Collector)
                gateway.add_link(name, "uplink", buffer=store)
            gateway.start()
            buffers = [info.handle for info in gateway.modules() if "buffer" in info.name]
            for n in range(250 if run < 3 else 0):
                for name in ("a", "b"):
                    say(gateway, name, b"%d %d" % (run, n) + bytes(2000))
            if run == 3:
                eventually(lambda: all(one._next == one._following() and not one._out for one in buffers))  # noqa: B023
            mine = [gateway.broker.worker_of(one) for one in buffers]
            eventually(lambda: all(worker.idle for worker in mine))  # noqa: B023
            gateway.destroy(60 if run == 3 else 1)
            workers += mine
            # On a busy machine the buffers end after the time that the hung one has used up.
            eventually(lambda: not any(worker.thread.is_alive() for worker in mine))  # noqa: B023
    lost = sum(worker.gone for worker in workers)
    assert lost > 0 and len(uplink.got) > 100 and lost + len(uplink.got) == 3 * 2 * 250


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_handled_at_the_second_hop_is_stored_where_its_source_keeps_it(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    gateway = Gateway()
    gateway.add_module("queue", _Backlogged, {"many": 20})
    gateway.add_module("between", Passer)
    gateway.add_module("sink", _OneByOne)
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
    assert info.stored + info.handled + info.lost + info.ledger.dropped.get("closed", 0) == count
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


class RefusesTogether(RefusesMany):
    """As slow as on a busy machine: what is to be tried again has all come when it is next read."""

    def receive_many(self, messages: Any) -> None:
        time.sleep(0.2)
        super().receive_many(messages)


def test_one_that_always_fails_keeps_no_other_from_a_process(gateway: Gateway, tmp_path: Path) -> None:
    add_refusing(gateway, AGAIN, tmp_path / "well", "RefusesTogether")
    say(gateway, "a", *[b"bad %d" % n for n in range(3)], b"1")
    eventually(lambda: b"1" in gateway.module("out").got)
    (tmp_path / "well").touch()
    eventually(lambda: len(set(gateway.module("out").got)) == 4)
