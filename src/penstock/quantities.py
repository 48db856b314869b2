"""Quantities as people write them and read them: durations, sizes, points in time. Pure functions."""

from __future__ import annotations

import datetime
import re
import time

from penstock.errors import InvalidArgument

__all__ = ["duration_s", "is_size", "iso_time", "moment_ns", "size_bytes"]

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {
    "": 1, "b": 1, "k": 1 << 10, "kb": 10**3, "kib": 1 << 10, "m": 1 << 20, "mb": 10**6, "mib": 1 << 20,
    "g": 1 << 30, "gb": 10**9, "gib": 1 << 30,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def iso_time(timestamp_ns: int) -> str:
    """Realtime nanoseconds as UTC with all nine digits."""
    seconds, rest = divmod(timestamp_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def duration_s(text: str, option: str) -> float:
    """``10``, ``2.5s``, ``5m``, ``1h``, ``7d`` as seconds."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS_S:
        raise InvalidArgument(f"{option} {text!r} is no duration; write 10s, 5m, 1h or 7d")
    return float(match[1]) * _UNITS_S[match[2].lower()]


def size_bytes(text: str, option: str) -> int:
    """``1000``, ``64k``, ``10M``, ``2GiB`` as bytes."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS_BYTES:
        raise InvalidArgument(f"{option} {text!r} is no size; write 65536, 64k, 10M or 2G")
    return int(float(match[1]) * _UNITS_BYTES[match[2].lower()])


def is_size(text: str) -> bool:
    """Whether ``text`` reads as a size with a unit (``10M``: in ``--split``, minutes are ``10min``)."""
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2].lower() in _UNITS_BYTES and match[2] not in ("m", "")


def moment_ns(text: str, option: str) -> int:
    """A point in time as realtime nanoseconds: an ISO date and time, ``now``, or a duration that reaches back."""
    if text == "now":
        return time.time_ns()
    if _QUANTITY.fullmatch(text) and not text.strip().isdigit():
        return time.time_ns() - int(duration_s(text, option) * 1e9)
    if text.isdigit():
        digits = int(text)
        return digits if digits > 10**14 else digits * 10**9
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{option} {text!r} is no time; write 2026-01-31T12:00:00, a number of seconds since 1970, or 5m for "
            "five minutes ago"
        ) from None
    if moment.tzinfo is None:
        moment = moment.astimezone()
    return int(moment.timestamp() * 1_000_000) * 1000
