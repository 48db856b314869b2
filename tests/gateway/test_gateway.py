"""Gateway: modules by name, links, events, changes while it runs, and the way back when one fails."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import InvalidArgument, StateError, publisher
from penstock.gateway import (
    AddLinkError,
    BrokerError,
    ConfigurationError,
    DrainError,
    Event,
    Filter,
    Gateway,
    GatewayMessage,
    LinkOptions,
    ListedModule,
    Module,
    ModuleError,
    QueueOptions,
)
from penstock.gateway.configuration import parse
from penstock.gateway.endpoint import Endpoint
from tests.gateway.conftest import Collector, Doubler, Passer, eventually
from tests.gateway.delivery import Backlogged

HERE = "tests.gateway.conftest"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


def entry(name: str, kind: str = "Collector", **more: Any) -> dict[str, Any]:
    return {"name": name, "loader": {"name": "python", "entrypoint": f"{HERE}:{kind}"}, **more}


def links(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("source", "sink"), pair.split(">"), strict=True)) for pair in pairs]


def say(gateway: Gateway, source: str, *contents: bytes) -> None:
    gateway.start()  # nothing is received before
    for content in contents:
        gateway.module(source).publish(content)


def listed(gateway: Gateway) -> dict[str, tuple[str, ...]]:
    return {line.name: line.sources for line in gateway.module_list()}


# ---- adding and starting


def test_the_steps_of_a_modules_life_in_order(gateway: Gateway) -> None:
    gateway.add_module("first", Collector)
    module = gateway.module("first")
    assert module.steps == ["create"]
    gateway.start()
    gateway.start()  # once is enough
    assert module.steps == ["create", "start"]
    gateway.add_module("late", f"{HERE}:Collector")
    assert gateway.module("late").steps == ["create", "start"]
    gateway.remove_module("first")
    assert module.steps == ["create", "start", "stop", "destroy"]
    late = gateway.module("late")
    assert gateway.destroy()
    assert late.steps == ["create", "start", "stop", "destroy"]
    with pytest.raises(StateError, match="destroyed"):
        gateway.add_module("after", Collector)


@pytest.mark.parametrize("name", ["", "*", "shm:/x", "a\0b"])
def test_names_that_cannot_be_are_refused(gateway: Gateway, name: str) -> None:
    for kind in (Collector, f"{HERE}:Collector"):
        with pytest.raises(InvalidArgument):
            gateway.add_module(name, kind)
    assert gateway.module_list() == []


def test_names_are_unique(gateway: Gateway) -> None:
    gateway.add_module("one", Collector)
    with pytest.raises(InvalidArgument, match="already"):
        gateway.add_module("one", Collector)
    assert list(listed(gateway)) == ["one"]


class Refusing(Module):
    """Fails at the step its args name."""

    made: list[str] = []

    @classmethod
    def parse(cls, args: Any) -> Any:
        if args == "parse":
            raise ValueError("args are wrong")
        return args

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.made.append("create")
        if configuration == "create":
            raise OSError("create is refused")

    def start(self) -> None:
        if self.configuration == "start":
            raise OSError("start is refused")

    def destroy(self) -> None:
        self.made.append("destroy")


@pytest.mark.parametrize("step", ["parse", "create", "start"])
def test_a_failing_step_undoes_the_earlier_ones(gateway: Gateway, step: str) -> None:
    gateway.add_module("sink", Collector)
    gateway.add_link("*", "sink")
    gateway.start()
    Refusing.made.clear()
    before, threads = listed(gateway), threading.active_count()
    with pytest.raises((ValueError, ModuleError), match=r"wrong|refused"):
        gateway.add_module("bad", Refusing, step)
    assert listed(gateway) == before
    assert threading.active_count() == threads
    assert Refusing.made == {"parse": [], "create": ["create"], "start": ["create", "destroy"]}[step]
    gateway.add_module("bad", Refusing, "well")
    assert listed(gateway)["sink"] == ("bad",)


# ---- links


def test_star_links_feed_from_every_other_module_now_and_later(gateway: Gateway) -> None:
    for name in ("a", "sink"):
        gateway.add_module(name, Collector)
    gateway.add_link("*", "sink")
    gateway.add_module("late", Collector)
    for name in ("a", "late", "sink"):
        say(gateway, name, name.encode())
    eventually(lambda: gateway.module("sink").got == [b"a", b"late"])
    assert listed(gateway) == {"a": (), "sink": ("a", "late"), "late": ()}


@pytest.mark.parametrize("order", [("*", "a"), ("a", "*")])
@pytest.mark.parametrize("gone", ["*", "a"])
def test_star_and_explicit_together_deliver_once_and_either_may_go(
    gateway: Gateway, order: tuple[str, str], gone: str
) -> None:
    for name in ("a", "b", "sink"):
        gateway.add_module(name, Collector)
    for source in order:
        gateway.add_link(source, "sink")
    say(gateway, "a", b"1")
    eventually(lambda: gateway.module("sink").got == [b"1"])
    gateway.remove_link(gone, "sink")
    say(gateway, "a", b"2")
    say(gateway, "b", b"from b")
    eventually(lambda: gateway.module("sink").got == [b"1", b"2"] + ([b"from b"] if gone == "a" else []))
    assert listed(gateway)["sink"] == (("a", "b") if gone == "a" else ("a",))


def test_links_that_cannot_be_are_refused(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "b")
    for source, sink, why in (("a", "b", "already"), ("a", "*", "cannot be a sink"), ("a", "c", "no module 'c'"),
                              ("c", "a", "no module 'c'")):  # fmt: skip
        with pytest.raises(AddLinkError, match=why):
            gateway.add_link(source, sink)
    gateway.remove_link("b", "a")  # unknown: nothing happens
    gateway.remove_link("x", "y")
    assert listed(gateway) == {"a": (), "b": ("a",)}


def test_cycles_and_self_links_appear_in_the_list(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    for ends in (("a", "b"), ("b", "a"), ("a", "a")):
        gateway.add_link(*ends)
    assert gateway.module_list() == [ListedModule("a", ("a", "b")), ListedModule("b", ("a",))]


def test_removing_a_module_removes_its_links(gateway: Gateway) -> None:
    for name in ("a", "b", "c"):
        gateway.add_module(name, Collector)
    for ends in (("a", "b"), ("b", "c"), ("*", "b"), ("a", "c")):
        gateway.add_link(*ends)
    gateway.remove_module("b")
    assert [link.ends for link in gateway.links()] == [("a", "c")]
    gateway.add_module("b", Collector)
    say(gateway, "a", b"x")
    eventually(lambda: gateway.module("c").got == [b"x"])
    assert gateway.module("b").got == []
    with pytest.raises(BrokerError, match="no module 'z'"):
        gateway.remove_module("z")


def test_a_filter_on_a_link(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "b", Filter({"kind": "warm"}))
    gateway.start()
    for kind in ("cold", "warm"):
        gateway.module("a").publish(kind.encode(), {"kind": kind})
    eventually(lambda: gateway.module("b").got == [b"warm"])


def test_a_module_may_change_the_gateway_it_lives_in(gateway: Gateway) -> None:
    class Grower(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            name = bytes(message).decode()
            gateway.add_module(name, Collector)
            gateway.add_link("grower", name)
            gateway.remove_module("source")

    gateway.add_module("source", Collector)
    gateway.add_module("grower", Grower)
    gateway.add_link("source", "grower")
    gateway.start()
    say(gateway, "source", b"child")
    eventually(lambda: set(listed(gateway)) == {"grower", "child"})


def test_a_module_may_remove_itself(gateway: Gateway) -> None:
    class Leaver(Collector):
        def receive(self, message: GatewayMessage) -> None:
            super().receive(message)
            gateway.remove_module("leaver")

    for name, kind in (("source", Collector), ("leaver", Leaver)):
        gateway.add_module(name, kind)
    gateway.add_link("source", "leaver")
    leaver = gateway.module("leaver")
    say(gateway, "source", b"go")
    eventually(lambda: list(listed(gateway)) == ["source"])
    assert "destroy" in leaver.steps


def test_a_removal_that_cannot_drain_leaves_the_gateway_as_it_was(gateway: Gateway) -> None:
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
    gateway.add_link("a", "b")
    sink = gateway.module("b")
    sink.gate.clear()
    say(gateway, "a", b"1")
    with pytest.raises(DrainError, match="drain=False"):
        gateway.remove_module("b", timeout=0.05)
    sink.gate.set()
    say(gateway, "a", b"2")
    eventually(lambda: sink.got == [b"1", b"2"])
    assert sink.steps == ["create", "start"]


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_dropped_with_a_removed_module_is_told_and_counted(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, stored: bool
) -> None:
    gateway.add_module("source", Backlogged if stored else Collector, {"many": 10})
    gateway.add_module("sink", Collector)
    gateway.start()
    sink = gateway.module("sink")
    sink.gate.clear()
    gateway.add_link("source", "sink")
    if not stored:
        say(gateway, "source", *[b"x"] * 10)
    worker = gateway.broker.worker_of(sink)
    eventually(lambda: worker.busy_since is not None and worker.waiting == 10)
    given: list[int] = []
    thread = threading.Thread(target=lambda: given.append(gateway.remove_module("sink", drain=False, timeout=60)))
    thread.start()
    eventually(worker.ending.is_set)
    sink.gate.set()
    thread.join(60)
    assert len(sink.got) == 1
    assert given == [0 if stored else 9], "what a durable source keeps is not lost"
    told = [record.getMessage() for record in caplog.records if "removed" in record.getMessage()]
    assert told == ([] if stored else ["module 'sink' was removed: 9 messages that it had not handled were dropped"])


# ---- the end


def test_shutdown_drains_in_link_order(gateway: Gateway) -> None:
    for name, kind in (("c", Collector), ("b", Passer), ("a", Passer)):  # added against the flow
        gateway.add_module(name, kind, queue=QueueOptions(depth=5000))
    for ends in (("a", "b"), ("b", "c")):
        gateway.add_link(*ends)
    gateway.start()
    first, last = gateway.module("a"), gateway.module("c")
    first.gate.clear()
    gateway.add_module("source", Collector)
    gateway.add_link("source", "a")
    say(gateway, "source", *[b"%d" % n for n in range(3000)])
    threading.Timer(0.05, first.gate.set).start()
    assert gateway.destroy()
    assert last.got == [b"%d" % n for n in range(3000)]


def test_shutdown_ends_a_cycle_that_never_would_and_tells(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "two"):
        gateway.add_module(name, Passer)
    gateway.add_link("one", "two")
    gateway.add_link("two", "one")
    say(gateway, "one", b"for ever")
    eventually(lambda: len(gateway.module("one").got) > 10)
    assert not gateway.destroy(timeout=0.2)
    assert "the cycle of one and two" in caplog.text


def test_a_full_cycle_is_told_as_an_event(gateway: Gateway) -> None:
    refused: list[Any] = []
    gateway.add_event_callback(Event.PUBLISH_REFUSED, lambda _, __, context, ___: refused.append(context[0]))
    gateway.add_module("doubler", Doubler, queue=QueueOptions(depth=1))
    gateway.add_link("doubler", "doubler")
    say(gateway, "doubler", b"x")
    eventually(lambda: refused[:2] == ["doubler", "doubler"])
    gateway.module("doubler").doubling = False


# ---- events


def test_events_in_order_with_their_context() -> None:
    told: list[tuple[Event, Any, Any]] = []

    def note(gateway: Gateway, event: Event, context: Any, parameter: Any) -> None:
        told.append((event, context, parameter))

    gateway = Gateway(callbacks=[(event, note, "p") for event in Event])
    gateway.add_module("a", Collector)
    gateway.add_link("a", "a")
    gateway.start()
    gateway.remove_module("a")
    gateway.destroy()
    assert told == [
        (Event.CREATED, None, "p"),
        (Event.MODULE_LIST_CHANGED, [ListedModule("a", ())], "p"),
        (Event.MODULE_LIST_CHANGED, [ListedModule("a", ("a",))], "p"),
        (Event.STARTED, None, "p"),
        (Event.MODULE_LIST_CHANGED, [], "p"),
        (Event.DESTROYED, None, "p"),
    ], "DESTROYED has been told when destroy returns"


# ---- descriptions


def test_from_json_makes_links_and_starts() -> None:
    text = json.dumps({"modules": [entry("a"), entry("b", "Passer"), entry("c")], "links": links("a>b", "b>c", "*>c")})
    with Gateway.from_json(text) as gateway:
        say(gateway, "a", b"x")
        eventually(lambda: gateway.module("c").got.count(b"x") == 2)
        assert gateway.module("a").steps == ["create", "start"]
        assert listed(gateway)["c"] == ("a", "b")


def test_an_update_adds_modules_and_links_or_nothing(gateway: Gateway) -> None:
    gateway.apply({"modules": [entry("a")], "links": []})
    gateway.start()
    gateway.update({"modules": [entry("b")], "links": links("a>b")})
    gateway.update(json.dumps({"links": links("b>a")}))
    before = listed(gateway), [link.ends for link in gateway.links()]
    for wrong in (
        {"modules": [entry("c"), entry("d", "Nobody")], "links": links("a>c")},
        {"modules": [entry("c")], "links": links("a>c", "a>nobody")},
        {"modules": [entry("c"), entry("a")]},
        {"links": links("a>a", "a>b")},
    ):
        with pytest.raises((InvalidArgument, AddLinkError)):
            gateway.update(wrong)
        assert (listed(gateway), [link.ends for link in gateway.links()]) == before
    say(gateway, "a", b"goes on")
    eventually(lambda: gateway.module("b").got == [b"goes on"])


def test_applying_a_changed_description_changes_only_the_difference(gateway: Gateway) -> None:
    gateway.apply({"modules": [entry("a"), entry("b"), entry("old")], "links": links("a>b", "a>old")})
    gateway.start()
    a, b = gateway.module("a"), gateway.module("b")
    done = gateway.apply(
        {"modules": [entry("a"), entry("b", args={"n": 1}), entry("new")], "links": links("a>b", "b>new")}
    )
    assert done == ["- a -> old", "- old", "~ b", "+ new", "+ b -> new"]
    assert gateway.module("a") is a
    assert gateway.module("b") is not b
    assert b.steps[-2:] == ["stop", "destroy"]
    assert gateway.module("new").steps == ["create", "start"]
    say(gateway, "a", b"x")
    eventually(lambda: gateway.module("b").got == [b"x"])
    assert gateway.apply(gateway._applied) == []


def test_a_description_that_fails_leaves_the_gateway_as_it_was(gateway: Gateway) -> None:
    first = {"modules": [entry("a"), entry("b")], "links": links("a>b")}
    gateway.apply(first)
    gateway.start()
    refusing = {"name": "bad", "loader": {"name": "python", "entrypoint": "tests.gateway.test_gateway:Refusing"}}
    before = listed(gateway), [link.ends for link in gateway.links()]
    for wrong in (
        {"modules": [entry("a"), {**refusing, "args": "parse"}], "links": []},
        {"modules": [entry("a"), {**refusing, "args": "create"}], "links": []},
        {"modules": [{**refusing, "args": "start"}, entry("c")], "links": []},
        {"modules": [entry("a")], "links": links("a>nobody")},
    ):
        with pytest.raises((ConfigurationError, ModuleError)):
            gateway.apply(wrong)
        assert (listed(gateway), [link.ends for link in gateway.links()]) == before
    say(gateway, "a", b"goes on")
    eventually(lambda: gateway.module("b").got == [b"goes on"])
    assert gateway.apply(first) == []


def test_a_failure_while_making_leaves_nothing_behind() -> None:
    wrong = {
        "modules": [entry("a"), {"name": "bad", "loader": {"name": "python", "entrypoint": "no.such:Thing"}}],
        "links": [],
    }
    with pytest.raises(ConfigurationError, match=r"modules\[1\]\.loader\.entrypoint.*no\.such"):
        Gateway(wrong)


def test_stuck_modules_are_told_of(gateway: Gateway) -> None:
    told: list[Any] = []
    gateway.add_event_callback(Event.MODULE_STUCK, lambda _, __, context, ___: told.append(context))
    gateway.add_module("slow", Collector, stuck_after_s=0.05)
    slow = gateway.module("slow")
    slow.gate.clear()
    gateway.add_link("slow", "slow")
    say(gateway, "slow", b"x")
    eventually(lambda: told)
    assert told[0][0] == "slow"
    assert told[0][1] > 0.05
    slow.gate.set()
    eventually(lambda: not gateway.broker.worker_of(slow).stuck)
    assert len(told) == 1, "told once a time"


class SpeaksAtOnce(Module):
    def start(self) -> None:
        self.publish(b"hello")
        self.publish(b"bye", output="other")


def test_what_is_added_to_a_gateway_at_work_starts_when_its_links_are_there() -> None:
    def speaker(name: str) -> dict[str, Any]:
        return {"name": name, "loader": {"name": "python", "entrypoint": f"{__name__}:SpeaksAtOnce"}}

    def links(name: str) -> list[dict[str, Any]]:
        return [{"source": source, "sink": "sink"} for source in (name, f"{name}.other")]

    with Gateway({"modules": [entry("sink")], "links": []}) as gateway:
        gateway.start()
        sink, both = gateway.module("sink"), [b"hello", b"bye"]
        gateway.update({"modules": [speaker("first")], "links": links("first")})
        eventually(lambda: sink.got == both)
        applied = {"modules": [entry("sink"), speaker("second")], "links": links("second")}
        gateway.apply(applied)
        eventually(lambda: sink.got == both * 2)
        never = {"name": "never", "loader": {"name": "python", "entrypoint": f"{__name__}:NeverStarts"}}
        with pytest.raises(ModuleError, match="never starts"):
            gateway.apply({**applied, "modules": [*applied["modules"], never]}, again=["second"])
        eventually(lambda: sink.got == both * 4, "made anew, and made once more when that was undone")


class NeverStarts(Module):
    def start(self) -> None:
        raise OSError("it never starts")


class Code(Collector):
    """What a module's file held first."""


