"""Dialogue: the client's side of the protocol without I/O. Bytes to send come out, bytes received go in.

Rules:

- Answers come in the order of the requests, so pending requests form a queue. The broker numbers publishes under this
  client's producer name; after a reconnect it says how many it has stored, and only the missing ones are sent again, in
  the same order: each is stored once.
- Used by one thread at a time.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from penstock._core.broker import Scanner, publish_lines
from penstock.address import NO_BROKER
from penstock.broker import words
from penstock.errors import InvalidArgument, PenstockError, ProtocolError, RefusedError

if TYPE_CHECKING:
    from penstock._core import Batch

VERSION = 2  # of the protocol; an older broker is greeted with 1
MAX_LINE_BYTES = 65_536
GATHER_BYTES = 65_536
MAX_KNOWN_TOPICS = 10_000
_START = re.compile(rb" from_(?:position|ordinal|time_ns)=\d+")  # the start position in the line of a subscription
Properties = bytes | list[bytes] | None  #: encoded: for all messages, for each, or (None) those of the batch itself


class Position(int):
    """A message's position; ``duplicate`` if its id was known: then it is the position of the first one."""

    duplicate = False


class _TryAgain(ProtocolError):
    """The broker cannot serve this client now: try again with another connection."""


class RenewalRefused(_TryAgain):
    """After a reconnect the broker does not give this client its queue: another consumer has it, for example."""


class NotABrokerError(ProtocolError):
    """Something else listens where one of several brokers should be: the others are tried."""


