"""Intervals as people write them: ``10 seconds``, ``1 minute``, ``10s``."""

from __future__ import annotations

import re

from penstock.errors import InvalidArgument

_UNITS = {
    "ms": 0.001, "millisecond": 0.001, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0,
}  # fmt: skip


def seconds(text: str) -> float:
    """``text`` in seconds; ``InvalidArgument`` shows the right form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    unit = match.group(2) if match else ""
    factor = _UNITS.get(unit) or _UNITS.get(unit.removesuffix("s"))
    if match is None or factor is None or float(match.group(1)) <= 0:
        raise InvalidArgument(f"{text!r} is not an interval such as '10s' or '1 minute'")
    return float(match.group(1)) * factor
