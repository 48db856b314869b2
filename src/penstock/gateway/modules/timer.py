"""Timer: publishes a message at a regular interval.

args: ``period_s`` (1.0), ``count`` (null: for ever), ``content`` (a text, ""), ``properties`` ({}).
Each message also has the property ``tick``, from 1. The interval is kept on average: a late tick is followed by a
shorter wait, and ticks that were missed completely are left out.

Example: {"name": "tick", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}, "args":
{"period_s": 5.0, "content": "poll"}}
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.module import Source, options


class Timer(Source):
    """Publishes ticks."""

    reaches_outside = False

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, period_s=1.0, count=None, content="", properties={})
        if not given["period_s"] > 0:
            raise ValueError(f"period_s must be above 0, not {given['period_s']}")
        if (count := given["count"]) is not None and (type(count) is not int or count < 0):
            raise ValueError(f"count must be a whole number, 0 or more, or null, not {count!r}")
        if not all(isinstance(text, str) and "\0" not in text for pair in given["properties"].items() for text in pair):
            raise ValueError("properties must be names with texts, without a NUL")
        return given

    def run(self) -> None:
        """Publish a tick at each multiple of the period."""
        period_s, count = self.configuration["period_s"], self.configuration["count"]
        content = self.configuration["content"].encode()
        begin, tick = self.clock.now(), 0
        due = begin
        while count is None or tick < count:
            if self.stopping.wait(max(0.0, due - self.clock.now())):
                return
            tick += 1
            self.publish(content, {**self.configuration["properties"], "tick": str(tick)})
            due = max(due + period_s, self.clock.now())