class FailsToBeCreated(Code):
    def create(self, broker: Any, configuration: Any) -> None:
        raise OSError("it cannot be created")


class FailsToStart(Code):
    def start(self) -> None:
        raise OSError("it cannot be started")


@pytest.mark.parametrize("later", [FailsToBeCreated, FailsToStart])
def test_a_module_whose_new_code_fails_goes_on_with_the_code_that_it_had(
    monkeypatch: pytest.MonkeyPatch, later: type[Code]
) -> None:
    mine = {"name": "mine", "loader": {"name": "python", "entrypoint": f"{__name__}:Code"}}
    whole = {"modules": [entry("source"), mine], "links": links("source>mine")}
    first = Code
    with Gateway(whole) as gateway:
        gateway.start()
        monkeypatch.setattr(f"{__name__}.Code", later)
        with pytest.raises(ModuleError, match="it cannot be"):
            gateway.apply(whole, again=["mine"])
        say(gateway, "source", b"goes on")
        eventually(lambda: gateway.module("mine").got == [b"goes on"])
        assert type(gateway.module("mine")) is first


def test_what_could_not_be_put_back_is_added_by_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"name": "mine", "loader": {"name": "python", "entrypoint": f"{__name__}:Code"}}
    whole = {"modules": [entry("source"), mine], "links": links("source>mine")}
    with Gateway(whole) as gateway:
        gateway.start()
        with monkeypatch.context() as broken:
            broken.setattr(Code, "create", FailsToBeCreated.create)  # also for one that is made as it was
            with pytest.raises(ModuleError, match="it cannot be created"):
                gateway.apply(whole, again=["mine"])
        assert [one.name for one in gateway.modules()] == ["source"]
        gateway.apply(whole)
        say(gateway, "source", b"again")
        eventually(lambda: gateway.module("mine").got == [b"again"])


