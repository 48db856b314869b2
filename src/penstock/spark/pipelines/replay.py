"""``replay``: messages of a DataFrame back to any address, in order, at their own speed, a factor of it, or flat out.

Order is by ``timestamp_ns``, then ``position`` and ``ordinal`` where they are there. The rows come to the driver one
partition at a time, so that memory does not grow with the recording; one thread publishes. Batch only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.address import publisher
from penstock.errors import CapacityError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.channel import Publisher

MAX_PUBLISHERS = 1024


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did: how many messages and bytes, how long it took, and the most it was behind its schedule."""

    messages: int
    payload_bytes: int
    seconds: float
    most_behind_s: float


def replay(
    frame: DataFrame,
    address: str,
    *,
    speed: float | None = 1.0,
    options: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Publish each row's payload to ``address``; ``{topic}`` in it is the row's topic. ``speed=None``: flat out."""
    if speed is not None and not speed > 0:
        raise InvalidArgument(f"speed={speed!r} must be above 0, or None for as fast as it goes")
    if "payload" not in frame.columns or "timestamp_ns" not in frame.columns:
        raise InvalidArgument(f"replay needs the columns payload and timestamp_ns, not {', '.join(frame.columns)}")
    order = [name for name in ("timestamp_ns", "position", "ordinal") if name in frame.columns]
    wanted = [name for name in ("topic", "timestamp_ns", "payload") if name in frame.columns]
    rows = frame.orderBy(*order).select(*wanted).toLocalIterator(prefetchPartitions=True)
    with _Publishers(address, options or {}) as publishers:
        return _play(iter(rows), publishers, speed=speed, on_progress=on_progress, clock=clock, sleep=sleep)


def _play(
    rows: Iterator[Any],
    publishers: _Publishers,
    *,
    speed: float | None,
    on_progress: Callable[[int, int], None] | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Replayed:
    messages = payload_bytes = 0
    behind = 0.0
    begun: float | None = None
    first_ns = 0
    for row in rows:
        if begun is None:
            begun, first_ns = clock(), row.timestamp_ns
        if speed is not None:
            wait = begun + (row.timestamp_ns - first_ns) / 1e9 / speed - clock()
            behind = max(behind, -wait)
            if wait > 0:
                sleep(wait)
        data = row.payload if row.payload is not None else b""
        publishers.of(row).publish(data)
        messages += 1
        payload_bytes += len(data)
        if on_progress is not None and messages % 1000 == 0:
            on_progress(messages, payload_bytes)
    if on_progress is not None:
        on_progress(messages, payload_bytes)
    return Replayed(messages, payload_bytes, 0.0 if begun is None else clock() - begun, behind)


class _Publishers:
    """One publisher a topic when the address names it, otherwise one for all."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self.address = address
        self.options = options
        self.by_topic = "{topic}" in address
        self.opened: dict[str, Publisher] = {}

    def of(self, row: Any) -> Publisher:
        topic = row.topic if self.by_topic else ""
        found = self.opened.get(topic)
        if found is None:
            if len(self.opened) >= MAX_PUBLISHERS:
                raise CapacityError(f"more than {MAX_PUBLISHERS} topics to replay to; filter the frame by topic")
            found = publisher(self.address.replace("{topic}", topic), **self.options)
            self.opened[topic] = found
        return found

    def __enter__(self) -> _Publishers:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self.opened.values():
            opened.close()
