"""Session: one connection's state, its answers and what a turn of the loop does with them. The loop thread only.

Answers are kept until the turn's commit is on disk, then they leave in the order in which they were asked for. Each
answer knows how many requests it answers, so that a commit that fails refuses exactly as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.broker import words
from penstock.broker.identifiers import Duplicate
from penstock.broker.queue import Queue
from penstock.broker.rights import EVERYTHING, Rights
from penstock.broker.words import Refusal
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock._core.broker import Outbox, Scanner
    from penstock.broker.broker import Broker

MAX_CREDIT = 65_536
MAX_WILDCARDS = 256  # of a queue, or a FETCH: each new topic is compared with each of them
LARGE_REPLY_BYTES = 8 << 20  # what an answer that is put out by a function counts as: one of them a turn

Line = bytes | Callable[[], None]  #: an answer: its line, or a function that puts a large one into the outbox


class Answered(NamedTuple):
    """An answer that waits for the commit."""

    requests: int  #: so many it answers; 0: it says why the connection is closed
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
        """Whether a consumer of the queue is there; None: not known yet. One that misses its probe is dropped."""

    def withdraw(self, session: Session, queue: Queue) -> None:
        """End a connection that consumes what it may not read any more."""

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
        """Whether the connection takes more output now."""
        if self.session.outbox.pending_bytes < self.session.output_bytes:
            return True
        self.session.starved = True
        return False

    def rebound(self) -> None:
        """Some queue has other topics now."""
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
        self.hello = 0  # the version of the protocol; 0: none said, the compatible mode
        self.name = ""
        self.token: str | None = None
        self.rights: Rights = EVERYTHING
        self.producer = ""
        self.subscriptions: dict[str, Subscription] = {}
        self.written: deque[tuple[Subscription, int, int, int]] = deque()  # positions, and the end of their bytes
        self.answers: list[Answered] = []  # of this turn
        self.answer_bytes = 0
        self.confirms = False  # answers of this turn depend on the commit
        self._row: tuple[int, int] | None = None  # positions that the last answer confirms
        self.starved = False  # messages wait for the client to read what it was sent
        self.failed = False  # a commit failed with messages of this connection in it
        self.loaded = 0  # messages that came in ranges, not yet counted
        self.subscribed: list[str] = []  # in this turn

    # --- answers

    def answer(self, requests: int, line: Line, publishes: bool = False) -> None:
        """Answer so many requests, after everything asked before was answered."""
        self._row = None
        self.answers.append(Answered(requests, line, publishes))
        self.answer_bytes += len(line) if isinstance(line, bytes) else LARGE_REPLY_BYTES
        self.touched()

    def confirm(self, positions: Sequence[int]) -> None:
        """Answer publishes, one request a position. Rows without gaps are told as one, duplicates each as such."""
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
        """The queue may be used by name."""
        words.check_queue(name)
        if not self.rights.may_use(name):
            raise Refusal("denied", f"queue {name} is not yours to use")

    def check_patterns(self, patterns: Sequence[str]) -> None:
        """The topics may be read, and looking for all of them takes nobody's time."""
        if sum(map(is_pattern, patterns)) > MAX_WILDCARDS:
            raise Refusal("limit", f"at most {MAX_WILDCARDS} patterns with wildcards stand together")
        for pattern in patterns:
            self.check_pattern(pattern)

    def check_pattern(self, pattern: str) -> None:
        """The topics may be read."""
        words.check_pattern(pattern)
        if not self.rights.may_subscribe(pattern):
            raise Refusal("denied", f"topics {pattern} are not yours to read")

    def may_read(self, queue: Queue) -> bool:
        """Whether this connection may have the messages that get into the queue."""
        return self.rights.may_use(queue.name) and all(
            self.rights.may_subscribe(pattern) for pattern in self.broker.sources(queue)
        )

    def own(self, name: str, what: str) -> str:
        """A producer or transaction of this connection's token: the same name of another token is another one."""
        return self.rights.owner + words.check_name(name, what)

    def check_publish(self, names: Iterable[str]) -> None:
        """The topics may be published to."""
        for name in names:
            if not self.rights.may_publish(name):
                raise Refusal("denied", f"the topic is not yours to publish to: {name}")

    def need_manage(self) -> None:
        """Queues may be changed."""
        if not self.rights.manage:
            raise Refusal("denied", "this needs the right manage")

    def need_statistics(self) -> None:
        """Counts may be seen."""
        if not self.rights.statistics:
            raise Refusal("denied", "this needs the right statistics")

    def managed(self, name: str) -> Queue:
        """A queue that may be changed."""
        self.need_manage()
        self.check_queue(name)
        return self.broker.queue(name)

    # --- the end of a turn and of the connection

    def flush(self) -> None:
        """Put the answers of this turn into the outbox: what they tell is true now."""
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
        """Whether messages of this connection are done without an acknowledgement of its own."""
        return bool(self.written) or any(subscription.raw for subscription in self.subscriptions.values())

    def settle(self, received_bytes: int) -> None:
        """Messages that need no acknowledgement are done when the peer's TCP has them: so many bytes of all sent."""
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
        """The commit failed: nothing of this turn is confirmed."""
        if self.confirms:
            self.failed = True
            self.answers = self._refusals(words.error_line(code, text))
            for name in self.subscribed:
                self.leave(name)
        self.flush()

    def _refusals(self, line: bytes) -> list[Answered]:
        """A refusal for each request; a producer that numbers its messages is cut off after the first publish."""
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
        """Consume the queue no more; what was not acknowledged goes back, as delivered once more or as never sent."""
        subscription = self.subscriptions.pop(name)
        self.broker.leave(subscription.queue, subscription, delivered=delivered and not subscription.raw)

    def attach(self) -> None:
        """The broker has taken its state from the log again: consume the queues that are there now."""
        for name, subscription in list(self.subscriptions.items()):
            old = subscription.queue
            queue = self.broker.queues.get(name)
            if queue is None and old.options.temporary:  # it is not in the log
                queue = self.broker.queue(name, old.options, start=old.state.floor, bounded=False)
            if queue is None:
                del self.subscriptions[name]
                continue
            subscription.queue = queue
            queue.raw = queue.raw or subscription.raw
            queue.add(subscription)
            self.broker.wake(queue)

    def end(self) -> None:
        """The connection has gone."""
        for name in list(self.subscriptions):
            self.leave(name)
