"""Aggregator: count, minimum, maximum, mean and last value of a number, over windows of time or of messages.
args: ``field`` ("value": of the JSON content), ``by`` ("deviceId": a window for each value of this property),
``window_s`` (10.0) or ``window_count`` (null; when given, windows of that many messages), ``max_groups`` (10000).
A window of time ends with the first message after it, or with the module. Properties of what it publishes: ``kind`` =
"aggregate" and the one named by ``by``.

Example: {"name": "minutes", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Aggregator"}, "args":
{"field": "celsius", "window_s": 60.0}}
"""

from __future__ import annotations

import json
import math
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class Aggregator(Module):
    """Publishes one message for each window."""

    gathers = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, field="value", by="deviceId", window_s=10.0, window_count=None, max_groups=10000)
        if given["window_s"] < 0 or given["max_groups"] < 1:
            raise ValueError("window_s must be 0 or more and max_groups 1 or more")
        if (count := given["window_count"]) is not None and (type(count) is not int or count < 1):
            raise ValueError(f"window_count must be a whole number, 1 or more, or null, not {count!r}")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Begin with no window."""
        super().create(broker, configuration)
        self._windows: dict[str, dict[str, float]] = {}

    def receive(self, message: GatewayMessage) -> None:
        """Add one value; publish the window that it completes or follows."""
        now, c = self.clock.now(), self.configuration
        value = _number(json.loads(bytes(message)), c["field"])
        group = message.properties.get(c["by"], "")
        window = self._windows.get(group)
        if window and c["window_count"] is None and now - window["begin"] >= c["window_s"]:
            window = self._close(group)
        if window is None:
            if len(self._windows) >= c["max_groups"]:
                self._close(next(iter(self._windows)))
            window = self._windows[group] = {"begin": now, "count": 0, "min": value, "max": value, "sum": 0.0}
        window.update(count=window["count"] + 1, sum=window["sum"] + value, last=value)
        window.update(min=min(window["min"], value), max=max(window["max"], value))
        if window["count"] == c["window_count"]:
            self._close(group)

    def stop(self) -> None:
        """Publish the open windows."""
        for group in list(self._windows):
            self._close(group)

    def _close(self, group: str) -> dict[str, float] | None:
        window = self._windows.pop(group)
        window["mean"] = window.pop("sum") / window["count"]
        del window["begin"]
        self.publish(json.dumps(window).encode(), {"kind": "aggregate", self.configuration["by"]: group})
        return None


def _number(content: Any, field: str) -> float:
    """The number in the field. Anything else is refused: it would make every figure of its window wrong."""
    try:
        value = float(content[field])
    except (LookupError, TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the content is not a JSON object with a number as {field!r}")
    return value
