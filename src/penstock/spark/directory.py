"""A journal's directory as Spark reads it: segments with their least and greatest values, indexes, checked blocks.

Rules: nothing here needs native code; files are only read. Planning touches headers and summaries, never a whole
index, so that the driver's memory does not grow with the journal. Reading follows the durable frontier, never a
file's size. A block whose checksum is wrong is looked at record by record, since the checksum itself may be what is
damaged. One ``Directory`` belongs to one thread.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy

from penstock.errors import CorruptionError, InvalidArgument, StateError
from penstock.journal import format as journal_format
from penstock.journal import layout
from penstock.journal.disk import open_regular, read_all, read_part
from penstock.journal.format import INDEX, read_frontier, record_bytes, wrong_records
from penstock.printable import command
from penstock.quantities import number_of
from penstock.spark.bounds import GREATEST, LEAST, Bounds
from penstock.spark.checksum import crc32
from penstock.spark.kept import Kept
from penstock.spark.topic_names import TopicNames

Array = numpy.ndarray[Any, Any]
Found = TypeVar("Found")
LOG = logging.getLogger("penstock.spark")
LEAST_SHARE = 0.01
HEADER_SIZE = 1024  # the approximate memory of one cached header, in bytes
HEADERS: Kept[layout.SegmentHeader] = Kept(32 << 20)
SUMMARIES: Kept[Array] = Kept(64 << 20)
LISTINGS = 100  # how often a directory is listed while segments keep disappearing during the read


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: positions ``first`` to ``next - 1``, ``end`` bytes of its log."""

    first: int
    next: int
    revision: int
    end: int
    sealed: bool
    gaps: bool
    nonce: int
    times: tuple[int, int] = (LEAST, GREATEST)
    stored: tuple[int, int] = (LEAST, GREATEST)
    follows: int = 0  # where the following segment begins: after ``next`` where positions are missing


@dataclass(slots=True)
class Stretch:
    """Entries of one segment and what is needed to turn them into rows."""

    path: Path
    segment: Segment
    index: Array
    topics: dict[int, str]
    log: Array | None
    damaged: Array | None = None
    damage: list[str] = field(default_factory=list)


