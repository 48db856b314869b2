"""What ``penstock journal`` does, as functions that return data: ``info``, ``verify``, ``repair`` and ``cat``.

All but ``repair`` only read, also while a writer is at work. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock._core import journal as native
from penstock.errors import CorruptionError, PenstockError
from penstock.journal import layout
from penstock.journal.disk import read_all, read_part, while_files_go
from penstock.journal.journal import QUEUE_KIND, Journal, topic_filter
from penstock.journal.lock import writer_pid
from penstock.journal.queue_notes import restore
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
    least_stored_ns: int | None = None
    greatest_stored_ns: int | None = None
    compacted: bool = False
    repaired: bool = False
    after_loss: bool = False  #: begun by a writer that found damage in what was stored before


@dataclass(slots=True)
class TopicInfo:
    """One topic, over all segments that are kept."""

    name: str
    number: int
    messages: int = 0
    least_ordinal: int = 0
    greatest_ordinal: int = 0
    greatest_time_ns: int | None = None
    least_time_ns: int | None = None
    greatest_stored_ns: int = 0


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
    """Everything that is known about a journal without reading all of it."""

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
        """How many messages are stored, as far as the segments' headers say."""
        return sum(segment.messages or 0 for segment in self.segments)


def info(directory: str | os.PathLike[str]) -> JournalInfo:
    """What is in the journal. Reads headers, summaries and the last segment."""
    path = Path(directory)
    return while_files_go(path, lambda: _info(path))


def _info(path: Path) -> JournalInfo:
    with Journal(path, mode="read") as journal:
        report = JournalInfo(
            str(path), str(journal.uuid), layout.VERSION, journal.first, journal.frontier, 0, writer_pid(path)
        )
        topics = {number: TopicInfo(name, number) for name, number in journal.topics.items()}
        for first, following, revision in journal._live_reader().segments():
            report.segments.append(_segment(path, first, following, revision, topics))
        report.queues = _queues(path, report)
    report.topics = sorted(topics.values(), key=lambda topic: topic.name)
    for entry in os.scandir(path):
        with suppress(FileNotFoundError):
            report.bytes += entry.stat().st_size if entry.is_file(follow_symlinks=False) else 0
    return report


def _segment(path: Path, first: int, following: int, revision: int, topics: dict[int, TopicInfo]) -> SegmentInfo:
    place = path / layout.segment_name(first, revision)
    size = place.stat().st_size
    try:
        header = layout.decode_segment_header(read_part(place, 0, layout.SEGMENT_HEADER_BYTES), str(place))
    except CorruptionError:
        return SegmentInfo(place.name, first, following, revision, size, False, None, None, None)
    rows = _summary(path, first, following, header)
    for number, _, messages, _, _, least, greatest, earliest, latest, _, stored_ns in rows:
        topic = topics.setdefault(number, TopicInfo(f"unknown#{number}", number))
        topic.least_ordinal = min(topic.least_ordinal or least, least)
        topic.messages += messages
        topic.greatest_ordinal = max(topic.greatest_ordinal, greatest)
        topic.greatest_stored_ns = max(topic.greatest_stored_ns, stored_ns)
        topic.least_time_ns = earliest if topic.least_time_ns is None else min(topic.least_time_ns, earliest)
        topic.greatest_time_ns = latest if topic.greatest_time_ns is None else max(topic.greatest_time_ns, latest)
    columns = list(zip(*rows, strict=True))
    times: list[int | None] = [None] * 4
    if rows:
        times = [min(columns[7]), max(columns[8]), min(columns[9]), max(columns[10])]
    return SegmentInfo(
        place.name, first, following, revision, size, header.seal is not None, sum(row[2] for row in rows),
        times[0], times[1], times[2], times[3],
        bool(header.flags & layout.SEGMENT_COMPACTED), bool(header.flags & layout.SEGMENT_REPAIRED),
        bool(header.flags & layout.SEGMENT_AFTER_LOSS),
    )  # fmt: skip


def _summary(path: Path, first: int, following: int, header: layout.SegmentHeader) -> list[tuple[int, ...]]:
    """Rows of the topic summary; if it is missing or fails its checksum, it is rebuilt from the index or the log."""
    segment = first, header.revision
    with suppress(FileNotFoundError, CorruptionError):
        rows = layout.decode_summary(read_all(path / layout.segment_name(*segment, "topics")), header)
        if rows is not None:
            return rows
    index = b""
    with suppress(FileNotFoundError, CorruptionError):
        index = read_part(
            path / layout.segment_name(*segment, "index"), 0, (following - first) * layout.INDEX_ENTRY_BYTES
        )
    count = header.seal.messages if header.seal else following - first
    if native.believed(index, header.nonce) != count:
        data = read_all(path / layout.segment_name(*segment))
        index = native.scan(data, header.nonce, first, following, following, header.gaps)["index"]
    return list(layout.TOPIC_SUMMARY.iter_unpack(native.summarise(index, header.nonce)))


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
    """Messages in order, from ``start`` up to but not including ``end``; with ``follow`` also new ones as they
    arrive."""
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