class Pending:
    """A request that is not answered yet. ``done`` becomes true once; then ``result()`` returns or raises. It stands
    for ``count`` requests, each with an answer; one answer may cover many.
    """

    __slots__ = (
        "asked", "convert", "count", "data", "done", "duplicate", "ends", "error", "first", "last", "left", "messages",
        "publishes", "refused", "repeat", "sent", "stages", "value", "whole",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        count: int = 1,
        *,
        publishes: bool = False,
        stages: bool = False,
        whole: bool = False,
        repeat: bool = True,
        ends: bool = False,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data = data  # kept to send it again
        self.count = count
        self.messages = count  # stays, where refusals make ``count`` smaller
        self.left = count
        self.done = count == 0
        self.publishes = publishes
        self.stages = stages
        self.whole = whole  # one request for all of its messages: a refusal is one answer too
        self.repeat = repeat
        self.ends = ends  # the end of the connection is the answer
        self.convert = convert  # parses the answer; an exception means that the answer is invalid
        self.sent = False  # whether it was sent on this connection
        self.asked = False  # whether it was sent on any connection
        self.duplicate = False
        self.refused = 0  # how many of its publishes were refused
        self.first: int | None = None
        self.last: int | None = None
        self.error: PenstockError | None = None
        self.value: Any = None

    def result(self) -> Any:
        """The answer; raises the broker's refusal."""
        if self.error is not None:
            raise self.error
        return self.value

    def settle(self, value: Any = None, error: PenstockError | None = None) -> None:
        """Set the result."""
        if error is None and self.error is None and self.convert is not None:
            value = self.convert(value)
        self.value = value
        self.error = self.error or error
        self.left = 0
        self.done = True
        self.data = b""


class Dialogue:
    """One client's requests to a broker and the answers, over any number of connections."""

    def __init__(
        self,
        *,
        token: str | None = None,
        name: str = "",
        producer: str | None = None,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        if token is not None and (not isinstance(token, str) or not token.isprintable() or " " in token):
            raise InvalidArgument("a token is text without blanks or control characters")
        self.token = token
        self.name = name
        self.producer = producer if producer is not None else uuid.uuid4().hex
        self.max_message_bytes = max_message_bytes
        self.scanner = self._new_scanner()
        self.ready = False
        self.version = VERSION
        self.times = False  # whether the broker accepts publishers' times; an older version does not
        self.ranges = False  # whether it accepts messages with ids and keys as ranges
        self.journal = ""
        self.one_store = False  # several brokers of one store: another one's positions and numbers mean nothing
        self.refused: PenstockError | None = None  # the broker has refused this client: do not try again
        self.subscriptions: dict[str, Callable[[Batch], None]] = {}
        self._subscribe_lines: dict[str, bytes] = {}
        self._placed: set[str] = set()  # queues, not temporary ones, that this store has confirmed as subscribed
        self._following: dict[str, int] = {}  # by temporary queue: the next position that it has not delivered
        self._heads: dict[str, bytes] = {}
        self._waiting: deque[Pending] = deque()
        self._outgoing: deque[bytes] = deque()
        self._sent = 0  # bytes sent of the first outgoing piece
        # A signal's function raised in the midst of an exchange: what was sent or handled on this connection is not
        # known, so only a new connection can continue.
        self.torn = False
        self._stored = 0  # publishes that the broker has confirmed
        self.farewell = ""  #: why the broker closed the last connection, until it answers again
        self._renewed: set[bytes] = set()

    # --- asking

    def ask(
        self,
        line: str | bytes,
        *,
        repeat: bool = True,
        ends: bool = False,
        convert: Callable[[Any], Any] | None = None,
        most_bytes: int = 4000,
    ) -> Pending:
        """Send one command with one answer; with ``ends`` the answer is the end of the connection, or a refusal."""
        data = line.encode() if isinstance(line, str) else line
        if b"\n" in data or b"\r" in data or len(data) > most_bytes:
            raise InvalidArgument(f"a command is one line of at most {most_bytes} bytes: {data[:60]!r}")
        return self._add(Pending(data + b"\n", repeat=repeat, ends=ends, convert=convert))

    def tell(self, line: str | bytes) -> None:
        """Send one command without an answer. If the connection is lost, it is lost too, and so is what it was
        about.
        """
        data = line.encode() if isinstance(line, str) else line
        if self.ready:
            self._outgoing.append(data + b"\n")

    def publish(
        self, topic: str, items: Any, options: str = "", properties: Properties = b"", times: Any = None
    ) -> Pending:
        """Publish messages to one topic; done when all of them are on disk. ``times``: signed 64-bit numbers, one
        each.
        """
        head = self._heads.get(topic) or self._head_of(topic)
        tail = f" {options}".encode() if options else b""
        data = publish_lines(head, items, tail, self.max_message_bytes, properties, times)
        count = len(items)
        return self._add(Pending(data, count, publishes=True))

    def _head_of(self, topic: str) -> bytes:
        words.check_topic(topic)
        if len(self._heads) >= MAX_KNOWN_TOPICS:
            self._heads.clear()
        head = self._heads[topic] = f"PUB {topic}".encode()
        return head

    def stage(self, transaction: str, topic: str, items: Any, properties: Properties = b"") -> Pending:
        """Stage messages for a transaction. They are not sent again on another connection."""
        head = f"STAGE {transaction} {words.check_topic(topic)}".encode()
        data = publish_lines(head, items, b"", self.max_message_bytes, properties)
        return self._add(Pending(data, len(items), stages=True, repeat=False))

    def publish_range(self, count: int, parts: Iterable[bytes]) -> Pending:
        """Publish ``count`` messages as one range (``ranges.py``): all of them are stored, or none."""
        data = b"".join(parts)
        line = f"LOAD {words.PUBLISH_RANGE} {len(data)}\n".encode()
        return self._add(Pending(line + data + b"\n", count, publishes=True, whole=True))

    def subscribe(self, queue: str, options: str, receive: Callable[[Batch], None]) -> Pending:
        """Subscribe to a queue, again on every new connection."""
        line = f"SUB {words.check_queue(queue)} {options}".rstrip().encode() + b"\n"
        self.subscriptions[queue] = receive
        self._subscribe_lines[queue] = line
        return self._add(Pending(line, convert=lambda answer: self._subscribed(queue, answer)))

    def _subscribed(self, queue: str, answer: tuple[str, str]) -> None:
        """Note where a temporary queue begins, so that it can continue there after a reconnect."""
        _, begins, position = answer[1].rpartition("begins=")
        if begins:
            self._following.setdefault(queue, words.number(position, "position"))
        elif b" temporary=" not in self._subscribe_lines.get(queue, b""):
            self._placed.add(queue)

    def unsubscribe(self, queue: str) -> Pending | None:
        """Unsubscribe from a queue."""
        self.subscriptions.pop(queue, None)
        self._subscribe_lines.pop(queue, None)
        self._following.pop(queue, None)
        self._placed.discard(queue)
        return self.ask(f"UNSUB {queue}", repeat=False) if self.ready else None

    def _add(self, pending: Pending) -> Pending:
        if self.refused is not None:
            pending.settle(error=self.refused)
        elif not pending.done:
            try:
                self._waiting.append(pending)
                if self.ready:
                    pending.sent = pending.asked = True
                    self._outgoing.append(pending.data)
            except BaseException:
                self.torn = True
                raise
        return pending

    @property
    def unconfirmed(self) -> int:
        """Publishes that are not confirmed yet."""
        return sum(pending.left for pending in self._waiting if pending.publishes)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._waiting

    # --- the connection

    def connected(self) -> None:
        """A connection was made: send HELLO on it."""
        parts = [f"HELLO {self.version}"]
        if self.token:
            parts.append(f"token={self.token}")
        if self.name:
            parts.append(f"name={self.name}")
        if self.producer:
            parts.append(f"producer={self.producer}")
        self.scanner = self._new_scanner()
        self._outgoing.clear()
        self._sent = 0
        self.ready = False
        self._outgoing.append(" ".join(parts).encode() + b"\n")

    def _new_scanner(self) -> Scanner:
        return Scanner("deliveries", max(self.max_message_bytes, 64 << 20) + (1 << 20), MAX_LINE_BYTES)

    def disconnected(self) -> None:
        """The connection was lost, and with it what it has not sent completely, or not understandably."""
        self.scanner = self._new_scanner()
        self.ready = False
        self._outgoing.clear()
        self._sent = 0
        self.torn = False
        while self._waiting and self._waiting[0].ends and self._waiting[0].sent:
            self._waiting.popleft().settle()
        for pending in self._waiting:
            pending.sent = False

    def fail(self, error: PenstockError) -> None:
        """Fail all pending requests: nothing will be answered any more."""
        self.refused = error
        while self._waiting:
            self._waiting.popleft().settle(error=error)

    def withdraw(self, pending: Pending) -> bool:
        """Nobody waits for this request any more: if it was never sent, drop it; says whether it was dropped."""
        if pending.asked or pending not in self._waiting:
            return False
        self._waiting.remove(pending)
        return True

    def outgoing(self) -> memoryview | None:
        """The bytes to send next; small pieces are joined."""
        if not self._outgoing:
            return None
        if len(self._outgoing) > 1 and len(self._outgoing[0]) < GATHER_BYTES and not self._sent:
            pieces = [self._outgoing.popleft()]
            size = len(pieces[0])
            while self._outgoing and size + len(self._outgoing[0]) <= GATHER_BYTES:
                pieces.append(self._outgoing.popleft())
                size += len(pieces[-1])
            self._outgoing.appendleft(b"".join(pieces))
        return memoryview(self._outgoing[0])[self._sent :]

    def sent(self, count: int) -> None:
        """Note that this many bytes were sent."""
        self._sent += count
        if self._outgoing and self._sent >= len(self._outgoing[0]):
            self._outgoing.popleft()
            self._sent = 0

    # --- answers

    def step(self, most: int = 16384) -> bool:
        """Handle one event of what was received; False when there is none.

        ProtocolError if it is not a broker's answer: then the outcome of all pending requests is unknown.
        NotABrokerError: nothing was asked yet.
        """
        try:
            event = self.scanner.next(most)
        except BaseException:
            self.torn = True
            raise
        if event is None:
            return False
        verb, rest, batch = event
        try:
            self._event(verb, rest, batch)
        except (_TryAgain, NotABrokerError):
            raise
        except (ProtocolError, RefusedError, ValueError, TypeError, LookupError, RecursionError) as error:
            sent = f"{verb} {rest[:100]}".strip()
            if self.one_store and not self.ready:
                raise NotABrokerError(f"it sent {sent}") from error
            wrong = ProtocolError(f"invalid answer of the broker: {sent}")
            self._abandon(wrong)
            raise wrong from error
        except BaseException:
            self.torn = True
            raise
        return True

    def _event(self, verb: str, rest: str, batch: Batch | None) -> None:
        if verb == "MSG" and batch is not None:
            receive = self.subscriptions.get(rest)
            if receive is not None:
                receive(batch)
                if rest in self._following:
                    self._following[rest] = (batch[-1].position or 0) + 1
        elif verb == "HELLO":
            self._welcome(rest)
        elif verb == "ERR":
            self._error(rest)
        elif verb == "STAGED":
            self._staged(words.number(rest, "count"))
        elif verb in (words.BROKEN, words.REFUSED, words.NEW_TOPIC):
            raise ProtocolError(rest)
        elif self._head().publishes:
            self._confirm(verb, rest)
        else:
            self._answer(verb, rest, batch)

    def _abandon(self, error: PenstockError) -> None:
        """The outcome of all pending requests is unknown; later ones use a new producer name."""
        while self._waiting:
            self._waiting.popleft().settle(error=error)
        if self.producer:
            self.producer = uuid.uuid4().hex
        self._stored = 0

    def _head(self) -> Pending:
        if not self._waiting or not self.ready:
            raise ProtocolError("the broker sent an answer without a request")
        self.farewell = ""
        return self._waiting[0]

    def _answer(self, verb: str, rest: str, batch: Batch | None) -> None:
        if self._head().stages:
            raise ProtocolError("the broker answered STAGE by something other than STAGED")
        self._waiting[0].settle(batch if batch is not None else (verb, rest))
        self._waiting.popleft()

    def _confirm(self, verb: str, rest: str) -> None:
        span, _, more = rest.partition(" ")
        if verb != "OK" or more not in ("", "duplicate"):
            raise ProtocolError("the broker answered PUB by something other than OK")
        first, last = words.span(span)
        self._check_asked(last - first + 1, lambda pending: pending.publishes)
        while first <= last:
            pending = self._head()
            count = min(pending.left, last - first + 1)
            pending.duplicate = bool(more)
            self._store(pending, first, first + count - 1)
            first += count

    def _check_asked(self, count: int, fits: Callable[[Pending], bool]) -> None:
        """Check that an answer for ``count`` requests of one kind fits the next pending requests."""
        for pending in self._waiting:
            if count <= 0 or not fits(pending):
                break
            count -= pending.left
        if count > 0:
            raise ProtocolError("the broker confirmed more messages than were sent")

    def _store(self, pending: Pending, first: int | None, last: int | None, count: int = 0) -> None:
        """Note that its next publishes are stored at these positions; without positions only their number is known."""
        count = count if first is None or last is None else last - first + 1
        if pending.left == pending.count:
            pending.first = first
        pending.last = last
        pending.left -= count
        self._stored += count
        if not pending.left:
            self._waiting.remove(pending)
            pending.settle((pending.first, pending.last))

    def _staged(self, count: int) -> None:
        self._check_asked(count, lambda pending: pending.stages)
        while count > 0:
            pending = self._head()
            now = min(count, pending.left)
            pending.left -= now
            count -= now
            if not pending.left:
                self._waiting.popleft()
                pending.settle(pending.count)

    def _error(self, rest: str) -> None:
        code, _, text = rest.partition(" ")
        if not code:
            raise ProtocolError("the broker sent an error without a code")
        if code == "closing":
            if not self.ready and self.one_store and NO_BROKER in text:
                raise NotABrokerError(text)
            self.farewell = text
            if not self.ready and self.version > 1 and "speaks version 1:" in text:
                self.version = 1  # an older broker: the next connection uses version 1
            elif not self.ready:
                self.fail(RefusedError(f"the broker refused the connection: {text}"))
            return
        if not self.ready:  # HELLO itself was refused: its commit failed
            raise _TryAgain(f"the broker cannot serve now: {text}")
        error = words.Refusal(code, text)
        pending = self._head()
        if pending.publishes:
            self._refused(pending, error)
        elif pending.stages:  # each of its messages has an answer
            pending.error = pending.error or error
            pending.left -= 1
            if not pending.left:
                self._waiting.popleft()
                pending.settle()
        else:
            self._waiting.popleft()
            # nobody waits for this one: reconnect and try again, unless that is pointless
            if pending.data in self._renewed:
                if not error.passing:
                    self.fail(error)
                raise RenewalRefused(f"the subscription was refused after the reconnect: {text}")
            pending.settle(error=error)

    def _refused(self, pending: Pending, error: words.Refusal) -> None:
        """One of its messages was refused, and the broker closes the connection: the later ones were not stored. They
        are sent again afterwards, unless there is no room, which holds for all.
        """
        if error.code == "full":
            for other in [found for found in self._waiting if found.publishes and found.sent]:
                self._waiting.remove(other)
                other.refused += other.left
                other.settle(error=error)
            raise _TryAgain(error.text)
        pending.error = pending.error or error
        refused = pending.left if pending.whole else 1
        pending.refused += refused
        pending.left -= refused
        pending.data = pending.data[_offset(pending.data, pending.count - pending.left) :] if pending.left else b""
        pending.count = pending.left
        if not pending.left:
            self._waiting.popleft()
            pending.settle()
        raise _TryAgain(error.text)

    def _welcome(self, rest: str) -> None:
        if self.ready:
            raise ProtocolError("the broker answered HELLO twice")
        version, *pairs = rest.split()
        words.number(version, "version")
        fields = dict(word.partition("=")[::2] for word in pairs)
        journal = fields["journal"]
        if self.one_store and self.journal not in ("", journal):
            said = f"the broker that answers now keeps journal {journal}, the one before it {self.journal}"
            self.fail(RefusedError(f"{said}: the brokers of an address must keep the same one"))
            raise _TryAgain(said)
        if self.journal != journal:  # another store: nothing known about the old one applies
            self._following.clear()
            self._placed.clear()
        self.journal = journal
        most = words.number(fields.get("max_message_bytes", f"{words.MAX_NUMBER}"), "max_message_bytes")
        self.max_message_bytes = min(self.max_message_bytes, most)
        self.times = "times" in fields
        self.ranges = "ranges" in fields
        self.ready = True
        self._known_stored(words.number(fields.get("last", "0"), "last"), fields.get("positions", ""))
        asked = {pending.data for pending in self._waiting}
        lines = {queue: line for queue, line in self._subscribe_lines.items() if line not in asked}
        for queue, line in lines.items():
            if queue in self._following:
                lines[queue] = _START.sub(b"", line[:-1]) + b" from_position=%d\n" % self._following[queue]
            elif queue in self._placed:  # the start position was sent once: the broker knows the position by now
                lines[queue] = _START.sub(b"", line)
        self._renewed = set(lines.values())
        again = deque(Pending(line) for line in self._renewed)
        for pending in self._waiting:
            if pending.repeat or not pending.asked:
                again.append(pending)
            else:
                pending.settle(error=RefusedError("the connection was lost before the answer came; try again"))
        self._waiting = again
        for pending in again:
            pending.sent = pending.asked = True
            self._outgoing.append(pending.data[_offset(pending.data, pending.count - pending.left) :])

    def _known_stored(self, last: int, positions: str) -> None:
        """Settle publishes that were stored although their confirmation was lost, with the positions that the broker
        sends.
        """
        lost = last - self._stored
        known = [words.span(text) for text in positions.split(",")] if positions else []
        publishes = [pending for pending in self._waiting if pending.publishes]
        while lost > 0 and publishes:
            pending = publishes[0]
            told = sum(end - first + 1 for first, end in known)
            if told > lost:  # skip those that were confirmed before
                first, end = known.pop(0)
                skip = min(told - lost, end - first + 1)
                if first + skip <= end:
                    known.insert(0, (first + skip, end))
                continue
            if told < lost or not known:  # more was lost than the broker remembers
                count = min(lost - told, pending.left)
                self._store(pending, None, None, count)
            else:
                first, end = known.pop(0)
                count = min(pending.left, end - first + 1)
                if first + count <= end:
                    known.insert(0, (first + count, end))
                self._store(pending, first, first + count - 1)
            lost -= count
            if pending.done:
                publishes.pop(0)
        self._stored = max(self._stored, last)


_LINE = re.compile(rb"(?:PUB \S+|STAGE \S+ \S+) (\d+)(?:\+(\d+))?[^\n]*\n")


def _offset(data: bytes, count: int) -> int:
    """Where the publishes after the first ``count`` begin."""
    at = 0
    for _ in range(count):
        found = _LINE.match(data, at)
        assert found is not None
        at = found.end() + int(found[1]) + int(found[2] or 0) + 1
    return at
