"""The portable performance objectives: nothing lost, nothing out of sequence, nothing non-conforming, without a throttle.

One simulator to one metrics module; two simulators to one; one simulator to two. Properties deviceId, sequence number
and timestamp, two more of 16 bytes, and 256 bytes of content. No time is asserted: the figures are in benchmarks/.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.gateway import Gateway, GatewayMessage, Source
from penstock.gateway.modules import Metrics
from tests.gateway.conftest import eventually

COUNT = 50_000


class Simulator(Source):
    """As fast as its sinks take them."""

    def run(self) -> None:
        content = bytes(256)
        for number in range(1, COUNT + 1):
            properties = {
                "deviceId": self.name,
                "sequence": str(number),
                "timestamp_ns": str(time.time_ns()),
                "extra-1": "0123456789abcdef",
                "extra-2": "fedcba9876543210",
            }
            self.broker.publish(self, GatewayMessage(content, properties))


@pytest.mark.parametrize(("simulators", "sinks"), [(1, 1), (2, 1), (1, 2)])
def test_nothing_is_lost_and_all_is_in_sequence(simulators: int, sinks: int) -> None:
    with Gateway() as gateway:
        metrics = [f"metrics-{n}" for n in range(sinks)]
        for name in metrics:
            gateway.add_module(name, Metrics)
        for number in range(simulators):
            gateway.add_module(f"simulator-{number}", Simulator)
            for name in metrics:
                gateway.add_link(f"simulator-{number}", name)
        gateway.start()
        modules: list[Any] = [gateway.module(name) for name in metrics]
        eventually(lambda: all(module.received >= simulators * COUNT for module in modules), timeout_s=100)
        for module in modules:
            assert module.counts() == {
                "received": simulators * COUNT,
                "bytes": simulators * COUNT * 256,
                "lost": 0,
                "out_of_sequence": 0,
                "non_conforming": 0,
            }
            assert gateway.broker.info(module).ledger.lost == 0


def test_the_same_through_a_module_in_its_own_process() -> None:
    with Gateway() as gateway:
        gateway.add_module("metrics", Metrics)
        gateway.add_module(
            "mapper", "penstock.gateway.modules:PropertyMapper", {"set": {"by": "mapper"}}, loader="process"
        )
        gateway.add_link("mapper", "metrics")
        gateway.add_module("simulator", Simulator)
        gateway.add_link("simulator", "mapper")
        gateway.start()
        metrics = gateway.module("metrics")
        eventually(lambda: metrics.received >= COUNT, timeout_s=100)
        counts = metrics.counts()
        assert (counts["received"], counts["lost"], counts["out_of_sequence"]) == (COUNT, 0, 0)
