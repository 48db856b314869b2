"""Flow: the counters of one link, mapped so that the monitor can read them from another process.

Counting costs a message nothing: the source's port counts what it publishes, and the filter counts what it refuses.
``count`` copies what was published since the link was added into the link's counters, under the broker's lock.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from penstock._core import Counters

if TYPE_CHECKING:
    from penstock.gateway.bounds import Bound
    from penstock.gateway.worker import Output, Worker

#: The most links of a broker that have counters. Further links work all the same; ``Uncounted`` says how many.
MAX_FLOWS = 4096


class Flow:
    """One link, named ``SOURCE -> SINK``."""

    def __init__(self, source: Output, sink: Worker) -> None:
        self.counters = Counters("gateway", "link", f"{source.name} -> {sink.name}")
        self.refused = bytearray(16)  # messages and bytes, counted natively by the source's port
        self._source, self._sink = source, sink
        self._since, self._bytes_since = source.port.published, source.port.bytes
        self._bound: Bound | None = None
        self._overflowed_before = 0  # messages refused by bounds that the link had before
        self._sent = self._filtered = self._overflowed = 0

    def count(self) -> None:
        """Update the counters."""
        joint = self._source.sinks.get(self._sink)
        bound = joint.bound if joint is not None else None
        if bound is not self._bound:
            self._overflowed_before += self._bound.dropped if self._bound is not None else 0
            self._bound = bound
        overflowed = self._overflowed_before + (bound.dropped if bound is not None else 0)
        # read afterwards: messages refused by a bound are counted there too
        refused, refused_bytes = struct.unpack("=QQ", self.refused)
        filtered = max(self._filtered, refused - overflowed)
        sent = max(self._source.port.published - self._since, filtered + overflowed)
        if sent != self._sent:
            self._sent = sent
            self.counters.set("last_ns", time.time_ns())
        self.counters.set("matched", sent)
        self.counters.set("delivered", sent - filtered - overflowed)
        self.counters.set("bytes", max(0, self._source.port.bytes - self._bytes_since - refused_bytes))
        self.counters.drop("filtered", filtered - self._filtered)
        self.counters.drop("overflow", overflowed - self._overflowed)
        self._filtered, self._overflowed = filtered, overflowed

    def close(self) -> None:
        """The link was removed."""
        self.counters.close()


class Uncounted:
    """The links beyond ``MAX_FLOWS``: one row in the monitor says how many there are, if any. Used under the broker's
    lock.
    """

    def __init__(self) -> None:
        self._links: set[tuple[Output, Worker]] = set()
        self._counters: Counters | None = None

    def add(self, source: Output, sink: Worker) -> None:
        """A link without counters was added."""
        self._links.add((source, sink))
        self._update_counters()

    def discard(self, source: Output, sink: Worker) -> None:
        """A link was removed, or has counters now."""
        if (source, sink) in self._links:
            self._links.discard((source, sink))
            self._update_counters()

    def close(self) -> None:
        """All links are gone."""
        self._links.clear()
        self._update_counters()

    def _update_counters(self) -> None:
        if not self._links:
            if self._counters is not None:
                self._counters.close()
            self._counters = None
            return
        if self._counters is None:
            self._counters = Counters("gateway", "links", "more links")
        self._counters.state(f"{len(self._links)} more, carried and not counted")
