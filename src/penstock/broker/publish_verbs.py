"""The verbs that publish: PUB, STAGE, LOAD, COMMIT, ABORT. The loop thread only."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from penstock._core.broker import batch_names, gather, range_batch
from penstock.broker import words
from penstock.broker.ranges import ENTRY, topic_names, whole
from penstock.broker.session import Session, need
from penstock.broker.words import Disconnect, Refusal
from penstock.errors import InvalidArgument
from penstock.journal.layout import encode_properties

if TYPE_CHECKING:
    from penstock._core import Batch

_OPTIONS = {"id": str, "ttl_ms": int, "delay_ms": int, "at_ns": int}


class PublishVerbs(Session):
    """Publishing."""

    def topic(self, name: str) -> None:
        """A topic that this connection publishes to for the first time."""
        try:
            words.check_topic(name)
        except Refusal as refusal:
            raise Disconnect(refusal.text) from None
        try:
            self._check_publish((name,))
            self.broker.check_topics((name,))
        except Refusal:  # told with each message to it, by ``refused``
            self.scanner.refuse(name)
        else:
            self.scanner.allow(name)

    def refused(self, code: str, line: str) -> None:
        """A message that the scanner passed over: it is too large, or its topic was refused before."""
        try:
            if code == "too_large":
                raise Refusal(code, f"the message is too large: {line[:200]}")
            verb, *names = line.split()
            name = names[0] if verb == "PUB" else names[1]
            self._check_publish((name,))
            self.broker.check_topics((name,))
            self.scanner.forget_topics()  # it is allowed by now: the next one goes through
            raise Refusal("unavailable", f"the topic is allowed by now; publish again: {name}")
        except Refusal as refusal:
            self.refuse_publishes(1, refusal)

    def pub(self, options: str, batch: Batch) -> None:
        """PUB <topic> <lengths> [options]: publish."""
        count = len(batch)
        try:
            if self.host.draining:
                raise Refusal("unavailable", "the broker is ending")
            if self.hello:  # a raw client is not read from at the quota instead: it understands no refusal
                self.broker.check_room(batch.total_bytes)
            if options:
                self.pub_with(options, batch)
                return
            positions = self.broker.publish(batch)
        except Refusal as refusal:
            if not self.hello:
                raise Disconnect(refusal.text) from None
            self.refuse_publishes(count, refusal)
            return
        if self.hello:
            self.confirm(positions)
            if self.producer:
                self.broker.produced(self.producer, count)
        else:
            self.confirms = True  # nothing is told, but a commit that fails closes the connection
            self.touched()

    def refuse_publishes(self, count: int, refusal: Refusal) -> None:
        """Tell each; a producer that numbers its messages is cut off, so that what is stored is always a first part."""
        for _ in range(1 if self.producer else count):
            self.reply(words.error_line(refusal.code, refusal.text))
        if self.producer:
            raise Disconnect

    def pub_with(self, text: str, batch: Batch) -> None:
        """Messages with options: an id, a time to live, a delay."""
        options = words.split_options(text.split(), _OPTIONS)
        now_ns = time.time_ns()
        more: dict[str, str] = {}
        if options.get("ttl_ms"):
            more["$expires_ns"] = str(now_ns + int(options["ttl_ms"]) * 1_000_000)
        due_ns = int(options.get("at_ns", 0)) or (
            now_ns + int(options["delay_ms"]) * 1_000_000 if options.get("delay_ms") else 0
        )
        identifier = str(options.get("id", ""))
        if identifier:
            words.check_name(identifier, "message id")
        if due_ns:
            self.broker.delayed.check_room(len(batch))
        repeats = len(batch) if identifier else 1  # a row with one id is one message, sent again
        batch = gather([batch[0]]) if repeats > 1 else batch
        names = batch_names(batch)
        for message in batch if due_ns else (None,):
            one = batch if message is None else gather([message])
            if due_ns and message is not None:
                topic = message.channel or names[0]
                found = self.broker.delayed.add(one, topic, due_ns, more, identifier)
            else:
                found = self.broker.publish_as(one, identifier, more=encode_properties(more))
            for _ in range(repeats):
                self.confirm(found)
            if self.producer:
                self.broker.produced(self.producer, len(found) * repeats)

    def stage(self, transaction: str, batch: Batch) -> None:
        """STAGE <transaction> <topic> <lengths>: keep a message until COMMIT."""
        count = len(batch)
        try:
            self.broker.transactions.stage(self._own(transaction, "transaction"), batch)
        except Refusal as refusal:
            for _ in range(count):
                self.reply(words.error_line(refusal.code, refusal.text))
            return
        self.reply(b"STAGED %d\n" % count)

    def load(self, transaction: str, batch: Batch) -> None:
        """LOAD <transaction> <length>: keep a range of messages, as FETCH gives it, until COMMIT."""
        name = self._own(transaction, "transaction")
        messages = self._range(bytes(batch[0]))
        self.loaded += len(messages) - 1
        self.broker.transactions.stage(name, messages)
        self.reply(b"STAGED %d\n" % len(messages))

    def _range(self, data: bytes) -> Batch:
        text, newline, _ = data.partition(b"\n")
        try:
            head = json.loads(text)
            count, topics = whole(head["count"]), topic_names(head)
            end = len(text) + len(newline) + count * ENTRY.size
            view = memoryview(data)
            index, body = view[len(text) + len(newline) : end], view[end:]
            if not 0 < count <= len(data) // ENTRY.size or len(index) != count * ENTRY.size:
                raise Refusal("bad_range", f"{len(data)} bytes are no range of {count} messages")
            messages = range_batch(index, body, topics, self.broker.limits.max_message_bytes)
        except InvalidArgument as error:
            raise Refusal("bad_range", str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise Refusal("bad_range", "the head of a range is JSON: count and topics (numbers and names)") from None
        self._check_publish(words.check_topic(name) for name in batch_names(messages))
        return messages

    def commit(self, arguments: list[str]) -> None:
        """COMMIT <transaction> [part ...]: publish what was staged, once per id."""
        transaction, *parts = need(arguments, 1, "COMMIT <transaction> [part ...]")
        name = self._own(transaction, "transaction")
        wholes = (transaction + part if part.startswith(".") else part for part in parts)
        owned = [self._own(part, "transaction") for part in dict.fromkeys(wholes)]  # one named twice is one
        staged = self.broker.transactions.batches(owned or [name], all_there=False)
        self._check_publish({topic for batch in staged for topic in batch_names(batch) if topic})  # it may be gone
        first, last, again = self.broker.commit_transaction(name, owned)
        self.confirms = True
        self.reply(b"COMMITTED %d-%d%s\n" % (first, last, b" again" if again else b""))

    def abort(self, arguments: list[str]) -> None:
        """ABORT <transaction>: forget what was staged."""
        (transaction,) = need(arguments, 1, "ABORT <transaction>", most=1)
        self.broker.transactions.abort(self._own(transaction, "transaction"))
        self.reply(b"OK\n")
