"""The room's log: connects, handshakes, drops. It is off by default and then costs one check of the level.

``PENSTOCK_LOG=debug`` (or ``info``, ``warning``) writes to stderr; programs with their own logging configure the logger
``penstock.tcp`` instead. Any thread may log.
"""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger("penstock.tcp")

BURST = 5  # a handle logs at most so many warnings in one period
PERIOD_S = 10.0  # further warnings of the period are only counted


class Throttle:
    """Limits the rate of one handle's warnings, so that a peer that misbehaves cannot fill the log. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = -PERIOD_S
        self._logged = self._suppressed = 0

    def warn(self, text: str, *arguments: object) -> None:
        """Log a warning; count it instead when this period has had ``BURST`` of them."""
        now = time.monotonic()
        with self._lock:
            if now - self._began >= PERIOD_S:
                suppressed, self._suppressed, self._logged, self._began = self._suppressed, 0, 0, now
            else:
                suppressed = 0
            self._logged += 1
            if self._logged > BURST:
                self._suppressed += 1
                return
        # Outside the lock: a logging handler may be slow, or may log through this object itself.
        if suppressed:
            logger.warning("%d more warnings were suppressed", suppressed)
        logger.warning(text, *arguments)

    def end(self) -> None:
        """The handle is closed: log how many warnings were suppressed."""
        with self._lock:
            suppressed, self._suppressed = self._suppressed, 0
        if suppressed:
            logger.warning("%d more warnings were suppressed", suppressed)


def _configure() -> None:
    level = os.environ.get("PENSTOCK_LOG", "").upper()
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        return
    logger.setLevel(number)
    # A program with logging of its own keeps it: a second handler would print each line twice.
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


_configure()
