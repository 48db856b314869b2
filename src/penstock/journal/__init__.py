"""The journal: a durable log of many topics on disk, usable alone.

``Journal(directory)`` writes or reads it; ``journal:DIRECTORY#TOPIC`` is its address. ``penstock.journal.format`` reads
it with numpy alone: importing this package, or that module, loads no native code.
"""

from __future__ import annotations

import errno
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.address import Address, opener
from penstock.journal.layout import FRONTIER_NAME, MARKER_NAME
from penstock.topics import check_topic

if TYPE_CHECKING:
    import datetime

    from penstock._core import Message
    from penstock.journal.follow import Follower, JournalPublisher
    from penstock.journal.journal import Details, Journal
    from penstock.journal.queue import Queue
    from penstock.journal.queue_notes import QueueSettings, QueueState
    from penstock.journal.recovery import Damage, Recovery
    from penstock.journal.repairs import RepairReport, repair
    from penstock.journal.transaction import Entry, Transaction

_PLACES = {
    "Journal": "journal",
    "Details": "journal",
    "Follower": "follow",
    "JournalPublisher": "follow",
    "Queue": "queue",
    "QueueSettings": "queue_notes",
    "QueueState": "queue_notes",
    "Damage": "recovery",
    "RepairReport": "repairs",
    "repair": "repairs",
    "Recovery": "recovery",
    "Entry": "transaction",
    "Transaction": "transaction",
}

__all__ = [
    "Journal",
    "Details",
    "Damage",
    "Entry",
    "Follower",
    "JournalPublisher",
    "Queue",
    "QueueSettings",
    "QueueState",
    "Recovery",
    "RepairReport",
    "Transaction",
    "repair",
    "open_publisher",
    "open_subscriber",
    "publisher",
    "subscriber",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"penstock.journal.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'penstock.journal' has no attribute {name!r}")


def open_publisher(
    address: Address,
    *,
    segment_bytes: int | str = 64 << 20,
    max_message_bytes: int | str = 64 << 20,
    retain_age_s: float | str | None = None,
    retain_bytes: int | str | None = None,
    sync: bool = True,
) -> JournalPublisher:
    """A publisher for ``journal:DIRECTORY#TOPIC``. Publishers of one process share the directory's writer."""
    from penstock.journal.follow import DEFAULT_TOPIC, JournalPublisher, share

    topic = check_topic(address.topic or DEFAULT_TOPIC)
    options = {
        "segment_bytes": segment_bytes,
        "max_message_bytes": max_message_bytes,
        "retain_age_s": retain_age_s,
        "retain_bytes": retain_bytes,
        "sync": sync,
    }
    return JournalPublisher(share(address.name, options), topic)


def open_subscriber(
    address: Address,
    *,
    start: int | str | datetime.datetime = "new",
    on_message: Callable[[Message], Any] | None = None,
) -> Follower:
    """A follower of ``journal:DIRECTORY#TOPIC``; TOPIC may be a pattern and defaults to ``default``.

    ``start`` is ``"new"``, ``"first"``, a position, a time or ``"last 10 min"``. The journal must exist: its first
    publisher creates it. ``on_message`` is called with every message from a thread of its own.
    """
    from penstock.errors import InvalidArgument
    from penstock.history import check_start
    from penstock.journal.follow import DEFAULT_TOPIC, Follower
    from penstock.journal.journal import Journal

    marker, frontier = Path(address.name) / MARKER_NAME, Path(address.name) / FRONTIER_NAME
    if not marker.exists():
        if marker.parent.exists() and not marker.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), address.name)
        raise InvalidArgument(f"there is no journal {address.name}: check the path; its first publisher creates it")
    deadline = time.monotonic() + 10
    # its writer is still creating it; the frontier file is written last
    while not frontier.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    start = check_start(start)
    journal = Journal(address.name, mode="read")
    follower = Follower(journal, journal.place_of(start), [address.topic or DEFAULT_TOPIC], own=True)
    return follower.call_in_thread(on_message)


if TYPE_CHECKING:
    from penstock.journal.opening import publisher, subscriber
else:
    publisher = opener("journal", open_publisher)
    subscriber = opener("journal", open_subscriber)
