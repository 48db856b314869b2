"""Sensor: a simulated sensor, for trying things out: a sine with noise, always the same for the same seed.

args: ``device`` ("sensor"), ``quantity`` ("temperature"), ``unit`` ("C"), ``mean`` (20.0), ``swing`` (5.0), ``noise``
(0.2), ``cycle_s`` (60.0), ``rate_per_s`` (10.0; 0: as fast as the sinks can take messages), ``count`` (null: for ever),
``seed`` (1). Content: JSON ``{"value": ...}``. Properties: ``deviceId``, ``quantity``, ``unit``, ``sequence`` (from 1),
``timestamp_ns``.

Example: {"name": "boiler", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Sensor"}, "args":
{"device": "boiler", "rate_per_s": 2.0}}
"""

from __future__ import annotations

import math
import random
from typing import Any

from penstock.gateway.module import Source, options


class Sensor(Source):
    """Publishes simulated readings."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, device="sensor", quantity="temperature", unit="C", mean=20.0, swing=5.0, noise=0.2,
                        cycle_s=60.0, rate_per_s=10.0, count=None, seed=1)  # fmt: skip
        if not given["cycle_s"] > 0 or not given["rate_per_s"] >= 0:
            raise ValueError("cycle_s must be above 0 and rate_per_s 0 or more")
        return given

    def run(self) -> None:
        """Publish readings at the rate asked for."""
        c = self.configuration
        chance = random.Random(c["seed"])  # noqa: S311 (a simulation)
        step_s = 1 / c["rate_per_s"] if c["rate_per_s"] else 0.0
        due, sequence = self.clock.now(), 0
        properties = {"deviceId": c["device"], "quantity": c["quantity"], "unit": c["unit"]}
        while c["count"] is None or sequence < c["count"]:
            if self.stopping.wait(max(0.0, due - self.clock.now())):
                return
            phase = 2 * math.pi * sequence * (step_s or 0.001) / c["cycle_s"]
            value = c["mean"] + c["swing"] * math.sin(phase) + chance.gauss(0, c["noise"])
            sequence += 1
            properties.update(sequence=str(sequence), timestamp_ns=str(self.clock.time_ns()))
            self.publish(b'{"value": %.4f}' % value, properties)
            due = max(due + step_s, self.clock.now())
