"""Broker: topics, queues, duplicates, delays and transactions over a store. No sockets here; the loop thread only.

A turn of the loop: messages are staged and state is changed; ``commit`` makes all of it durable in one step; the
answers that waited for it are sent; then ``pump`` delivers the messages that have become visible. State that needs no
confirmation (acknowledgements, deliveries) is stored with the next commit, at the latest ``LAZY_S`` later. If a commit
fails, everything that no client was told of is undone, back to the state before the turn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock._core import Counters
from penstock._core.broker import batch_bytes, batch_names, message_ids
from penstock.broker import dead_letters, delayed, words
from penstock.broker.identifiers import Duplicate, Identifier, Identifiers
from penstock.broker.limits import Limits
from penstock.broker.producers import Producer
from penstock.broker.queue import UNREADABLE_NS, WAIT, Consumer, Queue, QueueOptions
from penstock.broker.records import (
    KIND_ACCOUNT,
    KIND_CHANGE,
    KIND_DELAYED,
    KIND_DELETE,
    KIND_PRODUCER,
    KIND_QUEUE,
    KIND_SCHEMA,
    KIND_TRANSACTION,
    KINDS,
    named,
    unnamed,
)
from penstock.broker.transactions import LargeCommit, Transactions
from penstock.broker.words import Refusal
from penstock.errors import CorruptionError, PenstockError
from penstock.journal.schemas import Schemas
from penstock.topics import MAX_NAME_BYTES, check_pattern

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock.broker.store import Store

logger = logging.getLogger("penstock.broker")
Snapshot = Callable[[], Iterator[tuple[int, bytes]]]
LAZY_S = 0.05
MESSAGE_BYTES = 128  # overhead of a stored message
# most of a transaction that is stored in one turn; a larger one is committed in parts
PART_BYTES, PART_S = 1 << 20, 0.003
# the broker's own copies may exceed the quota by an eighth of it, or by 4 MiB if that is more
OWN_PART, OWN_BYTES = 8, 4 << 20
OBSERVE_MESSAGES = 65_536  # most messages that one call of ``observing`` examines
BY_TOPIC_SIZE = 1_000_000  # most entries (topics and their queues) of the routing cache
OBSERVE_QUEUE = 256  # the cost of examining a queue, as a number of messages


class Broker:
    """The broker without its sockets."""

    def __init__(self, make_store: Callable[[Snapshot], Store], limits: Limits, name: str = "") -> None:
        self.limits = limits
        self.transactions = Transactions(limits)
        self.expired = 0  # delayed messages that retention freed before they were due
        self.changes = 0  # counts changes of shared state; incremented before each change
        self.commits = 0
        self.large: LargeCommit | None = None  # a transaction that is being committed in parts
        self.wants_room = False  # a publish was refused because there was no room
        self.tripped = ""  # the queue whose dead letters caused an unexpected error
        self.trusting = True  # there are no tokens, so anybody may name any queue as dead-letter queue
        self.counters = Counters("broker", "broker", name or f"{uuid.uuid4()}")
        self._make_store = make_store
        self._observed = 0  # the queue at which the next ``observing`` begins
        self._open()
        self.trim()

    def _open(self) -> None:
        """Open the store and load all state from it."""
        self.queues: dict[str, Queue] = {}
        self.producers: OrderedDict[str, Producer] = OrderedDict()
        self.transactions.committed.clear()
        self.schemas = Schemas()  # the schemas of each topic's messages
        self.identifiers = Identifiers(self.limits)
        # by position, the accounts of messages with an id; read from the log at opening
        self._accounts: dict[int, str] = {}
        self._new_accounts: dict[str, list[int]] = {}  # for the next commit
        self.staged_bytes = 0  # for the next commit
        self._by_topic: dict[str, list[Queue]] = {}
        self._by_topic_size = 0
        self._ready: dict[Queue, None] = {}  # queues to be pumped, in this order
        self._timed: set[Queue] = set()  # queues with messages that will be due for redelivery
        self._stuck: dict[Queue, int] = {}  # queues whose next message cannot be read, and when to try again
        self._stored_bytes = 0
        self._moved: set[Queue] = set()  # queues whose state has to be recorded
        self._changed_producers: dict[str, Producer | None] = {}  # with their values before the change
        self._records: list[tuple[int, bytes]] = []  # kept until they are on disk
        self._undo: list[Callable[[], None]] = []  # called if the commit fails
        self._published: set[str] = set()
        self._first_staged = 0
        self._dirty = False
        self._dirty_since = 0.0
        self._pumped_ns = 0
        self.store = self._make_store(self.snapshot)
        try:
            self.delayed = delayed.Delayed(self)
            self._recover()
        except BaseException:
            self.store.close()
            raise

    def reopen(self) -> None:
        """Forget everything that is not on disk and load the state from the log again.

        The caller attaches the consumers again; the messages that they held are redelivered. What transactions have
        staged is kept.
        """
        for queue in self.queues.values():
            queue.counters.close()
        self._give_up_large()
        self.store.close()
        self._open()
        if self.tripped in self.queues:
            self._stuck[self.queues[self.tripped]] = time.time_ns() + UNREADABLE_NS
        self.tripped = ""

    # --- state: what is recorded, and how it comes back

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """The whole state, as records."""
        for queue in list(self.queues.values()):
            if not queue.options.temporary:
                yield KIND_QUEUE, self._queue_record(queue)
                yield KIND_CHANGE, named(queue.name, queue.state.snapshot())
        for name, producer in self.producers.items():
            yield KIND_PRODUCER, named(name, producer.encode())
        for name, (first, last) in self.transactions.committed.items():
            yield KIND_TRANSACTION, named(name, struct.pack("<QQ", first, last))
        accounts: dict[str, list[int]] = {}
        for account, position in self.identifiers.accounts():
            accounts.setdefault(account, []).append(position)
        for account, positions in accounts.items():
            yield KIND_ACCOUNT, named(account, struct.pack(f"<{len(positions)}Q", *positions))
        for record in self.schemas.records():
            yield KIND_SCHEMA, record
        yield KIND_DELAYED, self.delayed.state.snapshot()

    @staticmethod
    def _queue_record(queue: Queue) -> bytes:
        return json.dumps({"name": queue.name, "start": queue.start, "options": queue.options.record()}).encode()

    def _recover(self) -> None:
        for kind, data in self.store.records():
            self._apply(kind, data)
        for queue in self.queues.values():
            queue.state.recovered()
        self.delayed.state.recovered()
        try:
            self.delayed.read()
        except CorruptionError as error:
            self.store.close()
            raise CorruptionError(f"{error}; {getattr(self.store, 'mended_by', '')}", error.place) from None
        self._read_identifiers()

    def _apply(self, kind: int, data: bytes) -> None:
        if kind == KIND_QUEUE:
            fields = json.loads(data)
            self._apply_queue(fields["name"], QueueOptions.load(fields["options"]), fields["start"])
        elif kind == KIND_DELAYED:
            self.delayed.state.apply(data)
        elif kind == KIND_SCHEMA:
            self.schemas.note(data)
        elif kind in KINDS:
            self._apply_named(kind, *unnamed(data))

    def _apply_queue(self, name: str, options: QueueOptions, start: int) -> None:
        try:
            words.check_queue(name)
            for pattern in options.topics:
                check_pattern(pattern)
        except PenstockError as error:  # an error here would stop the loop for all clients
            logger.warning("queue %r of the log is left out: %s", name, error)
            return
        if name in self.queues:
            self.queues[name].rebind(options)
        else:
            self.queues[name] = Queue(name, options, start, self.store)

    def _apply_named(self, kind: int, name: str, rest: bytes) -> None:
        if kind == KIND_CHANGE and name in self.queues:
            self.queues[name].state.apply(rest)
        elif kind == KIND_DELETE:
            self.queues.pop(name, None)
        elif kind == KIND_PRODUCER:
            self._note_producer(name, (self.producers.get(name) or Producer()).decode(rest))
        elif kind == KIND_TRANSACTION:
            self.transactions.note(name, *struct.unpack("<QQ", rest))
        elif kind == KIND_ACCOUNT:
            self._accounts.update(dict.fromkeys(struct.unpack(f"<{len(rest) // 8}Q", rest), name))

    def _read_identifiers(self) -> None:
        """Read the message ids of the deduplication window from the stored messages."""
        horizon_ns = time.time_ns() - int(self.limits.deduplication_s * 1e9)
        start = self.store.find(timestamp_ns=horizon_ns)
        for message, identifier in self.store.identifiers(start):
            topic = message.channel or words.DEFAULT_TOPIC
            if topic == delayed.TOPIC:
                topic = message.properties.get("$topic", topic)
            position = message.position or 0
            key = Identifier(self._accounts.get(position, ""), topic, identifier)
            if not topic.startswith("$"):  # the broker's own copies keep the id, but are no duplicates
                self.identifiers.note(
                    key, position, (time.time_ns() - (message.stored_ns or message.timestamp_ns)) / 1e9
                )
        self._accounts.clear()

    # --- queues

    def queue(
        self, name: str, options: QueueOptions | None = None, *, start: int | None = None, bounded: bool = True
    ) -> Queue:
        """The queue of that name; created if it does not exist and ``options`` are given."""
        found = self.queues.get(name)
        if found is not None:
            return found
        if options is None:
            raise Refusal("unknown_queue", f"there is no queue {name}")
        if bounded and len(self.queues) >= self.limits.max_queues:
            raise Refusal("limit", f"there are {len(self.queues)} queues, the most allowed")
        self.changes += 1
        # messages freed before it existed do not count as lost
        following = self.store.next if start is None else max(start, self.store.first)
        queue = Queue(words.check_queue(name), options, following, self.store)
        queue.caught_up = start is None and not self._first_staged
        self.queues[name] = queue
        self._forget_by_topic()
        if not options.temporary:
            self._record(KIND_QUEUE, self._queue_record(queue))
        return queue

    def rebind(self, queue: Queue, options: QueueOptions) -> None:
        """Give a queue other options."""
        if options == queue.options:
            return
        self.changes += 1
        moved = options.topics != queue.options.topics
        queue.rebind(options)
        self._forget_by_topic()
        if not options.temporary:
            self._record(KIND_QUEUE, self._queue_record(queue))
        self.wake(queue)
        # all consumers, not only this queue's: a dead-letter queue gives access to the topics of the queues it serves
        if moved:
            for reader in [consumer for other in self.queues.values() for consumer in other.consumers]:
                reader.rebound()

    def sources(self, queue: Queue) -> set[str]:
        """The topics whose messages get into the queue: its own, and for dead letters those of the queues they come
        from.
        """
        found: set[str] = set()
        waiting, seen = [queue.name], {queue.name}
        while waiting:
            origin = self.queues.get(waiting.pop())
            # a deleted queue may have had any topic
            for topic in origin.options.topics if origin is not None else (">",):
                if topic.startswith(dead_letters.PREFIX):
                    name = topic.removeprefix(dead_letters.PREFIX)
                    waiting += {name} - seen
                    seen.add(name)
                else:
                    found.add(topic)
        return found

    def delete(self, queue: Queue) -> None:
        """Forget a queue. Its messages stay in the store."""
        self.changes += 1
        self.queues.pop(queue.name, None)
        self._forget_by_topic()
        queue.counters.close()
        if not queue.options.temporary:
            self._record(KIND_DELETE, named(queue.name, b""))

    def purge(self, queue: Queue) -> int:
        """Drop everything the queue still has; gives how many messages that were."""
        self.changes += 1
        count = queue.backlog(1 << 62) + queue.state.outstanding
        queue.state.reset(self.store.next)
        self._forget_stuck(queue)
        queue.caught_up = True
        queue.recount()
        self.touch(queue)
        return count

    def seek(self, queue: Queue, position: int) -> None:
        """Deliver from ``position`` on, again or for the first time."""
        self.changes += 1
        queue.state.reset(max(1, position, self.store.first))
        self._forget_stuck(queue)
        queue.caught_up = False
        queue.recount()
        self.wake(queue)

    def _forget_by_topic(self) -> None:
        self._by_topic.clear()
        self._by_topic_size = 0

    def _forget_stuck(self, queue: Queue) -> None:
        self._stuck.pop(queue, None)
        queue.clear_stuck()

    def leave(self, queue: Queue, consumer: Consumer, delivered: bool = True) -> None:
        """A consumer has left the queue."""
        self.changes += 1
        queue.remove(consumer, time.time_ns(), delivered)
        self.wake(queue)
        if not queue.consumers:
            queue.raw = False
            if queue.options.temporary:
                self.delete(queue)

    def acknowledge(self, queue: Queue, consumer: Consumer, first: int, last: int, exact: bool = False) -> int:
        """Mark messages that ``consumer`` holds as done."""
        self.changes += 1
        count = queue.state.acknowledge(consumer.number, first, last, exact)
        if count:
            queue.heard(consumer, first, last)
            self.wake(queue)
        return count

    def touch(self, queue: Queue | None = None) -> None:
        """Note that state has changed, which the next commit stores."""
        self.changes += 1
        if queue is not None and not queue.options.temporary:
            self._moved.add(queue)
        if not self._dirty:
            self._dirty, self._dirty_since = True, time.monotonic()

    def wake(self, queue: Queue) -> None:
        """The queue may have messages to deliver, and its state may have changed."""
        self._ready[queue] = None
        self.touch(queue)

    # --- publishing

    def check_room(self, batch: Batch) -> None:
        """Refuse these if the disk quota has no room for them."""
        if not self.has_room(batch):
            raise self._no_room()

    def has_room(self, batch: Batch) -> bool:
        """Whether disk and quota have room for these, besides what is stored and what is staged for the commit."""
        return self._fits(batch_bytes(batch) + MESSAGE_BYTES * len(batch) if self.limits.quota_bytes else 0)

    def check_own_room(self) -> None:
        """Refuse if the broker's own copies (dead letters and the like) have used up their share beyond the quota."""
        quota = self.limits.quota_bytes
        if not self._fits(0, max(quota // OWN_PART, OWN_BYTES)):
            raise self._no_room()

    def _fits(self, more_bytes: int, beyond_bytes: int = 0) -> bool:
        quota = self.limits.quota_bytes
        fits = not self.store.full and (not quota or self._stored() + more_bytes <= quota + beyond_bytes)
        self.wants_room = self.wants_room or not fits
        return fits

    def _no_room(self) -> Refusal:
        if self.store.full:
            return Refusal("full", "the broker's disk is full: free space there, or consume or purge queues")
        quota = self.limits.quota_bytes
        return Refusal("full", f"the disk quota of {quota} bytes is reached; consume, purge or raise it")

    def declare_schema(self, topic: str, text: str) -> None:
        """Set the schema of the topic's messages from now on, as one more version."""
        if self.schemas.total_bytes + len(text) > self.limits.max_schema_bytes:
            raise Refusal("limit", f"schemas have {self.limits.max_schema_bytes} bytes together at most")
        self._record(KIND_SCHEMA, self.schemas.add(topic, text, self.store.next_position))

    def check_topics(self, names: Iterable[str]) -> None:
        """Refuse these names if the number of topics would exceed its bound."""
        known, most = self.store.topics, self.limits.max_topics
        new = sum(name not in known for name in names)
        if new and len(known) + new > most:
            raise Refusal(
                "limit", f"there are {len(known)} topics, the most allowed are {most}; use those, or --max-topics"
            )

    def _stored(self) -> int:
        with contextlib.suppress(OSError):  # retention may have removed a file meanwhile: keep the last figure
            self._stored_bytes = self.store.statistics().stored_bytes
        return self._stored_bytes

    def publish(self, batch: Batch, **more: Any) -> Sequence[int]:
        """Stage messages; their positions. They count as published after the next commit."""
        self.changes += 1
        positions = self.store.stage(batch, **more)
        topic = more.get("topic")
        self._published.update((topic,) if topic else batch_names(batch))
        self._first_staged = self._first_staged or positions[0]
        size = batch_bytes(batch)
        self.staged_bytes += size
        self.counters.add("matched", len(batch))
        self.counters.add("bytes", size)
        return positions

    def publish_as(self, batch: Batch, identifier: Identifier, **more: Any) -> Sequence[int]:
        """Stage one message with a message id: it is stored once per deduplication window."""
        found = self.identifiers.find(identifier)
        if found is not None:
            return (Duplicate(found),)
        positions = self.publish(batch, message_id=identifier.id.encode(), **more)
        self.identifiers.note(identifier, positions[0])
        self._note_account(identifier.account, positions[0])
        self.on_failure(lambda: self.identifiers.forget(identifier))
        return positions

    def _note_account(self, account: str, position: int) -> None:
        if account:
            self._new_accounts.setdefault(account, []).append(position)

    def expire(self) -> None:
        """A delayed message was freed before it was due. It was counted as matched when it was stored."""
        self.expired += 1
        self.counters.add("expired")

    def produced(self, name: str, positions: Sequence[int]) -> None:
        """More messages of a numbered producer were staged."""
        before = self.producers.get(name)
        self._changed_producers.setdefault(name, before)
        self._note_producer(name, (before or Producer()).stored(positions))
        self.touch()  # also if nothing was stored: the producer's count must be on disk before it is confirmed

    def _note_producer(self, name: str, producer: Producer) -> None:
        self.producers[name] = producer
        self.producers.move_to_end(name)
        while len(self.producers) > self.limits.max_producers:
            self.producers.popitem(last=False)

    # --- transactions

    def commit_transaction(
        self, account: str, transaction: str, parts: list[str], least: int = 1
    ) -> Generator[str, None, tuple[int, int, bool]]:
        """Publish what was staged under the id (or its parts), in one commit; once per id. (first, last, again).

        Refused if fewer than ``least`` messages are staged: the others were lost by a restart, or dropped as idle.
        """
        while self.large is not None:  # only one large transaction at a time; it may be this very one
            yield WAIT
        names = parts or [transaction]
        done = self.transactions.committed.get(transaction)
        if done is not None:
            self.transactions.take(names)
            return *done, True
        pieces = self.transactions.pieces(names, all_there=True)
        batches = [piece.batch for piece in pieces]
        count = sum(map(len, batches))
        if count < least:  # an incomplete transaction is useless: the client must stage all of it again
            self.transactions.take(names)
            raise Refusal("unknown_transaction", f"{count} of {least} messages are staged; stage all of them again")
        whole_bytes = sum(batch_bytes(batch) + MESSAGE_BYTES * len(batch) for batch in batches)
        if not self._fits(whole_bytes):
            raise self._no_room()
        self.check_topics({name for batch in batches for name in batch_names(batch) if name})
        large = LargeCommit(account, transaction, pieces)
        if whole_bytes <= PART_BYTES:
            self._publish_part(large)
            large.taken = self.transactions.take(names)
            self.on_failure(lambda: self.transactions.put_back(large.taken))
            return large.first, large.last, False
        large.taken = self.transactions.take(names)
        self.transactions.hold(large.taken)
        self.large = large
        while not large.done:
            yield WAIT
        return large.first, large.last, False

    def begin_large(self) -> None:
        """Begin to store the large transaction. Everything else must be on disk, because its segment begins with a
        snapshot of the state.
        """
        assert self.large is not None and not self.dirty
        self.large.begun = True
        self.store.begin_parts()

    def write_part(self) -> None:
        """Store the next part of the large transaction, and what others have staged; the last part is stored by
        ``commit``.
        """
        assert self.large is not None
        self._publish_part(self.large)
        if self.large.left:
            self.staged_bytes = 0
            self.store.write_part()

    def _publish_part(self, large: LargeCommit) -> None:
        size, end = 0, time.monotonic() + PART_S
        while large.left and size < PART_BYTES and (not size or not large.begun or time.monotonic() < end):
            piece = large.left.popleft()
            batch = piece.batch
            positions = self.publish(batch, **({"timestamps_ns": batch.timestamps_ns} if piece.timed else {}))
            self.note_identifiers(large.account, batch, positions)
            large.first, large.last = large.first or positions[0], positions[-1]
            size += batch_bytes(batch) + MESSAGE_BYTES * len(batch)
        if large.left:
            return
        self.transactions.note(large.transaction, large.first, large.last)
        record = (KIND_TRANSACTION, named(large.transaction, struct.pack("<QQ", large.first, large.last)))
        self._record(*record)

        def undo() -> None:
            self.transactions.committed.pop(large.transaction, None)
            self._records.remove(record)

        self.on_failure(undo)

    def _give_up_large(self) -> None:
        """It was not stored: put its messages back among the staged ones."""
        if self.large is not None:
            large, self.large = self.large, None
            self.transactions.let_go(large.taken)
            self.transactions.put_back(large.taken)

    def _end_large(self) -> None:
        if self.large is not None and self.large.begun:
            large, self.large = self.large, None
            self.transactions.let_go(large.taken)
            large.taken.clear()
            large.done = True

    def note_identifiers(self, account: str, batch: Batch, positions: Sequence[int]) -> None:
        """Note the message ids of what a transaction or a range stores. They themselves are not deduplicated; a later
        publish with one of these ids is a duplicate.
        """
        found = message_ids(batch, len(batch), MAX_NAME_BYTES)
        if not found:
            return
        names = batch_names(batch)
        rows = [
            (Identifier(account, batch[number].channel or names[0], identifier), positions[number])
            for number, identifier in found
        ]
        fresh = self.identifiers.note_new(rows)
        where = dict(reversed(rows))
        for key in fresh:
            self._note_account(account, where[key])
        if fresh:
            self.on_failure(lambda: self.identifiers.forget(*fresh))

    # --- the turn of the loop

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Register a function that is called if the next commit fails, to undo a change."""
        self._undo.append(undo)

    def _record(self, kind: int, data: bytes) -> None:
        self._records.append((kind, data))
        self._first_staged = self._first_staged or self.store.next
        self.touch()

    @property
    def staged_anything(self) -> bool:
        """Whether something is staged that must be committed in this turn."""
        return bool(self._first_staged)

    @property
    def busy(self) -> bool:
        """Whether there is work for the next turn already."""
        return bool(self._first_staged or self._ready or self.large is not None)

    def lazy_due(self) -> bool:
        """Whether unconfirmed state has waited so long that it gets a commit of its own."""
        return self._dirty and time.monotonic() - self._dirty_since >= LAZY_S

    @property
    def dirty(self) -> bool:
        """Whether state waits for a commit."""
        return self._dirty

    def commit(self) -> None:
        """Make everything since the last commit durable. OSError: nothing of it is durable, and no client may be told
        that it is.
        """
        self._stage_records()
        first, published = self._first_staged, self._published
        producers, undo = self._changed_producers, self._undo
        self._changed_producers, self._published, self._undo = {}, set(), []
        self._first_staged = self.staged_bytes = 0
        self._moved, self._dirty = set(), False
        try:
            self.store.commit()
        except BaseException:
            self._not_stored(producers, undo)
            raise
        self._records.clear()
        self.commits += 1
        self._end_large()
        if published:
            self.counters.set("last_ns", time.time_ns())
        for topic in published:
            self._notify(topic, first)
        self.counters.set("delivered", self.counters.get("matched") - self.expired)

    def _stage_records(self) -> None:
        for kind, data in self._records:
            self.store.record(kind, data)
        for queue in self._moved:
            if queue.name not in self.queues:
                continue
            if queue.whole:
                self.store.record(KIND_CHANGE, named(queue.name, queue.state.snapshot()))
                queue.state.delta()
                queue.whole = False
            elif queue.state.changed:
                self.store.record(KIND_CHANGE, named(queue.name, queue.state.delta()))
        for name, before in self._changed_producers.items():
            if (producer := self.producers.get(name)) is not None:
                self.store.record(KIND_PRODUCER, named(name, producer.encode(before)))
        for account, positions in self._new_accounts.items():
            self.store.record(KIND_ACCOUNT, named(account, struct.pack(f"<{len(positions)}Q", *positions)))
        self._new_accounts.clear()
        waiting = self.delayed.record()
        if waiting is not None:
            self.store.record(KIND_DELAYED, waiting)

    def _not_stored(self, producers: dict[str, Producer | None], undo: list[Callable[[], None]]) -> None:
        for name, before in producers.items():
            if before is None:
                self.producers.pop(name, None)
            else:
                self.producers[name] = before
        for step in reversed(undo):
            step()
        self.delayed.not_stored()
        for queue in self.queues.values():
            queue.whole = True
            self.wake(queue)
        self.touch()

    def _notify(self, topic: str, first: int) -> None:
        if topic == delayed.TOPIC:
            self.delayed.look(first)
        for queue in self.queues_of(topic):
            queue.affected(first)
            self._ready[queue] = None

    def queues_of(self, topic: str) -> list[Queue]:
        """Queues bound to ``topic``."""
        found = self._by_topic.get(topic)
        if found is None:
            found = [queue for queue in self.queues.values() if queue.wants(topic)]
            self._by_topic_size += 1 + len(found)
            if self._by_topic_size > BY_TOPIC_SIZE:
                self._forget_by_topic()
            self._by_topic[topic] = found
        return found

    @property
    def may_hand_out(self) -> bool:
        """Whether there may be messages to deliver."""
        return bool(self._ready or self._timed or self._stuck)

    def pump(self, now_ns: int, over: Callable[[], bool]) -> list[Queue]:
        """Deliver what can be delivered, until the turn is ``over``; the rest waits for the next turn. Returns the
        queues in which an unexpected error occurred.
        """
        exhausted: list[tuple[Queue, int, int]] = []
        failed: list[Queue] = []
        self._pumped_ns = now_ns
        self._ready.update((queue, None) for queue in self._timed if queue.state.next_time_ns <= now_ns)
        self._ready.update((queue, None) for queue, again_ns in self._stuck.items() if again_ns <= now_ns)
        # Delivering may make queues ready again: those are for the next turn, otherwise this loop might never end.
        ready, self._ready = self._ready, {}
        for queue in ready:
            if queue.name not in self.queues:
                self._timed.discard(queue)
                self._stuck.pop(queue, None)
            elif over():
                self._ready[queue] = None
            else:
                self._pump_one(queue, now_ns, over, exhausted, failed)
        for queue, position, deliveries in exhausted:
            if over():
                self._ready[queue] = None
                break
            try:
                dead_letters.bury(self, queue, position, deliveries, "delivered too often")
            except (PenstockError, OSError) as error:
                queue.postpone(position, error, now_ns)
            except Exception:
                # Remembered, so that after the state was loaded again only this queue is held back, not all deliveries.
                self.tripped = queue.name
                raise
        return failed

    def _pump_one(
        self,
        queue: Queue,
        now_ns: int,
        over: Callable[[], bool],
        exhausted: list[tuple[Queue, int, int]],
        failed: list[Queue],
    ) -> None:
        """Pump one queue. A message that cannot be read, or that causes an unexpected error, stops only its own
        queue.
        """
        if queue.hands_out and self._stuck.get(queue, 0) <= now_ns:
            try:
                if not queue.pump(now_ns, over, exhausted):
                    self._ready[queue] = None
                self._forget_stuck(queue)
            except Exception as error:
                # try again later: the journal may be repaired, or SEEK may skip the message
                self._stuck[queue] = now_ns + UNREADABLE_NS
                queue.mark_stuck(error)
                if not isinstance(error, PenstockError | OSError):
                    logger.exception("queue %s: internal error of the broker", queue.name)
                    failed.append(queue)
        (self._timed.add if queue.hands_out and queue.state.outstanding else self._timed.discard)(queue)
        if queue.state.changed:
            self.touch(queue)

    def observing(self) -> Iterator[None]:
        """Set the counters of queues, which other processes read, in steps of a millisecond or two.

        A long backlog is counted in parts: the next call continues after the queue at which this one stopped.
        """
        names, left = list(self.queues), OBSERVE_MESSAGES
        for number in range(len(names)):
            at = (self._observed + number) % len(names)
            looked = 1
            while looked and left > 0 and (queue := self.queues.get(names[at])) is not None:
                looked = queue.observe()
                left -= looked
                yield
            left -= OBSERVE_QUEUE
            if left <= 0:
                self._observed = at + 1
                return
        self._observed = 0

    def trim(self) -> bool:
        """Let the store free what its retention rules allow, given how far all queues have got; True: call again
        soon.
        """
        end = self.store.next
        self.delayed.look(end)
        for queue in self.queues.values():
            if not self._undo:  # not while changes may still be undone: that may return messages to a queue
                queue.note_caught_up()
            if queue.caught_up:
                queue.state.look_from(end)
        floors = [queue.state.floor for queue in self.queues.values()]
        urgent, self.wants_room = self.wants_room or self.store.full, False
        try:
            return self.store.trim(min([*floors, self.delayed.state.floor]), bool(floors), urgent)
        except (PenstockError, OSError) as error:
            logger.warning("retention could not be applied: %s", error)
            return False

    def next_time_ns(self) -> int:
        """When the next timed event is due."""
        # Messages that were due at the last pump and still are have no consumer with credit. They need no timer: an
        # acknowledgement wakes their queue at once, and an expired ack time-out is noticed a little later.
        times = [queue.state.next_time_ns for queue in self._timed if queue not in self._stuck]
        stalled_ns = self._pumped_ns + int(LAZY_S * 1e9)
        later = [due if due > self._pumped_ns else stalled_ns for due in times]
        return min([*later, *self._stuck.values(), self.delayed.state.next_time_ns])

    def close(self) -> None:
        """Make the state durable and close the store."""
        try:
            while self.large is not None and self.large.begun and self.large.left:
                self.write_part()
            if self._dirty or self._first_staged:
                self.commit()
        finally:
            for queue in self.queues.values():
                queue.counters.close()
            self.counters.close()
            self.store.close()