def test_an_address_is_read_when_its_link_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = []
    with Gateway() as gateway:
        gateway.add_module("sink", Collector)
        gateway.add_link("sink", "bus:room")
        gateway.start()
        monkeypatch.setattr(Endpoint, "_read", lambda one: linked.append([link.ends for link in gateway.links()]))
        gateway.add_link("bus:room", "sink")
        gateway.add_link("bus:other", "sink")
    assert {len(links) for links in linked} == {2, 3}


def test_a_link_that_was_made_at_work_stays_when_an_end_of_it_is_made_anew() -> None:
    modules = [entry(name) for name in "abc"]
    with Gateway({"modules": modules, "links": [{"source": "a", "sink": "b"}]}) as gateway:
        gateway.start()
        gateway.add_link("b", "c")
        gateway.apply({"modules": modules, "links": []}, again=["b"])
        assert [link.ends for link in gateway.links()] == [("b", "c")]


def test_an_error_link_goes_with_the_last_link_that_asked_for_it() -> None:
    with Gateway() as gateway:
        for name in ("a", "b", "sink", "dead"):
            gateway.add_module(name, Collector)
        for name in ("a", "b"):
            gateway.add_link(name, "sink", error="dead")
        gateway.remove_link("a", "sink")
        assert ("sink.error", "dead") in [link.ends for link in gateway.links()]
        gateway.remove_module("b")
        assert gateway.links() == []
        gateway.add_link("sink.error", "dead")
        gateway.add_link("a", "sink", error="dead")
        gateway.remove_link("a", "sink")
        assert [link.ends for link in gateway.links()] == [("sink.error", "dead")], "that one was asked for by itself"


