"""Penstock: publish and subscribe for Python at every reach.

``publisher(address)`` and ``subscriber(address)`` open any reach; each room (``penstock.bus``, ``penstock.shm``,
``penstock.tcp``, ``penstock.journal``, ``penstock.broker``, ``penstock.gateway``, ``penstock.spark``) has its own full
classes, and a ``publisher`` and a ``subscriber`` of its own that are typed fully. All is loaded when it is first named:
importing this loads no native code, and takes a command's start no time.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing typing for it would be most of what this does
if TYPE_CHECKING:
    from typing import Any

    from penstock import bridge as bridge
    from penstock import broker as broker
    from penstock import bus as bus
    from penstock import calls as calls
    from penstock import clock as clock
    from penstock import gateway as gateway
    from penstock import journal as journal
    from penstock import shm as shm
    from penstock import spark as spark
    from penstock import tcp as tcp
    from penstock import types as types
    from penstock._core import Batch, Draft, Message
    from penstock.address import Address, publisher, subscriber
    from penstock.calls import client, server
    from penstock.channel import Ledger, Overflow, Publisher, Subscriber
    from penstock.errors import (
        CallFailed,
        CapacityError,
        ClosedError,
        CorruptionError,
        DecodeError,
        InvalidArgument,
        PeerGone,
        PenstockError,
        ProtocolError,
        RefusedError,
        StateError,
    )
    from penstock.types import Image

_ROOMS = ("bridge", "broker", "bus", "calls", "clock", "gateway", "journal", "nats", "shm", "spark", "tcp", "types")
_HOMES = {
    "_core": ("Batch", "Draft", "Message"),
    "address": ("Address", "publisher", "subscriber"),
    "calls": ("client", "server"),
    "channel": ("Ledger", "Overflow", "Publisher", "Subscriber"),
    "errors": (
        "CallFailed",
        "CapacityError",
        "ClosedError",
        "CorruptionError",
        "DecodeError",
        "InvalidArgument",
        "PeerGone",
        "PenstockError",
        "ProtocolError",
        "RefusedError",
        "StateError",
    ),
    "types": ("Image",),
}

__version__ = "0.1.0"

__all__ = [
    "publisher",
    "subscriber",
    "client",
    "server",
    "Address",
    "Batch",
    "Draft",
    "Image",
    "Ledger",
    "Message",
    "Overflow",
    "Publisher",
    "Subscriber",
    "CallFailed",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "DecodeError",
    "InvalidArgument",
    "PeerGone",
    "PenstockError",
    "ProtocolError",
    "RefusedError",
    "StateError",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS or name in _HOMES:
        return importlib.import_module(f"penstock.{name}")
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"penstock.{home}"), name)
            return found
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
