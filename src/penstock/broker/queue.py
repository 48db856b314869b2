"""Queue: a name, the topics it is bound to, who consumes it, and how far they are. The broker's loop thread only.

Which messages are done stands in the native ``QueueState``; here is who gets the next one. A queue is pumped: it
hands out what is due again first, then what is new, to the consumers that have room, in turn. A queue that nobody
consumes costs nothing but its state.
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
UNREADABLE_NS = 10_000_000_000  # a message that could not be read is tried again after this
TELL_NS = 2_000_000_000  # what is tried again is told of until it was tried
BUSY, WAIT = "busy", "wait"  #: what long work yields: it could go on now; it waits for something else
log = logging.getLogger("penstock.broker")


@dataclass(frozen=True)
class QueueOptions:
    """What a queue was created with. Times in seconds; 0 switches a rule off."""

    topics: tuple[str, ...] = (words.DEFAULT_TOPIC,)
    ack_timeout_s: float = 30.0
    max_deliveries: int = 0
    ttl_s: float = 0.0
    exclusive: bool = False
    temporary: bool = False
    dead_letter: str = ""
    paused: bool = False  #: nothing is handed out until it is set back; publishing and acknowledging go on

    @classmethod
    def load(cls, fields: dict[str, Any]) -> QueueOptions:
        """From what ``dump`` gave."""
        return cls(**{**fields, "topics": tuple(fields["topics"])})

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Consumer(Protocol):
    """Who takes messages of a queue: a connection's side of it."""

    number: int
    credit: int
    automatic: bool  #: a message counts as acknowledged when it was written

    def room(self) -> bool:
        """Whether its connection takes more output now."""

    def deliver(self, queue: Queue, batch: Batch, counts: bytes | None) -> None:
        """Send these."""

    def rebound(self) -> None:
        """Some queue has other topics: whether it may still read its own is to be asked again."""


