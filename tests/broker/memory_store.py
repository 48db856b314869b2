"""A store that is no file: lists in memory, positions with gaps. What the broker needs of storage and no more."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock._core import Batch, Message
from penstock._core.broker import batch_details, batch_names, range_batch
from penstock.broker import words
from penstock.broker.ranges import ENTRY
from penstock.broker.store import StoreStatistics
from penstock.channel import Buffer
from penstock.journal.layout import TIME_NOW, encode_properties


@dataclass(frozen=True)
class Stored:
    position: int
    topic: str
    ordinal: int
    timestamp_ns: int
    data: bytes
    properties: bytes
    message_id: bytes
    key: bytes


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
        self.failed = self.full = False
        self._staged: list[Stored] = []
        self._recorded: list[tuple[int, bytes]] = []

    @property
    def next(self) -> int:
        return self.memory.messages[-1].position + 1 if self.memory.messages else self.memory.first

    @property
    def next_position(self) -> int:
        return self._staged[-1].position + 1 if self._staged else self.next

    def stage(
        self,
        batch: Batch,
        *,
        topic: str | None = None,
        properties: bytes | None = None,
        more: bytes = b"",
        message_id: bytes = b"",
        timestamps_ns: Buffer = b"",
    ) -> Sequence[int]:
        names = batch_names(batch)
        position = max(self.next - 1, self._staged[-1].position if self._staged else 0)
        known = [*self.memory.messages, *self._staged]
        times = list(memoryview(timestamps_ns).cast("B").cast("q")) or [TIME_NOW] * len(batch)
        for message, (own_id, own_key), when in zip(batch, batch_details(batch), times, strict=True):
            position += next(self.memory.gaps)
            name = topic or message.channel or names[0]
            ordinal = 1 + sum(stored.topic == name for stored in known)
            own = encode_properties(message.properties) if properties is None else properties
            identity = message_id or own_id
            stored = Stored(
                position,
                name,
                ordinal,
                when if when != TIME_NOW else time.time_ns(),
                bytes(message),
                own + more,
                identity,
                own_key,
            )
            known.append(stored)
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

    def begin_parts(self) -> None:
        pass

    def write_part(self) -> None:
        pass

    @property
    def topics(self) -> set[str]:
        return {stored.topic for stored in self.memory.messages}

    @property
    def first(self) -> int:
        return self.memory.messages[0].position if self.memory.messages else self.memory.first

    def read(
        self, start: int, most: int, most_bytes: int, topics: tuple[str, ...] | None = None
    ) -> tuple[Batch, int, int]:
        skipped = max(0, self.first - start)
        found: list[Stored] = []
        size = 0
        for stored in self.memory.messages:
            if stored.position < start:
                continue
            if topics is not None and not any(words.matches(pattern, stored.topic) for pattern in topics):
                start = stored.position + 1
                continue
            if len(found) >= most or (found and size + len(stored.data) > most_bytes):
                break
            found.append(stored)
            size, start = size + len(stored.data), stored.position + 1
        else:
            start = max(start, self.next)
        return _batch(found), start, skipped

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

    def identifiers(self, start: int) -> Iterator[tuple[Message, str]]:
        for stored in self.memory.messages:
            if stored.position >= start and stored.message_id:
                yield _batch([stored])[0], stored.message_id.decode()

    def trim(self, below: int, queues: bool, urgent: bool) -> bool:
        return False

    def statistics(self) -> StoreStatistics:
        stored = sum(len(message.data) for message in self.memory.messages)
        return StoreStatistics(self.first, self.next, stored, self.memory.commits)

    def close(self) -> None:
        pass


def _batch(found: list[Stored]) -> Batch:
    """Messages as the broker reads them from any store: a range, which is memory and where in it each one lies."""
    names = {name: number for number, name in enumerate(dict.fromkeys(stored.topic for stored in found))}
    index, data = b"", b""
    for stored in found:
        parts = (stored.data, stored.properties, stored.message_id, stored.key)
        head = (stored.position, stored.ordinal, stored.timestamp_ns, len(data), len(stored.data), names[stored.topic])
        index += ENTRY.pack(*head, *(len(part) for part in parts[1:]))
        data += b"".join(parts)
    return range_batch(index, data, {number: name for name, number in names.items()}, foreign=False)
