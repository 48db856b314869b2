"""A tail of messages for the page: subscribes to one address and shows at most ``MAX_SHOWN_HZ`` messages.

Each tail has a thread of its own, since a subscriber may block; closing the generator ends it. At most ``MAX_TAILS``
run at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import penstock
from penstock import address as addresses
from penstock.errors import CapacityError, InvalidArgument, RefusedError
from penstock.filter import compile_filter
from penstock.observe import decode
from penstock.observe.memory import tailing
from penstock.observe.snapshot import live
from penstock.types.fields import Values

__all__ = ["follow", "tail_address"]

MAX_TAILS = 8
MAX_SHOWN_HZ = 50
MAX_BODY_BYTES = 2048
MAX_NUMBERS = 200  # that can be plotted

_tail_slots = threading.BoundedSemaphore(MAX_TAILS)


def tail_address(text: str) -> str:
    """The address to subscribe to for a tail of ``text``; ``RefusedError`` unless it is open on this machine."""
    parts = addresses.parse(text)
    if parts.scheme == "bus":
        raise InvalidArgument(f"{parts.text}: a bus lives inside one process; only that process can read it")
    bare = text.partition("?")[0]  # without the options: a tail of ?queue=NAME would consume the queue's messages
    if bare not in {block.address.partition("?")[0] for block in live()}:
        raise RefusedError(f"{bare}: nobody on this machine has it open")
    return bare


def follow(text: str, expression: str = "") -> Iterator[dict[str, Any]]:
    """Records of messages as they come, and once a second ``{"skipped": n}`` for those that were not shown."""
    where = tail_address(text)
    passes = compile_filter(expression) if expression.strip() else None
    if not _tail_slots.acquire(blocking=False):
        raise CapacityError(f"{MAX_TAILS} tails are open already; end one first")
    try:
        with tailing():
            opened = _open(where)
        with opened as subscriber:
            values = Values(subscriber)
            if passes is not None:
                values.check(addresses.parse(where).topic or None, passes.paths)
            yield {"opened": where}
            yield from _limited_records(subscriber, values, passes)
    finally:
        _tail_slots.release()


def _open(where: str) -> penstock.Subscriber:
    """A subscriber that takes as little as it can: of shared memory one slot, so that the program keeps its own."""
    options = {"max_active_messages": 1} if addresses.parse(where).scheme == "shm" else {}
    return penstock.subscriber(where, **options)


def _limited_records(subscriber: penstock.Subscriber, values: Values, passes: Any) -> Iterator[dict[str, Any]]:
    second, shown, skipped = int(time.monotonic()), 0, 0
    lost = dict(subscriber.ledger.dropped)
    while True:
        records, hidden = _read_records(subscriber, values, passes, MAX_SHOWN_HZ - shown)
        now = int(time.monotonic())
        if now != second:
            yield {"skipped": skipped, "lost": _new_losses(lost, dict(subscriber.ledger.dropped))}
            lost = dict(subscriber.ledger.dropped)
            second, shown, skipped = now, 0, 0
        shown += len(records)
        skipped += hidden
        yield from records


def _read_records(
    subscriber: penstock.Subscriber, values: Values, passes: Any, most: int
) -> tuple[list[dict[str, Any]], int]:
    """Records of what came, and how many were not shown. All messages are released when this returns."""
    records: list[dict[str, Any]] = []
    hidden = 0
    for message in subscriber.read_many(64, 0.5):
        if passes is not None and not passes(message, values):
            continue
        if len(records) < most:
            records.append(_record(message, values))
        else:
            hidden += 1
    return records, hidden


def _new_losses(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    lost = {reason: n - before.get(reason, 0) for reason, n in after.items() if reason != "filtered"}
    return {reason: n for reason, n in lost.items() if n > 0}


def _record(message: penstock.Message, values: Values) -> dict[str, Any]:
    shown = decode.described(message, values)
    if shown is not None and len(shown) <= MAX_BODY_BYTES:
        return {**decode.record(message, b""), "size": message.size, "payload": json.loads(shown), "cut": False}
    body = bytes(memoryview(message)[:MAX_BODY_BYTES])
    record = decode.record(message, body)
    record["size"] = message.size
    record["cut"] = message.size > len(body)
    if shown is not None:  # its bytes are no text
        record |= {"payload": shown[:MAX_BODY_BYTES], "cut": True}
    elif record["cut"]:
        record["payload"] = decode.body_text(body)
    if record["cut"]:
        with contextlib.suppress(ValueError):
            record["numbers"] = dict(itertools.islice(_numbers(values(message), ""), MAX_NUMBERS))
    return record


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    """The numbers in a value by their path: ``pose.x``, ``ranges[3]``. The page finds them in what is not cut."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield path or "value", value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{at}]")