class Queue:
    """One queue."""

    def __init__(self, name: str, options: QueueOptions, start: int, store: Store) -> None:
        self.name = name
        self.wire_name = name.encode()
        self.options = options
        self.start = start
        self.state = QueueState(start)
        self.consumers: list[Consumer] = []
        self.raw = False  # held by a client of the compatible mode
        self.caught_up = False
        self.counters = Counters("broker", "queue", name)
        self.dead_lettered = 0
        self.dropped = 0  # with topics that were replaced
        self.whole = False  # the next record is the whole state, not a change
        self._store = store
        self._rebinding = False  # what it would lose by other topics is being counted
        self._turn = 0
        self._internal: tuple[str, ...] = ()
        self._backlog = Backlog(self.state, store)
        self._said = ""
        self._trouble, self._trouble_until_ns = "", 0  # why a message cannot be handed out, and until when that counts
        self.rebind(options)

    def rebind(self, options: QueueOptions) -> None:
        """Take new options; messages looked at before stay as they are."""
        self.options = options
        self.patterns, self._internal = self._bound_to(options.topics)
        self._names = frozenset(self.patterns)
        self._wildcards = tuple(pattern for pattern in self.patterns if is_pattern(pattern))
        self.caught_up = False
        self.recount()
        self._say("paused" if options.paused else "")

    def _bound_to(self, topics: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of what a queue of these topics gets, and which of the broker's own topics are among them."""
        own = f"$queue.{self.name}"
        return (*topics, own), (own, *(topic for topic in topics if topic.startswith("$")))

    def wants(self, topic: str) -> bool:
        """Whether messages of ``topic`` are this queue's."""
        return topic in self._names or any(words.matches(pattern, topic) for pattern in self._wildcards)

    # --- consumers

    def add(self, consumer: Consumer) -> None:
        """One more consumer."""
        self.consumers.append(consumer)
        self.counters.set("peers", len(self.consumers))

    def remove(self, consumer: Consumer, now_ns: int, delivered: bool = True) -> None:
        """A consumer has gone: what it held is due again at once."""
        if consumer in self.consumers:
            self.consumers.remove(consumer)
        self.counters.set("peers", len(self.consumers))
        self.state.drop_consumer(consumer.number, now_ns, delivered)

    # --- delivery

    @property
    def hands_out(self) -> bool:
        """Whether there is anybody to hand messages to, and nobody has told it to wait."""
        return bool(self.consumers) and not (self.options.paused or self._rebinding)

    def pump(self, now_ns: int, over: Callable[[], bool], exhausted: list[tuple[Queue, int, int]]) -> bool:
        """Hand out what can be handed out; False when the turn was over before. Messages delivered too often are put
        on ``exhausted``."""
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
        """The consumer is done with what it held from first to last: what was sent ahead behind that has its time from
        now on, since it waits to be read."""
        now_ns = time.time_ns()
        self.counters.set("last_ns", now_ns)  # a queue whose messages were all sent ahead moves by what is acknowledged
        deadline_ns = self._deadline(consumer, now_ns)
        if deadline_ns != NO_DEADLINE:
            self.state.heard(consumer.number, first, last, deadline_ns)

    def _redeliver_due(self, now_ns: int, over: Callable[[], bool], exhausted: list[tuple[Queue, int, int]]) -> bool:
        """What is due again: to those with room, before anything new, or off to the dead letters. False: there is more
        of it, and the turn is over."""
        most = self.options.max_deliveries
        due = self.state.due(now_ns, TAKE_MESSAGES)
        for position, deliveries in due:
            if most and deliveries >= most:
                exhausted.append((self, position, deliveries))
                continue
            consumer = self._next()
            if consumer is None:
                return True  # nor can anything new be handed out
            try:
                batch, *_ = self._store.read(position, 1, 1 << 62)
            except (PenstockError, OSError) as error:
                self.postpone(position, error, now_ns)
                continue
            if len(batch) != 1 or batch.positions[0] != position:  # freed by retention while it waited
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
        """The next new messages to one consumer."""
        room = consumer.credit - self.state.in_flight_of(consumer.number)
        end = self._store.next
        cursor = self.state.cursor
        batch, following, skipped = self._store.read(cursor, min(room, TAKE_MESSAGES), TAKE_BYTES, self.patterns)
        if skipped:  # what was freed since is the next look's
            self._pass_freed(min(self._store.first, batch.positions[0] if len(batch) else following))
        deadline_ns, ttl_ns = self._deadline(consumer, now_ns), int(self.options.ttl_s * 1e9)
        most = self.options.max_deliveries
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
        """So many of this queue's will not be delivered (again): they are matched, or matched anew, and expired."""
        self.counters.add("matched", count)
        self.counters.add("expired", count)

    def pass_freed(self) -> None:
        """Go past what retention has freed before it was handed out, and count it where it was counted before."""
        first = self._store.first
        if self.state.cursor < first and not self.caught_up:
            self._pass_freed(first)

    def _pass_freed(self, first: int) -> None:
        self.expire(self._backlog.freed(first, self.patterns, self._internal))
        self.state.look_from(first)

    def postpone(self, position: int, error: Exception, now_ns: int) -> None:
        """A message that is due again cannot be read: it is tried again later, the others are not held up by it."""
        self.state.postpone(position, now_ns + UNREADABLE_NS)
        self.stuck(error, now_ns + UNREADABLE_NS + TELL_NS)

    def stuck(self, error: Exception, until_ns: int = NO_DEADLINE) -> None:
        """A message cannot be handed out: said where people look, until then or until ``unstuck``."""
        log.error("queue %s: %s", self.name, error)
        what = "dead letters wait" if isinstance(error, RefusedError) else "failed to read a message"
        self._trouble, self._trouble_until_ns = f"{what}: {error}", until_ns
        self._say(self._trouble)

    def unstuck(self) -> None:
        """The next message can be read again, or nobody wants it any more."""
        if self._trouble_until_ns == NO_DEADLINE:
            self._trouble = ""

    def note_caught_up(self) -> None:
        """Nothing waits up to the end, and all of it was counted: as after a consumer that has taken everything."""
        if self._counted and not self._backlog.count:
            self.caught_up = True

    def affected(self, first: int) -> None:
        """Something of this queue's was published at or after position ``first``."""
        if self.caught_up:
            self.state.look_from(first)
            self.caught_up = False

    # --- what is asked about it

    def counting(self, most: int = 100_000) -> Iterator[str]:
        """Count what waits, in steps of a few milliseconds, so that ``backlog`` has little left to do."""
        while self._count(most, 1):
            yield BUSY

    def losing(self, topics: tuple[str, ...]) -> Generator[str, None, int]:
        """How many of those that wait a queue of these topics would not have; counted in steps, none handed out."""
        if set(self.options.topics) <= set(topics):
            return 0
        wanted, either = self._bound_to(topics), self._bound_to((*self.options.topics, *topics))
        at, lost = self.state.cursor, 0
        self._rebinding = True
        try:
            while at < (end := self._store.next):
                last = end - at <= PIECE_MESSAGES  # in one go, or with what is published meanwhile it would never end
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
        """So many that waited will not be delivered: they are of topics that it no longer has."""
        self.counters.add("matched", count)
        self.counters.drop("filtered", count)
        self.dropped += count

    def backlog(self, most: int = 100_000) -> int:
        """Messages not handed out yet, counted up to ``most``."""
        self._count(most, 1 << 62)
        return self._backlog.count

    def _count(self, most: int, most_looks: int) -> int:
        """Go on counting what waits, up to ``most``; gives how many messages were looked at, none of them twice."""
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
        """What waits has to be counted from the cursor again: it was moved, or other topics are wanted."""
        self._backlog.restart()

    def observe(self) -> int:
        """Count a piece more of what waits and set the counters; gives how many messages were looked at."""
        state, end = self.state, self._store.next
        looked = self._count(1 << 62, 1)
        self.counters.set("depth", self._backlog.count + state.outstanding)
        self.counters.set("lag", 0 if self.caught_up else max(0, end - state.cursor))
        self._say(self._standstill(self._backlog.count) or ("" if self._counted else "counting what waits"))
        return looked

    def _standstill(self, backlog: int) -> str:
        """Why nothing is handed out although something waits; empty when it is."""
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

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.counters.state(text)

    def summary(self) -> dict[str, Any]:
        """For listings: plain values."""
        state = self.state
        backlog = self.backlog()
        return {
            "queue": self.name,
            **self.options.dump(),
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
            "state": self._standstill(backlog),
            "floor": state.floor,
            "cursor": state.cursor,
        }

    def with_options(self, **changes: Any) -> QueueOptions:
        """Its options with some of them changed."""
        return replace(self.options, **changes)
