"""Tells when a reading rises above its limit and when it is back, once each time."""

import json

from penstock.gateway import GatewayMessage, Module


class Alarm(Module):
    """args: ``above``, a limit for each quantity."""

    def create(self, broker, configuration):
        super().create(broker, configuration)
        self.raised: set[str] = set()

    def receive(self, message: GatewayMessage) -> None:
        properties = message.properties
        device, limit = properties["deviceId"], self.configuration["above"][properties["quantity"]]
        value = json.loads(bytes(message))["value"]
        if (value > limit) == (device in self.raised):
            return
        self.raised ^= {device}
        side = "above" if value > limit else "below"
        text = f"{properties['quantity']} {value} {properties['unit']} is {side} {limit}"
        self.publish(text.encode(), {"deviceId": device, "kind": "alarm"})
