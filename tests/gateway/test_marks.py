"""Marks and durable sources: what was handled is acknowledged, what was lost comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway import (
    Delivery,
    DrainError,
    Event,
    Gateway,
    GatewayMessage,
    LinkOptions,
    QueueOptions,
)
from penstock.gateway.durable import Forwarder
from penstock.gateway.losses import last_loss
from penstock.gateway.modules import FileTail
from tests.gateway.conftest import Collector, Passer, eventually
from tests.gateway.delivery import (
    AGAIN,
    Backlog,
    Backlogged,
    Fails,
    FromBacklog,
    OneByOne,
    marked,
    say,
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


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


@pytest.mark.parametrize("max_tries", [1, 3])
def test_a_mark_waits_for_the_dead_letter_to_be_handled(gateway: Gateway, max_tries: int) -> None:
    for name, kind in (("a", Collector), ("b", Fails), ("dead", Collector)):
        gateway.add_module(name, kind)
    gateway.add_link("a", "b", None, LinkOptions(max_tries=max_tries, backoff_s=0.01), error="dead")
    gateway.start()
    dead = gateway.module("dead")
    dead.gate.clear()
    say(gateway, "a", b"bad")
    mark = marked(gateway, "a")
    while gateway.broker.worker_of(dead).busy_since is None:
        assert not mark.handled()
    assert not mark.handled(), "its dead letter is in hand"
    dead.gate.set()
    eventually(mark.handled)
    assert dead.got == [b"bad"]


def test_dead_letters_are_at_least_once_where_one_that_asks_for_them_is(gateway: Gateway) -> None:
    for name in ("a", "b", "c", "dead"):
        gateway.add_module(name, Collector)

    def of_dead_letters() -> list[Delivery | None]:
        return [link.options.delivery for link in gateway.links() if link.source == "c.error"]

    gateway.add_link("a", "c", error="dead")
    assert of_dead_letters() == [Delivery.AT_MOST_ONCE]
    gateway.add_link("b", "c", None, AGAIN, error="dead")
    assert of_dead_letters() == [Delivery.AT_LEAST_ONCE]


def test_a_mark_of_a_cycle_ends(gateway: Gateway) -> None:
    gateway.add_module("a", Passer)
    gateway.add_link("a", "a", None, AGAIN)
    gateway.start()
    say(gateway, "a", b"round and round")
    eventually(marked(gateway, "a").handled)
    gateway.destroy(1)  # the cycle never comes to rest


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


@pytest.mark.parametrize("depth", [16, 1024])
def test_no_more_than_32_handled_ones_wait_to_be_acknowledged_also_with_a_backlog(depth: int) -> None:
    with Gateway() as gateway:
        gateway.add_module("queue", FromBacklog)
        gateway.add_module("sink", OneByOne, queue=QueueOptions(depth=depth))
        gateway.add_link("queue", "sink")
        gateway.start()
        backlog, sink = gateway.module("queue").queue, gateway.module("sink")
        for handled in range(50, 1001, 50):
            sink.allowed.release(50)
            eventually(lambda n=handled: len(sink.got) == n)  # type: ignore[misc]
            eventually(lambda n=handled: len(backlog.acked) > n - 32)  # type: ignore[misc]
            assert len(backlog.acked) <= handled, "nothing before it was handled"
        sink.kill()
        eventually(lambda: len(backlog.acked) == 2000)
        assert backlog.acked == list(range(2000))


def test_what_a_full_sink_refuses_is_given_back_and_comes_again(gateway: Gateway) -> None:
    gateway.add_module("queue", Backlogged)
    gateway.add_module("sink", OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
    gateway.add_link("queue", "sink")
    refused = threading.Event()
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda *_: refused.set())
    gateway.start()
    assert refused.wait(60)
    queue, sink = gateway.module("queue"), gateway.module("sink")
    sink.kill()
    eventually(lambda: {*sink.got} == {b"%d" % n for n in range(10)} and {*queue.queue.acked} == {*range(10)})


class _Unsure(Backlog):
    """Whose acknowledgements fail once."""

    failed = False

    def ack_many(self, batch: list[int], begin: int, end: int) -> None:
        if not self.failed:
            self.failed = True
            raise OSError("the disk is full")
        super().ack_many(batch, begin, end)


def test_what_was_read_is_published_also_when_an_acknowledgement_fails(gateway: Gateway) -> None:
    gateway.add_module("queue", FromBacklog)
    gateway.module("queue").queue = _Unsure(500)
    gateway.add_module("sink", Collector)
    gateway.add_link("queue", "sink")
    gateway.start()
    backlog = gateway.module("queue").queue
    eventually(lambda: backlog.failed and {*backlog.acked} == {*range(500)})


def test_a_message_that_is_tried_again_keeps_no_other_from_being_acknowledged(gateway: Gateway) -> None:
    gateway.add_module("queue", Backlogged, {"many": 640})
    gateway.add_module("sink", _FailsAt)
    gateway.add_link("queue", "sink", None, AGAIN)
    gateway.start()
    backlog, sink = gateway.module("queue").queue, gateway.module("sink")
    eventually(lambda: len(backlog.acked) == 640 - 32)
    assert {*range(640)} - {*backlog.acked} == {*range(32, 64)}, "the bad one's own group"
    sink.well.set()
    eventually(lambda: {*backlog.acked} == {*range(640)})


def test_an_older_one_that_is_tried_again_at_the_second_hop_keeps_nobody(gateway: Gateway) -> None:
    gateway.add_module("queue", Backlogged, {"many": 64})
    gateway.add_module("between", Passer)
    gateway.add_module("sink", _FailsAt)
    gateway.add_link("queue", "between")
    gateway.add_link("between", "sink", None, AGAIN)
    gateway.start()
    backlog, sink = gateway.module("queue").queue, gateway.module("sink")
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
    gateway.add_module("queue", Backlogged)
    gateway.add_module("mapper", "penstock.gateway.modules:PropertyMapper", {"set": {"a": "b"}}, loader="process")
    gateway.add_module("sink", OneByOne, queue=QueueOptions(depth=2, timeout_s=0.05))
    gateway.add_link("queue", "mapper")
    gateway.add_link("mapper", "sink", None, AGAIN)
    refused = threading.Event()
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda *_: refused.set())
    gateway.start()
    assert refused.wait(60)
    queue, sink = gateway.module("queue"), gateway.module("sink")
    assert queue.queue.acked == []
    sink.kill()
    eventually(lambda: {*sink.got} == {b"%d" % n for n in range(10)} and {*queue.queue.acked} == {*range(10)})


class Looks:
    """How often durable sources have looked whether somebody is linked to them."""

    def __init__(self, gateway: Gateway) -> None:
        self.count = 0
        self._linked = gateway.broker.linked
        gateway.broker.linked = self._look  # type: ignore[method-assign]

    def _look(self, source: Any) -> bool:
        self.count += 1
        return self._linked(source)

    def await_some(self) -> None:
        enough = self.count + 3
        eventually(lambda: self.count >= enough)


def test_a_durable_source_takes_nothing_while_nobody_is_linked_to_it(gateway: Gateway) -> None:
    looks = Looks(gateway)
    gateway.start()
    gateway.add_module("queue", Backlogged)
    gateway.add_module("sink", Collector)
    queue, sink = gateway.module("queue").queue, gateway.module("sink")
    looks.await_some()
    assert (list(queue.left), queue.acked) == ([*range(10)], [])
    gateway.add_link("queue", "sink")
    eventually(lambda: {*queue.acked} == {*range(10)})
    assert {*sink.got} == {b"%d" % n for n in range(10)}
    gateway.remove_link("queue", "sink")
    looks.await_some()
    queue.left.extend(range(10, 20))
    looks.await_some()
    assert [*queue.left] == [*range(10, 20)]
    gateway.add_link("queue", "sink")
    eventually(lambda: {*queue.acked} == {*range(20)} and {*sink.got} == {b"%d" % n for n in range(20)})


def test_what_goes_to_nobody_was_not_handled(gateway: Gateway) -> None:
    gateway.add_module("a", Collector)
    gateway.start()
    say(gateway, "a", b"to nobody")
    mark = marked(gateway, "a")
    assert mark.lost
    assert not mark.handled()


def test_lines_wait_for_the_first_link(gateway: Gateway, tmp_path: Path) -> None:
    looks, file, place = Looks(gateway), tmp_path / "lines", tmp_path / "place"
    file.write_text("old\n")
    gateway.start()
    gateway.add_module("lines", FileTail, FileTail.parse({"file": str(file), "place": str(place), "poll_s": 0.01}))
    gateway.add_module("sink", Collector)
    eventually(place.exists)
    with file.open("a") as end:
        end.write("new\n")
    looks.await_some()
    gateway.add_link("lines", "sink")
    eventually(lambda: gateway.module("sink").got == [b"new"])


class _Waits:
    """The mark of a message that is tried again until it is well, and that counts as handled only some checks later,
    as one does that went through a process."""

    lost = False
    held = stalled = True

    def __init__(self, well: threading.Event) -> None:
        self._well, self._left = well, 5

    def handled(self) -> bool:
        self.held = self.stalled = not self._well.is_set()
        self._left -= not self.held
        return self._left <= 0


@pytest.mark.parametrize("heals", [True, False])
def test_the_end_waits_for_one_that_is_not_tried_again_any_more(heals: bool) -> None:
    well = threading.Event()
    broker = SimpleNamespace(mark=lambda *_: _Waits(well), linked=lambda _: True)
    module: Any = SimpleNamespace(name="queue", broker=broker)
    queue = Backlog(1)
    forwarder = Forwarder(module, lambda: queue, lambda _: None)
    forwarder.start()
    eventually(lambda: forwarder._held)
    if heals:
        well.set()
    forwarder.stop()
    assert queue.acked == ([0] if heals else []), "one that still is tried again stays with its source"
