"""Modules for the gateway under torture: a source of numbered messages, a relay that is killed, a sink that logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.gateway import GatewayMessage, Module, Source
from penstock.torture import record


class Numbers(Source):
    """Publishes numbered messages at a steady rate and logs each one when publish has returned."""

    def run(self) -> None:
        """Publish until stopped."""
        log = record.Log(Path(self.configuration["log"]))
        sequence = 0
        while not self.stopping.wait(self.configuration["pause_s"]):
            for _ in range(self.configuration["burst"]):
                sequence += 1
                self.publish(record.make(1, sequence))
                log.add(1, sequence)
        log.close()


class Relay(Module):
    """Forwards every message; runs in a process of its own."""

    def receive(self, message: GatewayMessage) -> None:
        """Forward the message."""
        self.publish(message)


class Notes(Module):
    """Logs every message."""

    def create(self, broker: Any, configuration: Any) -> None:
        """Open the log."""
        super().create(broker, configuration)
        self._log = record.Log(Path(configuration["log"]))

    def receive(self, message: GatewayMessage) -> None:
        """Log one entry; producer 0 stands for a corrupted message."""
        self._log.add(*(record.look(bytes(message)) or (0, 0)))

    def destroy(self) -> None:
        """Close the log."""
        self._log.close()
