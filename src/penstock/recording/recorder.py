"""The recorder: reads addresses and stores what comes in one journal, losses included.

One thread per address reads and commits; the journal gathers the commits of all into shared syncs. Used from the main
thread: ``start``, ``trigger``, ``stop``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import penstock
from penstock import _core
from penstock.address import without_secrets
from penstock.carry import in_parts
from penstock.errors import CapacityError, PenstockError, RefusedError, describe
from penstock.journal import Entry
from penstock.recording.tape import Plan, Tape

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Plan", "Recorder"]

BATCH = 256
PRE_BUFFER_BYTES = 256 << 20
#: What a journal says to a message that it will never take; anything else is the journal's own trouble.
REFUSALS = (ValueError, TypeError, CapacityError)
#: How long what was published before the stop is still read and stored.
DRAIN_S = 10.0
WAIT_S = 0.01
ASK_S = 0.2  # how often a source is asked what its messages are made of, while there are any


@dataclass(slots=True)
class Source:
    """One address that is recorded. ``missed`` was read and could not be stored; ``error`` is the first reason."""

    address: str
    topic: str
    subscriber: penstock.Subscriber
    messages: int = 0
    bytes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    missed: int = 0
    waiting: deque[Entry] = field(default_factory=deque)
    waiting_bytes: int = 0
    error: str = ""
    unreached: str = ""  #: why nobody answered at first; of no account once somebody has
    counters: Any = None
    asked: float = 0.0  # when it was asked what its messages are made of
    done: threading.Event = field(default_factory=threading.Event)


class Recorder:
    """A context: subscribes to everything on entering, ends the story on leaving."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
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
        self._reading: list[tuple[Source, threading.Thread]] = []
        self._failed: dict[str, str] = {}  # addresses that were not read to the end, and why
        if plan.pre_buffer_s is None:
            self._armed.set()

    def __enter__(self) -> Recorder:
        try:
            for address, topic in self.plan.topics.items():
                source = Source(without_secrets(address), topic, penstock.subscriber(address))
                source.counters = _core.Counters("journal", "publisher", f"{self.plan.directory}#{topic}")
                self.sources.append(source)
            self._reach()
            self._tape = Tape(self.plan)
            for source in self.sources:
                thread = threading.Thread(target=self._run, args=(source, self._tape), name=f"record {source.topic}")
                thread.start()
                self._reading.append((source, thread))
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
        return not all(source.done.is_set() for source, _ in self._reading)

    def trigger(self) -> None:
        """Store what was held back, and everything from now on."""
        self._armed.set()

    @property
    def part(self) -> int:
        """The number of the part that is written now."""
        return 0 if self._tape is None else self._tape.part

    @property
    def errors(self) -> dict[str, str]:
        """Of each address that was not recorded as it should be, why not."""
        return {s.address: said for s in self.sources if (said := s.error or _not_reached_yet(s))}

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
            raise RefusedError(f"{said}; --wait tries until somebody is there")

    def _end_reading(self) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._stopped_ns, self._drain_until = time.time_ns(), time.monotonic() + DRAIN_S
                self._stop.set()

    def _wait(self) -> None:
        for source, thread in self._reading:
            while not source.done.is_set():  # neither join nor Event.wait is whole again after a Ctrl-C in its midst
                time.sleep(WAIT_S)
            thread.join()

    def _close(self) -> None:
        for source in self.sources:
            source.subscriber.close()
            source.counters.close()

    # -- one thread per address ----------------------------------------------------------------------------------------

    def _run(self, source: Source, tape: Tape) -> None:
        try:
            with source.subscriber:  # an error in the midst of it: what a queue gave and was not stored comes again
                while not self._stop.is_set():
                    self._step(source, tape, 0.2)
                self._drain(source, tape)
        except Exception as error:  # whatever it is, the others go on, and the story says where this one ended
            source.error = f"not recorded any more: {describe(error)}"
            self._failed[source.address] = describe(error)
            event = {"event": "failed", "address": source.address, "topic": source.topic, "error": describe(error)}
            with contextlib.suppress(PenstockError, OSError):  # no room for it now: the end of the story says it again
                tape.tell(event)
        finally:
            source.done.set()

    def _drain(self, source: Source, tape: Tape) -> None:
        """What was published before the stop; with a publisher that goes on there would always be one more."""
        while self.recording and not self._at_once.is_set() and time.monotonic() < self._drain_until:
            oldest_ns = self._step(source, tape, 0)
            if oldest_ns is None or oldest_ns > self._stopped_ns:
                return

    def _step(self, source: Source, tape: Tape, timeout: float) -> int | None:
        """Read once, and store or hold it; gives the time of the oldest, None when there was nothing."""
        armed = self._armed.is_set()
        if armed and source.waiting:
            held, source.waiting = list(source.waiting), deque()
            self._store(source, tape, held[: self._claim(len(held))])
        batch = self._read(source, armed, timeout)
        if len(batch) and time.monotonic() - source.asked >= ASK_S:  # a publisher that comes back may have another type
            source.asked = time.monotonic()
            with contextlib.suppress(PenstockError):  # a broker that does not tell it
                tape.describe(source.topic, source.subscriber.schema)
        entries = [_entry(source.topic, message, copy=not armed) for message in batch]
        if armed:
            self._store(source, tape, entries)
        else:
            self._hold(source, entries)
        self._note_losses(source, tape)
        return min((entry.timestamp_ns or 0 for entry in entries), default=None)

    def _read(self, source: Source, armed: bool, timeout: float) -> Any:
        """No more than is still wanted: what is not stored is not taken from a queue either."""
        if not armed or self.plan.max_messages is None:
            return source.subscriber.read_many(BATCH, timeout)
        source.subscriber.wait(timeout)
        claimed = self._claim(BATCH)
        if not claimed:  # the others have read the last ones, and are storing them
            self._stop.wait(0.01)
            return ()
        batch: Any = ()
        try:
            batch = source.subscriber.read_many(claimed, 0)
        finally:
            self._give_back(claimed - len(batch))
        return batch

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

    def _store(self, source: Source, tape: Tape, entries: list[Entry]) -> None:
        """All together; where one of them is not for a journal (too long, say), each on its own."""
        before = source.messages + source.missed
        try:
            for piece in tape.pieces(entries):
                in_parts(
                    piece,
                    lambda some: self._commit(source, tape, some),
                    lambda _, error: self._miss(source, tape, 1, error),
                    refusals=REFUSALS,
                )
        except Exception as error:
            self._miss(source, tape, len(entries) - (source.messages + source.missed - before), error)
            raise

    def _miss(self, source: Source, tape: Tape, count: int, error: Exception) -> None:
        """What was read and cannot be stored."""
        source.missed += count
        source.error = source.error or f"not everything could be stored: {describe(error)}"
        self._give_back(count)
        with contextlib.suppress(PenstockError, OSError):  # where the disk is full, too
            self._tell_loss(source, tape, count, describe(error))

    def _commit(self, source: Source, tape: Tape, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        size = sum(len(memoryview(entry.data)) for entry in entries)
        tape.commit(entries, size)
        source.messages += len(entries)
        source.bytes += size
        for field_, number in (("matched", len(entries)), ("delivered", len(entries)), ("bytes", size)):
            source.counters.add(field_, number)
        source.counters.set("last_ns", time.time_ns())
        with self._lock:
            self._stored += len(entries)
            complete = self._stored == self.plan.max_messages
        if complete:
            self._end_reading()

    def _hold(self, source: Source, entries: list[Entry]) -> None:
        """Keep the last seconds; the bound in bytes holds whatever the rate."""
        assert self.plan.pre_buffer_s is not None
        for entry in entries:
            source.waiting.append(entry)
            source.waiting_bytes += len(memoryview(entry.data))
        oldest_ns = time.time_ns() - int(self.plan.pre_buffer_s * 1e9)
        limit = PRE_BUFFER_BYTES // max(1, len(self.sources))
        while source.waiting and ((source.waiting[0].timestamp_ns or 0) < oldest_ns or source.waiting_bytes > limit):
            source.waiting_bytes -= len(memoryview(source.waiting.popleft().data))

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


def _not_reached_yet(source: Source) -> str:
    if not source.unreached or source.messages or source.subscriber.ledger.matched:
        return ""
    if any(session.connected for session in getattr(source.subscriber, "sessions", ())):
        source.unreached = ""
        return ""
    return f"not reached yet: {source.unreached}"


def _entry(topic: str, message: Message, copy: bool = False) -> Entry:
    properties = dict(message.properties) or None
    return Entry(topic, bytes(message) if copy else message, properties, timestamp_ns=message.timestamp_ns or None)
