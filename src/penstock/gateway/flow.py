"""Flow: what one link has carried, for who looks from outside.

A link costs its messages nothing: a source's port counts what it published, and a filter's refusals are counted where
the filter is asked. ``count`` puts what came since the joining into the link's counters, under the broker's lock.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from penstock._core import Counters

if TYPE_CHECKING:
    from penstock.gateway.worker import Worker

#: So many links of a broker are counted; what more there are is carried all the same.
MAX_FLOWS = 4096


class Flow:
    """One link, named ``SOURCE -> SINK``."""

    def __init__(self, source: Worker, sink: Worker) -> None:
        self.counters = Counters("gateway", "link", f"{source.name} -> {sink.name}")
        self.refused = bytearray(8)  # counted natively, by the source's port
        self._port = source.port
        self._since = source.port.published
        self._filtered = 0

    def count(self) -> None:
        """Bring the counters up to now."""
        filtered = struct.unpack("=Q", self.refused)[0]
        sent = max(self._port.published - self._since, filtered)
        self.counters.set("matched", sent)
        self.counters.set("delivered", sent - filtered)
        self.counters.drop("filtered", filtered - self._filtered)
        self._filtered = filtered

    def close(self) -> None:
        """The link is gone."""
        self.counters.close()
