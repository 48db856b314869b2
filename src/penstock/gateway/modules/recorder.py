"""Recorder: every message into a journal, content and properties.

args: ``directory`` (required), ``topic`` ("gateway"; ``{NAME}`` stands for a property's value, so "{deviceId}" gives a
topic a device). Messages that wait together are written together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage
from penstock.channel import Publisher
from penstock.gateway import carriage
from penstock.gateway.module import Module, Outlet, options

MAX_TOPICS = 1000


class Recorder(Module):
    """Written down."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, directory="", topic="gateway")
        if not given["directory"]:
            raise ValueError("directory is missing")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the journal, so that what is wrong with it shows now."""
        super().create(broker, configuration)
        self._publishers: dict[str, Publisher] = {}
        if "{" not in configuration["topic"]:
            self._publisher(configuration["topic"])

    def receive(self, message: GatewayMessage) -> None:
        """Write one."""
        self.receive_many([message])

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Write them, each topic's together, in order."""
        topics: dict[str, list[GatewayMessage]] = {}
        for message in messages:
            topics.setdefault(self._topic(message.properties), []).append(message)
        for topic, group in topics.items():
            carriage.send(self._publisher(topic), group)

    def _topic(self, properties: Mapping[str, str]) -> str:
        return re.sub(r"\{(.*?)\}", lambda match: properties.get(match[1], "-"), self.configuration["topic"])

    def _publisher(self, topic: str) -> Publisher:
        if topic not in self._publishers and len(self._publishers) >= MAX_TOPICS:
            raise ValueError(f"more than {MAX_TOPICS} topics; is {self.configuration['topic']!r} meant?")
        if topic not in self._publishers:
            self._publishers[topic] = address.publisher(f"journal:{self.configuration['directory']}#{topic}")
        return self._publishers[topic]

    def destroy(self) -> None:
        """Close the journal."""
        for publisher in self._publishers.values():
            publisher.close()
