"""The durable broker: queues on top of a journal that survive crashes, served over TCP by a text protocol.

``Server(directory, port)`` is the broker, ``Client`` and ``AsyncClient`` speak all of its verbs, ``Publisher`` and
``Subscriber`` are what ``broker://HOST:PORT/TOPIC?queue=NAME`` opens. ``penstock.broker.fetch`` reads and stages in
bulk without native code. Importing this loads no native code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.address import Address, opener

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.broker.client import AsyncClient, Client, Publisher, Subscriber
    from penstock.broker.connection import ConnectionLimits
    from penstock.broker.limits import Limits
    from penstock.broker.server import Server
    from penstock.broker.store import Store

_PLACES = {
    "AsyncClient": "client",
    "Client": "client",
    "ConnectionLimits": "connection",
    "Limits": "limits",
    "Publisher": "client",
    "Server": "server",
    "Store": "store",
    "Subscriber": "client",
}

__all__ = [
    "AsyncClient",
    "Client",
    "ConnectionLimits",
    "Limits",
    "Publisher",
    "Server",
    "Store",
    "Subscriber",
    "open_publisher",
    "open_subscriber",
    "publisher",
    "subscriber",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"penstock.broker.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'penstock.broker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


def open_publisher(
    address: Address,
    *,
    queue: str = "",
    unconfirmed: int = 0,
    ttl_s: float | None = None,
    token: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 30.0,
    reconnect: bool = True,
) -> Publisher:
    """A publisher for ``broker://HOST:PORT/TOPIC``; the queue, where named, is made first."""
    from penstock.broker.client.publisher import Publisher

    return Publisher(
        address.host,
        address.port or 9876,
        address.topic or "default",
        queue=queue,
        unconfirmed=unconfirmed,
        ttl_s=ttl_s,
        token=token,
        tls=tls,
        timeout=timeout,
        reconnect=reconnect,
    )


def open_subscriber(
    address: Address,
    *,
    queue: str = "",
    ack: str = "next",
    credit: int = 2048,
    ack_timeout_s: float | None = None,
    max_tries: int | None = None,
    ttl_s: float | None = None,
    exclusive: bool | None = None,
    dead_letter: str | None = None,
    from_position: int | None = None,
    from_ordinal: int | None = None,
    from_time_ns: int | None = None,
    token: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 30.0,
    reconnect: bool = True,
    on_message: Callable[[Message], Any] | None = None,
) -> Subscriber:
    """A consumer for ``broker://HOST:PORT/TOPIC?queue=NAME``; TOPIC may be a pattern; no queue: a temporary one.

    ``on_message`` is called with every message from a thread of its own.
    """
    from penstock.broker.client.subscriber import Subscriber

    return Subscriber(
        address.host,
        address.port or 9876,
        # only for new queues: an existing one keeps its options
        topics=address.topic or (None if queue else "default"),
        queue=queue,
        ack=ack,
        credit=credit,
        ack_timeout_s=ack_timeout_s,
        max_tries=max_tries,
        ttl_s=ttl_s,
        exclusive=exclusive,
        dead_letter=dead_letter,
        from_position=from_position,
        from_ordinal=from_ordinal,
        from_time_ns=from_time_ns,
        token=token,
        tls=tls,
        timeout=timeout,
        reconnect=reconnect,
    ).call_in_thread(on_message)


if TYPE_CHECKING:
    from penstock.broker.opening import publisher, subscriber
else:
    publisher = opener("broker", open_publisher)
    subscriber = opener("broker", open_subscriber)
