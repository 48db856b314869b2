"""The recorder: reads addresses and stores what comes in one journal, losses included.

One thread per address reads and commits; the journal gathers the commits of all into shared syncs. Used from the main
thread: ``start``, ``trigger``, ``stop``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import penstock
from penstock import _core
from penstock.address import without_secrets
from penstock.cli.recording import STORY
from penstock.errors import ClosedError, InvalidArgument, PenstockError
from penstock.journal import Entry, Journal

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Plan", "Recorder"]

BATCH = 256
PRE_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to record what, and when to begin a new part."""

    directory: Path
    topics: Mapping[str, str]
    split_bytes: int | None = None
    split_s: float | None = None
    max_bytes: int | None = None
    pre_buffer_s: float | None = None

    @property
    def split(self) -> bool:
        return self.split_bytes is not None or self.split_s is not None


@dataclass(slots=True)
class Source:
    """One address that is recorded."""

    address: str
    topic: str
    subscriber: penstock.Subscriber
    messages: int = 0
    bytes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    waiting: deque[Entry] = field(default_factory=deque)
    waiting_bytes: int = 0
    error: str = ""
    counters: Any = None


class Recorder:
    """A context: subscribes to everything on entering, ends the story on leaving."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sources: list[Source] = []
        self.part = 0
        self.started = time.monotonic()
        self._journal: Journal | None = None
        self._part_began = 0.0
        self._part_bytes = 0
        self._lock = threading.Lock()  # guards the journal against being changed for the next part
        self._stop = threading.Event()
        self._armed = threading.Event()
        self._threads: list[threading.Thread] = []
        if plan.pre_buffer_s is None:
            self._armed.set()

    def __enter__(self) -> Recorder:
        try:
            for address, topic in self.plan.topics.items():
                source = Source(without_secrets(address), topic, penstock.subscriber(address))
                source.counters = _core.Counters("journal", "publisher", f"{self.plan.directory}#{topic}")
                self.sources.append(source)
            self._next_part()
        except BaseException:
            self._close()
            raise
        for source in self.sources:
            thread = threading.Thread(target=self._run, args=(source,), name=f"record {source.topic}")
            thread.start()
            self._threads.append(thread)
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
        return any(thread.is_alive() for thread in self._threads)

    def trigger(self) -> None:
        """Store what was held back, and everything from now on."""
        self._armed.set()

    def stop(self) -> None:
        """Store what is still there, end the story, close everything."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._journal is not None and not self._journal.closed:
            # The addresses again: with --max-size the beginning of the story may be gone.
            self._tell({"event": "ended", "addresses": self._addresses(), **self.totals()})
        self._close()

    def totals(self) -> dict[str, Any]:
        """What was counted up to now."""
        return {
            "messages": sum(source.messages for source in self.sources),
            "bytes": sum(source.bytes for source in self.sources),
            "lost": sum(sum(source.lost.values()) for source in self.sources),
            "topics": {source.topic: source.messages for source in self.sources},
        }

    def _addresses(self) -> dict[str, str]:
        """Where each topic comes from; a recording holds no secret."""
        return {without_secrets(address): topic for address, topic in self.plan.topics.items()}

    def _close(self) -> None:
        for source in self.sources:
            source.subscriber.close()
            source.counters.close()
        if self._journal is not None:
            self._journal.close()

    # -- one thread per address ----------------------------------------------------------------------------------------

    def _run(self, source: Source) -> None:
        try:
            while not self._stop.is_set():
                self._step(source, 0.2)
            while self._step(source, 0):
                pass
        except ClosedError:
            source.error = "closed by its publisher"
        except (PenstockError, OSError) as error:
            source.error = str(error)

    def _step(self, source: Source, timeout: float) -> int:
        batch = source.subscriber.read_many(BATCH, timeout)
        count = len(batch)
        if count:
            if self._armed.is_set():
                entries = [*source.waiting, *(_entry(source.topic, message) for message in batch)]
                source.waiting.clear()
                self._store(source, entries)
            else:
                self._hold(source, batch)
        elif self._armed.is_set() and source.waiting:
            entries = list(source.waiting)
            source.waiting.clear()
            self._store(source, entries)
        self._note_losses(source)
        return count

    def _store(self, source: Source, entries: list[Entry]) -> None:
        size = sum(len(memoryview(entry.data)) for entry in entries)
        with self._lock:
            if self._part_is_full(size):
                self._next_part()
            assert self._journal is not None
            journal = self._journal
            journal.commit(entries)
            self._part_bytes += size
        source.messages += len(entries)
        source.bytes += size
        for field_, number in (("matched", len(entries)), ("delivered", len(entries)), ("bytes", size)):
            source.counters.add(field_, number)
        source.counters.set("last_ns", time.time_ns())

    def _hold(self, source: Source, batch: Any) -> None:
        """Keep copies of the last seconds; the bound in bytes holds whatever the rate."""
        assert self.plan.pre_buffer_s is not None
        for message in batch:
            entry = _entry(source.topic, message, copy=True)
            source.waiting.append(entry)
            source.waiting_bytes += len(memoryview(entry.data))
        oldest_ns = time.time_ns() - int(self.plan.pre_buffer_s * 1e9)
        limit = PRE_BUFFER_BYTES // max(1, len(self.sources))
        while source.waiting and ((source.waiting[0].timestamp_ns or 0) < oldest_ns or source.waiting_bytes > limit):
            source.waiting_bytes -= len(memoryview(source.waiting.popleft().data))

    def _note_losses(self, source: Source) -> None:
        dropped = dict(source.subscriber.ledger.dropped)
        if dropped == source.lost:
            return
        for reason, number in dropped.items():
            more = number - source.lost.get(reason, 0)
            if more > 0:
                event = {"event": "lost", "count": more, "reason": reason, "address": source.address}
                self._tell({**event, "topic": source.topic, "time_ns": time.time_ns()})
        source.lost = dropped

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _part_is_full(self, size: int) -> bool:
        plan = self.plan
        if plan.split_bytes is not None and self._part_bytes and self._part_bytes + size > plan.split_bytes:
            return True
        return plan.split_s is not None and time.monotonic() - self._part_began >= plan.split_s

    def _next_part(self) -> None:
        if self._journal is not None:
            self._journal.append(STORY, json.dumps({"event": "ended", "part": self.part}).encode())
            self._journal.close()
        self.part += 1
        directory = self.plan.directory / f"{self.part:05d}" if self.plan.split else self.plan.directory
        if self.part == 1 and self.plan.directory.exists() and any(self.plan.directory.iterdir()):
            raise InvalidArgument(f"{self.plan.directory} is not empty; a recording begins in a folder of its own")
        directory.parent.mkdir(parents=True, exist_ok=True)
        segment = 64 << 20
        if self.plan.max_bytes is not None:
            segment = max(1 << 20, min(segment, self.plan.max_bytes // 8))
        self._journal = Journal(directory, retain_bytes=self.plan.max_bytes, segment_bytes=segment)
        self._part_bytes, self._part_began = 0, time.monotonic()
        started = {"event": "started", "part": self.part, "addresses": self._addresses()}
        self._journal.append(STORY, json.dumps({**started, "time_ns": time.time_ns()}).encode())

    def _tell(self, event: dict[str, Any]) -> None:
        with self._lock:
            assert self._journal is not None
            self._journal.append(STORY, json.dumps(event).encode())


def _entry(topic: str, message: Message, copy: bool = False) -> Entry:
    properties = dict(message.properties) or None
    return Entry(topic, bytes(message) if copy else message, properties, timestamp_ns=message.timestamp_ns)
