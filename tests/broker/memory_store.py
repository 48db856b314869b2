"""A store that is no file: lists in memory, positions with gaps. What the broker needs of storage and no more."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock._core import Batch
from penstock._core.broker import Scanner, batch_names, gather
from penstock.broker import words
from penstock.broker.store import StoreStatistics


@dataclass(frozen=True)
class Stored:
    position: int
    topic: str
    ordinal: int
    timestamp_ns: int
    data: bytes
    properties: bytes
    message_id: str


@dataclass
class Memory:
    """What outlives a store that is closed."""

    identity: str = field(default_factory=lambda: str(uuid.uuid4()))
    messages: list[Stored] = field(default_factory=list)
    records: list[tuple[int, bytes]] = field(default_factory=list)
    gaps: Iterator[int] = field(default_factory=lambda: itertools.cycle((1, 7, 2, 1000)))
    first: int = 5
    commits: int = 0


class MemoryStore:
    def __init__(self, memory: Memory, snapshot: Callable[[], Iterable[tuple[int, bytes]]]) -> None:
        self.memory = memory
        self.identity = memory.identity
        self.failed = False
        self._staged: list[Stored] = []
        self._recorded: list[tuple[int, bytes]] = []

    @property
    def next(self) -> int:
        return self.memory.messages[-1].position + 1 if self.memory.messages else self.memory.first

    def stage(
        self,
        batch: Batch,
        *,
        topic: str | None = None,
        properties: bytes | None = None,
        more: bytes = b"",
        message_id: bytes = b"",
    ) -> Sequence[int]:
        names = batch_names(batch)
        position = max(self.next - 1, self._staged[-1].position if self._staged else 0)
        known = [*self.memory.messages, *self._staged]
        for message in batch:
            position += next(self.memory.gaps)
            own = b"".join(f"{key}\0{value}\0".encode() for key, value in message.properties.items())
            name = topic or message.channel or names[0]
            ordinal = 1 + sum(stored.topic == name for stored in known)
            chosen = (own if properties is None else properties) + more
            known.append(Stored(position, name, ordinal, time.time_ns(), bytes(message), chosen, message_id.decode()))
        staged = known[-len(batch) :]
        self._staged += staged
        return [stored.position for stored in staged]

    def record(self, kind: int, data: bytes) -> None:
        self._recorded.append((kind, data))

    def commit(self) -> None:
        self.memory.messages += self._staged
        self.memory.records += self._recorded
        self.memory.commits += 1
        self._staged, self._recorded = [], []

    def read(self, start: int, most: int, most_bytes: int, topics: tuple[str, ...] | None = None) -> tuple[Batch, int]:
        text, count, size = b"", 0, 0
        seen: set[str] = set()
        scanner = Scanner("deliveries", 64 << 20)
        for stored in self.memory.messages:
            if stored.position < start:
                continue
            if topics is not None and not any(words.matches(pattern, stored.topic) for pattern in topics):
                start = stored.position + 1
                continue
            if count >= most or (count and size + len(stored.data) > most_bytes):
                break
            head = f"MSG q {stored.topic} {stored.position} {stored.ordinal} {stored.timestamp_ns} 1 "
            if stored.topic not in seen:
                seen.add(stored.topic)
                scanner.allow(stored.topic)
            text += f"{head}{len(stored.data)}+{len(stored.properties)}\n".encode()
            text += stored.data + stored.properties + b"\n"
            count, size, start = count + 1, size + len(stored.data), stored.position + 1
        else:
            start = max(start, self.next)
        if not count:
            return gather([]), start
        scanner.feed(text)
        event = scanner.next(most)
        assert event is not None and event[2] is not None and len(event[2]) == count
        return event[2], start

    def find(self, *, ordinal: int | None = None, timestamp_ns: int | None = None, topic: str | None = None) -> int:
        for stored in self.memory.messages:
            if topic is not None and stored.topic != topic:
                continue
            if (ordinal is not None and stored.ordinal >= ordinal) or (
                timestamp_ns is not None and stored.timestamp_ns >= timestamp_ns
            ):
                return stored.position
        return self.next

    def records(self) -> Iterator[tuple[int, bytes]]:
        return iter(self.memory.records)

    def identifiers(self, start: int) -> Iterator[tuple[int, str, int]]:
        for stored in self.memory.messages:
            if stored.position >= start and stored.message_id:
                yield stored.position, stored.message_id, stored.timestamp_ns

    def trim(self, below: int | None) -> None:
        pass

    def statistics(self) -> StoreStatistics:
        stored = sum(len(message.data) for message in self.memory.messages)
        first = self.memory.messages[0].position if self.memory.messages else self.memory.first
        return StoreStatistics(first, self.next, stored, self.memory.commits)

    def close(self) -> None:
        pass
