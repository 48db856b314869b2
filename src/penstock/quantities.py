"""Quantities as people write and read them: durations, sizes, points in time. Pure functions; loads no native code.

A time without a zone is UTC. Penstock prints times in UTC, so what it prints can be given as an argument again.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from typing import Any

from penstock.errors import InvalidArgument

__all__ = [
    "check_duration", "check_size", "datetime_ns", "duration_s", "interval_s", "is_duration", "is_size", "iso_ns",
    "iso_time", "moment_ns", "number_of", "size_bytes",
]  # fmt: skip

_UNITS_S = {
    "": 1.0, "ms": 1e-3, "millisecond": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0,
    "minute": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0,
}  # fmt: skip
_UNITS_BYTES = {
    "": 1, "b": 1, "k": 1 << 10, "kb": 10**3, "kib": 1 << 10, "m": 1 << 20, "mb": 10**6, "mib": 1 << 20,
    "g": 1 << 30, "gb": 10**9, "gib": 1 << 30,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_FRACTION = re.compile(r"(:\d\d)[.,](\d{7,9})(?!\d)")  # datetime keeps 6 digits, so 7 to 9 are parsed apart
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def duration_s(text: str, option: str) -> float:
    """``10``, ``2.5s``, ``5m``, ``1 hour``, ``7d`` as seconds."""
    match = _QUANTITY.fullmatch(text)
    factor = None if match is None else _factor(match[2].lower())
    if match is None or factor is None:
        raise InvalidArgument(f"{option} {text!r} is no duration; write 10s, 5m, 1h or 7d")
    return float(match[1]) * factor


def interval_s(text: str, option: str) -> float:
    """A duration above zero with a unit, as Spark requires it."""
    seconds = duration_s(text, option)
    if seconds <= 0 or not is_duration(text):
        raise InvalidArgument(f"{option} {text!r} is no interval; write 10s, 5m or 1 hour")
    return seconds


def is_duration(text: str) -> bool:
    """Whether ``text`` reads as a duration with a unit."""
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2] != "" and _factor(match[2].lower()) is not None


def _factor(unit: str) -> float | None:
    return _UNITS_S.get(unit) or _UNITS_S.get(unit.removesuffix("s") or "?")


def size_bytes(text: str, option: str) -> int:
    """``1000``, ``64k``, ``10M``, ``2GiB`` as bytes."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS_BYTES:
        raise InvalidArgument(f"{option} {text!r} is no size; write 65536, 64k, 10M or 2G")
    return int(float(match[1]) * _UNITS_BYTES[match[2].lower()])


def check_size(value: Any, option: str) -> int:
    """A size in bytes as an option has it: an int of 1 or more, or a text as ``size_bytes`` reads it."""
    size = size_bytes(value, option) if isinstance(value, str) else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"{option}={value!r} must be a size in bytes of 1 or more, or a text such as '64M'")
    return size


def check_duration(value: Any, option: str) -> float:
    """A duration in seconds as an option has it: a number above 0, or a text as ``duration_s`` reads it."""
    seconds = duration_s(value, option) if isinstance(value, str) else value
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise InvalidArgument(f"{option}={value!r} must be seconds above 0, or a text such as '5 min'")
    return float(seconds)


def is_size(text: str) -> bool:
    """Whether ``text`` is a size with a unit. ``10M`` is one; ``10m`` is not, since ``m`` means minutes."""
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2].lower() in _UNITS_BYTES and match[2] not in ("m", "")


def iso_time(timestamp_ns: int) -> str:
    """Realtime nanoseconds as UTC with all nine digits."""
    seconds, rest = divmod(timestamp_ns, 1_000_000_000)
    moment = _EPOCH + datetime.timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def iso_ns(text: str) -> int:
    """An ISO date and time as realtime nanoseconds, all nine digits of a second kept; ``ValueError`` otherwise."""
    text = text.strip()
    rest_ns = 0
    found = _FRACTION.search(text)
    if found is not None:
        rest_ns = int(found[2].ljust(9, "0"))
        text = text[: found.end(1)] + text[found.end() :]
    return datetime_ns(datetime.datetime.fromisoformat(text)) + rest_ns


def datetime_ns(moment: datetime.datetime) -> int:
    """A datetime (UTC when it has no zone) as nanoseconds since 1970, in integers: a float would lose digits."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
    since = aware - _EPOCH
    return (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000


def moment_ns(text: str, option: str) -> int:
    """A point in time as realtime nanoseconds: ISO date and time, ``now``, seconds or ns since 1970, or a duration ago.
    """
    if text == "now":
        return time.time_ns()
    if is_duration(text):
        return time.time_ns() - int(duration_s(text, option) * 1e9)
    if text.isascii() and text.isdigit():
        digits = int(text)
        return digits if digits > 10**14 else digits * 10**9  # so large a number can only be nanoseconds
    try:
        return iso_ns(text)
    except ValueError:
        raise InvalidArgument(
            f"{option} {text!r} is no time; write 2026-01-31T12:00:00 (UTC) or ...+01:00, a number of seconds since "
            "1970, or 5m for five minutes ago"
        ) from None


def number_of(count: int, one: str, many: str = "") -> str:
    """``1 message``, ``2,000 messages``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
