"""Window: combines the messages of a period of time into one.

args: ``window_s`` (1.0), ``max_messages`` (1000) and ``max_bytes`` (1048576): a window also ends when it reaches one of
these; ``by`` (null; a property: a window for each of its values, at most ``max_groups`` (1000); beyond that the oldest
ends), ``format`` ("lines": contents with a line break between them; or "json": a list of their JSON values; what is no
JSON, NaN among it, is a text in it). Properties: ``count``, ``begin`` and ``end`` (seconds), and the one named by
``by``. Open windows are in memory: they are lost when the gateway is killed, and published when it is stopped properly.

Example: {"name": "batches", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Window"}, "args":
{"window_s": 10.0, "format": "json"}}
"""

from __future__ import annotations

import json
import threading
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Outlet, Source, options


class Window(Source):
    """Collects messages; its thread closes windows whose time is over."""

    gathers = True
    reaches_outside = False

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, window_s=1.0, max_messages=1000, max_bytes=1 << 20, by=None, max_groups=1000,
                        format="lines")  # fmt: skip
        if given["format"] not in ("lines", "json"):
            raise ValueError(f'format must be "lines" or "json", not {given["format"]!r}')
        if not (given["window_s"] > 0 and min(given["max_messages"], given["max_bytes"], given["max_groups"]) > 0):
            raise ValueError("window_s, max_messages, max_bytes and max_groups must be above 0")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Begin with no window."""
        super().create(broker, configuration)
        self._lock = threading.Lock()
        self._windows: dict[str, list[bytes]] = {}  # the oldest first
        self._begin: dict[str, float] = {}

    def receive(self, message: GatewayMessage) -> None:
        """Add one; publish the window that it fills."""
        c, content = self.configuration, bytes(message)
        group = message.properties.get(c["by"], "") if c["by"] is not None else ""
        with self._lock:
            window = self._windows.get(group)
            if window is not None and sum(map(len, window)) + len(content) > c["max_bytes"]:
                self._close(group)
                window = None
            if window is None:
                if len(self._windows) >= c["max_groups"]:
                    self._close(next(iter(self._windows)))
                window = self._windows[group] = []
                self._begin[group] = self.clock.time_ns() / 1e9
            window.append(content)
            if len(window) >= c["max_messages"]:
                self._close(group)

    def run(self) -> None:
        """Close what is due."""
        while not self.stopping.wait(self._seconds_left()):
            with self._lock:
                while self._windows and self._due() <= 0:
                    self._close(next(iter(self._windows)))

    def _seconds_left(self) -> float:
        """How long to wait: no window can become due before that, since one that opens meanwhile lasts at least as
        long.
        """
        with self._lock:
            return max(0.0, self._due()) if self._windows else float(self.configuration["window_s"])

    def _due(self) -> float:
        """Seconds until the oldest window is over; under the lock."""
        begin = next(iter(self._begin.values()))
        return begin + float(self.configuration["window_s"]) - self.clock.time_ns() / 1e9

    def stop(self) -> None:
        """Publish the open windows."""
        super().stop()
        with self._lock:
            for group in list(self._windows):
                self._close(group)

    def _close(self, group: str) -> None:
        """Publish a window. The caller holds the lock, so that windows are published in order."""
        window, c = self._windows.pop(group), self.configuration
        begin, end = self._begin.pop(group), self.clock.time_ns() / 1e9
        properties = {"count": str(len(window)), "begin": repr(begin), "end": repr(end)}
        if c["by"] is not None:
            properties[c["by"]] = group
        joined = b"\n".join(window) if c["format"] == "lines" else f"[{', '.join(map(_as_json, window))}]".encode()
        self.publish(joined, properties)


def _as_json(content: bytes) -> str:
    """The content's value as JSON text; of what is no JSON, the content as a JSON text."""
    try:
        return json.dumps(json.loads(content), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(content.decode(errors="backslashreplace"))
