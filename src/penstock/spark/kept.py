"""What is known of sealed segments, kept between plans: a process that plans a stream looks at each of them once.

A sealed segment never changes: compaction and repair make another revision, a journal made anew has another UUID. So
nothing here gets old; the least lately used goes when there is too much. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key, at most so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """What was put there, unless it had to go."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep it; what was not asked for longest goes."""
        with self._lock:
            self._held += size - self._values.pop(key, (value, 0))[1]
            self._values[key] = value, size
            while self._held > self._most:
                self._held -= self._values.popitem(last=False)[1][1]
