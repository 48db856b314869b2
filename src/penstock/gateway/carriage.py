"""Carriage: how a gateway's messages travel over channels that know nothing of gateways.

Where a channel's publisher carries properties, they go beside the content. Everywhere else the byte form travels, so
that properties arrive; a message without any goes as its bare content. What comes back is told apart by the byte
form's own rules (magic, exact sizes): anything that is not one is content as it stands.

A message in another process is framed: its source's number (u64, big-endian) precedes the byte form, and is
stripped before ``receive``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock._core import Message
from penstock._core.gateway import GatewayMessage
from penstock.channel import Publisher
from penstock.errors import ProtocolError

MAGIC = b"\xa1\x60"


def send(publisher: Publisher, messages: Sequence[GatewayMessage]) -> None:
    """Publish each of them in order."""
    if publisher.carries_properties_of_many:
        publish: Any = publisher.publish_many
        publish(messages, properties=[dict(message.properties) for message in messages])
    elif publisher.carries_properties:
        publish = publisher.publish
        for message in messages:
            publish(message, properties=dict(message.properties))
    else:
        publisher.publish_many([message.to_bytes() if message.encoded_properties else message for message in messages])


def arrived(message: Message) -> GatewayMessage:
    """A message of any channel as a gateway's: with its properties, whichever way they came. The bytes are copied, so
    that a module which keeps the message keeps no slot of the channel."""
    head = memoryview(message)[:2]
    if head == MAGIC:
        try:
            return GatewayMessage.from_bytes(memoryview(message))
        except ProtocolError:
            pass  # content that happens to begin like one
    return GatewayMessage(memoryview(message), message.properties, timestamp_ns=message.timestamp_ns)
