"""Session: one connection's state and its answers. The loop thread only.

Answers are held back until the turn's commit is on disk, then sent in the order of the requests. Each answer knows how
many requests it answers, so that a failed commit refuses exactly as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.broker import words
from penstock.broker.identifiers import Duplicate
from penstock.broker.queue import Queue
from penstock.broker.rights import EVERYTHING, NOTHING, Rights
from penstock.broker.words import Refusal
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock._core.broker import Outbox, Scanner
    from penstock.broker.broker import Broker

MAX_CREDIT = 65_536
MAX_WILDCARDS = 256  # of a queue, or a FETCH: each new topic is compared with each of them
LARGE_REPLY_BYTES = 8 << 20  # what a large answer (a function) counts as: one per turn

Line = bytes | Callable[[], None]  #: an answer: its line, or a function that writes a large one into the outbox


class Answered(NamedTuple):
    """An answer that waits for the commit."""

    requests: int  #: the number of requests that it answers; 0: it says why the connection is closed
    line: Line
    publishes: bool = False


class Host(Protocol):
    """What a session needs of the server around it."""

    broker: Broker
    draining: bool
    raw_allowed: bool  #: whether clients that do not say HELLO are served

    def rights_of(self, token: str | None, session: Session) -> Rights:
        """What the token allows; Disconnect when nothing."""

    def shutdown(self) -> None:
        """End gracefully."""

    def take_over(self, producer: str, session: Session) -> None:
        """Close an older connection of the same producer."""

    def evict_lost(self, queue: Queue) -> bool | None:
        """Whether the queue has a live consumer; None: not known yet. A consumer that misses its probe is dropped."""

    def withdraw(self, session: Session, queue: Queue) -> None:
        """End a connection whose right to read what it consumes was withdrawn."""

    def statistics(self) -> dict[str, Any]:
        """Counts of the server."""


class Subscription:
    """A connection's side of one queue."""

    def __init__(self, session: Session, queue: Queue, number: int, credit: int, automatic: bool, raw: bool) -> None:
        self.session = session
        self.queue = queue
        self.number = number
        self.credit = credit
        self.automatic = automatic
        self.raw = raw

    def room(self) -> bool:
        """Whether the connection accepts more output now."""
        if self.session.outbox.pending_bytes < self.session.output_bytes:
            return True
        self.session.starved = True
        return False

    def rebound(self) -> None:
        """The topics of some queue have changed."""
        if not self.session.may_read(self.queue):
            self.session.host.withdraw(self.session, self.queue)

    def deliver(self, queue: Queue, batch: Batch, counts: bytes | None) -> None:
        """Send these."""
        if self.raw:
            self.session.outbox.bare(batch)
        else:
            self.session.outbox.framed(queue.wire_name, batch, counts)
            if self.automatic:
                outbox = self.session.outbox
                end = outbox.sent_bytes + outbox.pending_bytes
                self.session.written.append((self, batch.positions[0], batch.positions[-1], end))
        self.session.touched()


