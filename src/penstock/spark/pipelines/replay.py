"""``replay``: publishes the messages of a DataFrame to any address, in order, at a chosen speed or unthrottled.

Order is by ``timestamp_ns``, then ``position`` and ``ordinal`` where they are there. The rows come to the driver one
partition at a time, so that memory does not grow with the recording; one thread publishes. Batch only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.address import publisher
from penstock.carry import due
from penstock.errors import CapacityError, InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock._core import Message
    from penstock.channel import Publisher

MAX_PUBLISHERS = 1024
_WANTED = ("topic", "position", "timestamp_ns", "payload", "properties", "message_id", "key")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: messages, bytes, the time it took, and how far it fell behind its schedule at most."""

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
    """Publish each row's payload to ``address``; ``{topic}`` in it is the row's topic. ``speed=0`` or None: as fast
    as it goes.
    """
    speed = speed or None
    if speed is not None and not speed > 0:
        raise InvalidArgument(f"speed={speed!r} must be above 0, or 0 for as fast as it goes")
    if "payload" not in frame.columns or "timestamp_ns" not in frame.columns:
        raise InvalidArgument(f"replay needs the columns payload and timestamp_ns, not {', '.join(frame.columns)}")
    order = [name for name in ("timestamp_ns", "position", "ordinal") if name in frame.columns]
    wanted = [name for name in _WANTED if name in frame.columns]
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
    begun = first_ns = None
    for group in due(rows, lambda row: row.timestamp_ns, _size, speed or 0.0, clock, sleep):
        if begun is None or first_ns is None:
            begun, first_ns = clock(), group[0].timestamp_ns
        if speed is not None:
            behind = max(behind, clock() - begun - (group[0].timestamp_ns - first_ns) / 1e9 / speed)
        # Only adjacent rows of one topic form a batch, so that topics keep their order among each other.
        for target, run in itertools.groupby(group, publishers.of):
            _forward(target, list(run))
        payload_bytes += sum(map(_size, group))
        before, messages = messages, messages + len(group)
        if on_progress is not None and messages // 1000 > before // 1000:
            on_progress(messages, payload_bytes)
    if on_progress is not None:
        on_progress(messages, payload_bytes)
    return Replayed(messages, payload_bytes, 0.0 if begun is None else clock() - begun, behind)


def _size(row: Any) -> int:
    return 0 if row.payload is None else len(row.payload)


def _forward(target: Publisher, run: list[Any]) -> None:
    """Publish rows; a journal and a broker store their ids and keys too, as far as the frame has them."""
    # Here, since the driver alone publishes; executors may have no native code.
    from penstock.journal.journal import Details

    messages = [_message(row) for row in run]
    details = [Details(getattr(row, "message_id", None) or "", getattr(row, "key", None) or "") for row in run]
    target.forward_details(messages, details)


def _message(row: Any) -> Message:
    """A row as a message, with its time and the properties that the frame has."""
    from penstock._core import Message

    if row.payload is None:
        at = f" at position {row.position}" if hasattr(row, "position") else ""
        raise InvalidArgument(
            f"the row{at} has a null payload, as damaged messages have that were read with mode=permissive: leave such "
            "rows out (frame.where('payload is not null')), or give them one"
        )
    properties = getattr(row, "properties", None)
    payload = row.payload.encode() if isinstance(row.payload, str) else row.payload
    return Message(payload, timestamp_ns=row.timestamp_ns, properties=dict(properties or {}))


class _Publishers:
    """One publisher a topic when the address names it, otherwise one for all."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self.address = address
        self.options = options
        self.by_topic = "{topic}" in address
        self.opened: dict[str, Publisher] = {}

    def of(self, row: Any) -> Publisher:
        topic = row.topic if self.by_topic else ""
        if topic is None:
            raise InvalidArgument(
                f"a row has no topic, which {{topic}} in {self.address} needs: leave such rows out, or give them one"
            )
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
