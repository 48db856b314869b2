"""A cache of what is known of sealed segments, so that a process that plans a stream reads each of them once.

A sealed segment never changes: compaction and repair create another revision, and a journal created anew has another
UUID. So entries never become stale; the least recently used one is dropped when the cache is full. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """A least-recently-used cache with a limit in bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """The value of ``key``, or None if it was never put or has been dropped."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Store a value; drops the least recently used ones if there is no room."""
        with self._lock:
            self._held += size - self._values.pop(key, (value, 0))[1]
            self._values[key] = value, size
            while self._held > self._most:
                self._held -= self._values.popitem(last=False)[1][1]
