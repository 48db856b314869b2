"""Recorder: stores every message in a journal, with its content and properties.

args: ``directory`` (required), ``topic`` ("gateway"; ``{NAME}`` in it stands for a property's value, so that
"{deviceId}" gives each device a topic, at most 1000). Waiting messages are written in one commit.

Example: {"name": "record", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Recorder"}, "args":
{"directory": "recording", "topic": "{deviceId}"}}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage
from penstock.channel import Publisher
from penstock.gateway import carriage
from penstock.gateway.module import Module, Outlet, options


class Recorder(Module):
    """Stores messages in a journal."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, directory="", topic="gateway")
        if not given["directory"]:
            raise ValueError("directory is missing")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the journal now if its topic is known, so that an error is noticed at once."""
        super().create(broker, configuration)
        self._publishers: dict[str, Publisher] = {}
        if "{" not in configuration["topic"]:
            self._publisher(configuration["topic"])

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Write them, each topic's together, in order."""
        topics: dict[str, list[GatewayMessage]] = {}
        for message in messages:
            found = re.sub(r"{(.*?)}", lambda m, p=message.properties: p.get(m[1], "-"), self.configuration["topic"])  # type: ignore[misc]
            topics.setdefault(found, []).append(message)
        for topic, group in topics.items():
            carriage.send(self._publisher(topic), group)

    def _publisher(self, topic: str) -> Publisher:
        if topic not in self._publishers:
            if len(self._publishers) >= 1000:
                raise ValueError(f"more than 1000 topics; check the arg topic={self.configuration['topic']!r}")
            self._publishers[topic] = address.publisher(f"journal:{self.configuration['directory']}#{topic}")
        return self._publishers[topic]

    def destroy(self) -> None:
        """Close the journal."""
        for publisher in self._publishers.values():
            publisher.close()
