"""Broker: topics, queues, duplicates, delays and transactions over a store. No sockets here; the loop thread only.

A turn of the loop: messages are staged and states changed; ``commit`` makes all of it durable in one step; what waited
for that is told; then ``pump`` hands out what has become visible. State that needs no confirm (acknowledgements,
deliveries) goes with the next commit, at the latest ``LAZY_S`` later.
"""

from __future__ import annotations

import json
import struct
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock._core import Counters
from penstock._core.broker import QueueState, batch_names
from penstock.broker import words
from penstock.broker.queue import Consumer, Queue, QueueOptions
from penstock.broker.words import Refusal

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock.broker.store import Store

KIND_QUEUE, KIND_CHANGE, KIND_DELETE, KIND_PRODUCER, KIND_TRANSACTION, KIND_DELAYED = range(1, 7)
DELAYED = "$delayed"
Snapshot = Callable[[], Iterator[tuple[int, bytes]]]
LAZY_S = 0.05
OBSERVE_MESSAGES = 65_536  # looked at in one go, at most: a few milliseconds
OBSERVE_QUEUE = 256  # what looking at a queue costs, in messages


@dataclass
class Limits:
    """Bounds on what clients can make grow."""

    max_message_bytes: int = 64 << 20
    max_queues: int = 10_000
    max_producers: int = 10_000
    max_transactions: int = 100_000
    max_staged_bytes: int = 256 << 20
    staged_idle_s: float = 3600.0
    quota_bytes: int = 0
    deduplication_ids: int = 100_000
    deduplication_s: float = 120.0


@dataclass
class Staged:
    """Messages of a transaction that is not committed."""

    batches: list[Batch] = field(default_factory=list)
    total_bytes: int = 0
    touched: float = 0.0


