"""Buses by name, for addresses. A named bus lives as long as a handle on it does."""

from __future__ import annotations

import threading
import weakref

from penstock.bus.bus import Bus

_named: weakref.WeakValueDictionary[str, Bus] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def named_bus(name: str) -> Bus:
    """The direct bus of that name; made when there is none."""
    with _lock:
        bus = _named.get(name)
        if bus is None or bus.closed:
            bus = _named[name] = Bus(name, mode="direct")
        return bus
