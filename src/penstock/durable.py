"""Durable channels: ``penstock.publisher("tcp://...", durable="DIRECTORY")``, at ``bus:``, ``shm:`` and ``tcp://``.

Rules:

- A message goes to disk first, then to the live publisher: every message that a subscriber has read is on disk. One
  thread commits messages in groups, another passes them to the live publisher. ``publish`` waits for neither; with
  ``durable_wait=True`` it waits for the disk.
- One directory holds one channel. So a message's ordinal is its position in the journal, and the next publisher
  continues the numbers.
- A subscriber with ``start=`` reads the journal only, old messages and new ones: there is no switch from one source to
  another at which messages could be lost or duplicated. A slow one lags on disk and slows nobody down. Over tcp the
  publisher reads the journal for it.
- ``publish`` may be called by any thread.

``open_publisher`` and ``open_subscriber`` are light: every room shows their options as its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    import datetime

    from penstock.address import Address
    from penstock.durable_publisher import DurablePublisher
    from penstock.journal.follow import Follower

REACHES = ("bus", "shm", "tcp")


def open_publisher(
    address: Address,
    live_options: Mapping[str, Any],
    *,
    durable: str | os.PathLike[str] | None = None,
    durable_wait: bool = False,
    retain_bytes: int | str | None = None,
    retain_age_s: float | str | None = None,
    segment_bytes: int | str = 64 << 20,
) -> DurablePublisher:
    """A publisher that stores its messages in the journal ``durable`` before it sends them."""
    if address.scheme == "nats":
        raise InvalidArgument(
            f"publisher of {address.text!r}: durable= is for subscribers there, the name under which the server "
            "remembers what was read; jetstream=true publishes to a stream that stores the message"
        )
    if address.scheme not in REACHES:
        raise InvalidArgument(f"durable= is for {', '.join(REACHES)}: what is published at {address.text!r} is kept")
    if durable is None or not os.fspath(durable):
        raise InvalidArgument(
            f"publisher of {address.text!r}: give durable=DIRECTORY, where the messages are kept; durable_wait=, "
            "retain_bytes=, retain_age_s= and segment_bytes= go with it"
        )
    if live_options.get("metadata_size"):
        raise InvalidArgument(
            f"publisher of {address.text!r}: metadata_size= does not go with durable=: the disk keeps properties, no "
            "metadata"
        )
    if live_options.get("before"):
        raise InvalidArgument(
            f"publisher of {address.text!r}: before= does not go with durable=: the directory knows the last ordinal"
        )
    if not isinstance(durable_wait, bool):
        raise InvalidArgument(f"durable_wait={durable_wait!r} must be True or False")
    from penstock.durable_publisher import DurablePublisher, end_forgotten
    from penstock.journal.journal import Journal

    end_forgotten()  # a publisher that was garbage-collected may still have this directory, address or port
    journal = Journal(durable, retain_bytes=retain_bytes, retain_age_s=retain_age_s, segment_bytes=segment_bytes)
    try:
        return DurablePublisher(address, journal, live_options, durable_wait)
    except BaseException:
        journal.close()
        raise


def open_subscriber(
    address: Address,
    live_options: Mapping[str, Any],
    *,
    start: int | str | datetime.datetime | None = None,
    durable: str | os.PathLike[str] | None = None,
) -> Follower:
    """A subscriber of ``bus:`` or ``shm:`` that begins at ``start`` in what its publisher keeps on disk.

    The publisher tells it the directory; without a publisher, ``durable`` names it.
    """
    from penstock.durable_subscriber import follow

    followed = follow(address, live_options, "new" if start is None else start, durable)
    return followed.call_in_thread(live_options.get("on_message"))
