"""Messages in memory that belongs to the user and is reused.

A static message has no references at first. ``acquire`` adds one, which the next publish takes over. When the count is
0 again, the memory may be written and published again; until then the user must not write to it, which nothing
enforces. May be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from penstock._core import bus as _native


class StaticMessage(_native.StaticMessage):
    """A message over ``memory`` (bytearray, numpy array, anything with a buffer)."""

    def __new__(cls, memory: Any, id: int) -> Self:
        return super().__new__(cls, memory, id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} id {self.id}, {self.size} bytes, {self.reference_count} references>"


class CallbackMessage(StaticMessage):
    """A static message that calls ``callback(self)`` when its last reference is gone.

    Called once per publish, in the thread that released the last reference, with the count at 0: it may acquire and
    publish the message again. It must not block.
    """

    def __new__(cls, memory: Any, id: int, callback: Callable[[Any], Any]) -> Self:
        if not callable(callback):
            raise TypeError(f"callback must be a function, not {type(callback).__name__}")
        return _native.StaticMessage.__new__(cls, memory, id, callback)
