"""What others see of a worker and of the keeper while a thread stands between two steps."""

from __future__ import annotations

import threading
from typing import Any

from penstock.gateway import Gateway, GatewayMessage
from penstock.gateway.broker import ModuleBroker

from .conftest import Collector, eventually

LONG = 60


def test_a_batch_that_has_just_left_the_queue_still_waits() -> None:
    with ModuleBroker() as broker:
        source, sink = Collector(), Collector()
        for module in (source, sink):
            broker.add_module(module)
        broker.add_link(source, sink)
        worker = broker.worker_of(sink)
        armed, taken, gate = threading.Event(), threading.Event(), threading.Event()
        read_many = worker.queue.read_many

        def slowly(*arguments: Any) -> Any:
            batch = read_many(*arguments)
            if armed.is_set():
                taken.set()
                assert gate.wait(LONG)
            return batch

        worker.queue.read_many = slowly  # type: ignore[method-assign]
        broker.publish(source, GatewayMessage(b"ends the read that waits"))
        eventually(lambda: sink.got == [b"ends the read that waits"] and worker.idle)
        armed.set()
        broker.publish(source, GatewayMessage(b"in hand"))
        assert taken.wait(LONG)
        assert worker.waiting == 1 and not worker.idle
        assert not broker.drain([sink], 0)
        gate.set()
        assert broker.drain([sink], LONG)
        assert sink.got[1:] == [b"in hand"] and worker.waiting == 0


def test_the_keeper_goes_on_after_a_look_that_failed() -> None:
    with Gateway() as gateway:
        looked = threading.Event()
        looks = 0

        def count_links() -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ValueError("these counters were closed")
            looked.set()

        gateway.broker.count_links = count_links  # type: ignore[method-assign]
        gateway.add_module("sink", Collector)
        assert looked.wait(LONG)
