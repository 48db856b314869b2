"""Penstock: publish and subscribe for Python at every reach.

``publisher(address)`` and ``subscriber(address)`` open any reach; each room (``penstock.bus``, ``penstock.shm``,
``penstock.tcp``, ``penstock.journal``, ``penstock.broker``, ``penstock.gateway``, ``penstock.spark``) has its own full
classes, and a ``publisher`` and a ``subscriber`` of its own that are typed fully. Rooms are loaded when they are first
named: importing this loads no native code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.address import Address, publisher, subscriber
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

if TYPE_CHECKING:
    from penstock import bridge as bridge
    from penstock import broker as broker
    from penstock import bus as bus
    from penstock import calls as calls
    from penstock import gateway as gateway
    from penstock import journal as journal
    from penstock import shm as shm
    from penstock import spark as spark
    from penstock import tcp as tcp
    from penstock import types as types
    from penstock._core import Batch, Draft, Message
    from penstock.calls import client, server
    from penstock.types import Image

_ROOMS = ("bridge", "broker", "bus", "calls", "gateway", "journal", "shm", "spark", "tcp", "types")

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
    if name in ("client", "server"):
        return getattr(importlib.import_module("penstock.calls"), name)
    if name in ("Message", "Batch", "Draft"):
        from penstock import _core

        return getattr(_core, name)
    if name == "Image":
        return importlib.import_module("penstock.types").Image
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
