"""A module's process is killed again and again under load: everything but the messages in hand comes through, in order."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from penstock.gateway import Gateway, GatewayMessage, Module, Policy, Restart
from tests.gateway.conftest import Collector, eventually

DEFAULT_KILLS = 8


class Echo(Module):
    """Answers each message."""

    def receive(self, message: GatewayMessage) -> None:
        self.publish(message, {"pid": str(os.getpid())})


@pytest.mark.torture
def test_kills_lose_only_what_was_in_hand(kills: int | None, seed: int) -> None:
    chance = random.Random(seed)
    wanted = DEFAULT_KILLS if kills is None else kills
    policy = Restart(Policy.ON_FAILURE, backoff_s=0.001, max_backoff_s=0.01, limit=None)
    with Gateway() as gateway:
        for name in ("source", "sink"):
            gateway.add_module(name, Collector)
        gateway.add_module("echo", "tests.crash.test_gateway_process:Echo", loader="process", restart=policy)
        gateway.add_link("source", "echo")
        gateway.add_link("echo", "sink")
        gateway.start()
        source, sink = gateway.module("source"), gateway.module("sink")
        stop, sent = threading.Event(), [0]

        def flood() -> None:
            while not stop.is_set():
                source.publish(b"%d" % sent[0])
                sent[0] += 1

        thread = threading.Thread(target=flood)
        thread.start()
        supervisor, worker = gateway.supervisor("echo"), gateway.broker.worker_of(gateway.module("echo"))
        try:
            for number in range(wanted):
                before = len(sink.got)
                eventually(lambda before=before: len(sink.got) > before, "messages flow")
                time.sleep(chance.random() * 0.01)  # any moment will do: nothing below depends on it
                _kill(gateway.module("echo").process.pid)
                eventually(lambda number=number: supervisor.restarts > number, "it was started again")
        finally:
            stop.set()
            thread.join()
        module = gateway.module("echo")
        eventually(lambda: worker.idle and module.handled == module.sent, "all was handled")
        eventually(module.mark_sent(), "what it said was published")
        eventually(lambda: gateway.broker.worker_of(sink).idle)
        _check([int(content) for content in sink.got], sent[0], worker, wanted)


def _check(numbers: list[int], sent: int, worker: Any, kills: int) -> None:
    """Each death may have cost the message in hand, and may have left an answer whose message was not counted yet."""
    assert numbers == sorted(numbers), "in order"
    twice = len(numbers) - len(set(numbers))
    missing = sent - len(set(numbers))
    lost = worker.counters.snapshot()["dropped"].get("error", 0)
    assert twice == 0, "none twice"
    assert missing <= lost <= kills, f"missing {missing}, counted {lost}, kills {kills}"


def _kill(number: int) -> None:
    os.kill(number, signal.SIGKILL)
