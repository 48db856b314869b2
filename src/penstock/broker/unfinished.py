"""Unfinished: what has come in of messages that are not whole yet, of all connections. The broker's loop thread only.

It is kept in memory, so all of it together has a bound. Where there is no room those go first that have brought the
least of late, so that nobody keeps others out by beginning messages: not by sending nothing more, nor by sending a
little.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

WINDOW_S = 1.0  # what "of late" is
LEAST_BYTES = 65_536  # less than this is not worth closing a connection for

Peer = TypeVar("Peer", bound=Hashable)


class _Pace:
    """How much one connection holds, and how fast it brings more."""

    def __init__(self, now: float) -> None:
        self.size = 0
        self._since, self._bytes, self._heard = now, 0, now
        self._rate = math.inf  # of the last whole window; a message that has just begun is given one

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
        """So much has come in of what is not whole."""
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
        """Whoever has brought the least of late; among equals ``last``, who has just sent, then who holds most."""
        large = [(peer, pace) for peer, pace in self._paces.items() if pace.size > LEAST_BYTES]
        found = min(large, key=lambda item: (item[1].rate(now), item[0] != last, -item[1].size), default=None)
        return found[0] if found is not None else None
