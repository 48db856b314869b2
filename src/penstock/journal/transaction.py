"""Transaction: messages of many topics and state records, stored together or not at all.

They are collected in memory and stored as one batch. If that would be too large, ``spill`` stores what was collected so
far, invisible to readers: the batches form a group that ends with ``commit`` and is ignored without its end. One thread
uses a transaction; several may be open at a time, but only one may have spilled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import InvalidArgument, StateError
from penstock.journal import layout

if TYPE_CHECKING:
    from penstock._core import Batch
    from penstock.channel import Buffer
    from penstock.journal.journal import Journal


@dataclass(frozen=True, slots=True)
class Entry:
    """One message to be stored."""

    topic: str
    payload: Any  # a buffer
    properties: Mapping[str, str] | None = None
    message_id: str | None = None
    key: str | None = None
    timestamp_ns: int | None = None


class Transaction:
    """Made by ``Journal.transaction``; leaving its block stores everything, an exception inside drops it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._messages: list[tuple[int, Buffer, bytes, bytes, bytes, int] | tuple[Batch, bytes]] = []
        self._states: list[tuple[int, int, Buffer]] = []
        self._done = self._spilled = False
        self.first: int | None = None
        self.last: int | None = None

    def append(
        self,
        topic: str,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        message_id: str | None = None,
        key: str | None = None,
        timestamp_ns: int | None = None,
    ) -> None:
        """Add a message."""
        self.add(Entry(topic, data, properties, message_id, key, timestamp_ns))

    def append_many(self, topic: str, batch: Iterable[Buffer]) -> None:
        """Add several of one topic."""
        number = self._journal.topic_id(topic)
        self._check_open()
        self._messages.extend((number, data, b"", b"", b"", layout.TIME_NOW) for data in batch)

    def append_batch(self, batch: Batch, topics: Sequence[str]) -> None:
        """Add a batch, each message with its properties, message id, key and time; ``topics``: the topic of each
        channel number."""
        self._check_open()
        numbers = [self._journal.topic_id(name) for name in topics]
        self._messages.append((batch, struct.pack(f"<{len(numbers)}I", *numbers)))

    def add(self, entry: Entry) -> None:
        """Add a message."""
        self._check_open()
        number = self._journal.topic_id(entry.topic)
        identity = layout.encode_text("message_id", entry.message_id)
        key = layout.encode_text("key", entry.key)
        properties = layout.encode_properties(entry.properties)
        time_ns = layout.TIME_NOW if entry.timestamp_ns is None else entry.timestamp_ns
        self._messages.append((number, entry.payload, properties, identity, key, time_ns))

    def state(self, kind: int, data: Buffer, *, internal: bool = False) -> None:
        """Add a state record."""
        self._check_open()
        if not 0 <= kind <= 65535:
            raise InvalidArgument(f"kind={kind} must be 0 to 65535")
        if not internal:
            self._journal.note_kind(kind)
        self._states.append((kind, layout.FLAG_INTERNAL if internal else 0, data))

    def spill(self, *, roll: bool = True) -> None:
        """Store the messages added so far; readers see them only after ``commit``, which makes everything visible at
        once.

        Until then other commits to this journal wait. Dropping a transaction after it has spilled fails the journal:
        when it is opened again, nothing of the transaction is there. ``roll=False`` keeps it in one segment, however
        large; for callers whose state runs ahead of what is committed.
        """
        self._check_open()
        if not self._spilled:
            self._journal._open_group(self)
            self._spilled = True
        try:
            # states are stored with the end: a segment that starts before it has only committed state in its head
            first, last, _ = self._journal.writer.stage_all(self._messages, [])
            self._journal.writer.commit_part()
            if roll:
                self._journal._roll_in_group()
        except BaseException:
            self.drop()
            raise
        self._messages = []
        self._note(first, last)

    def drop(self) -> None:
        """Drop it: nothing is stored. Dropping twice does nothing."""
        spilled, self._done, self._spilled = self._spilled, True, False
        if spilled:
            self._journal.writer.drop_group()
            self._journal._leave_group()

    def _note(self, first: int, last: int) -> None:
        if last >= first:
            self.first = first if self.first is None else self.first
            self.last = last

    def _end_group(self) -> None:
        try:
            first, last, _ = self._journal.writer.stage_all(self._messages, self._states)
            self._journal.writer.close_group()
        except BaseException:
            self.drop()
            raise
        self._done, self._spilled = True, False
        self._journal._leave_group()
        self._note(first, last)

    def commit(self) -> None:
        """Store everything now; on disk when this returns."""
        self._check_open()
        if self._spilled:
            return self._end_group()
        self._done = True
        if not self._messages and not self._states:
            return
        writer = self._journal.writer
        # before the commit: until then the state that on_snapshot functions return is the committed one
        self._journal._prepare()
        first, last, ticket = writer.stage_all(self._messages, self._states)
        writer.commit(ticket)
        self._note(first, last)

    def _check_open(self) -> None:
        if self._done:
            raise StateError("this transaction was committed or dropped")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._done:
            self.commit()
        self.drop()
