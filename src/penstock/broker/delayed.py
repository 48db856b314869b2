"""Delayed messages: stored at once in an internal topic, published when due. The broker's loop thread only.

One commit stores both that a message was published and that it no longer waits. Retention by age and size does not
wait for delayed messages; retention by queues does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock._core.broker import QueueState
from penstock.broker import words
from penstock.broker.words import Refusal
from penstock.errors import PenstockError
from penstock.journal.layout import encode_properties

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock.broker.broker import Broker
    from penstock.broker.identifiers import Identifier

log = logging.getLogger("penstock.broker")
TOPIC = "$delayed"
RELEASE_MESSAGES = 1024  # messages per turn
RETRY_NS = 1_000_000_000  # pause after a failed commit
UNREADABLE_NS = 10_000_000_000  # pause after a message that could not be read


class Delayed:
    """The messages that wait for their time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.state = QueueState(1)
        self._whole = False  # the next record must hold the complete state, not a change
        self._caught_up = False  # everything stored so far was examined
        self._added = 0  # first position not examined yet

    def look(self, first: int) -> None:
        """``read`` while the broker is running: no delayed message was stored between the last call and ``first``. A
        message that cannot be read now is tried again with the next retention.
        """
        if self._caught_up:
            self.state.look_from(first)
        try:
            self.read()
        except (PenstockError, OSError) as error:
            log.error("delayed messages cannot be read: %s", error)

    def check_room(self, count: int) -> None:
        """Refuse if this many more would exceed the bound."""
        most = self._broker.limits.max_delayed
        if self.state.outstanding + self._added + count > most:
            raise Refusal("full", f"more than {most} messages would be delayed; publish them when they are due")

    def add(
        self, batch: Batch, topic: str, due_ns: int, more: dict[str, str], identifier: Identifier | None
    ) -> Sequence[int]:
        """Store one message now and publish it at ``due_ns``."""
        self._added += 1
        told = encode_properties({"$topic": topic, "$due_ns": str(due_ns), **more})
        if identifier is None:
            return self._broker.publish(batch, topic=TOPIC, more=told)
        return self._broker.publish_as(batch, identifier, topic=TOPIC, more=told)

    def read(self) -> None:
        """Read what was stored since the last call."""
        store = self._broker.store
        end = store.next
        self._caught_up = False
        while self.state.cursor < end:
            batch, following, _ = store.read(self.state.cursor, 4096, 1 << 62, (TOPIC,))
            self.state.hold(batch)
            self.state.look_from(following)
        self._caught_up = True
        self._added = 0

    def release(self, now_ns: int) -> None:
        """Publish the messages whose time has come."""
        if self.state.next_time_ns > now_ns:
            return
        broker = self._broker
        due = self.state.due(now_ns, RELEASE_MESSAGES)
        try:
            broker.check_own_room()
        except Refusal:  # no room now: they wait
            for position, _ in due:
                self.state.postpone(position, now_ns + RETRY_NS)
            return
        for position, _ in due:
            try:
                batch, *_ = broker.store.read(position, 1, 1 << 62)
            except (PenstockError, OSError) as error:  # one unreadable message must not delay the others
                log.error("a delayed message that is due cannot be read: %s", error)
                self.state.postpone(position, now_ns + UNREADABLE_NS)
                continue
            if len(batch) == 1 and batch.positions[0] == position:
                properties = dict(batch[0].properties)
                topic = properties.pop("$topic", words.DEFAULT_TOPIC)
                properties.pop("$due_ns", None)
                broker.publish(batch, topic=topic, properties=encode_properties(properties))
            else:
                broker.expire()  # freed by retention while it waited
            self.state.acknowledge(0, position, position)
            broker.on_failure(lambda position=position: self.state.put_back(position, 0, now_ns + RETRY_NS))  # type: ignore[misc]
        broker.touch()

    def record(self) -> bytes | None:
        """The record for the next commit."""
        if self._whole:
            self._whole = False
            self.state.delta()
            return self.state.snapshot()
        return self.state.delta() if self.state.changed else None

    def not_stored(self) -> None:
        """Note that the last record was not stored."""
        self._whole = True
        self._added = 0
