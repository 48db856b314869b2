"""Messages in memory that the user gives and uses again.

A static message has no reference at first. ``acquire`` takes one, which the next publish takes over; when the count is
0 again the memory may be written and published anew. Until then it is the user who must not write: the memory is
theirs. May be called from any thread.
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
    """A static message that calls ``callback(self)`` when its last reference has gone.

    Once for each publishing, in the thread of whoever gave the last reference back, with the count already 0: it may
    acquire and publish the message again. It must not block.
    """

    def __new__(cls, memory: Any, id: int, callback: Callable[[Any], Any]) -> Self:
        if not callable(callback):
            raise TypeError(f"callback must be a function, not {type(callback).__name__}")
        return _native.StaticMessage.__new__(cls, memory, id, callback)
