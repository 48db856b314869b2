"""A subscriber that reads what a publisher keeps on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock import address as addresses
from penstock.durable_publisher import check_channel
from penstock.errors import InvalidArgument, RefusedError
from penstock.history import check_start
from penstock.journal.follow import Follower
from penstock.journal.journal import Journal
from penstock.journal.layout import FRONTIER_NAME

if TYPE_CHECKING:
    from penstock.address import Address


def follow(
    address: Address, live_options: Mapping[str, Any], start: object, durable: str | os.PathLike[str] | None
) -> Follower:
    """Read from ``start`` on, in the directory ``durable`` or the one that the publisher names."""
    text = check_start(start)
    directory = durable or _kept_at(address, live_options)
    if not (Path(directory) / FRONTIER_NAME).exists():
        raise InvalidArgument(f"there is no journal {directory}: check the path; a publisher with durable= creates it")
    journal = Journal(directory, mode="read")
    try:
        channel = check_channel(journal, address, live_options)
        from_disk = f"start=first&durable={quote(os.path.abspath(directory), safe='/')}"
        seen_as = f"{channel}{'&' if '?' in channel else '?'}{from_disk}"
        return Follower(journal, journal.place_of(text), own=True, seen_as=seen_as)
    except BaseException:
        journal.close()
        raise


def _kept_at(address: Address, live_options: Mapping[str, Any]) -> str:
    """Where the publisher of ``address`` keeps its messages."""
    if address.scheme == "bus":
        bus = addresses.room("bus").named_bus(address.name)
        directory = bus.durable.get(live_options.get("id", 0), "")
    else:
        with addresses.room("shm").Subscriber(address.name, history=False) as looking:
            directory = looking._durable("")
    if not directory:
        raise RefusedError(
            f"{address.scheme}:{address.name} has no messages on disk that are known: it has no running publisher with "
            "durable=; give durable=DIRECTORY to read what a publisher left"
        )
    return str(directory)
