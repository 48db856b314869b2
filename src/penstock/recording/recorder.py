"""The recorder: reads addresses and stores what comes in one journal, losses included.

One thread reads all addresses in rounds and stores what they give in the order of its times, as far as it can know it
(``Merge``). Used from the main thread: ``start``, ``trigger``, ``stop``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import penstock
from penstock import _core
from penstock.address import parse, without_secrets
from penstock.carry import HOLDS, in_parts, not_held_of, time_of
from penstock.errors import CapacityError, PenstockError, RefusedError, describe
from penstock.journal import Entry
from penstock.recording.feed import Direct, feed_of
from penstock.recording.merge import Lane, Merge
from penstock.recording.tape import Plan, Tape
from penstock.resolving import resolving

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Plan", "Recorder"]

BATCH = 256
PRE_BUFFER_BYTES = 256 << 20
#: What a journal says to a message that it will never take; anything else is the journal's own trouble.
REFUSALS = (ValueError, TypeError, CapacityError)
#: How long what was published before the stop is still read and stored.
DRAIN_S = 10.0
WAIT_S = 0.2
HOLDING_S = 0.01

logger = logging.getLogger("penstock.recording")

Pair = tuple["Source", Entry]


@dataclass(slots=True, eq=False)
class Source:
    """One address that is recorded. ``missed`` was read and could not be stored; ``error`` is the first reason."""

    address: str
    topic: str
    subscriber: penstock.Subscriber
    feed: Direct
    lane: Lane[Pair]
    messages: int = 0
    bytes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    missed: int = 0
    waiting: deque[tuple[float, Entry]] = field(default_factory=deque)  # since when
    waiting_bytes: int = 0
    error: str = ""
    unreached: str = ""  #: why nobody answered at first; of no account once somebody has
    counters: Any = None
    drained: bool = False  # nothing more was there at the last read
    oldest_ns: int = 0  # of what the last read gave; 0: nothing
    ahead: bool = False  # a message came whose time was still to come
    begun: bool = False  # a message has come
    done: threading.Event = field(default_factory=threading.Event)


class Recorder:
    """A context: subscribes to everything on entering, ends the story on leaving."""

    def __init__(self, plan: Plan) -> None:
        self.plan = dataclasses.replace(plan, topics=dict(plan.topics))
        self.sources: list[Source] = []
        self.started = time.monotonic()
        self._tape: Tape | None = None
        self._lock = threading.Lock()  # guards the two counts
        self._wanted = plan.max_messages  # how many more may be read
        self._stored = 0
        self._stop = threading.Event()
        self._stopped_ns = 0
        self._drain_until = 0.0
        self._at_once = threading.Event()
        self._armed = threading.Event()
        self._merge: Merge[Pair] = Merge(_owned)
        self._thread: threading.Thread | None = None
        self._joining: deque[tuple[str, str]] = deque()
        self._failed: dict[str, str] = {}  # addresses that were not read to the end, and why
        if plan.pre_buffer_s is None:
            self._armed.set()

    def __enter__(self) -> Recorder:
        try:
            self._subscribe_all()
            self._reach()
            self._tape = Tape(self.plan)
            self._thread = threading.Thread(target=self._run, args=(self._tape,), name="record")
            self._thread.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def recording(self) -> bool:
        """Whether messages are stored yet; before ``trigger`` the last seconds are held in memory."""
        return self._armed.is_set()

    @property
    def running(self) -> bool:
        """Whether any address is still read."""
        return self._thread is not None and bool(self._open())

    def trigger(self) -> None:
        """Store what was held back, and everything from now on."""
        self._armed.set()

    def add(self, address: str, topic: str) -> None:
        """Record one more address, from the next round on."""
        self._joining.append((address, topic))

    def refuse(self, address: str, error: str) -> None:
        """Count an address that cannot be recorded among ``errors``."""
        self._failed[without_secrets(address)] = error

    def _subscribe_all(self) -> None:
        for address, topic in list(self.plan.topics.items()):
            try:
                self._subscribe(address, topic)
            except (PenstockError, OSError) as error:
                if address not in self.plan.found or len(self.plan.topics) == 1:
                    raise
                self.refuse(address, describe(error))
                del self.plan.topics[address]

    def _subscribe(self, address: str, topic: str) -> None:
        if self.plan.reach_s is not None:
            _reach_broker(address, time.monotonic() + self.plan.reach_s)
        subscriber = penstock.subscriber(address)
        feed = feed_of(address, subscriber, self._claim, self._give_back)
        lane = self._merge.lane(patient=feed.patient)
        source = Source(without_secrets(address), topic, subscriber, feed, lane)
        source.counters = _core.Counters("journal", "publisher", f"{os.path.abspath(self.plan.directory)}#{topic}")
        self.sources.append(source)

    @property
    def part(self) -> int:
        """The number of the part that is written now."""
        return 0 if self._tape is None else self._tape.part

    @property
    def errors(self) -> dict[str, str]:
        """Of each address that was not recorded as it should be, why not."""
        found = {s.address: said for s in self.sources if (said := s.error or _not_reached_yet(s))}
        return self._failed | found

    def stop(self) -> None:
        """Store what was published until now, end the story, close everything.

        What keeps coming is not waited for, nor a backlog longer than ``DRAIN_S``. Interrupted (a second Ctrl-C) it
        gives up the backlog; called again then, it ends the story.
        """
        try:
            self._end_reading()
            self._wait()
        except BaseException:
            self._at_once.set()
            self._wait()
            raise
        try:
            if self._tape is not None:
                self._failed.update({s.address: said for s in self.sources if (said := _not_reached_yet(s))})
                self._tape.end({**self.totals(), "failed": self._failed})
        finally:
            self._close()

    def totals(self) -> dict[str, Any]:
        """What was counted up to now."""
        return {
            "messages": sum(source.messages for source in self.sources),
            "bytes": sum(source.bytes for source in self.sources),
            "lost": sum(sum(source.lost.values()) + source.missed for source in self.sources),
            "topics": {source.topic: source.messages for source in self.sources},
        }

    def _reach(self) -> None:
        """Look whether the publishers are there; ``RefusedError`` when none is, before anything is written."""
        if self.plan.reach_s is None:
            return
        deadline = time.monotonic() + self.plan.reach_s
        for source in self.sources:
            if hasattr(source.subscriber, "sessions"):
                from penstock.tcp.explain import unreached

                source.unreached = unreached(source.subscriber, deadline)
        if self.sources and all(source.unreached for source in self.sources):
            said = "; ".join(f"{source.address}: {source.unreached}" for source in self.sources)
            raise RefusedError(f"{said}; start the publisher, or give --wait to keep trying")

    def _end_reading(self) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._stopped_ns, self._drain_until = time.time_ns(), time.monotonic() + DRAIN_S
                self._stop.set()

    def _wait(self) -> None:
        if self._thread is None:
            return
        while self._open():  # neither join nor Event.wait is whole again after a Ctrl-C in its midst
            time.sleep(HOLDING_S)
        self._thread.join()

    def _close(self) -> None:
        for source in self.sources:
            source.feed.stop()
            source.subscriber.close()
            source.counters.close()

    # -- the thread that reads ----------------------------------------------------------------------------------------

    def _run(self, tape: Tape) -> None:
        try:
            while not self._stop.is_set() and self._open():
                self._join(tape)
                if not self._round(tape):
                    self._sleep()
            self._drain(tape)
            self._store(tape, self._merge.flush() if self.recording else [])
        except Exception as error:  # nothing can be stored any more: the story says where each one ended
            for source in self._open():
                self._fail(source, tape, error)
        finally:
            for source in self._open():
                self._end(source)

    def _join(self, tape: Tape) -> None:
        """Subscribe to what was added; one that cannot be opened is an error, and the others go on."""
        while self._joining:
            address, topic = self._joining.popleft()
            try:
                self._subscribe(address, topic)
            except (PenstockError, OSError) as error:
                self.refuse(address, describe(error))
                continue
            self.plan.topics[address] = topic
            tape.tell({"event": "joined", "addresses": {without_secrets(address): topic}})

    def _open(self) -> list[Source]:
        return [source for source in self.sources if not source.done.is_set()]

    def _end(self, source: Source, error: Exception | None = None) -> None:
        """Give the subscriber back. After an error, what a queue gave and was not stored comes again."""
        self._merge.end(source.lane)
        source.feed.stop()
        with contextlib.suppress(PenstockError, OSError):
            source.subscriber.__exit__(type(error) if error else None, error, None)
        source.done.set()

    def _fail(self, source: Source, tape: Tape, error: Exception) -> None:
        """The others go on, and the story says where this one ended."""
        source.error = f"not recorded any more: {describe(error)}"
        self._failed[source.address] = describe(error)
        event = {"event": "failed", "address": source.address, "topic": source.topic, "error": describe(error)}
        with contextlib.suppress(PenstockError, OSError):  # no room for it now: the end of the story says it again
            tape.tell(event)
        self._end(source, error)

    def _drain(self, tape: Tape) -> None:
        """Record what was published before the stop; with a publisher that goes on, this would never end otherwise."""
        left = self._open() if self.recording else []
        for source in left:
            source.feed.drain()
        while left and not self._at_once.is_set() and time.monotonic() < self._drain_until:
            if not self._round(tape, left):
                time.sleep(HOLDING_S)  # of a queue, which is read by a thread of its own
            for source in left:
                over = source.feed.over
                if source.drained or (self._is_later(source) if over is None else over):
                    self._merge.end(source.lane)
            left = [source for source in left if not source.lane.ended]

    def _is_later(self, source: Source) -> bool:
        """Whether what was read last was published after the stop, by the publisher's clock if that is not ahead."""
        return source.oldest_ns > self._stopped_ns and not source.ahead

    def _round(self, tape: Tape, sources: list[Source] | None = None) -> int:
        """Read each once, store or hold what is there; gives how many there were."""
        armed = self._armed.is_set()
        if armed:
            self._store_held(tape)
        self._merge.begin_round(time.time_ns(), time.monotonic())
        count = 0
        for source in self._open() if sources is None else sources:
            try:
                count += self._read(source, tape, armed)
            except Exception as error:  # whatever it is
                self._fail(source, tape, error)
        if armed:
            self._store(tape, self._merge.take())
        return count

    def _read(self, source: Source, tape: Tape, armed: bool) -> int:
        """What is there, up to ``BATCH``; of one whose messages keep, one batch."""
        source.drained, source.oldest_ns = False, 0
        count = 0
        while count < BATCH and source.lane.readable:
            batch = source.feed.read(self._share(BATCH - count))
            tape.describe(source.topic, source.feed.schemas(read=len(batch) > 0))  # even if nothing was published yet
            if not len(batch):
                source.drained = source.feed.empty
                if source.drained:
                    self._merge.at_end(source.lane)
                break
            if not source.begun:
                source.begun = True
                if lost := not_held_of(batch[0], HOLDS["journal"]):
                    said = "%s: a recording cannot hold %s of messages: they end here"
                    logger.warning(said, source.address, " and ".join(lost))
            entries = [_entry(source.topic, message, copy=not armed) for message in batch]
            times = [entry.timestamp_ns or 0 for entry in entries]
            source.oldest_ns = source.oldest_ns if count else min(times)
            source.ahead = source.ahead or max(times) > time.time_ns()
            count += len(entries)
            if armed:
                sized = ((e.timestamp_ns or 0, len(memoryview(e.payload)), (source, e)) for e in entries)
                self._merge.add(source.lane, sized)
            else:
                self._hold(source, entries)
            if source.feed.patient:
                break
        self._note_losses(source, tape)
        return count

    def _share(self, most: int) -> int:
        """Where only so many messages are wanted, each source gives a part of them, so that they are the oldest."""
        with self._lock:
            wanted = self._wanted
        return most if wanted is None else max(1, min(most, wanted // max(1, len(self._open()))))

    def _sleep(self) -> None:
        """Wait until there may be something to read."""
        timeout_s = HOLDING_S if self._merge.holding else WAIT_S
        poll = select.poll()
        for source in self._open():
            number = source.feed.fileno()
            if number < 0:
                timeout_s = HOLDING_S
            else:
                poll.register(number, select.POLLIN)
        poll.poll(timeout_s * 1000)
        if self._wanted == 0:  # what is read already is all that is wanted
            self._stop.wait(HOLDING_S)

    def _store_held(self, tape: Tape) -> None:
        """What was held back before the trigger."""
        if not any(source.waiting for source in self.sources):
            return
        lanes = [[(source, entry) for _, entry in source.waiting] for source in self.sources]
        held = list(heapq.merge(*lanes, key=lambda pair: pair[1].timestamp_ns or 0))
        for source in self.sources:
            source.waiting, source.waiting_bytes = deque(), 0
        self._store(tape, held[: self._claim(len(held))])

    def _claim(self, most: int) -> int:
        """How many of so many are wanted; they count as stored until given back."""
        with self._lock:
            if self._wanted is None:
                return most
            claimed = min(most, self._wanted)
            self._wanted -= claimed
        return claimed

    def _give_back(self, count: int) -> None:
        with self._lock:
            if self._wanted is not None:
                self._wanted += count

    def _store(self, tape: Tape, pairs: list[Pair]) -> None:
        """In commits of a bounded size."""
        begin = 0
        for piece in tape.pieces([entry for _, entry in pairs]):
            self._store_together(tape, pairs[begin : begin + len(piece)])
            begin += len(piece)

    def _store_together(self, tape: Tape, pairs: list[Pair]) -> None:
        """All as one; where one of them is not for a journal (too long, say), each on its own."""
        done: set[int] = set()

        def commit(some: Sequence[Pair]) -> None:
            self._commit(tape, some)
            done.update(map(id, some))

        def refuse(pair: Pair, error: Exception) -> None:
            self._count_missed(pair[0], tape, 1, error)
            done.add(id(pair))

        try:
            in_parts(pairs, commit, refuse, refusals=REFUSALS)
        except Exception as error:
            missed = Counter(pair[0].topic for pair in pairs if id(pair) not in done)
            for source in self.sources:
                if missed[source.topic]:
                    self._count_missed(source, tape, missed[source.topic], error)
            raise

    def _count_missed(self, source: Source, tape: Tape, count: int, error: Exception) -> None:
        """What was read and cannot be stored."""
        source.missed += count
        source.error = source.error or f"not everything could be stored: {describe(error)}"
        self._give_back(count)
        with contextlib.suppress(PenstockError, OSError):  # where the disk is full, too
            self._tell_loss(source, tape, count, describe(error))

    def _commit(self, tape: Tape, pairs: Sequence[Pair]) -> None:
        tape.commit([entry for _, entry in pairs], sum(len(memoryview(entry.payload)) for _, entry in pairs))
        for source, found in _by_source(pairs).items():
            size = sum(len(memoryview(entry.payload)) for entry in found)
            source.messages += len(found)
            source.bytes += size
            for field_, number in (("matched", len(found)), ("delivered", len(found)), ("bytes", size)):
                source.counters.add(field_, number)
            source.counters.set("last_ns", time.time_ns())
        self._stored += len(pairs)
        if self._stored == self.plan.max_messages:
            self._end_reading()

    def _hold(self, source: Source, entries: list[Entry]) -> None:
        """Keep the last seconds; the bound in bytes holds whatever the rate."""
        assert self.plan.pre_buffer_s is not None
        now = time.monotonic()  # a message's own time is no measure: its publisher may give it any
        for entry in entries:
            source.waiting.append((now, entry))
            source.waiting_bytes += len(memoryview(entry.payload))
        self._give_back(len(entries))  # they count when they are stored
        oldest = now - self.plan.pre_buffer_s
        limit = PRE_BUFFER_BYTES // max(1, len(self.sources))
        while source.waiting and (source.waiting[0][0] < oldest or source.waiting_bytes > limit):
            source.waiting_bytes -= len(memoryview(source.waiting.popleft()[1].payload))

    def _note_losses(self, source: Source, tape: Tape) -> None:
        dropped = dict(source.subscriber.ledger.dropped)
        if dropped == source.lost:
            return
        for reason, number in dropped.items():
            more = number - source.lost.get(reason, 0)
            if more > 0:
                self._tell_loss(source, tape, more, reason)
        source.lost = dropped

    def _tell_loss(self, source: Source, tape: Tape, count: int, reason: str) -> None:
        event = {"event": "lost", "count": count, "reason": reason}
        tape.tell({**event, "address": source.address, "topic": source.topic})


def _reach_broker(address: str, deadline: float) -> None:
    """``RefusedError`` where nobody listens at a broker's address by then: opening it would try for half a minute, and
    say nothing. A group of brokers has time to choose its leader."""
    parsed = parse(address)
    if parsed.scheme != "broker" or parsed.host is None or "," in parsed.host:
        return
    while True:
        try:
            with resolving(parsed.host):
                socket.create_connection((parsed.host, parsed.port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                place = f"{parsed.host}:{parsed.port}"
                raise RefusedError(f"the broker at {place} cannot be reached: {describe(error)}") from error
        time.sleep(HOLDING_S)


def _by_source(pairs: Sequence[Pair]) -> dict[Source, list[Entry]]:
    found: dict[Source, list[Entry]] = {}
    for source, entry in pairs:
        found.setdefault(source, []).append(entry)
    return found


def _owned(pair: Pair) -> Pair:
    """A copy of what may lie in a channel's own memory."""
    source, entry = pair
    return source, dataclasses.replace(entry, payload=bytes(entry.payload))


def _not_reached_yet(source: Source) -> str:
    if not source.unreached or source.messages or source.subscriber.ledger.matched:
        return ""
    if any(session.connected for session in getattr(source.subscriber, "sessions", ())):
        source.unreached = ""
        return ""
    return f"not reached yet: {source.unreached}"


def _entry(topic: str, message: Message, copy: bool = False) -> Entry:
    properties = dict(message.properties) or None
    return Entry(topic, bytes(message) if copy else message, properties, timestamp_ns=time_of(message))
