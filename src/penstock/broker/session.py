"""Session: one connection's state, its replies and what a turn of the loop does with them. The loop thread only.

Replies are kept until the turn's commit is on disk, then they leave in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.broker import words
from penstock.broker.queue import Queue
from penstock.broker.rights import EVERYTHING, Rights
from penstock.broker.words import Refusal

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock._core.broker import Outbox, Scanner
    from penstock.broker.broker import Broker

MAX_CREDIT = 65_536
LARGE_REPLY_BYTES = 1 << 20  # what a reply that is put out by a function counts as


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
                self.session.written.append((self, batch.positions[0], batch.positions[-1]))
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
        self.hello = False
        self.name = ""
        self.token: str | None = None
        self.rights: Rights = EVERYTHING
        self.producer = ""
        self.subscriptions: dict[str, Subscription] = {}
        self.written: list[tuple[Subscription, int, int]] = []
        self.replies: list[bytes | Callable[[], None]] = []
        self.reply_bytes = 0
        self.confirms = False  # replies of this turn depend on the commit
        self._last_ok: list[int] | None = None
        self.starved = False  # messages wait for the client to read what it was sent
        self.failed = False  # a commit failed with messages of this connection in it
        self.loaded = 0  # messages that came in ranges, not yet counted

    # --- replies

    def reply(self, line: bytes | Callable[[], None]) -> None:
        """Answer, after everything asked before was answered; what is large is put out by a function."""
        self._last_ok = None
        self.replies.append(line)
        self.reply_bytes += len(line) if isinstance(line, bytes) else LARGE_REPLY_BYTES
        self.touched()

    def confirm(self, positions: Sequence[int]) -> None:
        """Answer publishes: once the commit is on disk. Rows without gaps are told as one."""
        self.confirms = True
        if not isinstance(positions, range):
            for position in positions:
                self.confirm(range(position, position + 1))
            return
        first, last = positions[0], positions[-1]
        row = self._last_ok
        if row is not None and row[1] + 1 == first:
            row[1] = last
            self.replies[-1] = words.ok_line(row[0], last)
            return
        self.reply(words.ok_line(first, last))
        self._last_ok = [first, last]

    # --- checks

    def _check_queue(self, name: str) -> None:
        words.check_queue(name)
        if not self.rights.may_use(name):
            raise Refusal("denied", f"queue {name} is not yours to use")

    def _check_pattern(self, pattern: str) -> None:
        words.check_pattern(pattern)
        if not self.rights.may_subscribe(pattern):
            raise Refusal("denied", f"topics {pattern} are not yours to read")

    def may_read(self, queue: Queue) -> bool:
        """Whether this connection may have the messages that get into the queue."""
        return self.rights.may_use(queue.name) and all(
            self.rights.may_subscribe(pattern) for pattern in self.broker.sources(queue)
        )

    def _own(self, name: str, what: str) -> str:
        """A producer or transaction of this connection's token: the same name of another token is another one."""
        return self.rights.owner + words.check_name(name, what)

    def _check_publish(self, names: Iterable[str]) -> None:
        for name in names:
            if not self.rights.may_publish(name):
                raise Refusal("denied", f"the topic is not yours to publish to: {name}")

    def _need_manage(self) -> None:
        if not self.rights.manage:
            raise Refusal("denied", "this needs the right manage")

    def _need_statistics(self) -> None:
        if not self.rights.statistics:
            raise Refusal("denied", "this needs the right statistics")

    def _managed(self, name: str) -> Queue:
        self._need_manage()
        self._check_queue(name)
        return self.broker.queue(name)

    def _subscription(self, name: str) -> Subscription:
        found = self.subscriptions.get(name)
        if found is None:
            raise Refusal("not_subscribed", f"this connection does not consume {name}")
        return found

    # --- the end of a turn and of the connection

    def flush(self) -> None:
        """Put the replies of this turn into the outbox: what they tell is true now."""
        replies, self.replies = self.replies, []
        self.reply_bytes = 0
        for reply in replies:
            if isinstance(reply, bytes):
                self.outbox.text(reply)
            else:
                reply()
        self._last_ok = None
        self.confirms = False

    def settle(self) -> None:
        """After output was written: messages that need no acknowledgement are done."""
        for subscription in self.subscriptions.values():
            if subscription.raw:
                for first, last in self.outbox.take_sent():
                    self.broker.acknowledge(subscription.queue, subscription, first, last, exact=True)
        if self.written and not self.outbox.pending_bytes:
            for subscription, first, last in self.written:
                self.broker.acknowledge(subscription.queue, subscription, first, last, exact=True)
            self.written.clear()
        if self.starved and self.outbox.pending_bytes < self.output_bytes:
            self.starved = False
            for subscription in self.subscriptions.values():
                self.broker.wake(subscription.queue)

    def fail_replies(self, code: str, text: str) -> None:
        """The commit failed: nothing of this turn is confirmed."""
        if self.confirms:
            self.failed = True
            self.replies = [words.error_line(code, text) for reply in self.replies for _ in range(_answers(reply))]
        self.flush()

    def end(self) -> None:
        """The connection has gone."""
        for subscription in self.subscriptions.values():
            self.broker.leave(subscription.queue, subscription, delivered=not subscription.raw)
        self.subscriptions.clear()


def _answers(line: bytes | Callable[[], None]) -> int:
    """How many commands a reply answers: a row of confirms answers many."""
    if not isinstance(line, bytes) or not line.startswith(b"OK ") or b"-" not in line:
        return 1
    first, _, last = line[3:].partition(b"-")
    return int(last) - int(first) + 1


def need(arguments: list[str], least: int, form: str, most: int | None = None) -> list[str]:
    if len(arguments) < least or (most is not None and len(arguments) > most):
        raise Refusal("bad_request", f"the form is {form}")
    return arguments
