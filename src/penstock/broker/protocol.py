"""The protocol of one connection: a method for each verb. Takes events of the scanner, gives replies; no sockets here.

Rules:

- Until HELLO a connection is raw, as the reference's clients are: SUB, PUB, BYE, SHUTDOWN, no reply to anything, an
  error closes. After HELLO every command but ACK, NACK and CREDIT is answered, in the order asked; answers that depend
  on the disk leave after the commit.
- ``Session`` is used by the broker's loop thread only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock._core.broker import batch_names, fetch_index
from penstock.broker import words
from penstock.broker.broker import encode_properties
from penstock.broker.queue import Queue, QueueOptions
from penstock.broker.rights import EVERYTHING, Rights
from penstock.broker.words import Disconnect, Refusal

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock._core.broker import Outbox, Scanner
    from penstock.broker.broker import Broker

VERSION = 1
MAX_CREDIT = 65_536
RAW_CREDIT = 1024
MAX_SUBSCRIPTIONS = 1024
LARGE_REPLY_BYTES = 1 << 20  # what a reply that is put out by a function counts as

_QUEUE_OPTIONS = {
    "topics": str, "ack_timeout_ms": int, "max_deliveries": int, "ttl_ms": int, "exclusive": int, "temporary": int,
    "dead_letter": str,
}  # fmt: skip
_START_OPTIONS = {"from_position": int, "from_ordinal": int, "from_time_ns": int}
_PUBLISH_OPTIONS = {"id": str, "ttl_ms": int, "delay_ms": int, "at_ns": int}


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
    """One connection's state and verbs."""

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
        self.waits_for_commit = 0  # publishes whose confirm is still to come
        self._last_ok: list[int] | None = None
        self.starved = False  # messages wait for the client to read what it was sent
        self.failed = False  # a commit failed with messages of this connection in it

    # --- events

    def handle(self, verb: str, rest: str, batch: Batch | None) -> None:
        """One event of the scanner. Disconnect when the connection is to be closed."""
        if not (self.hello or self.host.raw_allowed or verb == "HELLO"):
            raise Disconnect
        if verb == "PUB" and batch is not None:
            self.pub(rest, batch)
            return
        try:
            if verb == "?":
                self.topic(rest)
            elif verb == "!":
                code, _, line = rest.partition(" ")
                text = "the message is too large" if code == "too_large" else "the topic is not yours to publish to"
                self.refuse_publishes(1, Refusal(code, f"{text}: {line[:200]}"))
            elif verb == "#":
                raise Disconnect(rest)
            elif not self.hello:
                self.raw_verb(verb, rest)
            elif verb == "STAGE" and batch is not None:
                self.stage(rest, batch)
            else:
                self.hello_verb(verb, rest)
        except Refusal as refusal:
            if not self.hello:
                raise Disconnect(refusal.text) from None
            self.reply(words.error_line(refusal.code, refusal.text))

    def raw_verb(self, verb: str, rest: str) -> None:
        """A line of a client that has not said HELLO."""
        if verb == "HELLO":
            self.hello_(rest.split())
        elif verb == "SUB":
            self.raw_sub(rest)
        elif verb == "BYE" and not rest:
            raise Disconnect
        elif verb == "SHUTDOWN" and not rest:
            self.shutdown([])
        else:
            raise Disconnect("unknown verb")

    def hello_verb(self, verb: str, rest: str) -> None:
        """A line of a client that has said HELLO."""
        method = _VERBS.get(verb)
        if method is None:
            raise Disconnect(f"unknown verb {verb[:40]!r}")
        method(self, rest.split())

    def topic(self, name: str) -> None:
        """A topic that this connection publishes to for the first time."""
        try:
            words.check_topic(name)
        except Refusal as refusal:
            raise Disconnect(refusal.text) from None
        if self.rights.may_publish(name):
            self.scanner.allow(name)
        else:
            self.scanner.refuse(name)

    # --- replies

    def reply(self, line: bytes | Callable[[], None]) -> None:
        """Answer, after everything asked before was answered; what is large is put out by a function."""
        self._last_ok = None
        self.replies.append(line)
        self.reply_bytes += len(line) if isinstance(line, bytes) else LARGE_REPLY_BYTES
        self.touched()

    def confirm(self, first: int, last: int) -> None:
        """Answer publishes: once the commit is on disk. Rows are told as one."""
        self.confirms = True
        row = self._last_ok
        if row is not None and row[1] + 1 == first:
            row[1] = last
            self.replies[-1] = words.ok_line(row[0], last)
            return
        self.reply(words.ok_line(first, last))
        self._last_ok = [first, last]

    # --- publishing

    def pub(self, options: str, batch: Batch) -> None:
        """PUB <topic> <length> [options]: publish."""
        count = len(batch)
        try:
            if self.host.draining:
                raise Refusal("unavailable", "the broker is ending")
            if self.hello:  # a raw client is not read from at the quota instead: it understands no refusal
                self.broker.check_room(batch.total_bytes)
            if options:
                self.pub_with(options, batch)
                return
            span = self.broker.publish(batch)
        except Refusal as refusal:
            if not self.hello:
                raise Disconnect(refusal.text) from None
            self.refuse_publishes(count, refusal)
            return
        if self.hello:
            self.confirm(*span)
            if self.producer:
                self.broker.produced(self.producer, count)

    def refuse_publishes(self, count: int, refusal: Refusal) -> None:
        """Tell each; a producer that numbers its messages is cut off, so that what is stored is always a first part."""
        for _ in range(1 if self.producer else count):
            self.reply(words.error_line(refusal.code, refusal.text))
        if self.producer:
            raise Disconnect

    def pub_with(self, text: str, batch: Batch) -> None:
        """Messages with options: an id, a time to live, a delay."""
        options = words.split_options(text.split(), _PUBLISH_OPTIONS)
        now_ns = time.time_ns()
        properties: dict[str, str] = {}
        if options.get("ttl_ms"):
            properties["expires_ns"] = str(now_ns + int(options["ttl_ms"]) * 1_000_000)
        due_ns = int(options.get("at_ns", 0)) or (
            now_ns + int(options["delay_ms"]) * 1_000_000 if options.get("delay_ms") else 0
        )
        identifier = str(options.get("id", ""))
        if identifier:
            words.check_name(identifier, "message id")
            if len(batch) != 1:
                raise Refusal("duplicate", "two messages in a row have the same id")
        names = batch_names(batch)
        for message in batch if due_ns else (None,):
            one = batch if message is None else self.broker_single(message)
            if due_ns and message is not None:
                topic = message.channel or names[0]
                found = self.broker.delay(one, topic, due_ns, properties=properties, identifier=identifier)
            else:
                found = self.broker.publish_as(one, identifier, properties=encode_properties(properties))
            self.confirm(*found)
            if self.producer:
                self.broker.produced(self.producer, found[1] - found[0] + 1)

    @staticmethod
    def broker_single(message: Any) -> Batch:
        """A batch of one message."""
        from penstock._core.broker import gather

        return gather([message])

    def stage(self, transaction: str, batch: Batch) -> None:
        """STAGE <transaction> <topic> <length>: keep a message until COMMIT."""
        count = len(batch)
        try:
            self.broker.stage(transaction, batch)
        except Refusal as refusal:
            for _ in range(count):
                self.reply(words.error_line(refusal.code, refusal.text))
            return
        self.reply(b"STAGED %d\n" % count)

    def commit(self, arguments: list[str]) -> None:
        """COMMIT <transaction> [part ...]: publish what was staged, once per id."""
        transaction, *parts = _need(arguments, 1, "COMMIT <transaction> [part ...]")
        words.check_name(transaction, "transaction")
        first, last, again = self.broker.commit_transaction(transaction, parts)
        self.confirms = True
        self.reply(b"COMMITTED %d-%d%s\n" % (first, last, b" again" if again else b""))

    def abort(self, arguments: list[str]) -> None:
        """ABORT <transaction>: forget what was staged."""
        (transaction,) = _need(arguments, 1, "ABORT <transaction>", most=1)
        self.broker.abort(transaction)
        self.reply(b"OK\n")

    # --- sessions

    def hello_(self, arguments: list[str]) -> None:
        """HELLO <version> [token=] [name=] [producer=]: ask for replies and framing."""
        if self.hello or self.subscriptions:
            raise Disconnect("HELLO comes first")
        version, *rest = arguments or [""]
        if version != str(VERSION):
            self.hello = True
            raise Disconnect(f"this broker speaks version {VERSION}: HELLO {VERSION}")
        self.hello = True
        options = words.split_options(rest, {"token": str, "name": str, "producer": str})
        self.token = str(options["token"]) if "token" in options else None
        self.rights = self.host.rights_of(self.token, self)
        self.name = str(options.get("name", ""))[:255]
        more = b""
        if options.get("producer"):
            self.producer = words.check_name(str(options["producer"]), "producer")
            self.host.take_over(self.producer, self)
            more = b" last=%d" % self.broker.producers.get(self.producer, 0)
        self.confirms = True  # `last` counts what is on its way to the disk
        limits = self.broker.limits
        self.reply(
            b"HELLO %d journal=%s max_message_bytes=%d%s\n"
            % (VERSION, self.broker.store.identity.encode(), limits.max_message_bytes, more)
        )

    def ping(self, arguments: list[str]) -> None:
        """PING: answered by PONG, after everything before it is on disk."""
        self.confirms = True
        self.reply(b"PONG\n")

    def bye(self, arguments: list[str]) -> None:
        """BYE: close."""
        raise Disconnect

    def shutdown(self, arguments: list[str]) -> None:
        """SHUTDOWN: end the server gracefully; from loopback or with the right."""
        if not (self.rights.shutdown or (self.loopback and self.rights is EVERYTHING)):
            raise Refusal("denied", "SHUTDOWN needs the right shutdown, or a connection from loopback")
        self.host.shutdown()
        raise Disconnect

    # --- queues

    def raw_sub(self, name: str) -> None:
        """SUB of the compatible mode: one queue a connection, one connection a queue."""
        if self.subscriptions:
            raise Disconnect("a second SUB")
        try:
            if not 1 <= len(name.encode()) <= words.MAX_NAME_BYTES or not name.isprintable() or name.startswith("$"):
                raise Disconnect("bad name")
        except UnicodeEncodeError:
            raise Disconnect("bad name") from None
        if " " in name:
            raise Disconnect("bad name")
        queue = self.broker.queue(name, QueueOptions())
        if queue.consumers:
            raise Disconnect("the queue has a client")
        queue.raw = True
        self._subscribe(queue, RAW_CREDIT, automatic=True, raw=True)

    def sub(self, arguments: list[str]) -> None:
        """SUB <queue> [options]: consume a queue; made if it is not there."""
        name, *rest = _need(arguments, 1, "SUB <queue> [options]")
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "credit": int, "ack": str})
        self._check_queue(name)
        if name in self.subscriptions:
            raise Refusal("exists", f"this connection consumes {name} already")
        if len(self.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise Refusal("limit", f"a connection consumes at most {MAX_SUBSCRIPTIONS} queues")
        credit = max(1, min(int(options.get("credit", 256)), self.max_unacknowledged))
        if options.get("ack", "") not in ("", "none"):
            raise Refusal("bad_option", "ack is none, or left out")
        queue = self._declare(name, options, change=False)
        if queue.consumers and (queue.raw or queue.options.exclusive):
            raise Refusal("busy", f"queue {name} has a client and is exclusive")
        self.confirms = True
        self.reply(b"OK\n")
        self._subscribe(queue, credit, automatic=options.get("ack") == "none", raw=False)

    def _subscribe(self, queue: Queue, credit: int, *, automatic: bool, raw: bool) -> None:
        subscription = Subscription(self, queue, self.numbers(), credit, automatic, raw)
        self.subscriptions[queue.name] = subscription
        queue.add(subscription)
        self.broker.wake(queue)

    def queue(self, arguments: list[str]) -> None:
        """QUEUE <queue> [options] [create]: make a queue, or give it other options (with create: only make it)."""
        name, *rest = _need(arguments, 1, "QUEUE <queue> [options]")
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "create": int})
        self._check_queue(name)
        self._declare(name, options, change="create" not in options)
        self.confirms = True
        self.reply(b"OK\n")

    def _declare(self, name: str, given: dict[str, Any], *, change: bool) -> Queue:
        found = self.broker.queues.get(name)
        old = found.options if found else QueueOptions()
        wanted = self._options(given, old)
        if found is None:
            for pattern in wanted.topics:
                self._check_pattern(pattern)
            return self.broker.queue(name, wanted, start=self._start(given, wanted.topics))
        if wanted != old:
            if not change:
                raise Refusal("exists", f"queue {name} has other options (LIST shows them); QUEUE changes them")
            if not self.rights.manage:
                raise Refusal("denied", f"queue {name} has other options; changing them needs the right manage")
            for pattern in wanted.topics:
                if pattern not in old.topics:
                    self._check_pattern(pattern)
            self.broker.rebind(found, wanted)
        start = self._start(given, wanted.topics)
        if start is not None:
            self._need_manage()
            self.broker.seek(found, start)
        return found

    @staticmethod
    def _options(given: dict[str, Any], old: QueueOptions) -> QueueOptions:
        changes: dict[str, Any] = {}
        if "topics" in given:
            changes["topics"] = tuple(str(given["topics"]).split(","))
        if "ack_timeout_ms" in given:
            changes["ack_timeout_s"] = given["ack_timeout_ms"] / 1e3
        if "ttl_ms" in given:
            changes["ttl_s"] = given["ttl_ms"] / 1e3
        for key in ("max_deliveries", "dead_letter"):
            if key in given:
                changes[key] = given[key]
        for key in ("exclusive", "temporary"):
            if key in given:
                changes[key] = bool(given[key])
        return replace(old, **changes)

    def _start(self, given: dict[str, Any], topics: tuple[str, ...]) -> int | None:
        """Where a queue is to begin, when the client says so."""
        if "from_position" in given:
            return int(given["from_position"])
        if "from_time_ns" in given:
            return self.broker.store.find(timestamp_ns=int(given["from_time_ns"]))
        if "from_ordinal" in given:
            if len(topics) != 1 or "*" in topics[0] or ">" in topics[0]:
                raise Refusal("bad_option", "from_ordinal needs a queue of one topic without wildcards")
            return self.broker.store.find(ordinal=int(given["from_ordinal"]), topic=topics[0])
        return None

    def unsub(self, arguments: list[str]) -> None:
        """UNSUB <queue>: consume no more; what was not acknowledged goes back."""
        (name,) = _need(arguments, 1, "UNSUB <queue>", most=1)
        subscription = self._subscription(name)
        del self.subscriptions[name]
        self.broker.leave(subscription.queue, subscription)
        self.reply(b"OK\n")

    def credit(self, arguments: list[str]) -> None:
        """CREDIT <queue> <count>: how many unacknowledged messages this consumer takes. Not answered."""
        name, count = _need(arguments, 2, "CREDIT <queue> <count>", most=2)
        subscription = self._subscription(name)
        subscription.credit = min(words.number(count, "credit"), self.max_unacknowledged)
        self.broker.wake(subscription.queue)

    def ack(self, arguments: list[str]) -> None:
        """ACK <queue> <position>[-<position>] ... [confirm]: these are done. Answered only with confirm."""
        name, *spans = _need(arguments, 2, "ACK <queue> <position>[-<position>] ...")
        confirm = spans[-1] == "confirm"
        subscription = self._subscription(name)
        count = 0
        for text in spans[:-1] if confirm else spans:
            count += self.broker.acknowledge(subscription.queue, subscription, *words.span(text))
        if confirm:
            self.confirms = True
            self.reply(b"OK %d\n" % count)

    def nack(self, arguments: list[str]) -> None:
        """NACK <queue> <position> [delay_ms=]: deliver it again. Not answered."""
        name, position, *rest = _need(arguments, 2, "NACK <queue> <position> [delay_ms=]")
        options = words.split_options(rest, {"delay_ms": int})
        subscription = self._subscription(name)
        due_ns = time.time_ns() + int(options.get("delay_ms", 0)) * 1_000_000
        if subscription.queue.state.return_message(subscription.number, words.number(position, "position"), due_ns):
            self.broker.wake(subscription.queue)

    def seek(self, arguments: list[str]) -> None:
        """SEEK <queue> from_position=|from_ordinal=|from_time_ns=: deliver from there on."""
        name, *rest = _need(arguments, 2, "SEEK <queue> from_position=|from_ordinal=|from_time_ns=")
        queue = self._managed(name)
        start = self._start(words.split_options(rest, _START_OPTIONS), queue.options.topics)
        self.broker.seek(queue, start or 1)
        self.confirms = True
        self.reply(b"OK\n")

    def purge(self, arguments: list[str]) -> None:
        """PURGE <queue>: drop what it has."""
        (name,) = _need(arguments, 1, "PURGE <queue>", most=1)
        self.confirms = True
        self.reply(b"OK %d\n" % self.broker.purge(self._managed(name)))

    def delete(self, arguments: list[str]) -> None:
        """DELETE <queue>: forget it; refused while it has consumers."""
        (name,) = _need(arguments, 1, "DELETE <queue>", most=1)
        queue = self._managed(name)
        if queue.consumers:
            raise Refusal("busy", f"queue {name} has {len(queue.consumers)} consumer(s)")
        self.broker.delete(queue)
        self.confirms = True
        self.reply(b"OK\n")

    def redrive(self, arguments: list[str]) -> None:
        """REDRIVE <queue>: send its dead letters back to it."""
        (name,) = _need(arguments, 1, "REDRIVE <queue>", most=1)
        self.confirms = True
        self.reply(b"OK %d\n" % self.broker.redrive(self._managed(name)))

    # --- looking

    def list_queues(self, arguments: list[str]) -> None:
        """LIST: the queues, as JSON."""
        self._need_statistics()
        self._data([queue.summary() for queue in self.broker.queues.values() if self.rights.may_use(queue.name)])

    def stats(self, arguments: list[str]) -> None:
        """STATS: counts of the broker, as JSON."""
        self._need_statistics()
        self._data(self.host.statistics())

    def peers(self, arguments: list[str]) -> None:
        """PEERS <topic>: how many queues take it and how many consumers these have."""
        (name,) = _need(arguments, 1, "PEERS <topic>", most=1)
        queues = self.broker.queues_of(words.check_topic(name))
        self.reply(b"PEERS %d %d\n" % (len(queues), sum(len(queue.consumers) for queue in queues)))

    def fetch(self, arguments: list[str]) -> None:
        """FETCH <first> <most> [bytes=] [topics=]: messages by position, index first, for readers in bulk."""
        first, most, *rest = _need(arguments, 2, "FETCH <first> <most> [bytes=] [topics=]")
        options = words.split_options(rest, {"bytes": int, "topics": str})
        patterns = str(options["topics"]).split(",") if "topics" in options else [">"]
        for pattern in patterns:
            self._check_pattern(pattern)
        most_bytes = min(int(options.get("bytes", 4 << 20)), 16 << 20)
        start, count = words.number(first, "position"), min(words.number(most, "most"), 1 << 20)
        self.reply(lambda: self._put_range(start, max(1, count), most_bytes, patterns))

    def _put_range(self, start: int, count: int, most_bytes: int, patterns: list[str]) -> None:
        statistics = self.broker.store.statistics()
        batch, following = self.broker.store.read(start, count, most_bytes, tuple(patterns))
        index, size = fetch_index(batch)
        head = {
            "count": len(batch),
            "next": following,
            "first": statistics.first,
            "frontier": statistics.next,
            "journal": self.broker.store.identity,
            "topics": {str(number): name for number, name in enumerate(batch_names(batch)) if name},
        }
        text = json.dumps(head).encode() + b"\n"
        self.outbox.text(b"DATA %d\n%s" % (len(text) + len(index) + size, text))
        self.outbox.lent(index)
        self.outbox.payloads(batch)
        self.outbox.text(b"\n")

    def _data(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.reply(b"DATA %d\n%s\n" % (len(text), text))

    # --- checks

    def _check_queue(self, name: str) -> None:
        words.check_name(name, "queue")
        if not self.rights.may_use(name):
            raise Refusal("denied", f"queue {name} is not yours to use")

    def _check_pattern(self, pattern: str) -> None:
        words.check_pattern(pattern)
        if not self.rights.may_subscribe(pattern):
            raise Refusal("denied", f"topics {pattern} are not yours to read")

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
                self.broker.acknowledge(subscription.queue, subscription, first, last)
            self.written.clear()
        if self.starved and self.outbox.pending_bytes < self.output_bytes:
            self.starved = False
            for subscription in self.subscriptions.values():
                self.broker.wake(subscription.queue)

    def fail_replies(self, code: str, text: str) -> None:
        """The commit failed: nothing of this turn is confirmed."""
        if self.confirms:
            self.failed = True
            self.replies = [
                words.error_line(code, text) for reply in self.replies for _ in range(_answers(reply))
            ]
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


def _need(arguments: list[str], least: int, form: str, most: int | None = None) -> list[str]:
    if len(arguments) < least or (most is not None and len(arguments) > most):
        raise Refusal("bad_request", f"the form is {form}")
    return arguments


_VERBS: dict[str, Callable[[Session, list[str]], None]] = {
    "SUB": Session.sub,
    "UNSUB": Session.unsub,
    "QUEUE": Session.queue,
    "CREDIT": Session.credit,
    "ACK": Session.ack,
    "NACK": Session.nack,
    "SEEK": Session.seek,
    "PURGE": Session.purge,
    "DELETE": Session.delete,
    "REDRIVE": Session.redrive,
    "LIST": Session.list_queues,
    "STATS": Session.stats,
    "PEERS": Session.peers,
    "FETCH": Session.fetch,
    "COMMIT": Session.commit,
    "ABORT": Session.abort,
    "PING": Session.ping,
    "BYE": Session.bye,
    "SHUTDOWN": Session.shutdown,
    "HELLO": Session.hello_,
}