def test_an_error_end_that_leads_back_is_told_and_the_sink_itself_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with Gateway() as gateway:
        for name in ("a", "b", "c"):
            gateway.add_module(name, Collector)
        gateway.add_link("a", "b")
        gateway.add_link("b", "c", None, LinkOptions(max_tries=1), error="a")
        assert "link b -> c: error 'a' leads back to it" in caplog.text
        with pytest.raises(AddLinkError, match="own sink"):
            gateway.add_link("a", "c", None, LinkOptions(max_tries=1), error="c")
        assert ("a", "c") not in [link.ends for link in gateway.links()]
        with pytest.raises(AddLinkError, match="did you mean shm:/cam"):
            gateway.add_link("smh:/cam", "c")
    data = {"modules": [], "links": [{"source": "shm:/a", "sink": "bus:x", "max_tries": 1, "error": "bus:x"}]}
    with pytest.raises(ConfigurationError, match=r"links\[0\].error: 'bus:x' is the link's own sink"):
        parse(data)
    with pytest.raises(ConfigurationError, match=r"did you mean shm:/cam\?"):
        parse({"modules": [], "links": [{"source": "smh:/cam", "sink": "bus:x"}]})
    with pytest.raises(ConfigurationError, match="colour: is not known here; valid: "):
        parse({"modules": [{"name": "a", "colour": 1}], "links": []})


@pytest.mark.parametrize("closed", [False, True])
def test_the_time_out_of_destroy_is_checked(closed: bool) -> None:
    with Gateway() as gateway:
        if closed:
            gateway.destroy()
        for wrong in (-1, "x", float("nan")):
            with pytest.raises((InvalidArgument, TypeError)):
                gateway.destroy(wrong)  # type: ignore[arg-type]


def test_a_tcp_source_that_nobody_serves_is_told_and_told_again_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.gateway.endpoint.FIRST_TRY_S", 0.0)
    with socket.socket() as reserved:  # bound and not listening: nobody serves it, and nobody else gets it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with Gateway() as gateway:
            gateway.add_module("sink", Collector)
            gateway.add_link(f"tcp://127.0.0.1:{port}", "sink")
            gateway.start()
            eventually(lambda: f"tcp://127.0.0.1:{port} is not there yet" in caplog.text)
            reserved.close()
            with publisher(f"tcp://127.0.0.1:{port}"):
                eventually(lambda: f"tcp://127.0.0.1:{port} is there" in caplog.text)
    assert caplog.text.count("is not there yet") == 1
