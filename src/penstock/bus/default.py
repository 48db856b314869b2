"""The default bus: made on first use, and switched off where a program wants every bus to be its own."""

from __future__ import annotations

import threading

from penstock.bus.bus import Bus
from penstock.errors import StateError

_lock = threading.Lock()
_bus: Bus | None = None
_enabled = True


def default_bus() -> Bus:
    """The one default bus (``mode="thread"``); made anew where it was closed."""
    global _bus  # noqa: PLW0603
    with _lock:
        if not _enabled:
            raise StateError("the default bus was switched off by disable_default_bus(); make a Bus() and use that")
        if _bus is None or _bus.closed:
            _bus = Bus("default")
        return _bus


def disable_default_bus() -> None:
    """Close the default bus, if there is one; asking for it raises from now on."""
    global _bus, _enabled
    with _lock:
        bus, _bus, _enabled = _bus, None, False
    if bus is not None:
        bus.close()


def enable_default_bus() -> None:
    """Allow it again."""
    global _enabled  # noqa: PLW0603
    with _lock:
        _enabled = True
