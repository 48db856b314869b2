"""A module's life: its calls come in order and one at a time, every failure is told and counted, and stopping ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import PenstockError
from penstock.gateway import (
    DrainError,
    Event,
    Gateway,
    GatewayMessage,
    Module,
    ModuleError,
    Policy,
    QueueOptions,
    Restart,
    Source,
    worker,
)
from penstock.gateway.broker import Ending
from penstock.gateway.worker import Deadline, Life
from tests.gateway.conftest import Collector, eventually

LONG = 60


class Hung(Collector):
    """Never comes back from ``receive`` while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()

    def receive(self, message: GatewayMessage) -> None:
        self.steps.append("receive begins")
        super().receive(message)
        self.steps.append("receive ends")


class Flood(Source):
    """Publishes as fast as it is let."""

    def run(self) -> None:
        while not self.stopping.is_set():
            self.publish(b"x")


@pytest.fixture
def hung() -> Iterator[list[Hung]]:
    """Whoever hangs in a test goes on at its end."""
    made: list[Hung] = []
    yield made
    for module in made:
        module.gate.set()


def ended(gateway: Gateway, timeout: float) -> bool:
    """Destroy in another thread: a test that fails does not hang. What destroy gave."""
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(gateway.destroy(timeout)), daemon=True)
    thread.start()
    thread.join(LONG)
    assert result, "destroy has not come back"
    return result[0]


def notes(gateway: Gateway, event: Event) -> list[Any]:
    told: list[Any] = []
    gateway.add_event_callback(event, lambda _, __, context, ___: told.append(context))
    return told


# ---- stopping ends


def test_a_hung_sink_and_a_source_that_waits_for_it_end_in_time(hung: list[Hung]) -> None:
    gateway = Gateway()
    told = notes(gateway, Event.MODULE_ABANDONED)
    gateway.add_module("sink", Hung, queue=QueueOptions(depth=4))
    gateway.add_module("source", Flood)
    gateway.add_link("source", "sink")
    gateway.start()
    sink, source = gateway.module("sink"), gateway.module("source")
    hung.append(sink)
    worker = gateway.broker.worker_of(sink)
    eventually(lambda: worker.waiting > 4, "the source waits")
    assert not ended(gateway, 2.0)
    assert gateway.abandoned == ["sink"]
    assert told == [("sink", "receive")]
    assert not source._thread.is_alive(), "nobody waits for the hung one"
    steps = list(sink.steps)
    sink.gate.set()
    worker.thread.join(LONG)
    assert sink.steps == [*steps, "receive ends"], "no further call, destroy included"
    assert worker.lost == 1 + worker.queue.ledger.delivered - 1, "all that it had taken is counted"


