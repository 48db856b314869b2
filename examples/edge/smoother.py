"""A filter that runs in a process of its own: the moving average of each device's readings."""

import json

from penstock.gateway import GatewayMessage, Module


class Smoother(Module):
    """args: ``weight`` of the newest reading, above 0 and at most 1."""

    def create(self, broker, configuration):
        super().create(broker, configuration)
        self.averages: dict[str, float] = {}

    def receive(self, message: GatewayMessage) -> None:
        device = message.properties["deviceId"]
        value = json.loads(bytes(message))["value"]
        weight = self.configuration["weight"]
        average = self.averages[device] = weight * value + (1 - weight) * self.averages.get(device, value)
        self.publish(json.dumps({"value": round(average, 3)}).encode(), {**message.properties, "smoothed": "yes"})
