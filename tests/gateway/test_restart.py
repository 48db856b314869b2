"""Supervision at work: modules that fail are made anew, keep their place, and are given up at the limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.gateway import Event, Gateway, GatewayMessage, Policy, Restart
from tests.gateway.conftest import Collector, Failing, eventually

QUICK = Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=0.02, limit=5)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        made.add_module("source", Collector)
        made.start()
        yield made


def say(gateway: Gateway, *contents: bytes) -> None:
    for content in contents:
        gateway.module("source").publish(content)


def notes(gateway: Gateway, *events: Event) -> list[Any]:
    told: list[Any] = []
    for event in events:
        gateway.add_event_callback(event, lambda _, event, context, __: told.append((event, context)))
    return told


def test_a_module_that_raises_is_made_anew_with_its_links(gateway: Gateway) -> None:
    told = notes(gateway, Event.MODULE_FAILED, Event.MODULE_RESTARTED)
    gateway.add_module("failing", Failing, restart=QUICK)
    gateway.add_module("sink", Collector)
    gateway.add_link("source", "failing")
    gateway.add_link("failing", "sink")
    first = gateway.module("failing")
    say(gateway, b"1", b"bad", b"2", b"3")
    eventually(lambda: gateway.module("failing").got == [b"2", b"3"])
    second = gateway.module("failing")
    assert second is not first
    assert first.got == [b"1", b"bad"]
    assert first.steps == ["create", "start", "destroy"]
    assert second.steps == ["create", "start"]
    second.publish(b"from the new one")
    eventually(lambda: gateway.module("sink").got == [b"from the new one"])
    eventually(lambda: len(told) == 2)
    assert told[0][1][:2] == ("failing", "receive")
    assert told[1] == (Event.MODULE_RESTARTED, "failing")
    assert gateway.supervisor("failing").restarts == 1
    assert gateway.broker.info(second).failed == 1


def test_it_is_given_up_at_the_limit_and_its_messages_still_go_on(gateway: Gateway) -> None:
    gateway.add_module("failing", Failing, restart=QUICK)
    gateway.add_link("source", "failing")
    say(gateway, *[b"bad"] * 8, b"last")
    eventually(lambda: gateway.module("failing").got[-1:] == [b"last"])
    supervisor = gateway.supervisor("failing")
    assert supervisor.gave_up
    assert supervisor.restarts == 5
    assert gateway.broker.info(gateway.module("failing")).failed == 8


class Stubborn(Failing):
    """Cannot be made again the first two times."""

    tries = 0

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        type(self).tries += 1
        if 1 < self.tries < 4:
            raise OSError("not yet")


def test_a_restart_that_fails_is_tried_again(gateway: Gateway) -> None:
    gateway.add_module("stubborn", Stubborn, restart=QUICK)
    gateway.add_link("source", "stubborn")
    say(gateway, b"bad", b"good")
    eventually(lambda: gateway.module("stubborn").got == [b"good"])
    assert Stubborn.tries == 4
    assert gateway.supervisor("stubborn").failures == 3


def test_a_module_waiting_for_its_restart_can_be_removed_and_the_gateway_ended(gateway: Gateway) -> None:
    slow = Restart(Policy.ON_FAILURE, backoff_s=3600, max_backoff_s=3600)
    for name in ("one", "two"):
        gateway.add_module(name, Failing, restart=slow)
        gateway.add_link("source", name)
    worker = gateway.broker.worker_of(gateway.module("one"))
    say(gateway, b"bad")
    eventually(lambda: worker.failed == 1 and worker.busy_since is None, "it waits, and is not taken for stuck")
    assert not worker.idle, "its message is still in hand"
    done = threading.Thread(target=gateway.destroy, kwargs={"timeout": 0.1})
    done.start()
    done.join(60)
    assert not done.is_alive()


def test_a_source_whose_thread_publishes_survives_a_restart_of_its_sink(gateway: Gateway) -> None:
    class Every(Failing):
        def receive(self, message: GatewayMessage) -> None:
            everything.append(bytes(message))
            if len(everything) % 100 == 0:
                raise RuntimeError("again")

    everything: list[bytes] = []
    gateway.add_module("sink", Every, restart=Restart(Policy.ON_FAILURE, 0.001, 0.001, limit=None))
    gateway.add_link("source", "sink")
    say(gateway, *[b"%d" % n for n in range(1000)])
    eventually(lambda: len(everything) == 1000)
    assert everything == [b"%d" % n for n in range(1000)]
    eventually(lambda: gateway.supervisor("sink").restarts == 10)