def test_many_hung_sinks_share_one_deadline(hung: list[Hung], monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    gateway.add_module("source", Collector)
    names = [f"sink{n}" for n in range(8)]
    for name in names:
        gateway.add_module(name, Hung)
        gateway.add_link("source", name)
        hung.append(gateway.module(name))
    gateway.start()
    source = gateway.module("source")
    source.publish(b"x")
    eventually(lambda: all("receive begins" in module.steps for module in hung))
    # there is nothing to drain; the source has time for its steps, on a slow machine too
    monkeypatch.setattr(Ending, "within", lambda _: Ending(Deadline(0), Deadline(3), Deadline(6)))
    began = time.monotonic()
    assert not ended(gateway, 6)
    assert time.monotonic() - began < 3 * len(names), "one deadline for all of them, not one each"
    assert sorted(gateway.abandoned) == names
    assert source.steps == ["create", "start", "stop", "destroy"], "the others end in order"


def test_who_is_not_behind_a_hung_module_ends_in_order(hung: list[Hung]) -> None:
    """Added before it or after it: its last words arrive, and only what comes from the hung one is cut off."""

    class Speaker(Collector):
        def stop(self) -> None:
            self.publish(b"last words")

    gateway = Gateway()
    for name, kind in (("before", Speaker), ("hung", Hung), ("source", Speaker), ("after", Speaker), ("ear", Collector)):
        gateway.add_module(name, kind)
    for source, sink in (("before", "ear"), ("after", "ear"), ("source", "hung")):
        gateway.add_link(source, sink)
    gateway.start()
    hung.append(gateway.module("hung"))
    gateway.module("source").publish(b"x")
    eventually(lambda: "receive begins" in hung[0].steps)
    ear = gateway.module("ear")
    assert not ended(gateway, 2.0)
    assert gateway.abandoned == ["hung"]
    assert ear.got == [b"last words"] * 2
    assert ear.steps == ["create", "start", "stop", "destroy"]


def test_a_source_that_is_blocked_in_its_own_read_is_abandoned() -> None:
    go = threading.Event()

    class Blocked(Source):
        def run(self) -> None:
            go.wait(LONG)

    gateway = Gateway()
    gateway.add_module("source", Blocked)
    gateway.start()
    try:
        ended(gateway, 2.0)
        assert gateway.abandoned == ["source"]
    finally:
        go.set()


def test_removing_a_source_that_waits_for_a_hung_sink_ends_in_time(hung: list[Hung]) -> None:
    gateway = Gateway()
    gateway.add_module("sink", Hung, queue=QueueOptions(depth=4))
    gateway.add_module("source", Flood)
    gateway.add_link("source", "sink")
    gateway.start()
    hung.append(gateway.module("sink"))
    queue = gateway.broker.worker_of(hung[0]).queue

    def blocked() -> bool:
        """Whether the sink hangs with its batch, its queue is full, and the source waits for room."""
        matched, delivered, dropped, queued, _ = queue._counts()
        return delivered > 0 and queued == 4 and matched - delivered - sum(dropped.values()) - queued == 1

    eventually(blocked)
    with pytest.raises(DrainError):
        gateway.remove_module("sink", timeout=2.0)
    eventually(blocked, "it is linked again")
    gateway.remove_module("source", timeout=2.0)
    assert gateway.abandoned == ["source"]
    assert [line.name for line in gateway.module_list()] == ["sink"]
    ended(gateway, 2.0)


def test_a_callback_that_hangs_does_not_keep_the_gateway_from_its_end() -> None:
    go = threading.Event()
    gateway = Gateway(callbacks=[(Event.DESTROYED, lambda *_: go.wait(LONG))])
    try:
        assert ended(gateway, 2.0)
    finally:
        go.set()


@pytest.mark.parametrize("step", ["stop", "destroy", "start"])
def test_a_step_that_hangs_is_abandoned(step: str) -> None:
    go = threading.Event()
    kind = type("Slow", (Collector,), {step: lambda _: go.wait(LONG)})
    gateway = Gateway()
    gateway.add_module("slow", kind)
    starting = threading.Thread(target=gateway.start, daemon=True)
    starting.start()
    if step != "start":
        starting.join(LONG)
    worker = gateway.broker.worker_of(gateway._kept["slow"].module)
    eventually(lambda: worker.doing == "start" or step != "start")
    try:
        ended(gateway, 2.0)
        assert gateway.abandoned == ["slow"]
    finally:
        go.set()


# ---- calls never overlap


class Strict(Module):
    """Notes every call that overlaps another or comes out of order."""

    ORDER = ("create", "start", "receive", "stop", "destroy")

    def __init__(self) -> None:
        self.at, self.inside, self.wrong = 0, "", list[str]()
        self.count = 0

    def step(self, name: str) -> None:
        place = self.ORDER.index(name)
        if self.inside or place < self.at or (name == "receive" and self.at < 1):
            self.wrong.append(f"{name} in {self.inside or 'nothing'} after {self.ORDER[self.at]}")
        self.inside, self.at = name, place
        time.sleep(0.001)
        self.inside = ""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.step("create")

    def start(self) -> None:
        self.step("start")

    def receive(self, message: GatewayMessage) -> None:
        self.step("receive")
        self.count += 1

    def stop(self) -> None:
        self.step("stop")

    def destroy(self) -> None:
        self.step("destroy")


@pytest.mark.parametrize("how", ["destroy", "destroy at once", "remove", "remove at once"])
def test_calls_come_in_order_and_one_at_a_time(how: str) -> None:
    gateway = Gateway()
    gateway.add_module("source", Flood)
    gateway.add_module("strict", Strict, queue=QueueOptions(depth=500))
    gateway.add_link("source", "strict")
    strict = gateway.module("strict")
    gateway.start()
    eventually(lambda: strict.count > 20)
    worker = gateway.broker.worker_of(strict)
    if how.startswith("remove"):
        gateway.remove_module("strict", drain=how == "remove", timeout=LONG)
    gateway.destroy(0 if how == "destroy at once" else LONG)
    assert strict.wrong == []
    assert strict.ORDER[strict.at] == "destroy"
    ledger = worker.queue.ledger
    assert strict.count + worker.lost + ledger.lost == ledger.matched, "what was dropped is counted"


def test_nothing_is_received_before_start_has_returned() -> None:
    gateway = Gateway()
    for name, kind in (("source", Collector), ("strict", Strict)):
        gateway.add_module(name, kind)
    gateway.add_link("source", "strict")
    strict = gateway.module("strict")
    gateway.module("source").publish(b"early")
    assert gateway.broker.info(strict).waiting == 1
    gateway.start()
    eventually(lambda: strict.count == 1)
    assert gateway.destroy()
    assert strict.wrong == []


# ---- failures are told, counted and supervised


def test_a_source_that_raises_is_told_counted_and_made_anew() -> None:
    made: list[Module] = []

    class Unplugged(Source):
        def run(self) -> None:
            made.append(self)
            raise RuntimeError("unplugged")

    with Gateway() as gateway:
        failed, restarted = notes(gateway, Event.MODULE_FAILED), notes(gateway, Event.MODULE_RESTARTED)
        gateway.add_module("source", Unplugged)
        gateway.start()
        eventually(lambda: len(made) > 2 and len(restarted) > 1)
        assert failed[0][:2] == ("source", "run")
        assert gateway.modules()[0].failed >= 2
        assert len(set(map(id, made))) == len(made)


def test_a_source_that_returns_is_done() -> None:
    class Once(Source):
        def run(self) -> None:
            self.publish(b"once")

    with Gateway() as gateway:
        gateway.add_module("source", Once)
        gateway.add_module("sink", Collector)
        gateway.add_link("source", "sink")
        gateway.start()
        eventually(lambda: gateway.module("sink").got == [b"once"])
        assert gateway.supervisor("source").failures == 0


class StartFails(Collector):
    """Cannot be started until somebody says so."""

    well = False

    def start(self) -> None:
        if not self.well:
            raise OSError("no device")
        super().start()


def test_a_start_that_raises_stops_nobody_else_and_starting_again_tries_once_more() -> None:
    StartFails.well = False
    with Gateway() as gateway:
        failed = notes(gateway, Event.MODULE_FAILED)
        for name, kind in (("first", Collector), ("bad", StartFails), ("last", Collector)):
            gateway.add_module(name, kind)
        gateway.add_link("first", "bad")
        with pytest.raises(ModuleError, match="'bad' failed in start: OSError: no device"):
            gateway.start()
        assert gateway.module("last").steps == ["create", "start"]
        eventually(lambda: failed)
        assert failed[0][:2] == ("bad", "start")
        worker = gateway.broker.worker_of(gateway.module("bad"))
        gateway.module("first").publish(b"dropped")
        eventually(lambda: worker.lost == 1)
        assert gateway.broker.info(gateway.module("bad")).failed == 1
        with pytest.raises(ModuleError, match="no device"):
            gateway.start()
        StartFails.well = True
        gateway.start()
        gateway.module("first").publish(b"handled")
        eventually(lambda: gateway.module("bad").got == [b"handled"])
        assert gateway.module("first").steps == ["create", "start"], "who was started is not started again"


def test_with_a_policy_a_start_that_raises_is_tried_again_by_itself() -> None:
    StartFails.well = False
    with Gateway() as gateway:
        gateway.add_module("bad", StartFails, restart=Restart(Policy.ON_FAILURE, 0.01, 0.02, limit=None))
        gateway.start()
        eventually(lambda: gateway.supervisor("bad").failures > 2)
        StartFails.well = True
        eventually(lambda: gateway.module("bad").steps == ["create", "start"])


@pytest.mark.parametrize("step", ["stop", "destroy"])
def test_a_last_step_that_raises_is_told_and_counted(step: str) -> None:
    def refuse(_: Any) -> None:
        raise OSError("not well")

    gateway = Gateway()
    failed = notes(gateway, Event.MODULE_FAILED)
    gateway.add_module("bad", type("Bad", (Collector,), {step: refuse}))
    gateway.start()
    worker = gateway.broker.worker_of(gateway.module("bad"))
    assert gateway.destroy()
    assert [context[:2] for context in failed] == [("bad", step)]
    assert worker.failed == 1


def test_async_steps_are_run_in_order() -> None:
    class Coroutines(Module):
        def __init__(self) -> None:
            self.steps: list[str] = []
            self.ticks = 0

        async def start(self) -> None:
            self.steps.append("start")
            self.task = asyncio.create_task(self.tick())

        async def tick(self) -> None:
            while True:
                await asyncio.sleep(0.001)
                self.ticks += 1

        async def receive(self, message: GatewayMessage) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            self.steps.append(bytes(message).decode())

        async def stop(self) -> None:
            self.task.cancel()
            self.steps.append("stop")

    gateway = Gateway()
    gateway.add_module("source", Collector)
    gateway.add_module("sink", Coroutines)
    gateway.add_link("source", "sink")
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: sink.ticks > 2, "its own tasks run while it waits")
    for n in range(5):
        gateway.module("source").publish(b"%d" % n)
    assert gateway.destroy()
    assert sink.steps == ["start", "0", "1", "2", "3", "4", "stop"]


