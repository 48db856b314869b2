"""Guard: a module's lock that a forked child can replace: the thread that held it does not exist in the child."""

from __future__ import annotations

import threading


class Guard:
    """Used by ``with``; any thread."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace the lock; only right after a fork, by the child's only thread."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
