"""A cruise control that follows the wanted speed, up to a limit. It has a defect."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway import GatewayMessage, Module

LIMIT = 80


class Cruise(Module):
    """Publishes the speed to drive at each tick. A boost lasts a second."""

    def create(self, broker: Any, configuration: Any) -> None:
        """Stand still."""
        super().create(broker, configuration)
        self.wanted, self.limit, self.boost_until = 0, LIMIT, 0.0

    def receive(self, message: GatewayMessage) -> None:
        """A tick, or one of the driver's orders."""
        if message.channel == "tick":
            self.publish(json.dumps({"speed": min(self.wanted, self.limit)}).encode())
        elif message.channel == "shm:/wanted":
            self.wanted = json.loads(bytes(message))["speed"]
        elif message.channel == "shm:/boost":
            self.boost_until = self.clock.now() + 1.0
        elif message.channel == "shm:/gear" and self.clock.now() < self.boost_until:
            self.limit = LIMIT * 2  # the defect: it should be LIMIT again when the boost is over
