"""TCP: publish and subscribe between machines, for messages that nobody stores.

Speaks protocol version 0 of tcp_pubsub byte for byte in both directions; our own peers add ordinals, times, drops,
virtual channels and properties in an extension that version 0 readers skip. Linux; Windows is out of scope.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.address import Address, opener
from penstock.channel import Overflow
from penstock.errors import InvalidArgument
from penstock.tcp.executor import Executor, default_executor
from penstock.tcp.past import Past
from penstock.tcp.publisher import Publisher, SubscriberState
from penstock.tcp.session import Session, SessionState
from penstock.tcp.subscriber import Delivery, Subscriber

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = [
    "Delivery",
    "Executor",
    "Overflow",
    "Publisher",
    "Session",
    "SessionState",
    "Subscriber",
    "SubscriberState",
    "default_executor",
    "open_publisher",
    "open_subscriber",
    "publisher",
    "subscriber",
]


def open_publisher(
    address: Address,
    *,
    overflow: str = Overflow.BLOCK,
    timeout: float | None = None,
    depth: int = 32768,
    depth_bytes: int = 16 << 20,
    tls: ssl.SSLContext | None = None,
    token: str | bytes | None = None,
    insecure: bool = False,
    handshake_timeout: float = 10.0,
    close_timeout: float = 5.0,
    keepalive: float | None = 15.0,
    executor: Executor | None = None,
    history: int | str | None = None,
    latest: bool = False,
    history_bytes: int | str | None = None,
    past: Past | None = None,
) -> Publisher:
    """A publisher at ``tcp://HOST:PORT`` (or ``tcp:///PATH``, a unix socket)."""
    return Publisher(
        address.port or 0,
        address.host or "127.0.0.1",
        path=address.name or None,
        overflow=overflow,
        timeout=timeout,
        depth=depth,
        depth_bytes=depth_bytes,
        tls=tls,
        token=token,
        insecure=insecure,
        handshake_timeout=handshake_timeout,
        close_timeout=close_timeout,
        keepalive=keepalive,
        executor=executor,
        schema=address.schema,
        history=history,
        latest=latest,
        history_bytes=history_bytes,
        past=past,
    )


def open_subscriber(
    address: Address,
    *,
    max_reconnects: int = -1,
    extended: bool = True,
    tls: ssl.SSLContext | None = None,
    token: str | bytes | None = None,
    max_message_size: int = 256 << 20,
    held_bytes: int = 1 << 30,
    handshake_timeout: float = 10.0,
    keepalive: float | None = 15.0,
    reconnect_delay: float = 0.05,
    reconnect_delay_max: float = 2.0,
    executor: Executor | None = None,
    history: bool = True,
    start: int | str | datetime.datetime | None = None,
    on_message: Callable[[Message], Any] | None = None,
) -> Subscriber:
    """A subscriber with one session to ``tcp://HOST:PORT`` (or ``tcp:///PATH``).

    ``on_message`` is called with every message from a thread of its own.
    """
    if not address.name and not address.port:
        raise InvalidArgument(f"a subscriber needs the publisher's port: {address.text!r} has none")
    subscriber = Subscriber(
        extended=extended,
        tls=tls,
        token=token,
        max_message_size=max_message_size,
        held_bytes=held_bytes,
        handshake_timeout=handshake_timeout,
        keepalive=keepalive,
        reconnect_delay=reconnect_delay,
        reconnect_delay_max=reconnect_delay_max,
        name=address.text,
        executor=executor,
        history=history,
        start=start,
    )
    subscriber.add_session(address.name or address.host, address.port or 0, max_reconnects)
    return subscriber.call_in_thread(on_message)


if TYPE_CHECKING:
    from penstock.tcp.opening import publisher, subscriber
else:
    publisher = opener("tcp", open_publisher)
    subscriber = opener("tcp", open_subscriber)
