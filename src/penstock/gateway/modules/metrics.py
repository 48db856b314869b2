"""Metrics: counts what arrives and checks that nothing is missing.

args: ``device`` ("deviceId") and ``sequence`` ("sequence"): the properties that name a stream and number its messages;
``period_s`` (null; or publish the counts as JSON at this interval). For each device it counts messages with both
properties: received, lost (missing numbers), out of sequence (not above the last). Others count as non-conforming.

Example: {"name": "counts", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Metrics"}, "args":
{"period_s": 60.0}}
"""

from __future__ import annotations

import json
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class Metrics(Module):
    """Counts; read ``counts()`` at any time."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        return options(args, device="deviceId", sequence="sequence", period_s=None)

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Begin at nothing."""
        super().create(broker, configuration)
        self.received = self.bytes = self.lost = self.out_of_sequence = self.non_conforming = 0
        self._last: dict[str, int] = {}
        self._published_at = self.clock.now()

    def receive(self, message: GatewayMessage) -> None:
        """Count one."""
        self.received += 1
        self.bytes += message.size
        try:
            device = message.properties[self.configuration["device"]]
            number = int(message.properties[self.configuration["sequence"]])
        except (KeyError, ValueError):
            self.non_conforming += 1
        else:
            last = self._last.get(device, 0)
            self.out_of_sequence += number <= last
            self.lost += max(0, number - last - 1)
            self._last[device] = max(number, last)
        period_s = self.configuration["period_s"]
        if period_s is not None and self.clock.now() - self._published_at >= period_s:
            self._published_at = self.clock.now()
            self.publish(json.dumps(self.counts()).encode(), {"kind": "metrics"})

    def counts(self) -> dict[str, int]:
        """All counts by name."""
        names = ("received", "bytes", "lost", "out_of_sequence", "non_conforming")
        return {name: getattr(self, name) for name in names}
