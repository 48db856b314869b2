"""Supervision: what happens to a module that fails. Pure policy, no threads; the clock is given.

``never`` counts and reports the failure, and the module goes on. ``on_failure`` replaces the module after a back-off
that doubles from ``backoff_s`` to ``max_backoff_s``; after ``limit`` failures in a row it gives up. After
``max_backoff_s`` (and at least a second) without a failure, the back-off starts again at ``backoff_s``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import InvalidArgument
from penstock.gateway.place import Checks, check_options


class Policy(enum.StrEnum):
    """When to replace a failed module."""

    NEVER = "never"
    ON_FAILURE = "on_failure"


CHECKS: Checks = {
    "policy": lambda place: place.member(Policy),
    "backoff_s": lambda place: place.seconds(),
    "max_backoff_s": lambda place: place.seconds(),
    "limit": lambda place: place.integer(1, optional=True),
}


@dataclass(frozen=True, slots=True)
class Restart:
    """A module's restart policy; ``limit`` None never gives up."""

    policy: Policy = Policy.NEVER
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    limit: int | None = 10

    def __post_init__(self) -> None:
        check_options(self, CHECKS)
        if self.backoff_s > self.max_backoff_s:
            raise InvalidArgument(f"backoff_s={self.backoff_s} is above max_backoff_s={self.max_backoff_s}")


class Supervisor:
    """Counts the failures of one module and decides about restarts."""

    def __init__(self, restart: Restart) -> None:
        self.restart = restart
        self.failures = 0
        self.restarts = 0
        self.gave_up = False
        self._in_a_row = 0
        self._last_s: float | None = None

    def failed(self, now_s: float) -> float | None:
        """Note a failure; returns the seconds to wait before the module is replaced, or None to keep it."""
        self.failures += 1
        if self.restart.policy is Policy.NEVER or self.gave_up:
            return None
        if self._last_s is not None and now_s - self._last_s >= max(1.0, self.restart.max_backoff_s):
            self._in_a_row = 0
        self._last_s = now_s
        self._in_a_row += 1
        if self.restart.limit is not None and self._in_a_row > self.restart.limit:
            self.gave_up = True
            return None
        doublings = min(self._in_a_row - 1, 64)
        return min(self.restart.backoff_s * 2.0**doublings, self.restart.max_backoff_s)

    def restarted(self) -> None:
        """Note that the module was replaced."""
        self.restarts += 1
