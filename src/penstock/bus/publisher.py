"""The writing handle of a bus, for one id. May be used by several threads at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import bus as _native
from penstock.channel import Buffer, Ledger, check_subscribers
from penstock.errors import ClosedError

if TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.history import Kept


class Publisher(_native.Publisher, channel.Publisher):
    """Publishes messages of one id on one bus."""

    def __init__(
        self,
        bus: Bus,
        id: int = 0,
        *,
        allocator: _native.Allocator | None = None,
        name: str = "",
        kept: Kept | None = None,
    ) -> None:
        self._place = name or f"{bus.name}?id={id}"
        super().__init__(bus, id, allocator, self._place)
        try:
            bus._admit(self)
        except BaseException:
            self.close()
            raise
        if kept is not None and kept.messages:
            bus._keep(id, *kept.words)

    def agree(self, terms: channel.Terms) -> None:
        self.bus.agree(self.id, terms)

    @property
    def schema(self) -> str | None:
        """What this id's messages are made of, or None."""
        return self.bus.schema(self.id)  # type: ignore[no-any-return]

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many subscribers of this id are on the bus."""
        if self.closed:
            raise ClosedError("this publisher was closed")
        check_subscribers(subscribers)
        return bool(self.bus._wait_ready(self.id, subscribers, timeout, self))

    def _publish_now(self, data: Buffer, options: Mapping[str, Any]) -> int:
        return self._now(data, **options)

    @property
    def ledger(self) -> Ledger:
        """What it published; the drops are in the ledgers of the subscribers."""
        published = self._published
        return Ledger(matched=published, delivered=published)
