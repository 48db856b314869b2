"""Deduplicate: passes on each message once and drops repetitions.

args: ``by`` (null: compares contents; else the name of a property, messages without it pass), ``window_s`` (60.0: a
repetition after this time passes), ``max_keys`` (100000: beyond this number the oldest are forgotten). Repetitions go
to the output ``dropped``, for modules linked to it, and are counted as filtered by this module.

Between links that deliver at least once, put a ``buffer`` on the link behind it. A message that was lost further on
(a module was removed, the gateway was killed) comes again from its source, and would be dropped here as a repetition.

Example: {"name": "once", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Deduplicate"}, "args":
{"by": "id", "window_s": 600.0}}
"""

from __future__ import annotations

import hashlib
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class Deduplicate(Module):
    """Remembers recent messages by content or property."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, by=None, window_s=60.0, max_keys=100000)
        if not given["window_s"] > 0 or given["max_keys"] < 1:
            raise ValueError("window_s must be above 0 and max_keys 1 or more")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Begin with nothing."""
        super().create(broker, configuration)
        self._seen: dict[bytes, float] = {}  # in order of arrival

    def receive(self, message: GatewayMessage) -> None:
        """Pass it on unless it is known. It becomes known only after it was passed on, so that it can be tried again
        after a failure.
        """
        key, now_s = self._key(message), self.clock.now()
        if key is None:
            self.publish(message)
            return
        self._forget(now_s)
        if key in self._seen:
            self.publish(message, output="dropped")
            return
        self.publish(message)
        self._seen[key] = now_s
        if len(self._seen) > self.configuration["max_keys"]:
            del self._seen[next(iter(self._seen))]

    def _key(self, message: GatewayMessage) -> bytes | None:
        name = self.configuration["by"]
        if name is None:
            return hashlib.blake2b(message.content, digest_size=16).digest()
        value = message.properties.get(name)
        return None if value is None else value.encode()

    def _forget(self, now_s: float) -> None:
        while self._seen:
            oldest = next(iter(self._seen))
            if now_s - self._seen[oldest] < self.configuration["window_s"]:
                return
            del self._seen[oldest]
