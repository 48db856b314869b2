"""Simulated sensors as modules of a gateway. Each counts what it publishes."""

from __future__ import annotations

import json
import math
import random
import time

from penstock.gateway import Source

__all__ = ["Camera", "Temperature", "Vibration"]


class _Paced(Source):
    """Publishes at a steady rate, and catches up after a late wake-up."""

    rate_hz = 1.0
    published = 0

    def run(self) -> None:
        """Publish until stopped."""
        began = time.monotonic()
        while True:
            due = began + self.published / self.rate_hz
            if self.stopping.wait(max(0.0, due - time.monotonic())):
                return
            behind = int((time.monotonic() - began) * self.rate_hz) - self.published + 1
            for _ in range(max(1, behind)):
                self.publish(self.make(self.published + 1))
                self.published += 1

    def make(self, number: int) -> bytes:
        """The body of one message."""
        raise NotImplementedError


class Temperature(_Paced):
    """A room that warms and cools, as JSON."""

    rate_hz = 100.0

    def make(self, number: int) -> bytes:
        celsius = 21 + 4 * math.sin(number / 700) + random.gauss(0, 0.15)
        return json.dumps({"n": number, "device": f"hall-{number % 4}", "celsius": round(celsius, 3)}).encode()


class Vibration(_Paced):
    """A machine that hums at two frequencies, as JSON."""

    rate_hz = 1000.0

    def make(self, number: int) -> bytes:
        value = math.sin(number / 8) + 0.4 * math.sin(number / 1.7) + random.gauss(0, 0.05)
        return b'{"n": %d, "g": %.4f}' % (number, value)


class Camera(_Paced):
    """Grey frames of 160 x 120 with a bar that moves."""

    rate_hz = 15.0
    width, height = 160, 120

    def make(self, number: int) -> bytes:
        at = number * 3 % self.width
        row = bytes(255 if at <= x < at + 12 else 40 + x // 2 for x in range(self.width))
        return number.to_bytes(8, "little") + row * self.height
