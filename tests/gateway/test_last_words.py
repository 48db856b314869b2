"""Around the end every message is in one number: handled, refused, or dropped and counted; and ``destroy`` says which."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.gateway import Gateway, GatewayMessage, Module, Source
from tests.gateway.conftest import Collector, eventually


class Deaf(Source):
    """Publishes until it is refused, whatever it is told."""

    def run(self) -> None:
        self.accepted = 0
        while True:
            self.publish(b"%d" % self.accepted)
            self.accepted += 1
            threading.Event().wait(0.001)


class Plain(Module):
    pass


def lost(gateway: Gateway) -> int:
    return sum(info.lost + info.waiting for info in gateway.modules())


def by_name(gateway: Gateway) -> dict[str, Any]:
    return {info.name: info for info in gateway.modules()}


@pytest.mark.parametrize("output", ["", "side"])
@pytest.mark.parametrize("passes", [False, True])
def test_who_publishes_until_it_is_refused_loses_nothing(output: str, passes: bool) -> None:
    for _ in range(10):
        gateway = Gateway()
        gateway.add_module("source", Plain)
        gateway.add_module("sink", Collector)
        source = "source.side" if output else "source"
        if passes:
            gateway.add_module("between", Passer)
            gateway.add_link(source, "between")
            gateway.add_link("between", "sink")
        else:
            gateway.add_link(source, "sink")
        gateway.start()
        module, sink = gateway.module("source"), gateway.module("sink")
        accepted = 0
        refused = threading.Event()

        def publish(module: Any = module, refused: threading.Event = refused) -> None:
            nonlocal accepted
            try:
                while True:
                    module.publish(b"%d" % accepted, output=output)
                    accepted += 1
            except PenstockError:
                refused.set()

        thread = threading.Thread(target=publish)
        thread.start()
        eventually(lambda sink=sink: len(sink.got) > 10)
        ended = gateway.destroy()
        assert refused.wait(60)
        thread.join()
        assert (ended, lost(gateway), len(sink.got)) == (True, 0, accepted)


class Passer(Module):
    def receive(self, message: GatewayMessage) -> None:
        self.publish(message)


def test_what_a_source_publishes_that_does_not_stop_is_handled_counted_or_refused() -> None:
    gateway = Gateway()
    gateway.add_module("deaf", Deaf)
    gateway.add_module("sink", Collector)
    gateway.add_link("deaf", "sink")
    gateway.start()
    source, sink = gateway.module("deaf"), gateway.module("sink")
    eventually(lambda: len(sink.got) > 10)
    gateway.destroy(1.0)
    eventually(lambda: not source._thread.is_alive(), "it was refused")
    assert len(sink.got) + lost(gateway) == source.accepted


class SaysGoodbye(Passer):
    def stop(self) -> None:
        self.publish(b"goodbye")


def test_what_modules_of_a_cycle_say_when_they_are_stopped_is_counted() -> None:
    gateway = Gateway()
    for name in ("a", "b"):
        gateway.add_module(name, SaysGoodbye)
    gateway.add_link("a", "b")
    gateway.add_link("b", "a")
    gateway.start()
    assert gateway.destroy() is False
    infos = by_name(gateway)
    assert [infos[name].published for name in "ab"] == [1, 1]
    assert sum(infos[name].handled for name in "ab") + lost(gateway) == 2


class Fails(Module):
    def receive(self, message: GatewayMessage) -> None:
        raise OSError("no")


@pytest.mark.parametrize("kind", [Collector, Fails])
def test_destroy_is_true_exactly_when_nothing_was_lost_from_then_on(kind: type[Module]) -> None:
    gateway = Gateway()
    gateway.add_module("source", Plain)
    gateway.add_module("sink", kind)
    gateway.add_link("source", "sink")
    gateway.start()
    gateway.module("source").publish(b"before")
    eventually(lambda: (info := by_name(gateway)["sink"]).handled + info.lost == 1)
    gateway.pause("sink")
    gateway.module("source").publish(b"waits")
    assert gateway.destroy() is (kind is Collector)
    assert lost(gateway) == (0 if kind is Collector else 2)


class Sleeps(Module):
    """Never comes back from a message."""

    def receive(self, message: GatewayMessage) -> None:
        threading.Event().wait()


def test_a_healthy_process_ends_in_order_when_another_does_not_finish_in_time() -> None:
    gateway = Gateway()
    gateway.add_module("source", Plain)
    gateway.add_module("hung", f"{__name__}:Sleeps", loader="process", stuck_after_s=None)
    gateway.add_module("healthy", f"{__name__}:Plain", loader="process")
    for sink in ("hung", "healthy"):
        gateway.add_link("source", sink)
    gateway.start()
    hung, healthy = gateway.module("hung").process, gateway.module("healthy").process
    for _ in range(5):
        gateway.module("source").publish(b"x")
    eventually(lambda: by_name(gateway)["healthy"].handled == 5)
    assert gateway.destroy(20.0) is False  # a quarter of which is for the end of processes, on a busy machine too
    assert (hung.returncode, healthy.returncode) == (-signal.SIGKILL, 0)
    infos = by_name(gateway)
    assert (infos["healthy"].handled, infos["healthy"].failed, infos["healthy"].lost) == (5, 0, 0)
    assert (infos["hung"].handled, infos["hung"].lost) == (0, 5)
