"""ModuleBroker: the router of modules alone, by the reference's rules and where it was weak."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import InvalidArgument
from penstock.channel import Overflow
from penstock.gateway import (
    AddLinkError,
    BrokerError,
    DrainError,
    Filter,
    GatewayMessage,
    ModuleBroker,
    QueueOptions,
    RemoveLinkError,
)
from penstock.gateway.worker import Life
from tests.gateway.conftest import Collector, Doubler, Failing, Passer, eventually


@pytest.fixture
def broker() -> Iterator[ModuleBroker]:
    made = ModuleBroker(cycle_timeout_s=0.2)
    yield made
    while made.references:
        made.dec_ref()


def attach(broker: ModuleBroker, *modules: Collector, **options: Any) -> None:
    for module in modules:
        module.create(broker, None)
        broker.add_module(module, **options)


def say(broker: ModuleBroker, source: Any, *contents: bytes) -> None:
    for content in contents:
        broker.publish(source, GatewayMessage(content))


# ---- the handle


def test_each_broker_has_an_id_of_its_own() -> None:
    with ModuleBroker() as one, ModuleBroker() as other:
        assert one.id != other.id
        assert one.id[:12] in repr(one)


def test_references_are_counted_and_the_last_one_ends_everything() -> None:
    broker, sink = ModuleBroker(), Collector()
    attach(broker, sink)
    assert broker.inc_ref() is broker
    broker.dec_ref()
    say(broker, sink, b"still there")
    thread = [t for t in threading.enumerate() if t.name.startswith("module ")]
    assert len(thread) == 1
    broker.destroy()
    assert broker.references == 0
    assert not thread[0].is_alive()
    broker.dec_ref()  # once more is nothing
    for use in (lambda: say(broker, sink, b""), lambda: broker.add_module(Collector()), broker.inc_ref):
        with pytest.raises(BrokerError, match="destroyed"):
            use()


def test_a_destroyed_broker_keeps_nothing_alive() -> None:
    broker, sink = ModuleBroker(), Collector()
    attach(broker, sink)
    broker.add_link(sink, sink, Filter(min_bytes=1))
    say(broker, sink, b"a", b"b")
    watch = weakref.ref(sink), weakref.ref(broker)
    broker.dec_ref()
    del broker, sink
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


def test_a_failure_while_attaching_leaves_no_thread_and_no_descriptor(broker: ModuleBroker) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for wrong in (None, object(), 7):
        with pytest.raises(InvalidArgument):
            broker.add_module(wrong)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


# ---- routing


def test_a_message_goes_to_every_linked_sink_in_order_and_to_nobody_else(broker: ModuleBroker) -> None:
    source, first, second, stranger = modules = [Collector() for _ in range(4)]
    attach(broker, *modules)
    broker.add_link(source, first)
    broker.add_link(source, second)
    contents = [b"%d" % n for n in range(5000)]
    say(broker, source, *contents)
    eventually(lambda: len(first.got) == len(second.got) == 5000)
    assert first.got == second.got == contents
    assert stranger.got == source.got == []
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=True)), "one message by reference"


def test_without_a_link_publishing_is_no_error(broker: ModuleBroker) -> None:
    source = Collector()
    attach(broker, source)
    say(broker, source, b"nobody hears")
    assert broker.info(source).published == 1


def test_a_duplicate_link_delivers_once_and_a_self_link_delivers(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    for _ in range(3):
        broker.add_link(source, sink)
    broker.add_link(source, source)
    say(broker, source, b"a", b"b")
    eventually(lambda: len(sink.got) == len(source.got) == 2)
    assert broker.info(sink).ledger.matched == 2


def test_removing_a_link_stops_new_messages_only(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, b"queued")
    broker.remove_link(source, sink)
    say(broker, source, b"late")
    sink.gate.set()
    eventually(lambda: sink.got == [b"queued"])
    assert broker.info(source).sinks == ()


def test_what_is_none_or_unknown_is_refused_by_name(broker: ModuleBroker) -> None:
    source, sink, unknown = Collector(), Collector(), Collector()
    attach(broker, source, sink)
    message = GatewayMessage()
    for arguments in ((None, message), (source, None), (None, None)):
        with pytest.raises(InvalidArgument):
            broker.publish(*arguments)  # type: ignore[arg-type]
    for ends in ((None, sink), (source, None)):
        with pytest.raises(InvalidArgument):
            broker.add_link(*ends)
        with pytest.raises(InvalidArgument):
            broker.remove_link(*ends)
    with pytest.raises(InvalidArgument):
        broker.remove_module(None)
    with pytest.raises(BrokerError, match="not attached"):
        broker.publish(unknown, message)
    with pytest.raises(BrokerError, match="not attached"):
        broker.remove_module(unknown)
    with pytest.raises(BrokerError, match="already"):
        broker.add_module(source)
    for ends in ((unknown, sink), (source, unknown)):
        with pytest.raises(AddLinkError):
            broker.add_link(*ends)
        with pytest.raises(RemoveLinkError):
            broker.remove_link(*ends)
    with pytest.raises(RemoveLinkError, match="no link"):
        broker.remove_link(source, sink)
    with pytest.raises(TypeError, match="GatewayMessage"):
        broker.publish(source, b"bare bytes")  # type: ignore[arg-type]


def test_the_publisher_keeps_his_message_and_may_publish_it_again(broker: ModuleBroker) -> None:
    source, other, sink = Collector(), Collector(), Collector()
    attach(broker, source, other, sink)
    broker.add_link(source, sink)
    broker.add_link(other, sink)
    message = GatewayMessage(b"again", {"a": "1"})
    for publisher in (source, source, other):
        broker.publish(publisher, message)
    eventually(lambda: len(sink.got) == 3)
    assert sink.got == [b"again"] * 3
    assert len({m.address for m in sink.messages}) == 1, "the content is shared"
    assert [(m.channel, m.ordinal) for m in sink.messages] == [
        (broker.info(source).name, 1),
        (broker.info(source).name, 2),
        (broker.info(other).name, 1),
    ]
    assert all(m.properties == {"a": "1"} for m in sink.messages)


def test_a_received_message_can_be_published_on(broker: ModuleBroker) -> None:
    source, passer, sink = Collector(), Passer(), Collector()
    attach(broker, source, passer, sink)
    broker.add_link(source, passer)
    broker.add_link(passer, sink)
    say(broker, source, *[b"%d" % n for n in range(1000)])
    eventually(lambda: len(sink.got) == 1000)
    assert sink.got == passer.got
    assert sink.messages[0].address == passer.messages[0].address
    assert sink.messages[0] is not passer.messages[0]


def test_a_message_that_goes_round_and_round_keeps_none_of_its_earlier_selves(broker: ModuleBroker) -> None:
    class Ring(Collector):
        def receive(self, message: GatewayMessage) -> None:
            selves.append(weakref.ref(message))
            if len(selves) < 5:
                broker.publish(self, message)
            else:
                super().receive(message)

    selves: list[weakref.ref[GatewayMessage]] = []
    ring = Ring()
    attach(broker, ring)
    broker.add_link(ring, ring)
    say(broker, ring, b"round")
    eventually(lambda: len(ring.got) == 1)
    # the first lends its content to the last
    eventually(lambda: [one() is not None for one in selves] == [True, False, False, False, True])
    assert ring.got == [b"round"]


def test_a_worker_that_waits_holds_no_message(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    message = GatewayMessage(b"x")
    watch = weakref.ref(message)
    broker.publish(source, message)
    del message
    eventually(lambda: broker.worker_of(sink).idle)
    sink.messages.clear()
    eventually(lambda: watch() is None)


# ---- failure


def test_a_module_that_raises_is_counted_and_goes_on(broker: ModuleBroker, caplog: pytest.LogCaptureFixture) -> None:
    source, failing, well = Collector(), Failing(), Collector()
    caplog.set_level(logging.DEBUG, "penstock.gateway")
    attach(broker, source, failing, well)
    broker.add_link(source, failing)
    broker.add_link(source, well)
    say(broker, source, b"bad 1", b"good", b"bad 2", b"good")
    eventually(lambda: len(failing.got) == len(well.got) == 4)
    eventually(lambda: broker.info(failing).handled + broker.info(failing).lost == 4)
    assert (broker.info(failing).failed, broker.info(failing).lost) == (2, 2)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [one.getMessage() for one in told] == [
        "module 'Failing-2' failed in receive: RuntimeError: cannot take b'bad 1'"
    ]
    assert told[0].exc_info is None, "one line; where it failed is for who looks for it"
    assert caplog.text.count("Traceback") == 1, "told once, counted from then on"


def test_an_error_in_a_queue_ends_that_worker_alone(broker: ModuleBroker) -> None:
    source, broken, well = Collector(), Collector(), Collector()
    told: list[tuple[str, str]] = []
    broken.create(broker, None)
    attach(broker, source, well)
    broker.add_module(broken, name="broken", on_failure=lambda worker, step, _: told.append((worker.name, step)))
    broker.add_link(source, broken)
    broker.add_link(source, well)
    worker = broker.worker_of(broken)
    broken.gate.clear()
    say(broker, source, b"1")
    eventually(lambda: worker.doing == "receive" and worker.busy_since is not None)

    class Broken:
        queued, closed = 0, False

        def read_many(self, *_: object) -> None:
            raise OSError("the queue is broken")

    real, worker.queue = worker.queue, Broken()  # type: ignore[assignment]
    broken.gate.set()
    eventually(lambda: worker.life is Life.QUIET)
    assert told == [("broken", "queue")]
    worker.queue = real
    say(broker, source, b"2")
    eventually(lambda: well.got == [b"1", b"2"])


def test_no_message_can_imitate_the_quit_signal(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    worker = broker.worker_of(sink)
    for text in (broker.id, worker.queue.name, "quit", ""):
        broker.publish(source, GatewayMessage(text.encode(), {text: text, "quit": broker.id}))
    say(broker, source, b"last")
    eventually(lambda: sink.got[-1:] == [b"last"])
    assert worker.life is Life.RUNNING


# ---- back-pressure


def test_a_queue_that_stays_full_is_told_in_the_words_of_a_gateway(
    broker: ModuleBroker, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Collector()
    broker.add_module(sink, name="a/b", queue=QueueOptions(depth=4))
    for _ in range(2):
        broker.worker_of(sink).queue._tell_stuck(5.0)
    assert len(caplog.messages) == 1, "once a minute"
    assert caplog.messages[0].startswith("module 'a/b': its queue of 4 messages has been full for 5 s")
    assert "queue.timeout_s" in caplog.messages[0]


def test_a_full_queue_stops_the_source_and_nothing_is_lost(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source)
    attach(broker, sink, queue=QueueOptions(depth=4))
    broker.add_link(source, sink)
    sink.gate.clear()
    thread = threading.Thread(target=say, args=(broker, source, *[b"%d" % n for n in range(3000)]))
    thread.start()
    eventually(lambda: broker.info(sink).waiting >= 4)
    assert thread.is_alive()
    assert broker.info(source).published < 3000, "the source is held back"
    most = broker.info(sink).waiting
    sink.gate.set()
    thread.join(60)
    eventually(lambda: len(sink.got) == 3000)
    assert sink.got == [b"%d" % n for n in range(3000)]
    assert broker.info(sink).ledger.lost == 0
    assert 4 <= most <= 4 + 4, "a full queue, and at most as many that were taken out of it together"


@pytest.mark.parametrize("overflow", [Overflow.DROP_OLDEST, Overflow.DROP_NEWEST])
def test_dropping_happens_only_where_asked_for_and_is_counted(broker: ModuleBroker, overflow: Overflow) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source)
    attach(broker, sink, queue=QueueOptions(depth=4, overflow=overflow))
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, b"first")
    eventually(lambda: broker.worker_of(sink).busy_since is not None)
    say(broker, source, *[b"%d" % n for n in range(100)])
    sink.gate.set()
    eventually(lambda: broker.worker_of(sink).idle)
    kept = range(96, 100) if overflow is Overflow.DROP_OLDEST else range(4)
    assert sink.got == [b"first", *[b"%d" % n for n in kept]]
    ledger = broker.info(sink).ledger
    assert ledger.dropped == {"overflow": 96}
    assert ledger.balanced


def test_a_publish_that_would_wait_on_its_own_cycle_fails_after_a_time_out_and_is_told(broker: ModuleBroker) -> None:
    refused: list[str] = []
    broker.on_refused = lambda name, error: refused.append(name)
    one, two = Doubler(), Doubler()
    for module in (one, two):
        module.create(broker, None)
    broker.add_module(one, name="one", queue=QueueOptions(depth=2))
    broker.add_module(two, name="two", queue=QueueOptions(depth=2))
    broker.add_link(one, two)
    broker.add_link(two, one)
    say(broker, one, b"x")
    eventually(lambda: len(refused) >= 4, "a cycle that doubles its messages runs full")
    one.doubling = two.doubling = False
    eventually(lambda: broker.worker_of(one).idle and broker.worker_of(two).idle, "nobody hangs")
    assert set(refused) == {"one", "two"}
    assert broker.worker_of(one).failed + broker.worker_of(two).failed >= 4
    lost = broker.info(one).ledger.dropped["overflow"] + broker.info(two).ledger.dropped["overflow"]
    assert lost == len(refused)


def test_a_self_link_with_a_full_queue_does_not_hang(broker: ModuleBroker) -> None:
    module = Doubler()
    attach(broker, module, queue=QueueOptions(depth=1))
    broker.add_link(module, module)
    say(broker, module, b"x")
    eventually(lambda: broker.worker_of(module).failed >= 2)
    module.doubling = False
    eventually(lambda: broker.worker_of(module).idle)


def test_a_queue_on_a_cycle_keeps_its_own_shorter_time_out() -> None:
    module = Doubler()
    with ModuleBroker(cycle_timeout_s=3600) as broker:
        attach(broker, module, queue=QueueOptions(depth=1, timeout_s=0.01))
        broker.add_link(module, module)
        say(broker, module, b"x")
        eventually(lambda: broker.worker_of(module).failed >= 2)
        module.doubling = False
        eventually(lambda: broker.worker_of(module).idle)


def test_a_slow_sink_off_the_cycle_is_waited_for_even_inside_receive(broker: ModuleBroker) -> None:
    source, passer, slow = Collector(), Passer(), Collector()
    attach(broker, source, passer)
    attach(broker, slow, queue=QueueOptions(depth=1))
    broker.add_link(source, passer)
    broker.add_link(passer, slow)
    slow.gate.clear()
    say(broker, source, *[b"%d" % n for n in range(20)])
    time.sleep(broker.cycle_timeout_s * 2)  # longer than a cycle would be waited for: nothing may be refused
    slow.gate.set()
    eventually(lambda: len(slow.got) == 20)
    assert broker.info(passer).failed == 0


# ---- removal


def test_removal_handles_what_is_queued_first(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, *[b"%d" % n for n in range(500)])
    threading.Timer(0.05, sink.gate.set).start()
    broker.remove_module(sink)
    assert len(sink.got) == 500
    say(broker, source, b"gone")
    assert [info.name for info in broker.modules()] == [broker.info(source).name]


class Begins(Collector):
    """Says that it has begun with a message."""

    def receive(self, message: GatewayMessage) -> None:
        self.steps.append("receive")
        super().receive(message)


def test_removal_without_draining_drops_and_counts(broker: ModuleBroker) -> None:
    source, sink = Collector(), Begins()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, b"in hand")
    worker = broker.worker_of(sink)
    eventually(lambda: "receive" in sink.steps)
    say(broker, source, *[b"%d" % n for n in range(99)])
    threading.Timer(0.05, sink.gate.set).start()
    broker.remove_module(sink, drain=False)
    assert sink.got == [b"in hand"]
    assert worker.queue.ledger.dropped == {"closed": 99}


def test_a_drain_that_does_not_end_leaves_everything_as_it_was(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, b"1", b"2")
    with pytest.raises(DrainError, match=r"2 messages after 0\.05 s"):
        broker.remove_module(sink, timeout=0.05)
    sink.gate.set()
    say(broker, source, b"3")
    eventually(lambda: sink.got == [b"1", b"2", b"3"])


def test_removing_a_module_whose_receive_publishes_does_not_deadlock(broker: ModuleBroker) -> None:
    source, passer, sink = Collector(), Passer(), Collector()
    attach(broker, source)
    attach(broker, passer, sink, queue=QueueOptions(depth=8))
    broker.add_link(source, passer)
    broker.add_link(passer, sink)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            say(broker, source, b"x")

    thread = threading.Thread(target=flood)
    thread.start()
    eventually(lambda: len(sink.got) > 100)
    broker.remove_module(passer)
    count = len(passer.got)
    eventually(lambda: len(sink.got) == count)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_publisher_blocked_on_a_module_that_goes_is_let_go(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source)
    attach(broker, sink, queue=QueueOptions(depth=1))
    broker.add_link(source, sink)
    sink.gate.clear()
    thread = threading.Thread(target=say, args=(broker, source, *[b"%d" % n for n in range(10)]))
    thread.start()
    eventually(lambda: broker.info(sink).waiting >= 2)
    threading.Timer(0.05, sink.gate.set).start()
    broker.remove_module(sink, drain=False)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("drain", [True, False])
def test_a_module_may_remove_itself(broker: ModuleBroker, drain: bool) -> None:
    class Leaver(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            if bytes(message) == b"leave":
                broker.remove_module(self, drain=drain)

    source, leaver = Collector(), Leaver()
    attach(broker, source, leaver)
    broker.add_link(source, leaver)
    leaver.gate.clear()
    say(broker, source, b"1", b"leave", b"2", b"3")
    leaver.gate.set()
    eventually(lambda: len(broker.modules()) == 1)
    assert leaver.got[:2] == [b"1", b"leave"]
    if drain:
        assert leaver.got == [b"1", b"leave", b"2", b"3"]


def test_a_source_id_is_not_used_again_while_its_messages_are_in_flight(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    attach(broker, source, sink)
    broker.add_link(source, sink)
    sink.gate.clear()
    say(broker, source, b"in flight")
    number = broker.info(source).source_id
    broker.remove_module(source)
    broker._next_id = iter([number, number, 77] * 1000)  # type: ignore[assignment]
    other = Collector()
    attach(broker, other)
    assert broker.info(other).source_id == 77
    sink.gate.set()
    eventually(lambda: sink.got == [b"in flight"])
    message = weakref.ref(sink.messages[0])
    sink.messages.clear()
    eventually(lambda: gc.collect() is not None and message() is None, "its worker lets go of it")
    late = Collector()
    attach(broker, late)
    assert broker.info(late).source_id == number


# ---- filters and snapshots


def test_filters_act_before_the_queue_so_a_slow_sink_behind_one_stops_nobody(broker: ModuleBroker) -> None:
    source, slow = Collector(), Collector()
    attach(broker, source)
    attach(broker, slow, queue=QueueOptions(depth=2))
    broker.add_link(source, slow, Filter(one_in=500))
    slow.gate.clear()
    say(broker, source, *[b"%d" % n for n in range(1000)])
    slow.gate.set()
    eventually(lambda: slow.got == [b"0", b"500"])
    ledger = broker.info(slow).ledger
    assert ledger.dropped == {"filtered": 998}
    assert ledger.balanced


def test_a_predicate_that_raises_costs_its_own_link_the_message(broker: ModuleBroker) -> None:
    source, one, other = Collector(), Collector(), Collector()
    attach(broker, source, one, other)
    told: list[str] = []
    broker.on_filter_error = lambda name, error: told.append(str(error))
    broker.add_link(source, one, Filter(predicate=lambda message: 1 // message.size))
    broker.add_link(source, other)
    say(broker, source, b"", b"x")
    eventually(lambda: one.got == [b"x"] and other.got == [b"", b"x"])
    assert len(told) == 1
    assert broker.info(one).ledger.dropped == {"error": 1}


def test_a_snapshot_of_a_module_says_what_it_is_and_does(broker: ModuleBroker) -> None:
    source, sink = Collector(), Collector()
    source.create(broker, None)
    sink.create(broker, None)
    broker.add_module(source, name="source")
    broker.add_module(sink, name="sink", queue=QueueOptions(depth=7))
    broker.add_link(source, sink)
    say(broker, source, b"1")
    eventually(lambda: broker.info(sink).handled == 1)
    info = broker.info(sink)
    assert (info.name, info.handle, info.kind, info.depth, info.waiting) == ("sink", sink, "Collector", 7, 0)
    assert (info.sources, info.sinks, info.thread) == (("source",), (), "module sink")
    assert [i.name for i in broker.modules()] == ["source", "sink"]
    assert broker.info(source).sinks == ("sink",)


def test_many_sources_and_sinks_while_links_come_and_go(broker: ModuleBroker) -> None:
    sources, sinks = [Collector() for _ in range(3)], [Collector() for _ in range(3)]
    attach(broker, *sources, queue=QueueOptions(depth=16))
    attach(broker, *sinks, queue=QueueOptions(depth=16))
    steady = sinks[0]
    for source in sources:
        broker.add_link(source, steady)
    threads = [
        threading.Thread(target=say, args=(broker, source, *[b"%d %d" % (index, n) for n in range(3000)]))
        for index, source in enumerate(sources)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for source in sources:
            for sink in sinks[1:]:
                broker.add_link(source, sink)
        for source in sources:
            for sink in sinks[1:]:
                broker.remove_link(source, sink)
    eventually(lambda: len(steady.got) == 9000)
    for sink in sinks:
        eventually(lambda sink=sink: broker.worker_of(sink).idle)
        for index in range(3):
            numbers = [int(c.split()[1]) for c in sink.got if c.startswith(b"%d " % index)]
            assert numbers == sorted(set(numbers)), "in order, none twice"
        assert broker.info(sink).ledger.balanced


def test_a_forked_child_finds_its_parents_broker_at_its_end(broker: ModuleBroker) -> None:
    source = Collector()
    attach(broker, source)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            broker.publish(source, GatewayMessage())
        except BrokerError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    say(broker, source, b"the parent goes on")
