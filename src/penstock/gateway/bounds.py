"""Bound: how much of one link may wait in its sink's queue, in messages and in bytes. Any thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from penstock._core import Message
from penstock.channel import Overflow
from penstock.gateway.filters import Predicate
from penstock.gateway.links import LinkOptions


class LinkFull(TimeoutError):
    """A link stayed full for as long as a publisher may wait."""


class Bound:
    """Limits a link's waiting messages. A publisher waits for room, or its message is dropped and counted."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._sink = ""
        self._patience: Callable[[], float] = lambda: math.inf
        self._room = threading.Condition()
        self._messages = self._bytes = 0
        self._closed = False
        self.dropped = 0

    def admit(self, message: Message) -> bool:
        """Take room for a message; False: there is none, and the message is dropped. ``LinkFull`` after a wait in
        vain.
        """
        with self._room:
            if not self._fits(message):
                if self._options.overflow is not Overflow.BLOCK:
                    self.dropped += 1
                    return False
                wait_s = self._patience()
                if not self._room.wait_for(lambda: self._fits(message), None if wait_s == math.inf else wait_s):
                    raise LinkFull(
                        f"the link to {self._sink!r} was full for {wait_s:g} s; the message was dropped for it and "
                        "counted, the others received it"
                    )
            self._messages += 1
            self._bytes += message.size
            return True

    def limit(self, sink: str, patience: Callable[[], float]) -> None:
        """Set how long the calling thread may wait for room, in seconds; ``sink`` is named when that is over."""
        self._sink, self._patience = sink, patience

    def behind(self, accepts: Predicate) -> Predicate:
        """A predicate that takes room only for messages that pass the filter."""
        return lambda message: bool(accepts(message)) and self.admit(message)

    def release(self, message: Message) -> None:
        """Return the room of a message that has left the queue."""
        with self._room:  # a message that came before the link had a bound took none
            self._messages = max(0, self._messages - 1)
            self._bytes = max(0, self._bytes - message.size)
            self._room.notify_all()

    def change(self, options: LinkOptions) -> None:
        """The link has other options now; what waits has its room."""
        with self._room:
            self._options = options
            self._room.notify_all()

    def close(self) -> None:
        """The link was removed: end all waits."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    def _fits(self, message: Message) -> bool:
        if self._closed or self._messages == 0:  # one message may always wait, however large
            return True
        o = self._options
        return (o.max_messages is None or self._messages < o.max_messages) and (
            o.max_bytes is None or self._bytes + message.size <= o.max_bytes
        )
