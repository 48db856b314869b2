"""The room's log: connects, handshakes, drops. Off unless asked for; then it costs a test of a level.

``PENSTOCK_LOG=debug`` (or ``info``, ``warning``) writes to stderr; programs with their own logging configure the logger
``penstock.tcp`` instead. Any thread may log.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("penstock.tcp")


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
