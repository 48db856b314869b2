"""NATS: ``nats://HOST:PORT/SUBJECT`` reads from and publishes to servers that people run already.

Core NATS by default; JetStream where ``stream=`` (reading) or ``jetstream=true`` (publishing) is given. Headers are
properties. Needs nats-py: ``pip install 'penstock[nats]'``. Several servers: ``nats://a:4222,b:4222/SUBJECT``;
4222 is the port of a host that is written without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.address import DEFAULT_PORTS, Address, opener
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.channel import Publisher, Subscriber

PORT = DEFAULT_PORTS["nats"]


def open_publisher(
    address: Address,
    *,
    jetstream: bool = False,
    token: str | None = None,
    user: str | None = None,
    password: str | None = None,
    creds: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 10.0,
) -> Publisher:
    """A publisher for ``nats://HOST:PORT/SUBJECT``. ``jetstream``: each message is confirmed by its stream."""
    from penstock.nats.connection import Access
    from penstock.nats.publishing import Publisher

    access = Access(address.host, address.port or PORT, token, user, password, tls, timeout, creds)
    return Publisher(access, address.topic, jetstream=jetstream)


def open_subscriber(
    address: Address,
    *,
    queue: str = "",
    stream: str = "",
    durable: str = "",
    new: bool = False,
    from_time_ns: int | None = None,
    token: str | None = None,
    user: str | None = None,
    password: str | None = None,
    creds: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 10.0,
    on_message: Callable[[Message], Any] | None = None,
) -> Subscriber:
    """A subscriber for ``nats://HOST:PORT/SUBJECT``, which may have wildcards.

    ``queue``: share the messages with others of that group. ``stream``: read what a JetStream stream has stored; with
    ``durable`` the server remembers under that name what was read, and redelivers the rest. ``new``, ``from_time_ns``:
    not from the stream's first message on, but what is stored from now on, or from a time on.
    """
    from penstock.nats.connection import Access
    from penstock.nats.subscribing import Subscriber

    for option in ("queue", "stream", "durable"):
        if address.options.get(option) == "":
            raise InvalidArgument(f"address {address.text!r}: {option}= is empty: give it a name, or leave it out")
    access = Access(address.host, address.port or PORT, token, user, password, tls, timeout, creds)
    return Subscriber(
        access, address.topic, queue=queue, stream=stream, durable=durable, new=new, from_time_ns=from_time_ns
    ).call_in_thread(on_message)


if TYPE_CHECKING:
    from penstock.nats.opening import publisher, subscriber
else:
    publisher = opener("nats", open_publisher)
    subscriber = opener("nats", open_subscriber)
