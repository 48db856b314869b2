"""Throttle: limits the rate of log lines of one kind, and logs how many were left out. Any thread."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

PERIOD_S = 10.0


class Log(Protocol):
    """A logger, or an object with its method ``log``."""

    def log(self, level: int, text: str, /, *arguments: Any) -> None:
        """Write a line."""


class Throttle:
    """The first line is logged at once; those that follow within ``period_s`` are counted, and the next line says how
    many."""

    def __init__(self, log: Log, period_s: float = PERIOD_S) -> None:
        self._log = log
        self._period_s = period_s
        self._next_s = 0.0
        self.left_out = 0

    def error(self, text: str, *arguments: Any, **options: Any) -> bool:
        """Log an error, or only count it; returns whether it was logged."""
        return self.log(logging.ERROR, text, *arguments, **options)

    def log(self, level: int, text: str, *arguments: Any, **options: Any) -> bool:
        """Log a line, or only count it; returns whether it was logged."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self.left_out += 1
            return False
        left_out, self.left_out = self.left_out, 0
        self._next_s = now_s + self._period_s
        if left_out:
            text, arguments = text + " (%d more like it since the last one)", (*arguments, left_out)
        self._log.log(level, text, *arguments, **options)
        return True
