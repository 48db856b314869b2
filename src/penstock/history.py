"""How much of a channel's past is kept for late joiners: the options ``history``, ``latest`` and ``history_bytes``.

``history=10`` keeps the last ten messages, ``history="5 s"`` those of the last five seconds; both are bounded by
``history_bytes``, and the newest message is kept whatever its size. ``latest=True`` is ``history=1`` for topics that
have a state: ``publisher.set(value)`` replaces it. Pure values; loads no native code.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidArgument
from penstock.quantities import check_size, duration_s, is_duration, moment_ns

MAX_BYTES = 1 << 40
DEFAULT_BYTES = 16 << 20
MAX_MESSAGES = 1 << 19


@dataclass(frozen=True, slots=True)
class Kept:
    """Three bounds that hold together. ``messages=0`` keeps nothing."""

    messages: int = 0
    age_ns: int = 0  # 0: however old
    bytes: int = DEFAULT_BYTES

    @property
    def words(self) -> tuple[int, int, int]:
        """The bounds as the native core expects them."""
        return self.messages, self.age_ns, self.bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """A past on disk, opened for one reader."""

    source: Any  #: a subscriber
    position: int  #: where it begins, whether that is still there or not
    frontier: int  #: what was on disk then lies before this position


def kept_of(history: int | str | None, latest: bool, history_bytes: int | str | None) -> Kept:
    """What the three options of a publisher mean together."""
    most_bytes = DEFAULT_BYTES if history_bytes is None else check_size(history_bytes, "history_bytes")
    if most_bytes > MAX_BYTES:
        raise InvalidArgument(f"history_bytes={history_bytes} must be at most {MAX_BYTES}")
    if not isinstance(latest, bool):
        raise InvalidArgument(f"latest={latest!r} must be True or False")
    if latest:
        if history is not None:
            raise InvalidArgument("latest=True keeps the last message alone: give history= or latest=, not both")
        return Kept(1, 0, most_bytes)
    if history is None:
        if history_bytes is not None:
            raise InvalidArgument("history_bytes= bounds a history: give history= too")
        return Kept()
    if isinstance(history, bool) or not isinstance(history, int | str):
        raise TypeError(f"history must be a number of messages or a duration such as '5 s', not {history!r}")
    if isinstance(history, int) or history.isdigit():
        count = int(history)
        if not 0 <= count <= MAX_MESSAGES:
            raise InvalidArgument(f"history={count} must be 0 to {MAX_MESSAGES} messages")
        return Kept(count, 0, most_bytes)
    seconds = duration_s(history, "history") if is_duration(history) else math.inf
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(
            f"history {history!r} is neither a number of messages nor a duration such as '5 s' or '2 min'"
        )
    age_ns = int(seconds * 1e9)
    return Kept(MAX_MESSAGES if age_ns else 0, age_ns, most_bytes)


def wants_past(history: object) -> bool:
    """Whether a subscriber wants the past: its option ``history``."""
    if not isinstance(history, bool):
        raise InvalidArgument(
            f"history={history!r} of a subscriber must be True or False: its publisher says how much is kept"
        )
    return history


def check_start(start: object) -> str:
    """Where a subscriber starts in the stored messages, as text: ``new``, ``first``, a position or a time."""
    if isinstance(start, datetime.datetime):
        return start.isoformat()
    if isinstance(start, bool) or not isinstance(start, int | str):
        raise TypeError(f"start must be 'first', 'new', a position, a time or 'last 10 min', not {start!r}")
    text = str(start).strip()
    if text in ("new", "first"):
        return text
    if text.removeprefix("-").isdigit():
        if not 1 <= int(text) < 1 << 62:
            raise InvalidArgument(f"start={text} must be a position from 1 to 2**62 - 1")
        return text
    if len(text) > 100:
        raise InvalidArgument("start= is too long to be a position, a time or a duration")
    start_ns(text)
    return text


def start_ns(text: str) -> int:
    """The time that such a text names: an ISO date and time, or ``last 10 min``."""
    back = text.removeprefix("last ")
    if back != text and is_duration(back):
        return time.time_ns() - int(duration_s(back, "start") * 1e9)
    try:
        return moment_ns(text, "start")
    except InvalidArgument:
        raise InvalidArgument(
            f"start={text!r} is no valid start; write 'first', 'new', a position, a time such as "
            "2026-01-31T12:00:00 (UTC), or 'last 10 min'"
        ) from None
