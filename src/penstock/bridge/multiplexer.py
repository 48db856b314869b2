"""Multiplexer: a sink with many virtual channels in one shared-memory channel, a publisher for each.

Rules:

- Channels named in ``names`` (the same file on every machine, ``penstock.shm.read_vchans``) are opened at once, so that
  subscribers can join before the first message. Other ids get ``MULTIPLEXER/vchan-ID`` at their first message.
- A message without a virtual channel is refused, and so is a virtual channel beyond ``max_publishers``.
- One thread at a time; ``close`` and ``ledger`` by any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from penstock import shm
from penstock._core import Message
from penstock.address import check_options, convert, parse
from penstock.channel import Ledger, Publisher
from penstock.errors import ClosedError, InvalidArgument, RefusedError


class Multiplexer(Publisher):
    """``Multiplexer("shm:/cameras", {0: "/front", 1: "/back"})``."""

    def __init__(self, address: str, names: Mapping[int, str], **options: Any) -> None:
        parts = parse(address)
        if parts.scheme != "shm":
            raise InvalidArgument(f"{address!r} cannot be a multiplexer: that is shared memory, as in shm:/NAME")
        self.address = address
        self._mux = parts.name
        self._names = dict(names)
        self._options: dict[str, Any] = {**convert(parts.options, shm.open_publisher, address), **options}
        check_options(self._options, shm.open_publisher, f"multiplexer {address!r}")
        self._publishers: dict[int, shm.Publisher] = {}
        self._closed = False
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            for vchan_id in sorted(self._names):
                opened.enter_context(self._open(vchan_id))
            self._stack = opened.pop_all()

    def _open(self, vchan_id: int) -> shm.Publisher:
        name = self._names.get(vchan_id, f"{self._mux}/vchan-{vchan_id}")
        publisher = shm.Publisher(name, mux=self._mux, vchan_id=vchan_id, **self._options)
        self._publishers[vchan_id] = publisher
        return publisher

    def _publisher_for(self, vchan_id: int | None) -> shm.Publisher:
        if self._closed:
            raise ClosedError(f"the multiplexer at {self.address} is closed")
        if vchan_id is None:
            raise RefusedError(f"{self.address} is a multiplexer: a message without a virtual channel has no place")
        found = self._publishers.get(vchan_id)
        return found if found is not None else self._stack.enter_context(self._open(vchan_id))

    def publish(self, data: Any, *, vchan_id: int | None = None, timeout: float | None = None) -> int | None:
        """Publish a copy of ``data`` to the virtual channel ``vchan_id``."""
        publisher = self._publisher_for(vchan_id)
        return publisher.forward([data]) if isinstance(data, Message) else publisher.publish(data, timeout=timeout)

    def publish_many(self, batch: Iterable[Any], *, timeout: float | None = None) -> int:
        """Publish messages, each to its own virtual channel; returns how many. ``timeout`` is for each."""
        count = 0
        for message in batch:
            self.publish(message, vchan_id=getattr(message, "vchan_id", None), timeout=timeout)
            count += 1
        return count

    forward = publish_many

    def reserve(self, size: int) -> Any:
        raise RefusedError(f"{self.address} is a multiplexer; reserve at one of its virtual channels")

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until each open virtual channel has ``subscribers`` of them; ``timeout`` applies to each in turn."""
        return all(publisher.wait_ready(subscribers, timeout) for publisher in list(self._publishers.values()))

    @property
    def ledger(self) -> Ledger:
        """The sum over the virtual channels."""
        published = sum(publisher.ledger.matched for publisher in list(self._publishers.values()))
        return Ledger(published, published)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._stack.close()
