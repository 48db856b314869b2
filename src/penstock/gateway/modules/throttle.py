"""Throttle: passes at most a number of messages per second, for each value of a property, and drops the rest.

args: ``rate_per_s`` (1.0), ``by`` (null: all together; else a property), ``max_keys`` (10000). Dropped messages go to
the output ``dropped``, for modules linked to it, and are counted as filtered by this module.

Example: {"name": "limit", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Throttle"}, "args":
{"rate_per_s": 1.0, "by": "deviceId"}}
"""

from __future__ import annotations

from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.filters import Filter, Predicate
from penstock.gateway.module import Module, Outlet, options


class Throttle(Module):
    """A limit by key."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, rate_per_s=1.0, by=None, max_keys=10000)
        Filter(rate_per_s=given["rate_per_s"])  # checks the bounds of the rate
        if given["max_keys"] < 1 or not isinstance(given["by"], str | None):
            raise ValueError("max_keys must be 1 or more, and by must be the name of a property or null")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Begin with the full rate for every key."""
        super().create(broker, configuration)
        self._limits: dict[str, Predicate] = {}
        self.dropped = 0

    def receive(self, message: GatewayMessage) -> None:
        """Pass it on if the rate of its key allows it."""
        name = self.configuration["by"]
        key = message.properties.get(name, "") if name is not None else ""
        limit = self._limits.get(key)
        if limit is None:
            if len(self._limits) >= self.configuration["max_keys"]:
                del self._limits[next(iter(self._limits))]
            limit = self._limits[key] = Filter(rate_per_s=self.configuration["rate_per_s"]).compile(self.clock.now)
        if limit(message):
            self.publish(message)
        else:
            self.dropped += 1
            self.publish(message, output="dropped")