class Broker:
    """The broker without its sockets."""

    def __init__(self, make_store: Callable[[Snapshot], Store], limits: Limits) -> None:
        self.limits = limits
        self.queues: dict[str, Queue] = {}
        self.producers: OrderedDict[str, int] = OrderedDict()
        self.transactions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.staged: dict[str, Staged] = {}
        self.staged_bytes = 0
        self.identifiers: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.counters = Counters("broker", "broker", f"{uuid.uuid4()}")
        self.on_lonely: Callable[[Queue], None] | None = None
        self._by_topic: dict[str, list[Queue]] = {}
        self._ready: set[Queue] = set()  # to be pumped in this turn
        self._timed: set[Queue] = set()  # with messages that may come due
        self._moved: set[Queue] = set()  # with state to record
        self._changed_producers: dict[str, int] = {}  # and what they were
        self._published: set[str] = set()
        self._first_staged = 0
        self._dirty = False
        self._dirty_since = 0.0
        self._full_until = 0.0
        self._pumped_ns = 0
        self._observed = 0  # where the next look at the queues begins
        self.store = make_store(self.snapshot)
        self._delayed = QueueState(1)
        self._recover()

    # --- state: what is recorded, and how it comes back

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """The whole state, as records."""
        for queue in list(self.queues.values()):
            if not queue.options.temporary:
                yield KIND_QUEUE, self._queue_record(queue)
                yield KIND_CHANGE, _named(queue.name, queue.state.snapshot())
        for name, sequence in self.producers.items():
            yield KIND_PRODUCER, _named(name, struct.pack("<Q", sequence))
        for name, (first, last) in self.transactions.items():
            yield KIND_TRANSACTION, _named(name, struct.pack("<QQ", first, last))
        yield KIND_DELAYED, self._delayed.snapshot()

    @staticmethod
    def _queue_record(queue: Queue) -> bytes:
        return json.dumps({"name": queue.name, "start": queue.start, "options": queue.options.dump()}).encode()

    def _recover(self) -> None:
        for kind, data in self.store.records():
            self._apply(kind, data)
        for queue in self.queues.values():
            queue.state.recovered()
        self._delayed.recovered()
        self._read_delayed()
        self._read_identifiers()

    def _apply(self, kind: int, data: bytes) -> None:
        if kind == KIND_QUEUE:
            fields = json.loads(data)
            options = QueueOptions.load(fields["options"])
            if fields["name"] in self.queues:
                self.queues[fields["name"]].rebind(options)
            else:
                self.queues[fields["name"]] = Queue(fields["name"], options, fields["start"], self.store)
        elif kind == KIND_DELAYED:
            self._delayed.apply(data)
        else:
            self._apply_named(kind, *_unnamed(data))

    def _apply_named(self, kind: int, name: str, rest: bytes) -> None:
        if kind == KIND_CHANGE and name in self.queues:
            self.queues[name].state.apply(rest)
        elif kind == KIND_DELETE:
            self.queues.pop(name, None)
        elif kind == KIND_PRODUCER:
            self._note_producer(name, max(self.producers.get(name, 0), struct.unpack("<Q", rest)[0]))
        elif kind == KIND_TRANSACTION:
            self._note_transaction(name, *struct.unpack("<QQ", rest))

    def _read_identifiers(self) -> None:
        """Message ids of the window, out of the messages themselves."""
        horizon_ns = time.time_ns() - int(self.limits.deduplication_s * 1e9)
        start = self.store.find(timestamp_ns=horizon_ns)
        for position, identifier, timestamp_ns in self.store.identifiers(start):
            self.identifiers[identifier] = (position, time.monotonic() - (time.time_ns() - timestamp_ns) / 1e9)

    # --- queues

    def queue(self, name: str, options: QueueOptions | None = None, *, start: int | None = None) -> Queue:
        """The queue of that name; made when it is not there and ``options`` are given."""
        found = self.queues.get(name)
        if found is not None:
            return found
        if options is None:
            raise Refusal("unknown_queue", f"there is no queue {name}")
        if len(self.queues) >= self.limits.max_queues:
            raise Refusal("limit", f"there are {len(self.queues)} queues, the most allowed")
        following = self.store.next if start is None else start
        queue = Queue(words.check_name(name, "queue"), options, following, self.store)
        queue.caught_up = start is None and not self._first_staged
        self.queues[name] = queue
        self._by_topic.clear()
        if not options.temporary:
            self._record(KIND_QUEUE, self._queue_record(queue))
        return queue

    def rebind(self, queue: Queue, options: QueueOptions) -> None:
        """Give a queue other options."""
        if options == queue.options:
            return
        queue.rebind(options)
        self._by_topic.clear()
        if not options.temporary:
            self._record(KIND_QUEUE, self._queue_record(queue))
        self.wake(queue)

    def delete(self, queue: Queue) -> None:
        """Forget a queue. Its messages stay in the store."""
        self.queues.pop(queue.name, None)
        self._by_topic.clear()
        queue.counters.close()
        if not queue.options.temporary:
            self._record(KIND_DELETE, _named(queue.name, b""))

    def purge(self, queue: Queue) -> int:
        """Drop everything the queue still has; gives how many messages that were."""
        count = queue.backlog(1 << 62) + queue.state.outstanding
        queue.state.reset(self.store.next)
        queue.caught_up = True
        queue.recount()
        self.touch(queue)
        return count

    def seek(self, queue: Queue, position: int) -> None:
        """Deliver from ``position`` on, again or for the first time."""
        queue.state.reset(max(1, position))
        queue.caught_up = False
        queue.recount()
        self.wake(queue)

    def leave(self, queue: Queue, consumer: Consumer, delivered: bool = True) -> None:
        """A consumer has gone."""
        queue.remove(consumer, time.time_ns(), delivered)
        self.wake(queue)
        if not queue.consumers:
            queue.raw = False
            if queue.options.temporary:
                self.delete(queue)

    def acknowledge(self, queue: Queue, consumer: Consumer, first: int, last: int, exact: bool = False) -> int:
        """Messages that ``consumer`` holds are done."""
        count = queue.state.acknowledge(consumer.number, first, last, exact)
        if count:
            self.wake(queue)
        return count

    def touch(self, queue: Queue | None = None) -> None:
        """State has changed that the next commit takes along."""
        if queue is not None and not queue.options.temporary:
            self._moved.add(queue)
        if not self._dirty:
            self._dirty, self._dirty_since = True, time.monotonic()

    def wake(self, queue: Queue) -> None:
        """The queue may have something to hand out, and its state may have changed."""
        self._ready.add(queue)
        self.touch(queue)

    # --- publishing

    def check_room(self, more_bytes: int) -> None:
        """Refusal when the disk quota is reached."""
        quota = self.limits.quota_bytes
        if quota and self.store.statistics().stored_bytes + more_bytes > quota:
            raise Refusal("full", f"the disk quota of {quota} bytes is reached; consume, purge or raise it")

    def full(self) -> bool:
        """Whether the disk quota is reached."""
        quota = self.limits.quota_bytes
        return bool(quota) and self.store.statistics().stored_bytes >= quota

    def publish(self, batch: Batch, **more: Any) -> tuple[int, int]:
        """Stage messages; first and last position. They count as published after the next commit."""
        span = self.store.stage(batch, **more)
        topic = more.get("topic")
        self._published.update((topic,) if topic else batch_names(batch))
        self._first_staged = self._first_staged or span[0]
        self.counters.add("matched", len(batch))
        return span

    def publish_as(self, batch: Batch, identifier: str = "", **more: Any) -> tuple[int, int]:
        """Stage messages; with an id of its user's, one message that is stored once in the window."""
        if not identifier:
            return self.publish(batch, **more)
        self._forget_identifiers()
        found = self.identifiers.get(identifier)
        if found is not None:
            return found[0], found[0]
        span = self.publish(batch, message_id=identifier.encode(), **more)
        self.identifiers[identifier] = (span[0], time.monotonic())
        return span

    def _forget_identifiers(self) -> None:
        horizon = time.monotonic() - self.limits.deduplication_s
        while self.identifiers:
            _, (_, when) = next(iter(self.identifiers.items()))
            if when >= horizon and len(self.identifiers) < self.limits.deduplication_ids:
                return
            self.identifiers.popitem(last=False)

    def produced(self, producer: str, count: int) -> None:
        """``count`` more messages of a numbered producer were staged."""
        before = self.producers.get(producer, 0)
        self._changed_producers.setdefault(producer, before)
        self._note_producer(producer, before + count)
        self.touch()  # also where nothing was stored: the count is part of what is confirmed

    def _note_producer(self, name: str, sequence: int) -> None:
        self.producers[name] = sequence
        self.producers.move_to_end(name)
        while len(self.producers) > self.limits.max_producers:
            self.producers.popitem(last=False)

    # --- delayed messages: stored at once in a topic of the broker's own, published when due in one step with that

    def delay(
        self, batch: Batch, topic: str, due_ns: int, properties: dict[str, str], identifier: str
    ) -> tuple[int, int]:
        """Store one message now and publish it at ``due_ns``."""
        told = {"topic": topic, "due_ns": str(due_ns), **properties}
        return self.publish_as(batch, identifier, topic=DELAYED, properties=encode_properties(told))

    def _read_delayed(self) -> None:
        end = self.store.next
        while self._delayed.cursor < end:
            batch, following = self.store.read(self._delayed.cursor, 4096, 1 << 62, (DELAYED,))
            self._delayed.hold(batch)
            self._delayed.look_from(following)

    def release_delayed(self, now_ns: int) -> None:
        """Publish delayed messages whose time has come."""
        if self._delayed.next_time_ns > now_ns:
            return
        for position, _ in self._delayed.due(now_ns, 1024):
            batch, _ = self.store.read(position, 1, 1 << 62)
            if len(batch) == 1 and batch.positions[0] == position:
                properties = dict(batch[0].properties)
                topic = properties.pop("topic")
                properties.pop("due_ns", None)
                self.publish(batch, topic=topic, properties=encode_properties(properties))
            self._delayed.acknowledge(0, position, position)

    # --- dead letters

    def dead_letter(self, queue: Queue, position: int, reason: str) -> None:
        """Move a message that was delivered too often to the queue of dead letters, in one step."""
        batch, _ = self.store.read(position, 1, 1 << 62)
        name = queue.options.dead_letter or f"{queue.name}.dead"
        target = f"$dead.{queue.name}"
        if len(batch) == 1 and batch.positions[0] == position:
            message = batch[0]
            self.queue(name, QueueOptions(topics=(target,), ack_timeout_s=queue.options.ack_timeout_s))
            properties = dict(message.properties)
            properties.setdefault("topic", message.channel or words.DEFAULT_TOPIC)
            properties.update(queue=queue.name, reason=reason, position=str(position))
            self.publish(batch, topic=target, properties=encode_properties(properties))
            queue.dead_lettered += 1
        queue.state.acknowledge(0, position, position)
        self.touch(queue)

    def redrive(self, queue: Queue) -> int:
        """Send the dead letters of ``queue`` back to it, and to it alone; gives how many."""
        dead = self.queues.get(queue.options.dead_letter or f"{queue.name}.dead")
        count, end = 0, self.store.next
        if dead is None:
            return 0
        for position, _ in dead.state.due(1 << 62, 1 << 20):
            count += self._drive_back(queue, position)
            dead.state.acknowledge(0, position, position)
        while dead.state.cursor < end:
            batch, following = self.store.read(dead.state.cursor, 1024, 16 << 20, dead.patterns)
            for position in batch.positions:
                count += self._drive_back(queue, position)
            dead.state.look_from(following)
        dead.whole = True
        self.touch(dead)
        return count

    def _drive_back(self, queue: Queue, position: int) -> int:
        batch, _ = self.store.read(position, 1, 1 << 62)
        if len(batch) != 1 or batch.positions[0] != position:
            return 0
        properties = {key: value for key, value in batch[0].properties.items() if key not in ("reason", "position")}
        self.publish(batch, topic=f"$queue.{queue.name}", properties=encode_properties(properties))
        return 1

    # --- transactions

    def stage(self, transaction: str, batch: Batch) -> None:
        """Keep messages until their transaction is committed."""
        words.check_name(transaction, "transaction")
        total = batch.total_bytes
        if self.staged_bytes + total > self.limits.max_staged_bytes:
            most = self.limits.max_staged_bytes
            raise Refusal("full", f"more than {most} bytes would be staged; commit or abort first")
        staged = self.staged.setdefault(transaction, Staged())
        staged.batches.append(batch)
        staged.total_bytes += total
        staged.touched = time.monotonic()
        self.staged_bytes += total

    def commit_transaction(self, transaction: str, parts: list[str]) -> tuple[int, int, bool]:
        """Publish what was staged under the id (and its parts), in one commit; once per id. (first, last, again)."""
        done = self.transactions.get(transaction)
        if done is not None:
            for part in parts or [transaction]:
                self.abort(part)
            return *done, True
        names = parts or [transaction]
        missing = [name for name in names if name not in self.staged]
        if missing and parts:
            raise Refusal("unknown_transaction", f"nothing is staged under {missing[0]}; stage it again")
        first = last = 0
        for name in names:
            staged = self.staged.get(name)
            for batch in staged.batches if staged else ():
                start, last = self.publish(batch)
                first = first or start
        for name in names:
            self.abort(name)
        self._note_transaction(transaction, first, last)
        self._record(KIND_TRANSACTION, _named(transaction, struct.pack("<QQ", first, last)))
        return first, last, False

    def _note_transaction(self, name: str, first: int, last: int) -> None:
        self.transactions[name] = (first, last)
        while len(self.transactions) > self.limits.max_transactions:
            self.transactions.popitem(last=False)

    def abort(self, transaction: str) -> bool:
        """Forget what was staged; ``NAME.*`` is all of NAME's parts, those of failed attempts too."""
        names = [transaction]
        if transaction.endswith(".*"):
            names = [name for name in self.staged if name.startswith(transaction[:-1])]
        found = [self.staged.pop(name) for name in names if name in self.staged]
        self.staged_bytes -= sum(staged.total_bytes for staged in found)
        return bool(found)

    def forget_staged(self) -> None:
        """Transactions that nobody has touched for long are given up."""
        horizon = time.monotonic() - self.limits.staged_idle_s
        for name in [name for name, staged in self.staged.items() if staged.touched < horizon]:
            self.abort(name)

    # --- the turn of the loop

    def _record(self, kind: int, data: bytes) -> None:
        self.store.record(kind, data)
        self._first_staged = self._first_staged or self.store.next
        self.touch()

    @property
    def staged_anything(self) -> bool:
        """Whether something waits for a commit that must not wait."""
        return bool(self._first_staged)

    @property
    def busy(self) -> bool:
        """Whether the next turn has something to do already."""
        return bool(self._first_staged or self._ready)

    def lazy_due(self) -> bool:
        """Whether state has waited long enough for a commit of its own."""
        return self._dirty and time.monotonic() - self._dirty_since >= LAZY_S

    @property
    def dirty(self) -> bool:
        """Whether state waits for a commit."""
        return self._dirty

    def commit(self) -> None:
        """Make everything since the last commit durable. OSError: nothing of it was, and nothing is told."""
        for queue in self._moved:
            if queue.name not in self.queues:
                continue
            if queue.whole:
                self.store.record(KIND_CHANGE, _named(queue.name, queue.state.snapshot()))
                queue.state.delta()
                queue.whole = False
            elif queue.state.changed:
                self.store.record(KIND_CHANGE, _named(queue.name, queue.state.delta()))
        for name in self._changed_producers:
            self.store.record(KIND_PRODUCER, _named(name, struct.pack("<Q", self.producers.get(name, 0))))
        if self._delayed.changed:
            self.store.record(KIND_DELAYED, self._delayed.delta())
        first, published = self._first_staged, self._published
        producers = self._changed_producers
        self._changed_producers, self._published, self._first_staged = {}, set(), 0
        self._moved, self._dirty = set(), False
        try:
            self.store.commit()
        except BaseException:
            self.producers.update(producers)
            for queue in self.queues.values():
                queue.whole = True
                self.touch(queue)
            raise
        for topic in published:
            self._notify(topic, first)
        self.counters.set("delivered", self.counters.get("matched"))

    def _notify(self, topic: str, first: int) -> None:
        if topic == DELAYED:
            self._read_delayed()
        for queue in self.queues_of(topic):
            queue.affected(first)
            self._ready.add(queue)

    def queues_of(self, topic: str) -> list[Queue]:
        """Queues bound to ``topic``."""
        found = self._by_topic.get(topic)
        if found is None:
            if len(self._by_topic) > 10_000:
                self._by_topic.clear()
            found = self._by_topic[topic] = [queue for queue in self.queues.values() if queue.wants(topic)]
        return found

    def pump(self, now_ns: int) -> None:
        """Hand out what can be handed out."""
        exhausted: list[tuple[Queue, int]] = []
        self._pumped_ns = now_ns
        self._ready.update(queue for queue in self._timed if queue.state.next_time_ns <= now_ns)
        ready, self._ready = self._ready, set()
        for queue in ready:
            if queue.name not in self.queues:
                self._timed.discard(queue)
                continue
            if queue.hands_out:
                queue.pump(now_ns, exhausted)
            (self._timed.add if queue.hands_out and queue.state.outstanding else self._timed.discard)(queue)
            if queue.state.changed:
                self.touch(queue)
        for queue, position in exhausted:
            self.dead_letter(queue, position, "delivered too often")

    def observe(self) -> None:
        """Set the counters of queues for who looks from outside; where there are many, some of them at a time."""
        names, looked = list(self.queues), 0
        for number in range(len(names)):
            queue = self.queues[names[(self._observed + number) % len(names)]]
            looked += OBSERVE_QUEUE + queue.observe(OBSERVE_MESSAGES)
            if looked >= OBSERVE_MESSAGES:
                break
        self._observed = (self._observed + number + 1) % len(names) if names else 0

    def trim(self) -> None:
        """Tell the store what every queue is done with; it frees that if it was told to."""
        end = self.store.next
        self._read_delayed()
        for queue in self.queues.values():
            if queue.caught_up:
                queue.state.look_from(end)
        if self.queues:
            self.store.trim(min([*(queue.state.floor for queue in self.queues.values()), self._delayed.floor]))

    def next_time_ns(self) -> int:
        """When something is due, if nothing else happens."""
        # What was due at the last pump and still is has nobody with credit: an acknowledgement wakes its queue at once,
        # and a hold that runs out is seen a little later.
        times = [queue.state.next_time_ns for queue in self._timed]
        stalled_ns = self._pumped_ns + int(LAZY_S * 1e9)
        return min([*(due if due > self._pumped_ns else stalled_ns for due in times), self._delayed.next_time_ns])

    def close(self) -> None:
        """Make state durable and let go of the store."""
        try:
            if self._dirty or self._first_staged:
                self.commit()
        finally:
            for queue in self.queues.values():
                queue.counters.close()
            self.counters.close()
            self.store.close()


def encode_properties(properties: dict[str, str]) -> bytes:
    """``key NUL value NUL ...``"""
    return b"".join(f"{key}\0{value}\0".encode() for key, value in properties.items())


def _named(name: str, rest: bytes) -> bytes:
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + rest


def _unnamed(data: bytes) -> tuple[str, bytes]:
    size = struct.unpack_from("<H", data)[0]
    return data[2 : 2 + size].decode(), data[2 + size :]