class Directory:
    """A journal's directory, opened for reading without native code."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        marker = self.path / layout.MARKER_NAME
        try:
            self.uuid = str(layout.decode_marker(read_part(marker, 0, layout.MARKER_BYTES), str(marker)))
        except (FileNotFoundError, NotADirectoryError):
            what = "there is no such directory" if not self.path.exists() else f"it has no {layout.MARKER_NAME}"
            raise InvalidArgument(f"{self.path} is not a journal: {what}") from None
        self._headers: dict[tuple[int, int], layout.SegmentHeader] = {}
        self._topics: dict[Path, dict[int, str]] = {}
        self._listed: list[tuple[int, int]] = []
        self._listed_at = 0, 0  # the frontier's generation and the directory's time when they were listed
        self._names: dict[int, str] = {}  # topic names by number, as far as planning has read them
        self._wanted: dict[Any, tuple[int, Array]] = {}  # by patterns: (names considered, numbers that match)
        self.permissive = False  # rebuild a damaged segment header if possible, instead of failing
        self.remembers = True  # use headers that this process has read before
        self.deleted: list[tuple[int, int]] = []  # what ``visit`` went on without, each range with its end

    # -- what is there ------------------------------------------------------------------------------------------------

    def words(self) -> layout.Frontier:
        """The words of the frontier file; reads again if a writer changed them meanwhile."""
        return read_frontier(self.path, self._uuid())

    def _uuid(self) -> Any:
        from uuid import UUID

        return UUID(self.uuid)

    @property
    def frontier(self) -> int:
        """The position below which everything is on disk."""
        return self.words().frontier

    @property
    def first(self) -> int:
        """The least position kept."""
        return max(1, self.words().first)

    def segments(self, start: int | None = None, among: tuple[int, int] | None = None) -> list[Segment]:
        """All segments, or those that can hold a position ``among`` these, in order; the last ends at the frontier.

        ``StateError`` if ``start`` has been deleted. The list of files decides what exists: the journal updates its
        first position only after it has deleted files.
        """
        for _ in range(LISTINGS):
            words = self.words()
            names = self._names_at(words)
            if start is not None and names and start < names[0][0]:
                raise StateError(gone_text(start, names[0][0], str(self.path)))
            low, high = among or (0, words.frontier)  # headers of others need not be read
            begin = max(0, bisect.bisect_right(names, (low, sys.maxsize)) - 1)
            stop = bisect.bisect_left(names, (min(high, words.frontier), -1))
            ends = [*(min(first, words.frontier) for first, _ in names[begin + 1 : stop + 1]), words.frontier]
            pairs = zip(names[begin:stop], ends, strict=False)
            try:
                return [self._segment(name, end, words) for name, end in pairs if end > low]
            except FileNotFoundError:
                self._listed_at = 0, 0  # it was deleted, or replaced by its next revision, after it was listed
        raise StateError(f"the segments of {self.path} are deleted faster than they can be listed; keep more")

    def _names_at(self, words: layout.Frontier) -> list[tuple[int, int]]:
        """The names of all segments. They are listed again when the directory has changed. By the generation every
        segment below the frontier is listed; by the time, which may be too coarse, also those that are gone.
        """
        now = words.generation, os.stat(self.path).st_mtime_ns
        if self._listed_at != now:
            self._listed, self._listed_at = layout.latest_segments(os.listdir(self.path)), now
        return self._listed

    def _segment(self, name: tuple[int, int], following: int, words: layout.Frontier) -> Segment:
        header = self.header(name)
        seal, follows = header.seal, following
        times = stored = (LEAST, GREATEST)
        if seal is not None:
            end, following, times = seal.end, min(following, seal.next), (seal.least_time_ns, seal.greatest_time_ns)
            stored = (seal.least_stored_ns, seal.greatest_stored_ns)
        elif name[0] == words.segment:
            end = words.end
        else:
            end = self._file(name, "log").stat().st_size
        sealed = seal is not None
        return Segment(name[0], following, name[1], end, sealed, header.gaps, header.nonce, times, stored, follows)

    def header(self, name: tuple[int, int]) -> layout.SegmentHeader:
        """A segment's header; that of a sealed segment is read once and kept."""
        known = self._headers.get(name) or (HEADERS.get((self.uuid, name)) if self.remembers else None)
        if known is None or known.seal is None:
            path = self._file(name, "log")
            data = read_part(path, 0, layout.SEGMENT_HEADER_BYTES + layout.BATCH.size)
            try:
                known = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
            except CorruptionError as error:
                if not self.permissive:
                    raise CorruptionError(f"{error}; {remedy_text(self.path)}", error.place) from None
                known = self._rebuilt_header(path, name, data)
                LOG.warning("%s; made again from its name and its first batch", error)
            if str(known.uuid) != self.uuid:
                raise StateError(anew_text(str(self.path)))
            if known.seal is not None and not self.permissive:
                HEADERS.put((self.uuid, name), known, HEADER_SIZE)
            self._headers[name] = known
        return known

    def _rebuilt_header(self, path: Path, name: tuple[int, int], data: bytes) -> layout.SegmentHeader:
        """Rebuild a damaged header from the nonce of the first batch, and from the seal if that is intact."""
        batch = data[layout.SEGMENT_HEADER_BYTES :]
        complete = len(batch) == layout.BATCH.size and batch[:4] == layout.BATCH_MAGIC
        fields = layout.BATCH.unpack(batch) if complete else ()
        if not fields or fields[10] != layout.crc32c(batch[8:60]):
            what = f"{path}: neither its header nor its first batch is whole"
            raise CorruptionError(f"{what}; run: {command('journal', 'verify', self.path)}", str(path))
        made = layout.SegmentHeader(self._uuid(), fields[2], name[0], 0, name[1]).encode()
        head = made[: layout.SEGMENT.size] + data[layout.SEGMENT.size : layout.SEGMENT_HEADER_BYTES]
        return layout.decode_segment_header(head, str(path))

    def _file(self, name: tuple[int, int], suffix: str) -> Path:
        return self.path / layout.segment_name(*name, suffix)

    def file(self, segment: Segment, suffix: str) -> Path:
        """The path of one of a segment's files."""
        return self._file((segment.first, segment.revision), suffix)

    # -- planning -----------------------------------------------------------------------------------------------------

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of positions, each with its end, for which there is no segment though there are older ones.

        Retention deletes the oldest segments only, so these are damage. A segment may also have been deleted while the
        directory was being listed, so it is listed again before damage is reported.
        """
        self._listed_at = 0, 0
        found = gaps_of(self.segments(among=(start, end)), start, end)
        self._listed_at = 0, 0
        return found and gaps_of(self.segments(among=(start, end)), start, end)

    def visit(
        self,
        start: int,
        end: int,
        bounds: Bounds,
        look: Callable[[Segment, int, int], Found],
        *,
        fail_if_deleted: bool,
        lossy: bool = False,
    ) -> Iterator[Found]:
        """Call ``look(segment, low, high)`` for each segment that can match by its header and topic summary.

        A segment that disappears meanwhile is looked up again: either its next revision exists, or it is lost, which is
        a ``StateError`` with ``fail_if_deleted`` and otherwise noted in ``deleted``. A segment that is missing between
        others is damage, unless ``lossy``.
        """
        start, end = max(start, bounds.positions[0]), min(end, bounds.positions[1] + 1)
        tries = 0
        # `start` moves with each segment that is done, so that a new listing goes on there and repeats nothing.
        while start < end:
            listed = self.segments(start if fail_if_deleted else None, (start, end))
            kept = min(end, listed[0].first) if listed else end
            if not fail_if_deleted and kept > start:
                self.deleted.append((start, kept))
            if not lossy and gaps_of(listed, start, end) and (gaps := self.missing(start, end)):
                raise CorruptionError(missing_text(gaps, str(self.path)), str(self.path))
            for segment in listed:
                low, high = max(start, segment.first), min(end, segment.next)
                if high <= low:
                    continue
                try:
                    found = [look(segment, low, high)] if self._wants(segment, bounds) else []
                except FileNotFoundError:
                    self._listed_at = 0, 0
                    start, tries = low, tries + 1
                    if tries > LISTINGS:
                        raise
                    break
                start = high
                yield from found
            else:
                return

    def _wants(self, segment: Segment, bounds: Bounds) -> bool:
        everything = (LEAST, GREATEST)
        if not bounds.wants(everything, (segment.first, segment.next - 1), segment.times, segment.stored):
            return False
        summary = self._summary(segment) if bounds.by_row else None
        if summary is None:
            return True
        if bounds.patterns:
            summary = summary[numpy.isin(summary["topic"], self._wanted_topics(segment, summary["topic"], bounds))]
        return any(
            bounds.wants(
                (int(row["least_ordinal"]), int(row["greatest_ordinal"])),
                (int(row["least_position"]), int(row["greatest_position"])),
                (int(row["least_time_ns"]), int(row["greatest_time_ns"])),
                (int(row["least_stored_ns"]), int(row["greatest_stored_ns"])),
            )
            for row in summary
        )

    def _wanted_topics(self, segment: Segment, numbers: Array, bounds: Bounds) -> Array:
        """The numbers of the topics that match, among those known so far; cached, since a number's name never changes.
        """
        self._check_topic_names(numbers, self._topic_names(segment, numbers))
        known, wanted = self._wanted.get(bounds.patterns, (0, numpy.empty(0, numpy.uint32)))
        if known != len(self._names):
            found = [number for number, name in self._names.items() if bounds.wants_topic(name)]
            wanted = numpy.array(found, numpy.uint32)
            self._wanted[bounds.patterns] = len(self._names), wanted
        return wanted

    def _topic_names(self, segment: Segment, numbers: Array) -> dict[int, str]:
        """Topic names by number, including those of a segment's messages if they can be read."""
        if set(numpy.unique(numbers).tolist()) - self._names.keys():
            self._names |= self.topics(segment)
        return self._names

    def _check_topic_names(self, numbers: Array, topics: dict[int, str]) -> None:
        """Raise if a topic's name is damaged: a query for topics by name would silently miss its messages."""
        unknown = set(numpy.unique(numbers).tolist()) - topics.keys()
        if unknown:
            text = f"the name of topic number {min(unknown)} is damaged"
            raise CorruptionError(f"{text}; run: {command('journal', 'verify', self.path)}", str(self.path))

    def _summary(self, segment: Segment) -> Array | None:
        if not segment.sealed:
            return None
        key = self.uuid, segment.nonce
        found = SUMMARIES.get(key)
        if found is None:
            try:
                data = read_all(self.file(segment, "topics"))
            except (FileNotFoundError, CorruptionError):
                return None
            found = journal_format.summary(data, self.header((segment.first, segment.revision)))
            if found is not None:
                SUMMARIES.put(key, found, len(data) + HEADER_SIZE)
        return found

    def share(self, segment: Segment, bounds: Bounds, log: bool) -> float:
        """The approximate share of a segment's bytes that a reader touches: its index alone, or a range of times."""
        part = 1.0 if log else min(1.0, (segment.next - segment.first) * INDEX.itemsize / max(1, segment.end))
        least, greatest = segment.times
        if segment.sealed and greatest > least:
            inside = min(greatest, bounds.times[1]) - max(least, bounds.times[0])
            part *= min(1.0, max(LEAST_SHARE, inside / (greatest - least)))
        return part

    def cut(self, segment: Segment, start: int, end: int, most_bytes: float) -> Iterator[tuple[int, int, int]]:
        """Cut a segment's positions into pieces (start, end, bytes) of about ``most_bytes`` of its log each."""
        entries = None if segment.gaps else self._entries(segment)
        if entries is None or len(entries) < end - segment.first:
            entries = self.index(segment, start, end)
            if len(entries) == 0:
                return
            positions, offsets = entries["position"], entries["offset"]
            place: Callable[[int], int] = lambda at: start if at == 0 else int(positions[at])  # noqa: E731
            count = len(entries)
        else:  # samples a few entries of the mapped index; a damaged one makes pieces uneven, never incorrect
            entries = entries[start - segment.first : end - segment.first]
            offsets = entries["offset"]
            place = lambda at: start + at  # noqa: E731
            count = end - start
        begin = int(offsets[0])
        last = segment.end if end >= segment.next else int(offsets[-1]) + int(record_bytes(entries[-1:])[0])
        total = max(1, last - begin)
        pieces = min(count, max(1, math.ceil(total / max(1.0, most_bytes))))
        edges = [begin + total * number // pieces for number in range(1, pieces)]
        cuts = sorted(bisect.bisect_left(range(count), edge, key=lambda at: int(offsets[at])) for edge in edges)
        if pieces == count:  # one position per piece, although several may lie between two edges
            cuts = list(range(1, count))
        for low, high in itertools.pairwise([0, *cuts, count]):
            if high > low:
                size = (begin + total if high == count else int(offsets[high])) - int(offsets[low])
                yield place(low), end if high == count else place(high), max(1, size)

    # -- reading ------------------------------------------------------------------------------------------------------

    def index(self, segment: Segment, start: int, end: int) -> Array:
        """The entries of positions ``start`` to ``end - 1``, mapped."""
        start, end = max(start, segment.first), min(end, segment.next)
        if end <= start:
            return numpy.empty(0, INDEX)
        entries = self._entries(segment)
        if entries is None or segment.gaps:
            return self._entries_by_reader(segment, start, end)
        entries = entries[start - segment.first : end - segment.first]
        gapless = len(entries) == end - start and bool((numpy.diff(entries["position"]) == 1).all())
        if not gapless or int(entries["position"][0]) != start or not journal_format.believed(entries, segment.nonce):
            return self._entries_by_reader(segment, start, end)
        return entries

    def _entries(self, segment: Segment) -> Array | None:
        """A segment's whole index file, mapped and unchecked; None if there is none."""
        path = self.file(segment, "index")
        try:
            file = open_regular(path)
        except (FileNotFoundError, CorruptionError):
            return None
        with os.fdopen(file, "rb") as opened:
            count = min(os.fstat(file).st_size // INDEX.itemsize, segment.next - segment.first)
            return numpy.memmap(opened, INDEX, mode="r", shape=(count,)) if count else numpy.empty(0, INDEX)

    def _entries_by_reader(self, segment: Segment, start: int, end: int) -> Array:
        """The entries by the journal's own reader: it handles gaps, and rebuilds a damaged index from the log."""
        name = (segment.first, segment.revision)
        there = journal_format.open_directory(self.path).segments
        found = [item for item in there if (item.first, item.revision) == name]
        if not found:
            raise FileNotFoundError(errno.ENOENT, "the segment was deleted", str(self.file(segment, "log")))
        entries = found[0].index(start, end)
        if len(entries) != end - start and not segment.gaps:
            path = self.file(segment, "log")
            what = f"{path} holds {len(entries)} of positions {start} to {end - 1}"
            raise CorruptionError(f"{what}; run: {command('journal', 'verify', self.path)}", str(path))
        return entries

    def stretches(
        self,
        start: int,
        end: int,
        bounds: Bounds,
        *,
        log: bool,
        named: bool = True,
        fail_if_deleted: bool = False,
        lossy: bool = False,
    ) -> Iterator[Stretch]:
        """The matching entries of positions ``start`` to ``end - 1``, segment by segment, not yet checked.

        Without ``named`` topics have no names, which saves reading them.
        """

        def look(segment: Segment, low: int, high: int) -> Stretch | None:
            entries = self.index(segment, low, high)
            if bounds.by_row:
                wanted = self._wanted_topics(segment, entries["topic"], bounds) if bounds.patterns else None
                entries = entries[bounds.mask(entries, wanted)]
            if not len(entries):
                return None
            topics = self._topic_names(segment, entries["topic"]) if named else {}
            path = self.file(segment, "log")
            return Stretch(path, segment, entries, topics, self._map(path, segment) if log else None)

        yield from filter(None, self.visit(start, end, bounds, look, fail_if_deleted=fail_if_deleted, lossy=lossy))

    def _map(self, path: Path, segment: Segment) -> Array:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < segment.end and not self.permissive:
                what = f"{path} has {size} bytes, its journal says {segment.end}: its end is lost"
                raise CorruptionError(f"{what}; {remedy_text(self.path)}", f"{path}:{size}")
            shape = (min(size, segment.end),)
            if not size:  # nothing can be mapped
                return numpy.empty(0, numpy.uint8)
            mapped: Array = numpy.memmap(file, numpy.uint8, mode="r", shape=shape)
        return mapped

    def topics(self, segment: Segment) -> dict[int, str]:
        """Topic names by number, for all messages of this segment; lists the directory again if necessary."""
        at = bisect.bisect_right(self._listed, (segment.first, sys.maxsize))
        if at == len(self._listed):
            return TopicNames(self, segment).names
        path = self._file(self._listed[at], "log")  # the next one's head: it does not change
        if path not in self._topics:
            try:
                self._topics[path] = TopicNames(self, segment, self._listed).names
            except FileNotFoundError:  # compaction has replaced it since the listing
                return TopicNames(self, segment).names
        return self._topics[path]

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self, stretch: Stretch, low: int, high: int) -> Array:
        """Which of the entries ``low`` to ``high - 1`` are damaged; adds the reasons to ``stretch.damage``."""
        entries = stretch.index[low:high]
        damaged = numpy.zeros(len(entries), numpy.bool_)
        log = stretch.log
        if log is None or not len(entries):
            return damaged
        begins = entries["offset"].astype(numpy.int64)
        ends = begins + record_bytes(entries)
        outside = (ends > len(log)) | (begins < layout.SEGMENT_HEADER_BYTES)
        inside = len(entries)
        if outside.any():  # do not follow these offsets: they would read beyond the mapped file
            is_short = len(log) < stretch.segment.end
            inside = int(outside.argmax()) if is_short else 0
            damaged[inside:] = True
            if is_short:
                lost = number_of(len(entries) - inside, "message")
                stretch.damage.append(f"{stretch.path}:{len(log)}: the log ends here, {lost} too early")
            else:
                stretch.damage.append(f"{stretch.path}: {int(outside.sum())} index entries point outside of the log")
            if not inside:
                return damaged
        entries, begins, ends = entries[:inside], begins[:inside], ends[:inside]
        suspects = numpy.flatnonzero(self._suspects(stretch, low, begins, ends, log))
        if len(suspects):
            damaged[suspects] = wrong_records(log, begins[suspects], entries[suspects], stretch.segment.nonce)
        for at in numpy.flatnonzero(damaged[:inside]).tolist():
            stretch.damage.append(f"{stretch.path}:{begins[at]}: position {entries['position'][at]} is damaged")
        return damaged

    def _suspects(self, stretch: Stretch, low: int, begins: Array, ends: Array, log: Array) -> Array:
        """Records in a block with a wrong or missing checksum, and records that disagree with their index entry."""
        sums = self._sums(stretch.segment)
        first_blocks, last_blocks = begins // layout.BLOCK_BYTES, (ends - 1) // layout.BLOCK_BYTES
        first = int(first_blocks[0])
        view = memoryview(log)  # type: ignore[arg-type]
        bad = numpy.zeros(int(last_blocks[-1]) - first + 1, numpy.bool_)
        for block in _touched(first_blocks, last_blocks):
            bad[block - first] = not self._block_is_good(view, block, sums, stretch.segment)
        # Each record begins with its checksum, which the index repeats: this finds entries that point to other records.
        words = log[: len(log) // 4 * 4].view("<u4")
        strangers: Array = words[begins >> 2] != stretch.index["checksum"][low : low + len(begins)]
        if not bad.any():
            return strangers
        # Prefix sums: a record is suspect if any of the blocks from its first to its last one is bad.
        counts = numpy.concatenate([[0], numpy.cumsum(bad)])
        suspects: Array = counts[last_blocks - first + 1] - counts[first_blocks - first] > 0
        return suspects | strangers

    def _block_is_good(self, view: memoryview, block: int, sums: Array, segment: Segment) -> bool:
        begin, end = block * layout.BLOCK_BYTES, min((block + 1) * layout.BLOCK_BYTES, segment.end)
        complete = end - begin == layout.BLOCK_BYTES or segment.sealed  # an unfinished block has no checksum yet
        if not complete or block >= len(sums):
            return False
        data: Any = view[begin:end]
        if block == 0:
            # The seal is written into the header after the block's checksum was computed, so it counts as zeros.
            data = bytearray(data)
            data[layout.SEAL_OFFSET : layout.SEAL_OFFSET + layout.SEAL_BYTES] = bytes(layout.SEAL_BYTES)
        return crc32(data) == int(sums[block])

    def _sums(self, segment: Segment) -> Array:
        try:
            data = read_all(self.file(segment, "sums"))
        except (FileNotFoundError, CorruptionError):
            return numpy.empty(0, numpy.uint32)
        return numpy.frombuffer(data[: len(data) // 4 * 4], numpy.uint32)


def remedy_text(place: Path) -> str:
    """What to do about damage, the end of an error's text."""
    verify = command("journal", "verify", place)
    return f"read with mode=permissive to go on without what is lost, or run: {verify}"


def gone_text(start: int, first: int, place: str) -> str:
    """The error text for positions that retention has deleted."""
    return (
        f"positions {start} to {first - 1} of {place} were deleted by retention before they were read: keep more; "
        "a streaming query goes on without them with failOnDataLoss=false"
    )


def gaps_of(listed: list[Segment], start: int, end: int) -> list[tuple[int, int]]:
    """The positions from ``start`` to ``end`` that no listed segment holds, although there is one before them."""
    gaps = ((max(start, segment.next), min(end, segment.follows)) for segment in listed)
    return [(low, high) for low, high in gaps if low < high]


def missing_text(gaps: list[tuple[int, int]], place: str) -> str:
    """The error text for positions whose segments are missing between others."""
    low, high = gaps[0]
    more = f" and {len(gaps) - 1} more ranges" if len(gaps) > 1 else ""
    return (
        f"no segment of {place} has positions {low} to {high - 1}{more}: run: {command('journal', 'verify', place)}; "
        "failOnDataLoss=false (archiving: --skip-lost) goes on without them"
    )


def anew_text(place: str) -> str:
    """The error text for a journal that was created anew under the old name."""
    return f"{place} was made anew since the query was planned: it is another journal now; run the query again"


def _touched(first_blocks: Array, last_blocks: Array) -> list[int]:
    """Every block that holds a part of a record; simply all from the first to the last if records are dense."""
    first, last = int(first_blocks[0]), int(last_blocks[-1])
    if last - first <= 2 * len(first_blocks):
        return list(range(first, last + 1))
    blocks = [first_blocks, last_blocks]
    for at in numpy.flatnonzero(last_blocks - first_blocks > 1).tolist():
        blocks.append(numpy.arange(first_blocks[at], last_blocks[at]))
    touched: list[int] = numpy.unique(numpy.concatenate(blocks)).tolist()
    return touched
