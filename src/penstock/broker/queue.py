"""Queue: a name, its topics, its consumers, and how far they have got. The broker's loop thread only. The native
``QueueState`` knows which messages are done; this class decides who gets the next one. A pump delivers redeliveries
first, then new messages, to the consumers with credit, in turn. A queue without consumers costs nothing but its state.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock._core import Counters
from penstock._core.broker import QueueState
from penstock.broker import words
from penstock.broker.backlog import PIECE_MESSAGES, Backlog
from penstock.errors import PenstockError, RefusedError
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock.broker.store import Store

TAKE_MESSAGES = 1024
TAKE_BYTES = 256 * 1024
NO_DEADLINE = (1 << 63) - 1
UNREADABLE_NS = 10_000_000_000  # pause before an unreadable message is tried again
TELL_NS = 2_000_000_000  # the trouble stays visible this much longer than the pause, until the next try
BUSY, WAIT = "busy", "wait"  #: what long work yields: it can continue now; it waits for something else
log = logging.getLogger("penstock.broker")

#: Options that older versions call by another word, on disk and in LIST.
_RECORD_WORDS = {"max_tries": "max_deliveries"}
_FIELDS = {word: name for name, word in _RECORD_WORDS.items()}


@dataclass(frozen=True)
class QueueOptions:
    """What a queue was created with. Times in seconds; 0 switches a rule off."""

    topics: tuple[str, ...] = (words.DEFAULT_TOPIC,)
    ack_timeout_s: float = 30.0
    max_tries: int = 0
    ttl_s: float = 0.0
    exclusive: bool = False
    temporary: bool = False
    dead_letter: str = ""
    paused: bool = False  #: while set, nothing is delivered; publishing and acknowledging go on

    @classmethod
    def load(cls, fields: dict[str, Any]) -> QueueOptions:
        """The inverse of ``record``."""
        given = {_FIELDS.get(word, word): value for word, value in fields.items()}
        return cls(**{**given, "topics": tuple(given["topics"])})

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def record(self) -> dict[str, Any]:
        """As plain values in the words of records on disk, which brokers of any version read."""
        return {_RECORD_WORDS.get(name, name): value for name, value in self.dump().items()}


class Consumer(Protocol):
    """A consumer of a queue: one subscription of a connection."""

    number: int
    credit: int
    automatic: bool  #: messages count as acknowledged when they were sent

    def room(self) -> bool:
        """Whether its connection accepts more output now."""

    def deliver(self, queue: Queue, batch: Batch, counts: bytes | None) -> None:
        """Send these."""

    def rebound(self) -> None:
        """The topics of some queue have changed: check again whether this consumer may read its queue."""


class Queue:
    """One queue."""

    def __init__(self, name: str, options: QueueOptions, start: int, store: Store) -> None:
        self.name = name
        self.wire_name = name.encode()
        self.options = options
        self.start = start
        self.state = QueueState(start)
        self.consumers: list[Consumer] = []
        self.raw = False  # consumed by a client of the compatible mode
        self.caught_up = False
        self.counters = Counters("broker", "queue", name)
        self.dead_lettered = 0
        self.dropped = 0  # messages dropped because their topics were removed from the queue
        self.whole = False  # the next record must hold the complete state, not a change
        self._store = store
        self._rebinding = False  # messages that new topics would drop are being counted
        self._turn = 0
        self._internal: tuple[str, ...] = ()
        self._backlog = Backlog(self.state, store)
        self._state_text = ""
        self._trouble, self._trouble_until_ns = "", 0  # why a message cannot be delivered, and until when to report it
        self.rebind(options)

    def rebind(self, options: QueueOptions) -> None:
        """Set new options; messages before the cursor are not affected."""
        self.options = options
        self.patterns, self._internal = self._bound_to(options.topics)
        self._names = frozenset(self.patterns)
        self._wildcards = tuple(pattern for pattern in self.patterns if is_pattern(pattern))
        self.caught_up = False
        self.recount()
        self._set_state_text("paused" if options.paused else "")

    def _bound_to(self, topics: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of a queue with these topics, and which of them are internal topics of the broker."""
        own = f"$queue.{self.name}"
        return (*topics, own), (own, *(topic for topic in topics if topic.startswith("$")))

    def wants(self, topic: str) -> bool:
        """Whether the queue gets messages of ``topic``."""
        return topic in self._names or any(words.matches(pattern, topic) for pattern in self._wildcards)

    # --- consumers

    def add(self, consumer: Consumer) -> None:
        """Add a consumer."""
        self.consumers.append(consumer)
        self.counters.set("peers", len(self.consumers))

    def remove(self, consumer: Consumer, now_ns: int, delivered: bool = True) -> None:
        """Remove a consumer: the messages that it held are due for redelivery at once."""
        if consumer in self.consumers:
            self.consumers.remove(consumer)
        self.counters.set("peers", len(self.consumers))
        self.state.drop_consumer(consumer.number, now_ns, delivered)

    # --- delivery

    @property
    def hands_out(self) -> bool:
        """Whether it has consumers and delivery is not suspended."""
        return bool(self.consumers) and not (self.options.paused or self._rebinding)

    def pump(self, now_ns: int, over: Callable[[], bool], exhausted: list[tuple[Queue, int, int]]) -> bool:
        """Deliver what can be delivered; False if the turn was over before that. Messages that were delivered too often
        are appended to ``exhausted``.
        """
        if self.state.next_time_ns <= now_ns:
            self.state.expire(now_ns)
            if not self._redeliver_due(now_ns, over, exhausted):
                return False
        while not self.caught_up and (consumer := self._next()) is not None:
            self._forward(consumer, now_ns)
            if over():
                return self.caught_up
        return True

    def _next(self) -> Consumer | None:
        """The next consumer, in turn, that has credit and room."""
        for _ in range(len(self.consumers)):
            self._turn = (self._turn + 1) % len(self.consumers)
            consumer = self.consumers[self._turn]
            if consumer.credit > self.state.in_flight_of(consumer.number) and consumer.room():
                return consumer
        return None

    def _deadline(self, consumer: Consumer, now_ns: int) -> int:
        timeout_s = self.options.ack_timeout_s
        return now_ns + int(timeout_s * 1e9) if timeout_s and not consumer.automatic else NO_DEADLINE

    def heard(self, consumer: Consumer, first: int, last: int) -> None:
        """The consumer has acknowledged ``first`` to ``last``. Messages sent to it after those were waiting unread
        until now, so their ack time-out starts now.
        """
        now_ns = time.time_ns()
        # if all messages are sent already, acknowledgements are the only sign of progress
        self.counters.set("last_ns", now_ns)
        deadline_ns = self._deadline(consumer, now_ns)
        if deadline_ns != NO_DEADLINE:
            self.state.heard(consumer.number, first, last, deadline_ns)

    def _redeliver_due(self, now_ns: int, over: Callable[[], bool], exhausted: list[tuple[Queue, int, int]]) -> bool:
        """Redeliver what is due, to consumers with credit and before any new message; what was delivered too often
        becomes a dead letter. False: there is more, and the turn is over.
        """
        most = self.options.max_tries
        due = self.state.due(now_ns, TAKE_MESSAGES)
        for position, deliveries in due:
            if most and deliveries >= most:
                exhausted.append((self, position, deliveries))
                continue
            consumer = self._next()
            if consumer is None:
                return True  # without a consumer with credit, new messages cannot be delivered either
            try:
                batch, *_ = self._store.read(position, 1, 1 << 62)
            except (PenstockError, OSError) as error:
                self.postpone(position, error, now_ns)
                continue
            if len(batch) != 1 or batch.positions[0] != position:  # retention has freed it while it waited
                self.state.acknowledge(0, position, position)
                self.expire(1)
                continue
            count = self.state.redeliver(position, consumer.number, self._deadline(consumer, now_ns))
            consumer.deliver(self, batch, struct.pack("<I", count))
            self.counters.add("redelivered")
            self.counters.set("last_ns", now_ns)
            if over():
                return False
        return len(due) < TAKE_MESSAGES

    def _forward(self, consumer: Consumer, now_ns: int) -> None:
        """Deliver the next new messages to one consumer."""
        room = consumer.credit - self.state.in_flight_of(consumer.number)
        end = self._store.next
        cursor = self.state.cursor
        batch, following, skipped = self._store.read(cursor, min(room, TAKE_MESSAGES), TAKE_BYTES, self.patterns)
        if skipped:  # positions freed after this read are left for the next one
            self._pass_freed(min(self._store.first, batch.positions[0] if len(batch) else following))
        deadline_ns, ttl_ns = self._deadline(consumer, now_ns), int(self.options.ttl_s * 1e9)
        most = self.options.max_tries
        sent, counts, expired = self.state.take(
            batch, consumer.number, deadline_ns, now_ns, ttl_ns, self._internal, most
        )
        if expired:
            self.expire(expired)
        if sent is not None:
            consumer.deliver(self, sent, counts)
            self.counters.add("matched", len(sent))
            self.counters.add("delivered", len(sent))
            self.counters.add("bytes", sent.total_bytes)
            self.counters.set("last_ns", now_ns)
        taken = expired + (len(sent) if sent is not None else 0)
        self.state.look_from(following)
        self.caught_up = following >= end
        self._backlog.taken(taken, following, self.caught_up)

    def expire(self, count: int) -> None:
        """Count messages that will not be delivered (again): as matched (again, if they were delivered before) and as
        expired.
        """
        self.counters.add("matched", count)
        self.counters.add("expired", count)

    def pass_freed(self) -> None:
        """Move past what retention has freed before it was delivered; messages that the backlog had counted count as
        expired.
        """
        first = self._store.first
        if self.state.cursor < first and not self.caught_up:
            self._pass_freed(first)

    def _pass_freed(self, first: int) -> None:
        self.expire(self._backlog.freed(first, self.patterns, self._internal))
        self.state.look_from(first)

    def postpone(self, position: int, error: Exception, now_ns: int) -> None:
        """A message that is due for redelivery cannot be read: try again later, without delaying the others."""
        self.state.postpone(position, now_ns + UNREADABLE_NS)
        self.mark_stuck(error, now_ns + UNREADABLE_NS + TELL_NS)

    def mark_stuck(self, error: Exception, until_ns: int = NO_DEADLINE) -> None:
        """Log and report that a message cannot be delivered, until then or until ``clear_stuck``."""
        log.error("queue %s: %s", self.name, error)
        what = "dead letters wait" if isinstance(error, RefusedError) else "failed to read a message"
        self._trouble, self._trouble_until_ns = f"{what}: {error}", until_ns
        self._set_state_text(self._trouble)

    def clear_stuck(self) -> None:
        """The next message can be read again, or was skipped."""
        if self._trouble_until_ns == NO_DEADLINE:
            self._trouble = ""

    def note_caught_up(self) -> None:
        """Mark the queue as caught up if the whole backlog was counted and is empty, as if a consumer had read to the
        end.
        """
        if self._counted and not self._backlog.count:
            self.caught_up = True

    def affected(self, first: int) -> None:
        """A message for this queue was published at or after position ``first``."""
        if self.caught_up:
            self.state.look_from(first)
            self.caught_up = False

    # --- figures

    def counting(self, most: int = 100_000) -> Iterator[str]:
        """Count the backlog in steps of a few milliseconds, so that ``backlog`` has little left to do."""
        while self._count(most, 1):
            yield BUSY

    def losing(self, topics: tuple[str, ...]) -> Generator[str, None, int]:
        """How many waiting messages the queue would lose with these topics. Counted in steps; nothing is delivered
        meanwhile.
        """
        if set(self.options.topics) <= set(topics):
            return 0
        wanted, either = self._bound_to(topics), self._bound_to((*self.options.topics, *topics))
        at, lost = self.state.cursor, 0
        self._rebinding = True
        try:
            while at < (end := self._store.next):
                # the last stretch without a pause: otherwise new messages could keep this going for ever
                last = end - at <= PIECE_MESSAGES
                for bound, sign in ((either, 1), (wanted, -1)):
                    for count in self._backlog.pieces(at, end, *bound):
                        lost += sign * count
                        if not last:
                            yield BUSY
                at = end
        finally:
            self._rebinding = False
        return lost

    def drop(self, count: int) -> None:
        """Count waiting messages that will not be delivered, because the queue no longer has their topics."""
        self.counters.add("matched", count)
        self.counters.drop("filtered", count)
        self.dropped += count

    def backlog(self, most: int = 100_000) -> int:
        """How many messages were not delivered yet, counted up to ``most``."""
        self._count(most, 1 << 62)
        return self._backlog.count

    def _count(self, most: int, most_looks: int) -> int:
        """Continue to count the backlog, up to ``most``; returns how many messages were examined, each once."""
        self.pass_freed()
        if self.caught_up:
            self._backlog.restart(self._store.next)
        elif self._backlog.end < self.state.cursor:
            self.recount()
        return self._backlog.look(self.patterns, self._internal, most, most_looks)

    @property
    def _counted(self) -> bool:
        """Whether the backlog is exact; else it is a lower bound."""
        return self._backlog.certain and self._backlog.end >= self._store.next

    def recount(self) -> None:
        """Count the backlog from the cursor again: the cursor was moved, or the topics have changed."""
        self._backlog.restart()

    def observe(self) -> int:
        """Count one more piece of the backlog and set the counters; returns how many messages were examined."""
        state, end = self.state, self._store.next
        looked = self._count(1 << 62, 1)
        self.counters.set("depth", self._backlog.count + state.outstanding)
        self.counters.set("lag", 0 if self.caught_up else max(0, end - state.cursor))
        self._set_state_text(self._why_idle(self._backlog.count) or ("" if self._counted else "counting what waits"))
        return looked

    def _why_idle(self, backlog: int) -> str:
        """Why nothing is delivered although messages wait; empty if messages are delivered."""
        if self._trouble and time.time_ns() < self._trouble_until_ns:
            return self._trouble
        if self.options.paused:
            return "paused"
        waits = backlog + self.state.waiting
        if not waits or not self.consumers:
            return ""
        held = [self.state.in_flight_of(consumer.number) for consumer in self.consumers]
        if all(consumer.credit <= number for consumer, number in zip(self.consumers, held, strict=True)):
            return f"no credit: {len(held)} consumer(s) hold {sum(held)} unacknowledged, {waits} wait"
        return ""

    def _set_state_text(self, text: str) -> None:
        if text != self._state_text:
            self._state_text = text
            self.counters.state(text)

    def summary(self) -> dict[str, Any]:
        """Plain values for listings."""
        state = self.state
        backlog = self.backlog()
        return {
            "queue": self.name,
            **self.options.dump(),
            "max_deliveries": self.options.max_tries,  # as clients of version 1 know it
            "consumers": len(self.consumers),
            "depth": backlog + state.outstanding,
            "depth_at_least": not self._counted,
            "ready": backlog + state.waiting,
            "in_flight": state.in_flight,
            "delivered": self.counters.get("delivered"),
            "redelivered": self.counters.get("redelivered"),
            "expired": self.counters.get("expired"),
            "skipped": self._backlog.skipped,
            "dropped": self.dropped,
            "dead_lettered": self.dead_lettered,
            "state": self._why_idle(backlog),
            "floor": state.floor,
            "cursor": state.cursor,
        }

    def with_options(self, **changes: Any) -> QueueOptions:
        """Its options with some of them changed."""
        return replace(self.options, **changes)
