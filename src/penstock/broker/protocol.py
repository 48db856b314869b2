"""The protocol of one connection: a method for each verb. Takes events of the scanner, gives answers; no sockets here.

Rules:

- Until HELLO a connection is raw (the compatible mode of docs/formats.md, the protocol of ElephantMQ): only SUB, PUB,
  BYE and SHUTDOWN; nothing is answered, and an error closes it. After HELLO every command but ACK, NACK and CREDIT is
  answered, in the order asked; answers that depend on the disk leave after the commit.
- A verb's method gives its answer or raises Refusal, and never answers by itself: ``_finish`` and ``_refuse`` are the
  only places that do, so that every request has exactly one answer.
- A method that may take long is a generator. It yields BUSY when its share of the turn may be over and WAIT when it can
  only go on after something else has happened; what it returns is the answer. Its connection's next command waits.
- Used by the broker's loop thread only.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock._core.broker import batch_names, fetch_index, gather, joined, public_part, range_batch
from penstock.broker import dead_letters, words
from penstock.broker.identifiers import Identifier
from penstock.broker.producers import Producer
from penstock.broker.queue import BUSY, WAIT, Queue, QueueOptions
from penstock.broker.ranges import ENTRY, non_negative_int, topic_names
from penstock.broker.rights import EVERYTHING
from penstock.broker.session import Line, Session, Subscription
from penstock.broker.words import Disconnect, Refusal
from penstock.errors import InvalidArgument, PenstockError, nearest
from penstock.journal.layout import encode_properties
from penstock.topics import is_pattern, matches
from penstock.types.schema import Schema, digest_of

if TYPE_CHECKING:
    from penstock._core import Batch

VERSIONS = (1, 2)
RAW_CREDIT = 16_384
MAX_SUBSCRIPTIONS = 1024
MAX_FETCH_MESSAGES = 65_536
FETCH_STEP = 8192  # messages that FETCH reads in one step
LIST_STEP = 8  # queues that LIST describes in one step
MAX_DEAD_LETTER_NAME_BYTES = 245  # "$dead.NAME" and "NAME.dead" are names too

_PUBLISH_OPTIONS = {"id": str, "ttl_ms": int, "delay_ms": int, "at_ns": int}
_RANGE = "LOAD " + words.PUBLISH_RANGE  # a LOAD that publishes
MAX_RANGE_MESSAGES = 16_384  # of such a LOAD
_TIMED = "time_ns"  # the scanner's option for publishes that bring their own times
_QUEUE_OPTIONS = {
    "topics": str, "ack_timeout_ms": int, "max_tries": int, "ttl_ms": int, "exclusive": int, "temporary": int,
    "dead_letter": str, "max_deliveries": int,
}  # fmt: skip
_START_OPTIONS = {"from_position": int, "from_ordinal": int, "from_time_ns": int}

Answer = Line | Sequence[int] | None
Work = Generator[str, None, Answer]
OK = b"OK\n"


@dataclass(frozen=True)
class Verb:
    """A command: its method, its syntax, how many words it may have, and how it is answered."""

    method: Callable[..., Answer | Work]
    form: str
    least: int
    most: int | None
    stores: bool = False  #: the answer leaves after a commit
    answered: bool = True
    asks: bool = False  #: it changes nothing, so it is dropped when nobody is left to read the answer

    def words(self, rest: str) -> list[str]:
        """The words of a command; refused if there are too few or too many."""
        found = rest.split()
        if len(found) < self.least or (self.most is not None and len(found) > self.most):
            raise Refusal("bad_request", f"expected {self.form}")
        return found


class Protocol(Session):
    """One connection's verbs."""

    work: Work | None = None  #: the command in progress, if it takes more than one turn
    published = False  #: whether this client of the compatible mode has published
    _work: tuple[str, int] = ("", 0)  # of the command in progress: its verb and its number of requests
    _changed_at = -1  # the number of commits at its last change

    # --- events

    def handle(self, verb: str, rest: str, batch: Batch | None) -> None:
        """Handle one event of the scanner. Raises Disconnect if the connection must be closed."""
        if not (self.hello or self.host.raw_allowed or verb == "HELLO"):
            raise Disconnect
        if verb == words.BROKEN:
            raise Disconnect(rest)
        if verb == words.NEW_TOPIC:
            self.topic(rest)
            return
        requests = len(batch) if batch is not None and verb in ("PUB", "STAGE") else 1
        self._work = verb, requests
        self._advance(lambda: self._call(verb, rest, batch))

    def go_on(self) -> str:
        """Continue the command in progress: BUSY or WAIT while it is not done, then empty."""
        work = self.work
        assert work is not None
        said: list[str] = []

        def step() -> Answer | Work:
            try:
                said.append(next(work))
            except StopIteration as end:
                self.work = None
                answer: Answer = end.value
                return answer
            return work

        self._advance(step)
        return said[0] if said else ""

    def drop_question(self) -> None:
        """Drop the command in progress if it only asks: nobody is left to read its answer."""
        verb = VERBS.get(self._work[0])
        if self.work is not None and verb is not None and verb.asks:
            self.work = None

    def cancel(self, code: str, text: str) -> None:
        """Refuse the command in progress: it cannot continue."""
        if self.work is not None:
            self.work = None
            self._refuse(*self._work, Refusal(code, text))

    def _advance(self, step: Callable[[], Answer | Work]) -> None:
        """Run one step of a command. When it is done it is answered here, and nowhere else."""
        before = self.broker.changes
        try:
            answer = step()
        except Refusal as refusal:
            self.work = None
            self._refuse(*self._work, refusal)
            return
        finally:
            if self.broker.changes != before:
                self._changed_at = self.broker.commits
        if isinstance(answer, Generator):
            self.work = answer
        elif self.hello:
            self._finish(*self._work, answer)

    def _call(self, verb: str, rest: str, batch: Batch | None) -> Answer | Work:
        if verb == words.REFUSED:
            self.refused(*rest.split(" ", 1))
        if batch is not None and verb in _DATA_VERBS:
            return _DATA_VERBS[verb](self, rest, batch)
        if not self.hello:
            return self.raw_verb(verb, rest)
        found = VERBS.get(verb)
        if found is None:
            raise Disconnect(f"unknown verb {verb[:40]!r}")
        return found.method(self, *found.words(rest))

    def _finish(self, verb: str, requests: int, answer: Answer) -> None:
        if verb == "PUB":
            positions: Any = answer
            if len(positions) != requests:
                raise RuntimeError(f"{requests} publishes have {len(positions)} answers")
            self.confirms = True
            self.confirm(positions)
        elif verb == _RANGE:  # one request, however many messages
            stored: Any = answer
            self.confirms = True
            if isinstance(stored, range):
                self.answer(1, words.ok_line(stored[0], stored[-1]), True)
            else:  # a store whose positions have gaps
                self.confirm(stored)
        elif answer is not None:
            self.confirms = self.confirms or (verb in VERBS and VERBS[verb].stores)
            self.answer(requests, answer)  # type: ignore[arg-type]
        elif verb not in VERBS or VERBS[verb].answered:
            raise RuntimeError(f"{verb} has no answer")

    def _refuse(self, verb: str, requests: int, refusal: Refusal) -> None:
        """Refuse each request. A producer that numbers its messages is disconnected after its first refused message, so
        that the stored messages are always a prefix of those it sent.
        """
        if not self.hello:
            raise Disconnect(refusal.text) from None
        if verb in VERBS and not VERBS[verb].answered:
            raise Disconnect(refusal.text) from None  # these requests have no answer that could carry the error
        publishes = verb in ("PUB", _RANGE, words.REFUSED) and bool(self.producer)
        for _ in range(1 if publishes else requests):
            self.answer(1, words.error_line(refusal.code, refusal.text), publishes)
        if publishes:
            raise Disconnect from None

    def raw_verb(self, verb: str, rest: str) -> Answer | Work:
        """Handle a line of a client that has not sent HELLO."""
        if verb == "HELLO":
            return VERBS["HELLO"].method(self, *rest.split())
        if verb == "SUB":
            return self.raw_sub(rest)
        if verb == "BYE" and not rest:
            raise Disconnect
        if verb == "SHUTDOWN" and not rest:
            self.shutdown()
        raise Disconnect("unknown verb")

    # --- sessions

    def hello_(self, version: str = "", *rest: str) -> Answer:
        """HELLO <version> [token=] [name=] [producer=]: ask for replies and framing. If it is refused, the connection
        is closed: an unknown client is not served.
        """
        try:
            return self._greet(version, *rest)
        except Refusal as refusal:
            raise Disconnect(refusal.text) from None

    def _greet(self, version: str, *rest: str) -> Answer:
        if self.hello or self.subscriptions or self.published:
            raise Disconnect("HELLO comes first")
        known = [str(number) for number in VERSIONS]
        self.hello = int(version) if version in known else max(VERSIONS)
        if version not in known:
            raise Disconnect(f"this broker speaks versions {' and '.join(known)}: HELLO {known[-1]}")
        options = words.split_options(rest, {"token": str, "name": str, "producer": str})
        self.token = str(options["token"]) if "token" in options else None
        self.rights = self.host.rights_of(self.token, self)
        self.name = str(options.get("name", ""))[:255]
        more = b" times=1 ranges=1" if self.hello > 1 else b""
        if options.get("producer"):
            self.producer = self.own(str(options["producer"]), "producer")
            self.host.take_over(self.producer, self)
            stored = self.broker.producers.get(self.producer) or Producer()
            more += b" last=%d" % stored.count
            if self.hello > 1 and stored.runs:
                more += b" positions=" + b",".join(b"%d-%d" % run for run in stored.runs)
        self._wait_for_disk(stored=bool(self.producer))  # `last` includes messages that are not on disk yet
        limits = self.broker.limits
        return b"HELLO %d journal=%s max_message_bytes=%d%s\n" % (
            self.hello,
            self.broker.store.identity.encode(),
            limits.max_message_bytes,
            more,
        )

    def ping(self, *_: str) -> Answer:
        """PING: answered by PONG, after everything before it is on disk."""
        self._wait_for_disk(stored=self._changed_at == self.broker.commits)
        return b"PONG\n"

    def _wait_for_disk(self, *, stored: bool) -> None:
        """Delay the answer until the next commit; during a large commit, which takes long, only if something is
        stored.
        """
        self.confirms = self.confirms or stored or self.broker.large is None

    def bye(self, *rest: str) -> Answer:
        """BYE [unread]: close; with unread what was not acknowledged goes back as never sent."""
        for name in list(self.subscriptions) if "unread" in rest else ():
            self.leave(name, delivered=False)
        raise Disconnect

    def shutdown(self, *_: str) -> Answer:
        """SHUTDOWN: end the server gracefully; from loopback or with the right."""
        if not (self.rights.shutdown or (self.loopback and self.rights is EVERYTHING)):
            raise Refusal("denied", "SHUTDOWN needs the right shutdown; without tokens, a connection from loopback")
        self.host.shutdown()
        raise Disconnect

    # --- publishing

    def topic(self, name: str) -> None:
        """Check a topic that this connection publishes to for the first time."""
        try:
            words.check_topic(name)
        except Refusal as refusal:
            raise Disconnect(refusal.text) from None
        try:
            self.check_publish((name,))
            self.broker.check_topics((name,))
        except Refusal:  # ``refused`` answers each message to it with the reason
            self.scanner.refuse(name)
        else:
            self.scanner.allow(name)

    def refused(self, code: str, line: str) -> None:
        """Refuse a message that the scanner skipped: it is too large, or its topic was refused before."""
        if code == "too_large":
            raise Refusal(code, f"the message is too large: {line[:200]}")
        verb, *names = line.split()
        name = names[0] if verb == "PUB" else names[1]
        self.check_publish((name,))
        self.broker.check_topics((name,))
        self.scanner.forget_topics()  # the topic is allowed by now: the next message is accepted
        raise Refusal("unavailable", f"the right to publish was granted meanwhile; publish again: {name}")

    def pub(self, options: str, batch: Batch) -> Answer | Work:
        """PUB <topic> <lengths> [options]: publish."""
        if self.host.draining and self.producer:  # its client sends it again, to whichever broker is next
            raise Disconnect("the broker is shutting down")
        if self.host.draining:
            raise Refusal("unavailable", "the broker is shutting down")
        if not self.hello:
            return self.raw_pub(batch)
        self.broker.check_room(batch)
        positions = self.pub_with(options, batch) if options else self.broker.publish(batch)
        if self.producer:
            self.broker.produced(self.producer, positions)
        return positions

    def raw_pub(self, batch: Batch) -> Work:
        """PUB of the compatible mode. Its client cannot be refused, so at the quota it has to wait."""
        while not self.broker.has_room(batch):
            yield WAIT
        self.broker.publish(batch)
        self.published = True
        self.confirms = True  # this client gets no confirmation, but its connection is closed if the commit fails
        self.touched()
        return None

    def pub_with(self, text: str, batch: Batch) -> Sequence[int]:
        """Messages with options: times of their own, an id, a time to live, a delay."""
        given_words = text.split()
        timed = given_words[-1:] == [_TIMED]
        if any(word.startswith(f"{_TIMED}=") for word in given_words):
            raise Refusal("bad_option", f"{_TIMED}= must follow the length, once")
        options = words.split_options(given_words[:-1] if timed else given_words, _PUBLISH_OPTIONS)
        now_ns = time.time_ns()
        more: dict[str, str] = {}
        if options.get("ttl_ms"):
            more["$expires_ns"] = str(now_ns + int(options["ttl_ms"]) * 1_000_000)
        due_ns = int(options.get("at_ns", 0)) or (
            now_ns + int(options["delay_ms"]) * 1_000_000 if options.get("delay_ms") else 0
        )
        given = str(options.get("id", ""))
        if "id" in options:
            words.check_name(given, "message id")
        if due_ns and timed:
            due = "a delayed message has the time at which it is due"
            raise Refusal("bad_option", f"{due}: leave out timestamp_ns= ({_TIMED}= of the protocol)")
        if due_ns:
            # Checked for the whole batch before its first message, so that it is stored completely or refused
            # completely.
            self.broker.delayed.check_room(len(batch))
        # The common case: one call for the whole batch. Ids and delays need a record per message.
        if not given and not due_ns:
            return self.broker.publish(batch, more=encode_properties(more), **_times(batch, timed))
        positions: list[int] = []
        names = batch_names(batch)
        for message in batch:
            topic = message.channel or names[0]
            identifier = Identifier(self.rights.owner, topic, given) if given else None
            one = gather([message])
            if due_ns:
                positions += self.broker.delayed.add(one, topic, due_ns, more, identifier)
            elif identifier is not None:
                positions += self.broker.publish_as(one, identifier, more=encode_properties(more), **_times(one, timed))
        return positions

    def stage(self, transaction: str, batch: Batch) -> Answer:
        """STAGE <transaction> <topic> <lengths>: keep a message until COMMIT."""
        self.broker.transactions.stage(self.own(transaction, "transaction"), batch)
        return b"STAGED %d\n" % len(batch)

    def load(self, transaction: str, batch: Batch) -> Answer:
        """LOAD <transaction> <length>: keep a range of messages, as FETCH gives it, until COMMIT. With ``$publish`` in
        place of the transaction they are published at once.
        """
        if transaction == words.PUBLISH_RANGE:
            self._work = (_RANGE, 1)
            return self._publish_range(batch)
        name = self.own(transaction, "transaction")
        messages, timed = self._range(bytes(batch[0]))
        self.loaded += len(messages) - 1
        self.broker.transactions.stage(name, messages, timed=timed)
        return b"STAGED %d\n" % len(messages)

    def _publish_range(self, batch: Batch) -> Sequence[int]:
        """Publish a range as one part of the next commit. An id that is known leaves nothing out."""
        if self.host.draining and self.producer:
            raise Disconnect("the broker is shutting down")
        if self.host.draining:
            raise Refusal("unavailable", "the broker is shutting down")
        messages, timed = self._range(bytes(batch[0]))
        if len(messages) > MAX_RANGE_MESSAGES:
            raise Refusal("bad_range", f"at most {MAX_RANGE_MESSAGES} messages are published as one range")
        self.loaded += len(messages) - 1
        self.broker.check_topics({name for name in batch_names(messages) if name})
        self.broker.check_room(messages)
        positions = self.broker.publish(messages, **_times(messages, timed))
        self.broker.note_identifiers(self.rights.owner, messages, positions)
        if self.producer:
            self.broker.produced(self.producer, positions)
        return positions

    def _range(self, data: bytes) -> tuple[Batch, bool]:
        """The messages of a range, and whether they keep their times."""
        text, newline, _ = data.partition(b"\n")
        try:
            head = json.loads(text)
            count, topics, timed = non_negative_int(head["count"]), topic_names(head), head.get("times") is True
            end = len(text) + len(newline) + count * ENTRY.size
            view = memoryview(data)
            index, body = view[len(text) + len(newline) : end], view[end:]
            if not 0 < count <= len(data) // ENTRY.size or len(index) != count * ENTRY.size:
                raise Refusal("bad_range", f"{len(data)} bytes do not hold a range of {count} messages")
            messages = range_batch(index, body, topics, self.broker.limits.max_message_bytes)
        except InvalidArgument as error:
            raise Refusal("bad_range", str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise Refusal("bad_range", "the head of a range is JSON: count and topics (numbers and names)") from None
        self.check_publish(words.check_topic(name) for name in batch_names(messages))
        return messages, timed

    def commit(self, transaction: str, *parts: str) -> Work:
        """COMMIT <transaction> [part ...] [staged=]: publish what was staged (so many at least), once per id."""
        name = self.own(transaction, "transaction")
        told = [part for part in parts if part.startswith("staged=")]
        count = words.number(told[-1].removeprefix("staged="), "staged") if told else 1
        parts = tuple(part for part in parts if part not in told)
        wholes = (transaction + part if part.startswith(".") else part for part in parts)
        # a part that is named twice counts once
        owned = [self.own(part, "transaction") for part in dict.fromkeys(wholes)]
        staged = self.broker.transactions.pieces(owned or [name], all_there=False)
        # the transaction may be gone
        self.check_publish({topic for piece in staged for topic in batch_names(piece.batch) if topic})
        owner = self.rights.owner
        first, last, again = yield from self.broker.commit_transaction(owner, name, owned, count)
        return b"COMMITTED %d-%d%s\n" % (first, last, b" again" if again else b"")

    def abort(self, transaction: str) -> Answer:
        """ABORT <transaction>: forget what was staged."""
        self.broker.transactions.abort(self.own(transaction, "transaction"))
        return OK

    # --- consuming

    def _has_no_consumer(self, name: str) -> Generator[str, None, bool]:
        """Whether an exclusive queue has no consumer. A consumer that has vanished is detected and dropped."""
        while (queue := self.broker.queues.get(name)) is not None and queue.consumers:
            if not (queue.raw or queue.options.exclusive):
                return True
            there = self.host.evict_lost(queue)
            if there:
                return False
            if there is None:
                yield WAIT
        return True

    def raw_sub(self, name: str) -> Work:
        """SUB of the compatible mode: one queue a connection, one connection a queue."""
        if self.subscriptions:
            raise Disconnect("a second SUB on this connection")
        name = words.compatible_queue(name)
        if not (yield from self._has_no_consumer(name)):
            raise Disconnect("the queue already has a client")
        queue = self.broker.queue(name, QueueOptions())
        if queue.consumers:
            raise Disconnect("the queue already has a client")
        queue.raw = True
        self._subscribe(queue, RAW_CREDIT, automatic=True, raw=True)
        return None

    def sub(self, name: str, *rest: str) -> Work:
        """SUB <queue> [options]: consume a queue; created if it does not exist and topics are given."""
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "credit": int, "ack": str})
        self.check_queue(name)
        if name in self.subscriptions:
            raise Refusal("exists", f"this connection consumes {name} already")
        if len(self.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise Refusal("limit", f"a connection consumes at most {MAX_SUBSCRIPTIONS} queues")
        credit = max(1, min(int(options.get("credit", 256)), self.max_unacknowledged))
        if options.get("ack", "") not in ("", "none"):
            raise Refusal("bad_option", "ack is none, or left out")
        found = self.broker.queues.get(name)
        if found is not None and not self.may_read(found):
            raise Refusal("denied", f"queue {name} has topics that are not yours to read")
        free = yield from self._has_no_consumer(name)
        stores = name not in self.broker.queues or not _START_OPTIONS.keys().isdisjoint(options)
        queue = self._declare(name, options, change=False)
        self._wait_for_disk(stored=stores)
        if not free or (queue.consumers and (queue.raw or queue.options.exclusive)):
            raise Refusal("busy", f"queue {name} has a client and is exclusive")
        self._subscribe(queue, credit, automatic=options.get("ack") == "none", raw=False)
        # A temporary queue is deleted with its connection; this position lets its consumer continue on a new
        # connection.
        begins = self._start(options, queue.options.topics) or self.broker.store.next
        return b"OK begins=%d\n" % begins if queue.options.temporary else OK

    def _subscribe(self, queue: Queue, credit: int, *, automatic: bool, raw: bool) -> None:
        subscription = Subscription(self, queue, self.numbers(), credit, automatic, raw)
        self.subscriptions[queue.name] = subscription
        self.subscribed.append(queue.name)
        queue.add(subscription)
        self.broker.wake(queue)

    def unsub(self, name: str) -> Answer:
        """UNSUB <queue>: consume no more; what was not acknowledged goes back."""
        if name not in self.subscriptions:
            raise Refusal("not_subscribed", f"this connection does not consume {name}")
        self.leave(name)
        return OK

    def credit(self, name: str, count: str) -> Answer:
        """CREDIT <queue> <count>: how many unacknowledged messages this consumer takes. Not answered."""
        number = min(words.number(count, "credit"), self.max_unacknowledged)
        subscription = self.subscriptions.get(name)
        if subscription is not None:
            subscription.credit = number
            self.broker.wake(subscription.queue)
        return None

    def ack(self, name: str, *spans: str) -> Answer:
        """ACK <queue> <position>[-<position>] ... [confirm]: these are done. Answered only with confirm.

        What is not held counts as done before: a queue that this connection consumes no more holds nothing of it.
        """
        confirm = spans[-1] == "confirm"
        done = [words.span(text) for text in (spans[:-1] if confirm else spans)]
        subscription = self.subscriptions.get(name)
        count = 0
        if subscription is not None:
            count = sum(self.broker.acknowledge(subscription.queue, subscription, *span) for span in done)
        if not confirm:
            return None
        self.confirms = True
        return b"OK %d\n" % count

    def nack(self, name: str, position: str, *rest: str) -> Answer:
        """NACK <queue> <position> [delay_ms=]: deliver it again. Not answered."""
        options = words.split_options(rest, {"delay_ms": int})
        number = words.number(position, "position")
        due_ns = time.time_ns() + int(options.get("delay_ms", 0)) * 1_000_000
        subscription = self.subscriptions.get(name)
        if subscription is not None and subscription.queue.state.return_message(subscription.number, number, due_ns):
            subscription.queue.heard(subscription, number, number)
            self.broker.wake(subscription.queue)
        return None

    # --- managing queues

    def queue(self, name: str, *rest: str) -> Work:
        """QUEUE <queue> [options] [create] [drop_waiting]: make a queue, or give it other options (with create: only
        make it; with drop_waiting: also where messages wait of topics that it would no longer have)."""
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "create": int, "drop_waiting": int})
        self.check_queue(name)
        change = "create" not in options
        lost = 0
        if change and "topics" in options:
            lost = yield from self._count_lost(name, options)
        queue = self._declare(name, options, change=change, move=change)
        if lost:
            queue.drop(lost)
        return OK

    def _count_lost(self, name: str, given: dict[str, Any]) -> Generator[str, None, int]:
        """How many waiting messages the queue would drop with its new topics. Refused unless the client allowed it."""
        queue = self.broker.queues.get(name)
        if queue is None or not (self.rights.manage and self.may_read(queue)):
            return 0  # ``_declare`` raises the reason
        wanted = self._options(given, queue.options).topics
        self.check_patterns([pattern for pattern in wanted if pattern not in queue.options.topics])
        try:
            lost = yield from queue.losing(wanted)
        except (PenstockError, OSError) as error:
            if given.get("drop_waiting"):
                return 0
            raise Refusal("unavailable", f"what waits in queue {name} cannot be counted: {error}") from None
        finally:
            self.broker.wake(queue)
        if lost and not given.get("drop_waiting"):
            raise Refusal(
                "waiting",
                f"queue {name} would drop {lost} waiting message{'s' * (lost > 1)} of topics that it would no longer "
                "have: keep these topics, consume or purge them first, or say drop_waiting (--drop-waiting)",
            )
        return lost

    def _declare(self, name: str, given: dict[str, Any], *, change: bool, move: bool = True) -> Queue:
        """``change``: an existing queue gets these options; ``move``: and the start position, if one is given."""
        found = self.broker.queues.get(name)
        old = found.options if found else QueueOptions()
        wanted = self._options(given, old)
        if found is None or change or wanted != old:
            self._check_dead_letters(name, wanted, old)
        if found is None:
            if "topics" not in given and not wanted.temporary:  # so that a misspelt name creates no queue
                known = [queue for queue in self.broker.queues if self.rights.may_use(queue)]
                raise Refusal(
                    "unknown_queue",
                    f"there is no queue {name} ({nearest(name, known)}); a new one needs its topics: "
                    f"broker://HOST:PORT/TOPIC?queue={name}, topics= or --topic",
                )
            self.check_patterns(wanted.topics)
            made = self.broker.queue(name, wanted, start=self._start(given, wanted.topics))
            dead_letters.bind(self.broker, made)
            return made
        if wanted != old:
            if not change:
                text = f"queue {name} is there with {differences(old, wanted)}"
                raise Refusal("exists", f"{text}; QUEUE (penstock queue set) changes it")
            if not self.rights.manage:
                raise Refusal(
                    "denied",
                    f"queue {name} is there with {differences(old, wanted)}; changing it needs the right manage",
                )
            if not self.may_read(found):
                raise Refusal("denied", f"queue {name} has topics that are not yours to read")
            self.check_patterns([pattern for pattern in wanted.topics if pattern not in old.topics])
            self.broker.rebind(found, wanted)
        if change:
            dead_letters.bind(self.broker, found)
        start = self._start(given, wanted.topics) if move else None
        # for an existing one the start position does not apply
        if start is not None and not (found.options.temporary and not change):
            self.need_manage()
            self.broker.seek(found, start)
        return found

    def _check_dead_letters(self, name: str, wanted: QueueOptions, old: QueueOptions) -> None:
        """Check the rights now: the broker uses these names later, when no client is there to be refused. Dead letters
        go to the queue that is named, and to those that an earlier queue of this name has bound to them. Whoever adds
        messages to a queue of other topics, and a topic to that queue, needs both rights.
        """
        if wanted.dead_letter:
            self.check_queue(wanted.dead_letter)
            if wanted.dead_letter == name:
                raise Refusal("bad_option", f"queue {name} cannot be its own queue of dead letters")
        elif not wanted.max_tries:
            return
        if len(name.encode()) > MAX_DEAD_LETTER_NAME_BYTES:
            raise Refusal(
                "bad_name", f"a queue with max_tries has a name of at most {MAX_DEAD_LETTER_NAME_BYTES} bytes"
            )
        target = wanted.dead_letter or f"{name}.dead"
        if wanted.max_tries:
            self._check_no_ring(name, target)
        topic = dead_letters.PREFIX + name
        bound = [queue.name for queue in self.broker.queues.values() if topic in queue.options.topics]
        for found in dict.fromkeys((target, *bound)):
            there = self.broker.queues.get(found)
            if there is not None and not (found in bound and old.max_tries):  # otherwise nothing changes
                self._check_target(found, there.options.topics, topic)

    def _check_target(self, target: str, topics: Sequence[str], letters: str) -> None:
        """Refuse a target that may not be given these dead letters."""
        own = [topic for topic in topics if not topic.startswith("$")]
        if letters in topics and not own:
            return
        self.check_queue(target)
        if not (self.rights.manage and all(self.rights.may_publish_all(topic) for topic in own)):
            raise Refusal(
                "denied",
                f"dead letters would go to queue {target}, which is bound to other topics: "
                "this needs the right manage, and to publish to these",
            )

    def _check_no_ring(self, name: str, target: str) -> None:
        """Refuse a ring of dead-letter queues: its messages would go round for ever."""
        seen = {name}
        while (queue := self.broker.queues.get(target)) is not None and queue.options.max_tries:
            seen.add(target)
            target = queue.options.dead_letter or f"{target}.dead"
            if target in seen:
                raise Refusal("bad_option", f"dead letters of queue {name} would come back to queue {target}")

    @staticmethod
    def _options(given: dict[str, Any], old: QueueOptions) -> QueueOptions:
        changes: dict[str, Any] = {}
        if "topics" in given:
            changes["topics"] = tuple(str(given["topics"]).split(","))
        if "ack_timeout_ms" in given:
            changes["ack_timeout_s"] = given["ack_timeout_ms"] / 1e3
        if "ttl_ms" in given:
            changes["ttl_s"] = given["ttl_ms"] / 1e3
        for key, field in (("max_deliveries", "max_tries"), ("max_tries", "max_tries"), ("dead_letter", "dead_letter")):
            if key in given:  # max_deliveries: the word of clients of version 1
                changes[field] = given[key]
        for key in ("exclusive", "temporary"):
            if key in given:
                changes[key] = bool(given[key])
        return replace(old, **changes)

    def _start(self, given: dict[str, Any], topics: tuple[str, ...]) -> int | None:
        """The start position that the client asks for, if any."""
        if len(_START_OPTIONS.keys() & given.keys()) > 1:
            raise Refusal("bad_option", "a queue begins in one place: from_position=, from_ordinal= or from_time_ns=")
        if "from_position" in given:
            return int(given["from_position"])
        if "from_time_ns" in given:
            return self.broker.store.find(timestamp_ns=int(given["from_time_ns"]))
        if "from_ordinal" in given:
            if len(topics) != 1 or "*" in topics[0] or ">" in topics[0]:
                raise Refusal("bad_option", "from_ordinal needs a queue of one topic without wildcards")
            return self.broker.store.find(ordinal=int(given["from_ordinal"]), topic=topics[0])
        return None

    def seek(self, name: str, *rest: str) -> Answer:
        """SEEK <queue> from_position=|from_ordinal=|from_time_ns=: deliver from there on."""
        queue = self.managed(name)
        start = self._start(words.split_options(rest, _START_OPTIONS), queue.options.topics)
        self.broker.seek(queue, start or 1)
        return OK

    def purge(self, name: str) -> Work:
        """PURGE <queue>: drop its messages."""
        queue = self.managed(name)
        yield from queue.counting(1 << 62)
        return b"OK %d\n" % self.broker.purge(self.managed(name))

    def pause(self, name: str) -> Answer:
        """PAUSE <queue>: deliver nothing, also after a restart, until RESUME."""
        return self._set_paused(name, True)

    def resume(self, name: str) -> Answer:
        """RESUME <queue>: deliver again."""
        return self._set_paused(name, False)

    def _set_paused(self, name: str, paused: bool) -> Answer:
        queue = self.managed(name)
        self.broker.rebind(queue, queue.with_options(paused=paused))
        return OK

    def delete(self, name: str) -> Answer:
        """DELETE <queue>: forget it; refused while it has consumers."""
        queue = self.managed(name)
        if queue.consumers:
            raise Refusal("busy", f"queue {name} has {len(queue.consumers)} consumer(s)")
        self.broker.delete(queue)
        return OK

    def redrive(self, name: str) -> Work:
        """REDRIVE <queue>: send its dead letters back to it."""
        count = yield from dead_letters.redrive(self.broker, self.managed(name))
        return b"OK %d\n" % count

    # --- looking

    def list_queues(self, *_: str) -> Work:
        """LIST: the queues, as JSON."""
        self.need_statistics()
        found: list[str] = []
        for queue in list(self.broker.queues.values()):
            if self.rights.may_use(queue.name):
                yield from queue.counting()
                found.append(json.dumps(queue.summary()))
                if not len(found) % LIST_STEP:
                    yield BUSY
        return _data_text(f"[{', '.join(found)}]")

    def stats(self, *_: str) -> Answer:
        """STATS: counts of the broker, as JSON."""
        self.need_statistics()
        return _data(self.host.statistics())

    def peers(self, name: str) -> Answer:
        """PEERS <topic>: how many queues are bound to it and how many consumers these have."""
        if not (self.rights.may_publish(words.check_topic(name)) or self.rights.may_subscribe(name)):
            raise Refusal("denied", f"the topic is neither yours to publish to nor to read: {name}")
        queues = self.broker.queues_of(name)
        return b"PEERS %d %d\n" % (len(queues), sum(len(queue.consumers) for queue in queues))

    def schema(self, name: str, *rest: str) -> Answer:
        """SCHEMA <topic> [all|<version> <base64>]: the schema of its messages; with a text, set a new one. The version
        is the one that the text will get: if two clients change it at a time, the second is refused. With a pattern in
        place of the topic: the newest text of each topic that it matches and the client may read, and all versions of
        those that have several.
        """
        known = self.broker.schemas
        if not rest and is_pattern(name):
            found = [topic for topic in known.topics if matches(name, topic) and self.rights.may_subscribe(topic)]
            changed = {topic: known.joined(topic) for topic in found if len(known.versions(topic)) > 1}
            return _data({"topics": {topic: known.newest(topic)[1] for topic in found}, "versions": changed})
        version, text = known.newest(words.check_topic(name))
        if not rest or rest == ("all",):
            if not (self.rights.may_publish(name) or self.rights.may_subscribe(name)):
                raise Refusal("denied", f"the topic is neither yours to publish to nor to read: {name}")
            texts = list(known.versions(name).values())
            every = {"versions": texts} if rest else {}
            return _data({"version": version, "schema": text, "digests": [digest_of(one) for one in texts], **every})
        if len(rest) != 2:
            raise Refusal("bad_request", "expected SCHEMA <topic> [all|<version> <base64>]")
        self.check_publish([name])
        given = _schema_text(rest[1])
        if given != text:
            if words.number(rest[0], "version") != version + 1:
                raise Refusal("exists", f"topic {name} has version {version} of its schema")
            self.broker.check_topics([name])
            self.broker.declare_schema(name, given)
        return OK

    def fetch(self, first: str, most: str, *rest: str) -> Work:
        """FETCH <first> <most> [bytes=] [topics=|queue=] [stored]: messages by position, index first, in bulk."""
        options = words.split_options(rest, {"bytes": int, "topics": str, "queue": str, "stored": int})
        of_queue = "queue" in options
        if of_queue:
            patterns = self._topics_of(str(options["queue"]), options)
        else:
            patterns = str(options["topics"]).split(",") if "topics" in options else [">"]
            self.check_patterns(patterns)
        most_bytes = min(int(options.get("bytes", 4 << 20)), 16 << 20)
        start, count = words.number(first, "position"), min(words.number(most, "most"), MAX_FETCH_MESSAGES)
        while self.confirms:  # wait for the commit, so that the answer includes what this connection has published
            yield BUSY if self.broker.large is None else WAIT
        found: list[Batch] = []
        count, left_bytes = max(1, count), most_bytes
        while True:
            batch, start, _ = self.broker.store.read(start, min(count, FETCH_STEP), left_bytes, tuple(patterns))
            found.append(batch)
            count -= len(batch)
            left_bytes -= batch.total_bytes
            if len(batch) < FETCH_STEP or count <= 0 or left_bytes <= 0:
                break
            yield BUSY
        whole = joined(found) if len(found) > 1 else found[0]
        stored = bool(options.get("stored"))
        return lambda: self._put_range(whole, start, own=of_queue, stored=stored)

    def _topics_of(self, name: str, options: dict[str, Any]) -> list[str]:
        """The topics of a queue, dead letters included, if this connection may read it."""
        if "topics" in options:
            raise Refusal("bad_option", "FETCH has topics= or queue=, not both")
        self.check_queue(name)
        queue = self.broker.queue(name)
        if not self.may_read(queue):
            raise Refusal("denied", f"queue {name} has topics that are not yours to read")
        return list(queue.patterns)

    def _put_range(self, found: Batch, following: int, *, own: bool, stored: bool) -> None:
        batch, topics = public_part(found, own)  # wildcards do not match the broker's internal topics
        # read after the messages, so that ``first`` accounts for any retention the read has seen
        statistics = self.broker.store.statistics()
        index, size = fetch_index(batch)
        head: dict[str, Any] = {
            "count": len(batch),
            "next": following,
            "first": statistics.first,
            "frontier": statistics.next,
            "journal": self.broker.store.identity,
            "topics": {str(number): name for number, name in topics.items() if name},
        }
        if stored:
            head["stored"] = True
            index += bytes(batch.stored_ns)
        text = json.dumps(head).encode() + b"\n"
        self.outbox.text(b"DATA %d\n%s" % (len(text) + len(index) + size, text))
        self.outbox.lent(index)
        self.outbox.payloads(batch)
        self.outbox.text(b"\n")