def test_an_async_create_is_refused() -> None:
    class Wrong(Module):
        async def create(self, broker: Any, configuration: Any) -> None:  # type: ignore[override]
            pass

    with Gateway() as gateway, pytest.raises(ModuleError, match="async"):
        gateway.add_module("wrong", Wrong)


def test_a_life_can_be_read() -> None:
    with Gateway() as gateway:
        gateway.add_module("one", Collector)
        worker = gateway.broker.worker_of(gateway.module("one"))
        assert worker.life is Life.MADE
        gateway.start()
        assert worker.life is Life.RUNNING
        gateway.remove_module("one")
        assert worker.life is Life.ENDED


# ---- a start that does not come back, an end from inside, what is abandoned


def test_a_start_that_hangs_keeps_nobody_else_from_starting() -> None:
    go = threading.Event()
    kind = type("Slow", (Collector,), {"start": lambda _: go.wait(LONG)})
    with Gateway() as gateway:
        told = notes(gateway, Event.MODULE_STUCK)
        gateway.add_module("first", Collector)
        gateway.add_module("slow", kind, stuck_after_s=0.1)
        gateway.add_module("last", Collector)
        gateway.add_link("first", "slow")
        try:
            with pytest.raises(ModuleError, match="module 'slow' has not come back from start"):
                gateway.start(timeout=0.5)
            assert gateway.module("last").steps == ["create", "start"]
            eventually(lambda: told)
            assert told[0][0] == "slow"
            gateway.module("first").publish(b"waits")
        finally:
            go.set()
        eventually(lambda: gateway.module("slow").got == [b"waits"], "it receives when it has come back")


