"""The journals that a recorder writes: one, or several in a row (parts), each with the story of the recording. Any
thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.address import without_secrets
from penstock.carry import MOST, MOST_BYTES
from penstock.errors import InvalidArgument
from penstock.journal import Entry, Journal
from penstock.recording.story import STORY

__all__ = ["Plan", "Tape"]

SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to record what, when to begin a new part, when to end."""

    directory: Path
    topics: dict[str, str]
    split_bytes: int | None = None
    split_s: float | None = None
    max_bytes: int | None = None
    pre_buffer_s: float | None = None
    max_messages: int | None = None
    found: frozenset[str] = frozenset()  #: addresses that a pattern has found: if one fails, the others go on
    reach_s: float | None = None  #: how long publishers may take to answer; None: no limit, and nothing is reported

    @property
    def split(self) -> bool:
        return self.split_bytes is not None or self.split_s is not None

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each topic, without secrets, which must not get into a recording."""
        return {without_secrets(address): topic for address, topic in self.topics.items()}


class Tape:
    """The journal that is being written. It is created with the tape; an existing one is never overwritten."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.part = 0
        self.lost = 0  # losses reported so far, in all parts
        self._lock = threading.Lock()  # guards the journal against being changed for the next part
        self._bytes = 0
        self._began = 0.0
        self._schemas: dict[str, Sequence[str]] = {}
        self._journal: Journal
        self._begin_part()

    def commit(self, entries: Sequence[Entry], size: int) -> None:
        """Store them in one commit; ``size`` is the size of their bodies."""
        with self._lock:
            if self._part_is_full(size):
                self._append({"event": "ended", "part": self.part})
                self._journal.close()
                self._begin_part()
            self._head_segment()
            self._journal.commit(entries)
            self._bytes += size

    def pieces(self, entries: list[Entry]) -> Iterator[list[Entry]]:
        """The entries in pieces to commit. If old segments are removed by size, a commit that fills a segment would be
        removed as a whole; and a commit is in one part, however large it is.
        """
        most_bytes = MOST_BYTES if self.plan.max_bytes is None else min(MOST_BYTES, self._journal.segment_bytes)
        most_bytes = min(most_bytes, self.plan.split_bytes or most_bytes)
        begin = size = 0
        for at, entry in enumerate(entries):
            if at - begin >= MOST or (size and size + len(memoryview(entry.payload)) > most_bytes):
                yield entries[begin:at]
                begin, size = at, 0
            size += len(memoryview(entry.payload))
        if entries:
            yield entries[begin:]

    def describe(self, topic: str, schemas: Sequence[str]) -> None:
        """Store the schemas of a topic, in this part and in those that follow: every version, the newest last."""
        known = self._schemas.get(topic, ())
        if not schemas or schemas == known:
            return
        with self._lock:
            self._schemas[topic] = schemas
            for schema in (*(one for one in schemas[:-1] if one not in known), schemas[-1]):
                self._journal.declare_schema(topic, schema)

    def tell(self, event: dict[str, Any]) -> None:
        """Store one event of the story."""
        with self._lock:
            self._append(event)
            if event["event"] == "lost":
                self.lost += event["count"]

    def end(self, totals: dict[str, Any]) -> None:
        """Store the end of the story; a second call does nothing."""
        with self._lock:
            if self._journal.closed:
                return
            try:
                self._append({"event": "ended", "addresses": self.plan.addresses, **totals})
            finally:
                self._journal.close()

    def _append(self, event: dict[str, Any]) -> None:
        self._head_segment()
        self._write(event)

    def _head_segment(self) -> None:
        """If old segments are removed by size, begin each segment with the addresses, so that the rest of the story
        always has them.
        """
        journal = self._journal
        # the next entry begins a new segment
        if self.plan.max_bytes is not None and journal.writer.end >= journal.segment_bytes:
            self._write({"event": "going_on", "addresses": self.plan.addresses, "lost": self.lost})

    def _write(self, event: dict[str, Any]) -> None:
        self._journal.append(STORY, json.dumps({**event, "time_ns": time.time_ns()}).encode())

    def _part_is_full(self, size: int) -> bool:
        plan = self.plan
        if plan.split_bytes is not None and self._bytes and self._bytes + size > plan.split_bytes:
            return True
        return plan.split_s is not None and time.monotonic() - self._began >= plan.split_s

    def _begin_part(self) -> None:
        plan = self.plan
        if not self.part and plan.directory.exists() and any(plan.directory.iterdir()):
            raise InvalidArgument(f"{plan.directory} is not empty; a recording begins in a folder of its own")
        directory = plan.directory / f"{self.part + 1:05d}" if plan.split else plan.directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        segment = SEGMENT_BYTES
        if plan.max_bytes is not None:
            segment = max(1 << 20, min(segment, plan.max_bytes // 8))
        self._journal = Journal(directory, retain_bytes=plan.max_bytes, segment_bytes=segment)
        try:
            self.part += 1
            self._bytes, self._began = 0, time.monotonic()
            for topic, schema in ((topic, one) for topic, schemas in self._schemas.items() for one in schemas):
                self._journal.declare_schema(topic, schema)
            self._append({"event": "started", "part": self.part, "addresses": plan.addresses})
        except BaseException:
            self._journal.close()
            raise