def _times(batch: Batch, timed: bool) -> dict[str, Any]:
    """Take the publishers' times. The time of storing, which decides about expiry and retention, is always the
    broker's.
    """
    return {"timestamps_ns": batch.timestamps_ns} if timed else {}


def differences(old: QueueOptions, wanted: QueueOptions) -> str:
    """The options of a queue that differ from those asked for, as text."""
    before, after = old.dump(), wanted.dump()
    return ", ".join(
        f"{key}={_word(before[key])}, not {_word(after[key])}" for key in before if before[key] != after[key]
    )


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else f"{value}"


def _schema_text(encoded: str) -> str:
    try:
        return Schema.parse(base64.b64decode(encoded, validate=True).decode()).text
    except (ValueError, PenstockError) as error:
        raise Refusal("bad_request", f"the description of the messages cannot be read: {error}") from None


def _data(value: Any) -> bytes:
    return _data_text(json.dumps(value))


def _data_text(text: str) -> bytes:
    data = text.encode()
    return b"DATA %d\n%s\n" % (len(data), data)


_DATA_VERBS: dict[str, Callable[[Protocol, str, Any], Answer | Work]] = {
    "PUB": Protocol.pub,
    "STAGE": Protocol.stage,
    "LOAD": Protocol.load,
}

VERBS = {
    "HELLO": Verb(Protocol.hello_, "HELLO <version> [options]", 0, None),
    "COMMIT": Verb(Protocol.commit, "COMMIT <transaction> [part ...] [staged=]", 1, None, stores=True),
    "ABORT": Verb(Protocol.abort, "ABORT <transaction>", 1, 1),
    "SUB": Verb(Protocol.sub, "SUB <queue> [options]", 1, None),
    "UNSUB": Verb(Protocol.unsub, "UNSUB <queue>", 1, 1),
    "CREDIT": Verb(Protocol.credit, "CREDIT <queue> <count>", 2, 2, answered=False),
    "ACK": Verb(Protocol.ack, "ACK <queue> <position>[-<position>] ... [confirm]", 2, None, answered=False),
    "NACK": Verb(Protocol.nack, "NACK <queue> <position> [delay_ms=]", 2, None, answered=False),
    "QUEUE": Verb(Protocol.queue, "QUEUE <queue> [options]", 1, None, stores=True),
    "SEEK": Verb(Protocol.seek, "SEEK <queue> from_position=|from_ordinal=|from_time_ns=", 2, None, stores=True),
    "PURGE": Verb(Protocol.purge, "PURGE <queue>", 1, 1, stores=True),
    "PAUSE": Verb(Protocol.pause, "PAUSE <queue>", 1, 1, stores=True),
    "RESUME": Verb(Protocol.resume, "RESUME <queue>", 1, 1, stores=True),
    "DELETE": Verb(Protocol.delete, "DELETE <queue>", 1, 1, stores=True),
    "REDRIVE": Verb(Protocol.redrive, "REDRIVE <queue>", 1, 1, stores=True),
    "LIST": Verb(Protocol.list_queues, "LIST", 0, None, asks=True),
    "STATS": Verb(Protocol.stats, "STATS", 0, None, asks=True),
    "PEERS": Verb(Protocol.peers, "PEERS <topic>", 1, 1, asks=True),
    "SCHEMA": Verb(Protocol.schema, "SCHEMA <topic> [all|<version> <base64>]", 1, 3, stores=True),
    "FETCH": Verb(Protocol.fetch, "FETCH <first> <most> [bytes=] [topics=|queue=] [stored]", 2, None, asks=True),
    "PING": Verb(Protocol.ping, "PING", 0, None, asks=True),
    "BYE": Verb(Protocol.bye, "BYE [unread]", 0, None),
    "SHUTDOWN": Verb(Protocol.shutdown, "SHUTDOWN", 0, None),
}
