"""Books: the counters of a publisher or follower of a journal, safe against a concurrent ``close``."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from penstock._core import Counters
from penstock.channel import Ledger


class Books:
    """A handle's counters. Any thread may count, also while another one closes them."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._last: Ledger | None = None  # the last values, once closed

    def count(self, messages: int, size: int, dropped: int = 0, since_ns: int | None = None) -> None:
        """``messages`` were stored or delivered now; ``dropped`` were removed by retention before they were read."""
        with self._lock:
            if self._last is not None:  # closed meanwhile: too late to count
                gone = {"gap": self._last.dropped.get("gap", 0) + dropped} if dropped else {}
                self._last = replace(
                    self._last,
                    matched=self._last.matched + messages + dropped,
                    delivered=self._last.delivered + messages,
                    dropped={**self._last.dropped, **gone},
                )
                return
            self._counters.add("matched", messages + dropped)
            self._counters.add("delivered", messages)
            self._counters.add("bytes", size)
            if dropped:
                self._counters.drop("gap", dropped)
            if since_ns is not None:
                self._counters.measure(since_ns)
            elif messages:
                self._counters.set("last_ns", time.time_ns())

    def reach(self, position: int) -> None:
        """Record where a reader continues, so that the monitor can compute its lag."""
        with self._lock:
            if self._last is None:
                self._counters.set("position", position)

    @property
    def ledger(self) -> Ledger:
        """The current counts, or the last ones before ``close``."""
        with self._lock:
            return self._last or self._ledger()

    def _ledger(self) -> Ledger:
        found = self._counters.snapshot()
        return Ledger(matched=found["matched"], delivered=found["delivered"], dropped=dict(found["dropped"]))

    def close(self) -> bool:
        """Release the counters; False if that was done before."""
        with self._lock:
            if self._last is not None:
                return False
            self._last = self._ledger()
            self._counters.close()
            return True
