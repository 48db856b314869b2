"""What ``penstock journal`` does, as functions that give data: ``info``, ``verify``, ``repair`` and ``cat``.

All but ``repair`` only read, also while a writer is at work. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock._core import journal as native
from penstock.errors import CorruptionError, PenstockError
from penstock.journal import layout
from penstock.journal.disk import read_all
from penstock.journal.journal import QUEUE_KIND, Journal, topic_filter
from penstock.journal.lock import writer_pid
from penstock.journal.queue_state import restore
from penstock.journal.repairs import RepairReport, repair
from penstock.journal.verify import verify

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["JournalInfo", "QueueInfo", "RepairReport", "SegmentInfo", "TopicInfo", "cat", "info", "repair", "verify"]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment; times are None when it has no message, ``messages`` None when it cannot be known."""

    name: str
    first: int
    next: int
    revision: int
    bytes: int
    sealed: bool
    messages: int | None
    least_time_ns: int | None
    greatest_time_ns: int | None
    compacted: bool = False
    repaired: bool = False


@dataclass(slots=True)
class TopicInfo:
    """One topic, over all segments that are kept."""

    name: str
    number: int
    messages: int = 0
    least_ordinal: int = 0
    greatest_ordinal: int = 0
    greatest_time_ns: int = 0


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One embedded queue, as of the last commit."""

    name: str
    topics: tuple[str, ...]
    floor: int
    done_above: int
    behind: int


@dataclass(slots=True)
class JournalInfo:
    """Everything about a journal that is known without reading it through."""

    directory: str
    uuid: str
    version: int
    first: int
    frontier: int
    bytes: int
    writer_pid: int | None
    segments: list[SegmentInfo] = field(default_factory=list)
    topics: list[TopicInfo] = field(default_factory=list)
    queues: list[QueueInfo] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """How many are kept, as far as segments tell."""
        return sum(segment.messages or 0 for segment in self.segments)


def info(directory: str | os.PathLike[str]) -> JournalInfo:
    """What is in the journal. Reads headers, summaries and the last segment."""
    path = Path(directory)
    with Journal(path, mode="read") as journal:
        report = JournalInfo(
            str(path), str(journal.uuid), layout.VERSION, journal.first, journal.frontier, 0, writer_pid(path)
        )
        topics = {number: TopicInfo(name, number) for name, number in journal.topics.items()}
        for first, following, revision in journal._live_reader().segments():
            report.segments.append(_segment(path, first, following, revision, topics))
        report.queues = _queues(path, report)
    report.topics = sorted(topics.values(), key=lambda topic: topic.name)
    report.bytes = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return report


def _segment(path: Path, first: int, following: int, revision: int, topics: dict[int, TopicInfo]) -> SegmentInfo:
    place = path / layout.segment_name(first, revision)
    size = place.stat().st_size
    try:
        with place.open("rb") as file:
            header = layout.decode_segment_header(file.read(layout.SEGMENT_HEADER_BYTES), str(place))
    except CorruptionError:
        return SegmentInfo(place.name, first, following, revision, size, False, None, None, None)
    rows = _summary(path, first, following, revision, header.seal is not None)
    for number, _, messages, _, _, least, greatest, _, latest in rows:
        topic = topics.setdefault(number, TopicInfo(f"unknown#{number}", number))
        topic.least_ordinal = min(topic.least_ordinal or least, least)
        topic.messages += messages
        topic.greatest_ordinal = max(topic.greatest_ordinal, greatest)
        topic.greatest_time_ns = max(topic.greatest_time_ns, latest)
    least_time = min((row[7] for row in rows), default=None)
    greatest_time = max((row[8] for row in rows), default=None)
    return SegmentInfo(
        place.name, first, following, revision, size, header.seal is not None, sum(row[2] for row in rows),
        least_time, greatest_time, bool(header.flags & layout.SEGMENT_COMPACTED),
        bool(header.flags & layout.SEGMENT_REPAIRED),
    )  # fmt: skip


def _summary(path: Path, first: int, following: int, revision: int, sealed: bool) -> list[tuple[int, ...]]:
    """Rows of the topic summary; of the active segment it is made from its index."""
    try:
        if sealed:
            data = read_all(path / layout.segment_name(first, revision, "topics"))
        else:
            index = read_all(path / layout.segment_name(first, revision, "index"))
            data = native.summarise(index[: (following - first) * layout.INDEX_ENTRY_BYTES])
    except FileNotFoundError:
        return []
    return list(layout.TOPIC_SUMMARY.iter_unpack(data[: len(data) // 64 * 64]))


def _queues(path: Path, report: JournalInfo) -> list[QueueInfo]:
    if not report.segments:
        return []
    last = report.segments[-1]
    place = path / last.name
    try:
        data = read_all(place)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(place))
        scan = native.scan(data, header.nonce, header.first, report.frontier, report.frontier, header.gaps)
        notes = [
            content for kind, flags, content in scan["states"] if flags & layout.FLAG_INTERNAL and kind == QUEUE_KIND
        ]
        states = restore(notes).values()
    except PenstockError:
        return []
    return [
        QueueInfo(
            state.name, state.settings.topics, state.floor, sum(last - first + 1 for first, last in state.runs),
            max(0, report.frontier - 1 - state.floor),
        )
        for state in sorted(states, key=lambda state: state.name)
    ]  # fmt: skip


def cat(
    directory: str | os.PathLike[str],
    *,
    start: int | None = None,
    end: int | None = None,
    topics: Iterable[str] | None = None,
    follow: bool = False,
) -> Iterator[Message]:
    """Messages in order, from ``start`` up to but without ``end``; with ``follow`` also those that come."""
    with Journal(directory, mode="read") as journal:
        at = journal.first if start is None else start
        if follow:
            with journal.follow(at, topics=topics) as follower:
                for message in follower:
                    if end is not None and (message.position or 0) >= end:
                        return
                    yield message
            return
        stop = journal.frontier if end is None else min(end, journal.frontier)
        chosen = topic_filter(topics)
        while at < stop:
            batch, at = journal.read_from(at, 1024, None, chosen)
            for message in batch:
                if (message.position or 0) >= stop:
                    return
                yield message
