"""Guard: a module's lock that a forked child can make anew, because whoever held it is not there."""

from __future__ import annotations

import threading


class Guard:
    """Used by ``with``; any thread."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Only right after a fork, by the one thread that there is."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
