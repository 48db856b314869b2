"""Flow: what one link has carried, for who looks from outside.

A link costs its messages nothing: a source's port counts what it published, and a filter's refusals are counted where
the filter is asked. ``count`` puts what came since the joining into the link's counters, under the broker's lock.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from penstock._core import Counters

if TYPE_CHECKING:
    from penstock.gateway.bounds import Bound
    from penstock.gateway.worker import Output, Worker

#: So many links of a broker are counted; what more there are is carried all the same, and told by ``Uncounted``.
MAX_FLOWS = 4096


class Flow:
    """One link, named ``SOURCE -> SINK``."""

    def __init__(self, source: Output, sink: Worker) -> None:
        self.counters = Counters("gateway", "link", f"{source.name} -> {sink.name}")
        self.refused = bytearray(16)  # messages and bytes, counted natively by the source's port
        self._source, self._sink = source, sink
        self._since, self._bytes_since = source.port.published, source.port.bytes
        self._bound: Bound | None = None
        self._overflowed_before = 0  # by the bounds that it had before
        self._sent = self._filtered = self._overflowed = 0

    def count(self) -> None:
        """Bring the counters up to now."""
        joint = self._source.sinks.get(self._sink)
        bound = joint.bound if joint is not None else None
        if bound is not self._bound:
            self._overflowed_before += self._bound.dropped if self._bound is not None else 0
            self._bound = bound
        overflowed = self._overflowed_before + (bound.dropped if bound is not None else 0)
        refused, refused_bytes = struct.unpack("=QQ", self.refused)  # after it: a bound's are counted there too
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
        """The link is gone."""
        self.counters.close()


class Uncounted:
    """The links past ``MAX_FLOWS``: one row, there while there are any, says how many. Under the broker's lock."""

    def __init__(self) -> None:
        self._links: set[tuple[Output, Worker]] = set()
        self._counters: Counters | None = None

    def add(self, source: Output, sink: Worker) -> None:
        """A link that nobody counts was made."""
        self._links.add((source, sink))
        self._tell()

    def discard(self, source: Output, sink: Worker) -> None:
        """A link is gone, or is counted now."""
        if (source, sink) in self._links:
            self._links.discard((source, sink))
            self._tell()

    def close(self) -> None:
        """All links are gone."""
        self._links.clear()
        self._tell()

    def _tell(self) -> None:
        if not self._links:
            if self._counters is not None:
                self._counters.close()
            self._counters = None
            return
        if self._counters is None:
            self._counters = Counters("gateway", "links", "more links")
        self._counters.state(f"{len(self._links)} more, carried and not counted")