class Session:
    """One connection's state."""

    def __init__(
        self,
        host: Host,
        scanner: Scanner,
        outbox: Outbox,
        numbers: Callable[[], int],
        *,
        loopback: bool,
        touched: Callable[[], None],
        output_bytes: int = 1 << 20,
        max_unacknowledged: int = MAX_CREDIT,
    ) -> None:
        self.host = host
        self.broker = host.broker
        self.scanner = scanner
        self.outbox = outbox
        self.numbers = numbers
        self.loopback = loopback
        self.touched = touched
        self.output_bytes = output_bytes
        self.max_unacknowledged = max_unacknowledged
        self.hello = 0  # the protocol's version; 0: no HELLO, the compatible mode
        self.name = ""
        self.token: str | None = None
        self.rights: Rights = EVERYTHING if host.raw_allowed else NOTHING
        self.producer = ""
        self.subscriptions: dict[str, Subscription] = {}
        self.written: deque[tuple[Subscription, int, int, int]] = deque()  # positions, and the end of their bytes
        self.answers: list[Answered] = []  # answers of this turn
        self.answer_bytes = 0
        self.confirms = False  # answers of this turn depend on the commit
        self._row: tuple[int, int] | None = None  # positions that the last answer confirms
        self.starved = False  # messages wait until the client reads its output
        self.failed = False  # a commit failed with messages of this connection in it
        self.loaded = 0  # messages received in ranges, not yet counted
        self.subscribed: list[str] = []  # in this turn

    # --- answers

    def answer(self, requests: int, line: Line, publishes: bool = False) -> None:
        """Answer this many requests, after all earlier ones."""
        self._row = None
        self.answers.append(Answered(requests, line, publishes))
        self.answer_bytes += len(line) if isinstance(line, bytes) else LARGE_REPLY_BYTES
        self.touched()

    def confirm(self, positions: Sequence[int]) -> None:
        """Confirm publishes, one request per position. Runs without gaps become one line; each duplicate gets its
        own."""
        if not isinstance(positions, range):
            for position in positions:
                if isinstance(position, Duplicate) and self.hello > 1:
                    self.answer(1, b"OK %d duplicate\n" % position, True)
                else:
                    self.confirm(range(position, position + 1))
            return
        first, last = positions[0], positions[-1]
        if self._row is not None and self._row[1] + 1 == first:
            before = self.answers.pop()
            first = self._row[0]
            self.answers.append(Answered(before.requests + len(positions), words.ok_line(first, last), True))
        else:
            self.answer(len(positions), words.ok_line(first, last), True)
        self._row = (first, last)

    # --- checks

    def check_queue(self, name: str) -> None:
        """Refuse a queue that this connection may not use."""
        words.check_queue(name)
        if not self.rights.may_use(name):
            own = " (a subscriber without queue= makes one: its token needs temporary.* among its queues)"
            text = f"queue {name} is not yours to use"
            raise Refusal("denied", text + (own if name.startswith(words.TEMPORARY) else ""))

    def check_patterns(self, patterns: Sequence[str]) -> None:
        """Refuse topics that this connection may not read, and more wildcards than can be compared in a turn."""
        if sum(map(is_pattern, patterns)) > MAX_WILDCARDS:
            raise Refusal("limit", f"at most {MAX_WILDCARDS} patterns with wildcards stand together")
        for pattern in patterns:
            self.check_pattern(pattern)

    def check_pattern(self, pattern: str) -> None:
        """Refuse topics that this connection may not read."""
        words.check_pattern(pattern)
        if not self.rights.may_subscribe(pattern):
            raise Refusal("denied", f"topics {pattern} are not yours to read")

    def may_read(self, queue: Queue) -> bool:
        """Whether this connection may read the messages of the queue."""
        return self.rights.may_use(queue.name) and all(
            self.rights.may_subscribe(pattern) for pattern in self.broker.sources(queue)
        )

    def own(self, name: str, what: str) -> str:
        """The full name of a producer or transaction of this connection: other tokens have names of their own."""
        return self.rights.owner + words.check_name(name, what)

    def check_publish(self, names: Iterable[str]) -> None:
        """Refuse topics that this connection may not publish to."""
        for name in names:
            if not self.rights.may_publish(name):
                raise Refusal("denied", f"the topic is not yours to publish to: {name}")

    def need_manage(self) -> None:
        """Refuse without the right ``manage``."""
        if not self.rights.manage:
            raise Refusal("denied", "this needs the right manage")

    def need_statistics(self) -> None:
        """Refuse without the right ``statistics``."""
        if not self.rights.statistics:
            raise Refusal("denied", "this needs the right statistics")

    def managed(self, name: str) -> Queue:
        """The queue, if this connection may change it."""
        self.need_manage()
        self.check_queue(name)
        return self.broker.queue(name)

    # --- the end of a turn and of the connection

    def flush(self) -> None:
        """Send the answers of this turn: their commit is on disk."""
        answers, self.answers = self.answers, []
        self.answer_bytes = 0
        self._row = None
        self.confirms = False
        self.subscribed.clear()
        for answer in answers:
            if isinstance(answer.line, bytes):
                self.outbox.text(answer.line)
            else:
                answer.line()

    @property
    def automatic(self) -> bool:
        """Whether messages to this connection need no acknowledgement."""
        return bool(self.written) or any(subscription.raw for subscription in self.subscriptions.values())

    def settle(self, received_bytes: int) -> None:
        """Acknowledge the messages that need no acknowledgement of their own and that the peer's TCP has received."""
        for subscription in self.subscriptions.values():
            if subscription.raw:
                for first, last in self.outbox.take_sent(received_bytes):
                    self.broker.acknowledge(subscription.queue, subscription, first, last, exact=True)
        while self.written and self.written[0][3] <= received_bytes:
            subscription, first, last, _ = self.written.popleft()
            self.broker.acknowledge(subscription.queue, subscription, first, last, exact=True)

    def wake_starved(self) -> None:
        """After output was written: there may be room for more."""
        if self.starved and self.outbox.pending_bytes < self.output_bytes:
            self.starved = False
            for subscription in self.subscriptions.values():
                self.broker.wake(subscription.queue)

    def fail_answers(self, code: str, text: str) -> None:
        """The commit failed: refuse everything of this turn."""
        if self.confirms:
            self.failed = True
            self.answers = self._refusals(words.error_line(code, text))
            for name in self.subscribed:
                self.leave(name)
        self.flush()

    def _refusals(self, line: bytes) -> list[Answered]:
        """A refusal for each request; a producer that numbers its messages is disconnected after the first publish."""
        found: list[Answered] = []
        for answer in self.answers:
            if not answer.requests:
                found.append(answer)
            elif answer.publishes and self.producer:
                return [*found, Answered(1, line)]
            else:
                found += [Answered(1, line)] * answer.requests
        return found

    def leave(self, name: str, delivered: bool = True) -> None:
        """Stop consuming the queue. Unacknowledged messages return to it; only those that were sent count as
        delivered."""
        subscription = self.subscriptions.pop(name)
        self.broker.leave(subscription.queue, subscription, delivered=delivered and not subscription.raw)

    def attach(self) -> None:
        """Subscribe again, after the broker has reloaded its state from the log."""
        for name, subscription in list(self.subscriptions.items()):
            old = subscription.queue
            queue = self.broker.queues.get(name)
            if queue is None and old.options.temporary:  # a temporary queue is not in the log
                queue = self.broker.queue(name, old.options, start=old.state.floor, bounded=False)
            if queue is None:
                del self.subscriptions[name]
                continue
            subscription.queue = queue
            queue.raw = queue.raw or subscription.raw
            queue.add(subscription)
            self.broker.wake(queue)

    def end(self) -> None:
        """The connection is closed: leave all queues."""
        for name in list(self.subscriptions):
            self.leave(name)
