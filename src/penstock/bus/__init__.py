"""The bus: pub/sub inside one process.

``bus:NAME`` addresses name a direct bus that lives as long as a handle on it does; ``Bus`` is the full class. Messages
have 16-bit ids; subscribers are callbacks, queues or fifos; memory comes from slabs, the heap or the user. Everything
here may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock._core.bus import Message
from penstock.address import Address, opener
from penstock.bus.allocator import CustomAllocator, HeapAllocator, Outstanding, SlabAllocator, static_slab
from penstock.bus.bus import Bus, declare, publish_to
from penstock.bus.default import default_bus, disable_default_bus, enable_default_bus
from penstock.bus.delayed import Caught, DelayedMessage
from penstock.bus.named import named_bus
from penstock.bus.publisher import Publisher
from penstock.bus.state_machine import PASS, State, StateMachine
from penstock.bus.static import CallbackMessage, StaticMessage
from penstock.bus.subscriber import (
    DEFAULT_DEPTH,
    DEFAULT_MAX_PUBLIC_ID,
    CallbackSubscriber,
    FifoSubscriber,
    QueueSubscriber,
    check_id,
)
from penstock.channel import Overflow
from penstock.clock import SystemClock, VirtualClock
from penstock.history import kept_of, wants_past

__all__ = [
    "Bus",
    "CallbackMessage",
    "CallbackSubscriber",
    "Caught",
    "CustomAllocator",
    "DelayedMessage",
    "FifoSubscriber",
    "HeapAllocator",
    "Message",
    "Outstanding",
    "PASS",
    "Publisher",
    "QueueSubscriber",
    "SlabAllocator",
    "State",
    "StateMachine",
    "StaticMessage",
    "SystemClock",
    "VirtualClock",
    "declare",
    "default_bus",
    "disable_default_bus",
    "enable_default_bus",
    "named_bus",
    "open_publisher",
    "open_subscriber",
    "publish_to",
    "publisher",
    "subscriber",
    "static_slab",
]


def open_publisher(
    address: Address,
    *,
    id: int = 0,
    history: int | str | None = None,
    latest: bool = False,
    history_bytes: int | str | None = None,
) -> Publisher:
    """A publisher of messages with one id on the named bus; the bus keeps ``history`` for late joiners."""
    kept = kept_of(history, latest, history_bytes)
    return Publisher(named_bus(address.name), check_id(id), name=_place(address, id), kept=kept)


def _place(address: Address, id: int) -> str:
    """The name of a handle: that of its bus, as the bus itself has it, and the id unless it is 0."""
    return f"{address.name}?id={id}" if id else address.name


def open_subscriber(
    address: Address,
    *,
    id: int = 0,
    depth: int = DEFAULT_DEPTH,
    overflow: str | Overflow = Overflow.BLOCK,
    timeout: float | None = None,
    drop_above: int | None = None,
    priority: int = 0,
    history: bool = True,
    on_message: Callable[[Message], Any] | None = None,
) -> QueueSubscriber:
    """A queue subscriber of one id on the named bus; ``on_message`` is called from a thread of its own."""
    subscriber = QueueSubscriber(
        name=_place(address, check_id(id)),
        ids=(id,),
        priority=priority,
        max_public_id=max(id, DEFAULT_MAX_PUBLIC_ID),
        depth=depth,
        overflow=overflow,
        timeout=timeout,
        drop_above=drop_above,
    )
    subscriber.history = wants_past(history)
    named_bus(address.name).add(subscriber)
    return subscriber.call_in_thread(on_message)


if TYPE_CHECKING:
    from penstock.bus.opening import publisher, subscriber
else:
    publisher = opener("bus", open_publisher)
    subscriber = opener("bus", open_subscriber)
