"""The room's log: connects, handshakes, drops. Off unless asked for; then it costs a test of a level.

``PENSTOCK_LOG=debug`` (or ``info``, ``warning``) writes to stderr; programs with their own logging configure the logger
``penstock.tcp`` instead. Any thread may log.
"""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger("penstock.tcp")

BURST = 5  # warnings of one handle that are told at once
PERIOD_S = 10.0  # then they are counted for so long


class Throttle:
    """Warnings of one handle: a peer that misbehaves again and again must not fill the log. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = -PERIOD_S
        self._told = self._kept_back = 0

    def tell(self, text: str, *arguments: object) -> None:
        """Warn, or count it where there were too many of late."""
        now = time.monotonic()
        with self._lock:
            if now - self._began >= PERIOD_S:
                kept_back, self._kept_back, self._told, self._began = self._kept_back, 0, 0, now
            else:
                kept_back = 0
            self._told += 1
            if self._told > BURST:
                self._kept_back += 1
                return
        if kept_back:
            logger.warning("%d more warnings were kept back", kept_back)
        logger.warning(text, *arguments)

    def end(self) -> None:
        """The handle is closed: tell of what was counted."""
        with self._lock:
            kept_back, self._kept_back = self._kept_back, 0
        if kept_back:
            logger.warning("%d more warnings were kept back", kept_back)


def _configure() -> None:
    level = os.environ.get("PENSTOCK_LOG", "").upper()
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        return
    logger.setLevel(number)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


_configure()
