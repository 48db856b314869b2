"""Unfinished: how much memory the incomplete messages of all connections use. The broker's loop thread only. Their sum
has a bound. When it is reached, the connections that have sent the least lately are closed first, so that nobody can
keep others out by beginning messages and then sending nothing, or very little.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

WINDOW_S = 1.0  # the time that "lately" means
LEAST_BYTES = 65_536  # less than this is not worth closing a connection for

Peer = TypeVar("Peer", bound=Hashable)


class _Pace:
    """How many bytes one connection has pending, and how fast it sends more."""

    def __init__(self, now: float) -> None:
        self.size = 0
        self._since, self._bytes, self._heard = now, 0, now
        self._rate = math.inf  # rate in the last full window; infinite for a message that has just begun

    def note(self, size: int, now: float) -> None:
        if size < self.size:  # another message
            self._since, self._bytes, self._rate = now, 0, math.inf
        self._bytes += max(0, size - self.size)
        self.size, self._heard = size, now
        if now - self._since >= WINDOW_S:
            self._rate = self._bytes / (now - self._since)
            self._since, self._bytes = now, 0

    def rate(self, now: float) -> float:
        if now - self._heard >= WINDOW_S:
            return 0.0
        return self._bytes / (now - self._since) if now - self._since >= WINDOW_S else self._rate


class Unfinished(Generic[Peer]):
    """The bytes of all connections."""

    def __init__(self) -> None:
        self.total = 0
        self._paces: dict[Peer, _Pace] = {}

    def note(self, peer: Peer, size: int, now: float) -> None:
        """Note how many bytes of an incomplete message a peer has sent."""
        pace = self._paces.get(peer)
        if pace is None:
            if not size:
                return
            pace = self._paces[peer] = _Pace(now)
        self.total += size - pace.size
        pace.note(size, now)
        if not size:
            del self._paces[peer]

    def forget(self, peer: Peer) -> None:
        """The connection is over."""
        pace = self._paces.pop(peer, None)
        self.total -= pace.size if pace is not None else 0

    def slowest(self, last: Peer, now: float) -> Peer | None:
        """The peer that has sent the least lately; among equals ``last``, which has just sent, then the one with the
        most bytes.
        """
        large = [(peer, pace) for peer, pace in self._paces.items() if pace.size > LEAST_BYTES]
        found = min(large, key=lambda item: (item[1].rate(now), item[0] != last, -item[1].size), default=None)
        return found[0] if found is not None else None