def test_a_start_that_raises_late_is_told_and_counted() -> None:
    go = threading.Event()

    def start(_: Any) -> None:
        go.wait(LONG)
        raise OSError("no device")

    with Gateway() as gateway:
        told = notes(gateway, Event.MODULE_FAILED)
        gateway.add_module("slow", type("Slow", (Collector,), {"start": start}))
        with pytest.raises(ModuleError):
            gateway.start(timeout=0.1)
        go.set()
        eventually(lambda: told)
        assert told[0][:2] == ("slow", "start")
        eventually(lambda: gateway.broker.worker_of(gateway.module("slow")).life is Life.FAILED)
        assert gateway.modules()[0].failed == 1


def test_adding_a_module_whose_start_hangs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.gateway.START_S", 0.1)
    monkeypatch.setattr("penstock.gateway.gateway.UNDO_S", 0.1)
    go = threading.Event()
    with Gateway() as gateway:
        gateway.start()
        try:
            with pytest.raises(ModuleError, match="did not come back from start"):
                gateway.add_module("slow", type("Slow", (Collector,), {"start": lambda _: go.wait(LONG)}))
            assert gateway.modules() == []
            assert gateway.abandoned == ["slow"]
        finally:
            go.set()


def test_destroying_the_gateway_inside_receive_ends_it_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", traces.append)

    class Last(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            gateway.destroy(5)

    gateway = Gateway()
    gateway.add_module("a", Collector)
    gateway.add_module("last", Last)
    gateway.add_link("a", "last")
    gateway.start()
    last = gateway.module("last")
    worker = gateway.broker.worker_of(last)
    last.gate.clear()
    for _ in range(5):
        gateway.module("a").publish(b"x")
    last.gate.set()
    worker.thread.join(LONG)
    assert not worker.thread.is_alive()
    assert traces == []
    assert last.got == [b"x"]
    assert last.steps == ["create", "start", "stop", "destroy"]
    with pytest.raises(ValueError, match="closed"):
        worker.counters.set("matched", 0)


def test_a_source_that_ignores_stopping_is_told_of_when_it_is_made_anew() -> None:
    go = threading.Event()

    class Deaf(Source):
        def run(self) -> None:
            go.wait(LONG)

        def receive(self, message: GatewayMessage) -> None:
            raise OSError("made anew")

    gateway = Gateway()
    told = notes(gateway, Event.MODULE_STUCK)
    gateway.add_module("deaf", Deaf, restart=Restart(Policy.ON_FAILURE, backoff_s=0.01), stuck_after_s=0.1)
    gateway.add_link("deaf", "deaf")
    gateway.start()
    gateway.module("deaf").publish(b"x")
    try:
        eventually(lambda: told, "it hangs in destroy, which waits for its thread")
        assert gateway.broker.worker_of(gateway.module("deaf")).doing == "destroy"
        assert not ended(gateway, 2.0)
        assert gateway.abandoned == ["deaf"]
    finally:
        go.set()


def test_stop_is_called_once_also_when_it_is_late() -> None:
    go = threading.Event()

    class Late(Collector):
        def stop(self) -> None:
            super().stop()
            go.wait(LONG)

        def kill(self) -> None:
            go.set()

    gateway = Gateway()
    gateway.add_module("late", Late)
    gateway.start()
    late = gateway.module("late")
    assert ended(gateway, 2.0)  # late, and nothing was lost
    assert late.steps == ["create", "start", "stop", "destroy"]


def test_what_goes_to_named_outputs_is_counted_as_published() -> None:
    with Gateway() as gateway:
        for name in ("a", "b"):
            gateway.add_module(name, Collector)
        gateway.add_link("a.left", "b")
        gateway.start()
        a = gateway.module("a")
        a.publish(b"1")
        a.publish(b"2", output="left")
        assert gateway.modules()[0].published == 2


def test_a_reload_removes_a_module_that_hangs_and_not_one_that_is_only_slow(
    hung: list[Hung], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = "tests.gateway.test_life"
    entries = [{"name": name, "loader": {"name": "python", "entrypoint": f"{here}:{kind}"}}
               for name, kind in (("a", "Collector"), ("hung", "Hung"))]  # fmt: skip
    remove = Gateway.remove_module
    monkeypatch.setattr(Gateway, "remove_module", lambda self, name, **how: remove(self, name, **{**how, "timeout": 1}))
    gateway = Gateway({"modules": entries, "links": [{"source": "a", "sink": "hung"}]})
    gateway.start()
    module = gateway.module("hung")
    hung.append(module)
    for _ in range(3):
        gateway.module("a").publish(b"x")
    eventually(lambda: "receive begins" in module.steps)
    worker = gateway.broker.worker_of(module)
    assert gateway.apply({"modules": entries[:1], "links": []}) == ["- a -> hung", "- hung"]
    assert [line.name for line in gateway.module_list()] == ["a"]
    assert gateway.abandoned == ["hung"]
    assert worker.lost + worker.queue.ledger.lost == 3
    assert gateway.destroy(LONG), "it was lost and abandoned before"


# ---- steps that would not run


def test_a_source_may_run_async() -> None:
    class Speaks(Source):
        async def run(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            self.publish(b"ran")

    with Gateway() as gateway:
        gateway.add_module("source", Speaks)
        gateway.add_module("sink", Collector)
        gateway.add_link("source", "sink")
        gateway.start()
        eventually(lambda: gateway.module("sink").got == [b"ran"])


def test_a_source_that_raises_in_async_run_has_failed() -> None:
    class Raises(Source):
        async def run(self) -> None:  # type: ignore[override]
            raise OSError("unplugged")

    with Gateway() as gateway:
        gateway.add_module("source", Raises, restart="never")
        gateway.start()
        eventually(lambda: gateway.modules()[0].failed == 1)


class Yields(Module):
    def receive(self, message: GatewayMessage) -> Iterator[None]:  # type: ignore[override]
        yield


class YieldsAsync(Module):
    async def receive(self, message: GatewayMessage) -> Any:
        yield


@pytest.mark.parametrize("loader", ["python", "process"])
@pytest.mark.parametrize("kind", [Yields, YieldsAsync])
def test_a_step_with_a_yield_is_refused(kind: type[Module], loader: str) -> None:
    with Gateway() as gateway:
        with pytest.raises(PenstockError, match="receive is a generator"):
            gateway.add_module("one", f"{__name__}:{kind.__name__}", loader=loader)
        if loader == "python":
            with pytest.raises(PenstockError, match="receive is a generator"):
                gateway.add_module("one", kind)
        assert gateway.modules() == []


# ---- time-outs


def test_draining_ends_at_three_quarters_and_at_most_five_seconds_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 0.0))
    moments = {timeout: Ending.within(timeout) for timeout in (0.0, 0.2, 0.5, 1.0, 2.0, 8.0, 20.0)}
    assert [one.drained_by.left_s for one in moments.values()] == pytest.approx([0, 0.15, 0.375, 0.75, 1.5, 6, 15])
    assert [one.over_by.left_s for one in moments.values()] == [0.5, 0.5, 0.5, 1, 2, 8, 20]
    for one in moments.values():
        assert one.drained_by.left_s < one.stopped_by.left_s < one.over_by.left_s  # type: ignore[operator]


@pytest.mark.parametrize("left", [0, 3])
def test_the_end_says_whether_anything_was_lost_not_whether_it_was_late(
    monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    class StopsLate(Collector):
        def stop(self) -> None:
            time.sleep(0.01)
            super().stop()

    gateway = Gateway()
    gateway.add_module("source", Collector)
    gateway.add_module("sink", StopsLate)
    gateway.add_link("source", "sink")
    if left:  # it waits: the gateway has not been started
        for _ in range(left):
            gateway.module("source").publish(b"x")
    else:
        gateway.start()
    monkeypatch.setattr(Ending, "within", lambda _: Ending(Deadline(0), Deadline(LONG), Deadline(LONG)))
    assert gateway.destroy(1) is (left == 0)
    assert gateway.abandoned == []


@pytest.mark.parametrize("timeout", [float("inf"), 1e300])
def test_any_number_of_seconds_is_a_time_for_the_end(timeout: float) -> None:
    gateway = Gateway()
    gateway.add_module("sink", Collector)
    gateway.start()
    assert gateway.destroy(timeout)
