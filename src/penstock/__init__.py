"""Penstock: publish and subscribe for Python at every reach.

``publisher(address)`` and ``subscriber(address)`` open any reach; each room (``penstock.bus``, ``penstock.shm``,
``penstock.tcp``, ``penstock.journal``, ``penstock.broker``, ``penstock.gateway``, ``penstock.spark``) has its own full
classes. Importing this loads no native code: that happens when a room needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.address import Address, publisher, subscriber
from penstock.channel import Ledger, Overflow, Publisher, Subscriber
from penstock.errors import (
    CallFailed,
    CapacityError,
    ClosedError,
    CorruptionError,
    InvalidArgument,
    PeerGone,
    PenstockError,
    ProtocolError,
    RefusedError,
    StateError,
)

if TYPE_CHECKING:
    from penstock import calls as calls
    from penstock._core import Batch, Draft, Message
    from penstock.calls import client, server

__version__ = "0.1.0"

__all__ = [
    "publisher",
    "subscriber",
    "client",
    "server",
    "Address",
    "Batch",
    "Draft",
    "Ledger",
    "Message",
    "Overflow",
    "Publisher",
    "Subscriber",
    "CallFailed",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "InvalidArgument",
    "PeerGone",
    "PenstockError",
    "ProtocolError",
    "RefusedError",
    "StateError",
]


def __getattr__(name: str) -> Any:
    if name in ("calls", "client", "server"):
        import importlib

        calls = importlib.import_module("penstock.calls")  # by name: rooms below import this module too
        return calls if name == "calls" else getattr(calls, name)
    if name in ("Message", "Batch", "Draft"):
        from penstock import _core

        return getattr(_core, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
