"""Reading a journal with numpy alone (pyarrow where batches are asked for): what Spark's executors run.

Rules:

- No native code, no mapping: files are read by ``pread``, so a file truncated meanwhile is an error and no fault.
- Nothing at or past the durable frontier is looked at.
- With ``check`` every byte that is handed out was covered by a checksum: the block sums (zlib) where they agree, else
  the CRC32C of each record.
- An index that does not agree with its log is not believed; the log is scanned instead.

A ``Directory`` is used by one thread at a time. docs/formats.md, "Journal", has the tables.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import numpy
from numpy.typing import NDArray

from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import layout
from penstock.journal.disk import open_regular, read_all, read_part
from penstock.topics import check_pattern, matches

if TYPE_CHECKING:
    import pyarrow

INDEX: Final = numpy.dtype(
    [
        ("position", "<u8"), ("ordinal", "<u8"), ("timestamp_ns", "<i8"), ("stored_ns", "<i8"), ("offset", "<u8"),
        ("length", "<u4"), ("topic", "<u4"), ("extra_bytes", "<u4"), ("checksum", "<u4"), ("reserved", "<u4"),
        ("entry_checksum", "<u4"),
    ]
)  # fmt: skip
RECORD: Final = numpy.dtype(
    [
        ("checksum", "<u4"), ("bytes", "<u4"), ("kind", "u1"), ("flags", "u1"), ("id_bytes", "<u2"),
        ("key_bytes", "<u2"), ("account_bytes", "<u2"), ("topic", "<u4"), ("properties_bytes", "<u4"),
        ("data_bytes", "<u4"), ("position_low", "<u4"), ("ordinal", "<u8"), ("timestamp_ns", "<i8"),
        ("stored_ns", "<i8"),
    ]
)  # fmt: skip
TOPICS: Final = numpy.dtype(
    [
        ("topic", "<u4"), ("checksum", "<u4"), ("messages", "<u8"), ("least_position", "<u8"),
        ("greatest_position", "<u8"), ("least_ordinal", "<u8"), ("greatest_ordinal", "<u8"),
        ("least_time_ns", "<i8"), ("greatest_time_ns", "<i8"),
        ("least_stored_ns", "<i8"), ("greatest_stored_ns", "<i8"),
    ]
)  # fmt: skip
HEAD: Final = RECORD.itemsize
_TABLE = numpy.array(layout._TABLE, dtype=numpy.uint32)

Entries = NDArray[Any]
Crc32 = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Hole:
    """Positions that cannot be read, and why: ``retention``, ``compaction`` or ``lost``."""

    first: int
    last: int
    reason: str


def crc32c_rows(rows: NDArray[numpy.uint8], seeds: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """CRC32C of each row, continued from its seed: one step a column, for all rows at once."""
    crc = ~seeds
    for column in range(rows.shape[1]):
        crc = crc >> numpy.uint32(8) ^ _TABLE[(crc ^ rows[:, column]) & numpy.uint32(255)]
    return ~crc


def believed(entries: Entries, nonce: int) -> bool:
    """Whether every index entry has the checksum that it must have. Where the native core is loaded, by it."""
    if not len(entries):
        return True
    packed = numpy.ascontiguousarray(entries)
    if core := sys.modules.get("penstock._core"):
        return bool(core.journal.believed(packed.view(numpy.uint8), nonce) == len(entries))
    rows = packed.view(numpy.uint8).reshape(len(entries), INDEX.itemsize)
    seeds = numpy.full(len(entries), layout.crc32c(struct.pack("<Q", nonce)), numpy.uint32)
    return bool((crc32c_rows(rows[:, :-4], seeds) == entries["entry_checksum"]).all())


def summary(data: bytes, header: layout.SegmentHeader) -> NDArray[Any] | None:
    """A ``.topics`` file; None where it cannot be believed: a checksum is wrong, or a row is missing."""
    if header.seal is None or len(data) % TOPICS.itemsize:
        return None
    rows = numpy.frombuffer(data, TOPICS)
    if (core := sys.modules.get("penstock._core")) and len(rows) < 1000:  # above that numpy is as fast
        kept = layout.decode_summary(data, header, core.journal.crc32c)
        return None if kept is None else rows
    pieces = rows.view(numpy.uint8).reshape(len(rows), TOPICS.itemsize)
    seeds = crc32c_rows(pieces[:, :4], numpy.full(len(rows), header.seed, numpy.uint32))
    whole = (crc32c_rows(pieces[:, 8:], seeds) == rows["checksum"]).all()
    return rows if whole and int(rows["messages"].sum()) == header.seal.messages else None


def open_directory(path: str | os.PathLike[str], *, crc32: Crc32 = zlib.crc32) -> Directory:
    """The journal in ``path``, read-only. ``crc32``: what computes block sums; who has a faster one gives it."""
    return Directory(path, crc32)


class Segment:
    """One ``.log`` and its caches. ``first`` to ``next`` - 1 are its positions (with gaps where ``gaps``)."""

    def __init__(
        self,
        directory: Path,
        first: int,
        revision: int,
        following: int,
        frontier: layout.Frontier,
        crc32: Crc32 = zlib.crc32,
    ) -> None:
        self._crc32 = crc32
        self.first, self.next, self.revision = first, min(following, frontier.frontier), revision
        self.path = directory / layout.segment_name(first, revision)
        self.active = following > frontier.frontier
        self.header = layout.decode_segment_header(
            read_part(self.path, 0, layout.SEGMENT_HEADER_BYTES), str(self.path)
        )
        self.gaps = self.header.gaps
        known_end = frontier.end if frontier.segment == first else 0
        self.end = self.header.seal.end if self.header.seal else known_end  # 0: not known
        self._scanned: Entries | None = None

    def file(self, suffix: str) -> Path:
        """The path of one of its files."""
        return self.path.with_suffix("." + suffix)

    def index(self, start: int | None = None, stop: int | None = None) -> Entries:
        """Index entries of the positions from ``start`` up to but without ``stop``, checked against the log."""
        start = self.first if start is None else max(start, self.first)
        stop = self.next if stop is None else min(stop, self.next)
        if stop <= start:
            return numpy.empty(0, INDEX)
        if self._scanned is not None:
            return _between(self._scanned, start, stop)
        if self.gaps:
            if self.header.seal is None:
                return self._rescan(start, stop)
            entries = _read_entries(self.file("index"), 0, self.header.seal.messages)
            ascending = bool((numpy.diff(entries["position"].astype(numpy.int64)) > 0).all())
            if len(entries) != self.header.seal.messages or not ascending or not believed(entries, self.header.nonce):
                return self._rescan(start, stop)
            return _between(entries, start, stop)
        entries = _read_entries(self.file("index"), start - self.first, stop - start)
        expected = numpy.arange(start, stop, dtype=numpy.uint64)
        if not numpy.array_equal(entries["position"], expected) or not believed(entries, self.header.nonce):
            return self._rescan(start, stop)
        return entries

    def topics_here(self) -> NDArray[Any] | None:
        """The topic summary of a sealed segment; None: not there, or not to be believed."""
        try:
            return summary(read_all(self.file("topics")), self.header)
        except (OSError, CorruptionError):
            return None

    def _rescan(self, start: int, stop: int) -> Entries:
        """The index made from the log, every record checked. Slow, and only done where the cache was lost."""
        entries = numpy.array(list(_walk(self)), dtype=INDEX)
        entries = _between(entries, self.first, self.next)
        count = self.header.seal.messages if self.header.seal else None if self.gaps else self.next - self.first
        if count is not None and len(entries) != count:
            place = f"{self.path}"
            what = f"{place} holds {len(entries)} of {count} messages"
            raise CorruptionError(f"{what}; run: penstock journal verify {self.path.parent}", place)
        if len(entries):
            data = self.read_bytes(
                0, int(entries["offset"][-1] + entries["length"][-1] + entries["extra_bytes"][-1]) + HEAD + 8
            )
            check_records(self, entries, data, 0)
        self._scanned = entries
        return _between(self._scanned, start, stop)

    def read(self, entries: Entries, *, check: bool = True) -> tuple[NDArray[numpy.uint8], int]:
        """The bytes of the log that hold the records of ``entries``, and the offset of the first of them."""
        begin = int(entries["offset"][0])
        last = entries[-1]
        stop = layout.padded(int(last["offset"]) + HEAD + int(last["length"]) + int(last["extra_bytes"]))
        data = self.read_bytes(begin, stop)
        if len(data) < stop - begin:
            raise CorruptionError(f"{self.path} ends at {begin + len(data)}, before its last record", f"{self.path}")
        self._match(entries, data, begin)
        if check:
            self._check(entries, data, begin, stop)
        return data, begin

    def read_bytes(self, begin: int, stop: int) -> NDArray[numpy.uint8]:
        """Bytes of the log; fewer where the file ends before."""
        return numpy.frombuffer(read_part(self.path, begin, max(0, stop - begin)), numpy.uint8)

    def _match(self, entries: Entries, data: NDArray[numpy.uint8], begin: int) -> None:
        """Each entry's checksum is the word at its offset, or one of the two is damaged."""
        offsets = entries["offset"] - numpy.uint64(begin)  # one before `begin` becomes very large
        sizes = entries["length"] + (entries["extra_bytes"] + numpy.uint64(HEAD))
        fits = (offsets <= numpy.uint64(len(data))) & (offsets + sizes <= numpy.uint64(len(data)))
        if fits.all() and not (offsets & numpy.uint64(7)).any():
            words = data[: len(data) // 4 * 4].view("<u4")
            bad = words[(offsets >> numpy.uint64(2)).view(numpy.int64)] != entries["checksum"]
        else:
            bad = ~fits | (offsets % numpy.uint64(8) != 0)
        if bad.any():
            entry = entries[int(numpy.argmax(bad))]
            raise _damage(self, int(entry["position"]), int(entry["offset"]))

    def _check(self, entries: Entries, data: NDArray[numpy.uint8], begin: int, stop: int) -> None:
        """Records in blocks whose sums agree are whole; the others are checked one by one."""
        size = numpy.uint64(layout.BLOCK_BYTES)
        good = self._good_blocks(data, begin, stop)
        if good.all():
            return
        bad_before = numpy.concatenate(([0], numpy.cumsum(~good)))
        base = begin // layout.BLOCK_BYTES
        ends = entries["offset"] + entries["length"] + entries["extra_bytes"] + numpy.uint64(HEAD + 6)
        first = (entries["offset"] // size).astype(numpy.int64) - base
        last = numpy.minimum((ends // size).astype(numpy.int64) - base, len(good) - 1)
        doubtful = bad_before[last + 1] > bad_before[first]
        if doubtful.any():
            check_records(self, entries[doubtful], data, begin)

    def _good_blocks(self, data: NDArray[numpy.uint8], begin: int, stop: int) -> NDArray[numpy.bool_]:
        """For each block that the range touches, whether it has a sum that agrees. Its other bytes are read as well."""
        size = layout.BLOCK_BYTES
        first, last = begin // size, (stop - 1) // size
        good = numpy.zeros(last - first + 1, numpy.bool_)
        summed = -(-self.end // size) if self.header.seal else self.end // size  # the tail block has no sum yet
        until = min((last + 1) * size, self.end, summed * size)
        try:
            data_of_sums = read_part(self.file("sums"), first * 4, len(good) * 4)
        except (OSError, CorruptionError):
            return good
        sums = numpy.frombuffer(data_of_sums[: len(data_of_sums) // 4 * 4], "<u4").tolist()
        parts = self.read_bytes(first * size, begin), data[: max(0, until - begin)], self.read_bytes(stop, until)
        joined = numpy.concatenate(parts) if len(parts[0]) or len(parts[2]) else data
        if first == 0:
            joined = joined.copy()
            joined[layout.SEAL_OFFSET : layout.SEAL_OFFSET + layout.SEAL_BYTES] = 0
        view = joined.data
        for at in range(min(len(sums), summed - first, len(good))):
            good[at] = self._crc32(view[at * size : (at + 1) * size]) == sums[at]
        return good


def check_records(segment: Segment, entries: Entries, data: NDArray[numpy.uint8], begin: int) -> None:
    """``CorruptionError`` for the first record whose CRC32C is wrong."""
    sizes = (entries["length"].astype(numpy.int64) + entries["extra_bytes"] + HEAD + 7) & ~7
    nonce = numpy.frombuffer(struct.pack("<Q", segment.header.nonce), numpy.uint8)
    for size in numpy.unique(sizes):
        chosen = entries[sizes == size]
        starts = (chosen["offset"].astype(numpy.int64) - begin)[:, None]
        step = max(1, (16 << 20) // int(size))
        for at in range(0, len(chosen), step):
            part = chosen[at : at + step]
            rows = data[starts[at : at + step] + numpy.arange(4, int(size))]
            seeds = numpy.zeros(len(part), numpy.uint32)
            seeds = crc32c_rows(numpy.broadcast_to(nonce, (len(part), 8)), seeds)
            places = numpy.ascontiguousarray(part["position"]).view(numpy.uint8).reshape(-1, 8)
            wrong = crc32c_rows(rows, crc32c_rows(places, seeds)) != part["checksum"]
            if wrong.any():
                entry = part[int(numpy.argmax(wrong))]
                raise _damage(segment, int(entry["position"]), int(entry["offset"]))


def _damage(segment: Segment, position: int, offset: int) -> CorruptionError:
    place = f"{segment.path}:{offset}"
    return CorruptionError(f"position {position} is damaged ({place})", place)


def _between(entries: Entries, start: int, stop: int) -> Entries:
    positions = entries["position"]
    return entries[numpy.searchsorted(positions, start) : numpy.searchsorted(positions, stop)]


def _read_entries(path: Path, start: int, count: int) -> Entries:
    try:
        data = read_part(path, max(0, start) * INDEX.itemsize, count * INDEX.itemsize)
    except (OSError, CorruptionError):
        return numpy.empty(0, INDEX)
    return numpy.frombuffer(data[: len(data) // INDEX.itemsize * INDEX.itemsize], INDEX)


def _batches(segment: Segment) -> Iterator[tuple[tuple[Any, ...], bytes, int]]:
    """(header, bytes, offset) of the batches below the durable end, as far as headers can be followed."""
    limit = segment.end or segment.path.stat().st_size
    offset = layout.SEGMENT_HEADER_BYTES
    with os.fdopen(open_regular(segment.path), "rb") as file:
        while offset + layout.BATCH.size <= limit:
            file.seek(offset)
            head = file.read(layout.BATCH.size)
            if len(head) < layout.BATCH.size:
                return
            header = layout.BATCH.unpack(head)
            magic, _, nonce, first, _, _, size = header[:7]
            ours = (
                magic == layout.BATCH_MAGIC
                and nonce == segment.header.nonce
                and header[10] == layout.crc32c(head[8:60])
            )
            if not ours or offset + size > limit or size < len(head) or (first >= segment.next and header[4]):
                return
            yield header, file.read(size - layout.BATCH.size), offset
            offset += size


def _walk(segment: Segment) -> Iterator[tuple[int, ...]]:
    for header, body, offset in _batches(segment):
        position = header[3]
        for record, at in _records(body):
            if record[2] != layout.KIND_MESSAGE:
                continue
            checksum, _, _, _, identity, key, account, topic, properties, length, _, ordinal, *times = record
            place = offset + layout.BATCH.size + at
            extra = properties + identity + key + account
            if HEAD + length + extra > record[1]:  # its parts are longer than it is: told as damaged
                length, extra, checksum = record[1] - HEAD, 0, checksum ^ 0xFFFF_FFFF
            yield (position, ordinal, *times, place, length, topic, extra, checksum, 0, 0)
            position += 1


def _records(body: bytes) -> Iterator[tuple[tuple[Any, ...], int]]:
    at = 0
    while at + HEAD <= len(body):
        record = layout.RECORD.unpack_from(body, at)
        if record[1] < HEAD or at + record[1] > len(body):
            return
        yield record, at
        at += record[1]


class Directory:
    """A journal's files as they are now; ``refresh`` looks again."""

    def __init__(self, path: str | os.PathLike[str], crc32: Crc32 = zlib.crc32) -> None:
        self.path = Path(path)
        self._crc32 = crc32
        marker = self.path / layout.MARKER_NAME
        try:
            self.uuid: UUID = layout.decode_marker(read_part(marker, 0, layout.MARKER_BYTES), str(marker))
        except FileNotFoundError:
            raise InvalidArgument(f"{self.path} is not a journal (no {layout.MARKER_NAME} in it)") from None
        self._names: dict[int, str] = {}
        self.segments: list[Segment] = []
        self.refresh()

    def refresh(self) -> None:
        """Look at the frontier and the list of files again."""
        for _ in range(100):
            try:
                words = self._words()
                self._list(words)
            except FileNotFoundError:  # retention or compaction was at work
                continue
            self.frontier = words.frontier
            return
        raise CorruptionError(f"{self.path}: its files keep vanishing", str(self.path))

    def _words(self) -> layout.Frontier:
        place = self.path / layout.FRONTIER_NAME
        for _ in range(1000):  # both copies may be changing at the moment they are read
            words = layout.decode_frontier(read_part(place, 0, layout.FRONTIER_BYTES), self.uuid)
            if words is not None:
                return words
        raise CorruptionError(f"{place} is damaged; opening the journal for writing makes it anew", str(place))

    def _list(self, words: layout.Frontier) -> None:
        found = [item for item in layout.latest_segments(os.listdir(self.path)) if item[0] <= words.frontier]
        following = [first for first, _ in found[1:]] + [2**63] * bool(found)
        old = {(segment.first, segment.revision): segment for segment in self.segments if not segment.active}
        self.segments = [
            old.get((first, revision)) or Segment(self.path, first, revision, after, words, self._crc32)
            for (first, revision), after in zip(found, following, strict=True)
        ]

    @property
    def first(self) -> int:
        """The least position kept."""
        return self.segments[0].first if self.segments else 1

    def topics(self) -> dict[int, str]:
        """Names by topic id. The newest segment's snapshot has all that were known before it; where it is damaged the
        others tell what they have."""
        for segment in reversed(self.segments):
            if self._names_of(segment):
                break
        return dict(self._names)

    def _names_of(self, segment: Segment) -> bool:
        """Learn names from a segment; False where it may have had more."""
        reached, whole = 0, True
        for header, body, offset in _batches(segment):
            reached = offset + layout.BATCH.size + len(body)
            if not header[9] & (layout.BATCH_TOPICS | layout.BATCH_SNAPSHOT):
                continue
            position = header[3]
            for record, at in _records(body):
                if record[2] == layout.KIND_TOPIC:
                    seed = struct.pack("<QQ", segment.header.nonce, position)
                    if layout.crc32c(body[at + 4 : at + record[1]], layout.crc32c(seed)) == record[0]:
                        self._names[record[7]] = body[at + HEAD : at + HEAD + record[9]].decode("utf-8", "replace")
                    else:
                        whole = False
                position += record[2] == layout.KIND_MESSAGE
        return whole and reached > 0 and (not segment.end or reached >= segment.end)

    def _check_named(self, numbers: Any) -> None:
        """Who asks for topics by name must not miss the messages of one whose name is damaged."""
        unknown = set(numpy.unique(numbers).tolist()) - self._names.keys()
        if unknown:
            text = f"the name of topic number {min(unknown)} is damaged"
            raise CorruptionError(f"{text}; run: penstock journal verify {self.path}", str(self.path))

    def topic_ids(self, topics: Iterable[str] | None) -> list[int] | None:
        """Ids that the patterns select; None for all."""
        if topics is None:
            return None
        if isinstance(topics, str):
            raise TypeError("topics is a list of names or patterns, not one str")
        patterns = [check_pattern(pattern) for pattern in topics]
        if ">" in patterns:
            return None
        names = self.topics().items()
        return [number for number, name in names if any(matches(p, name) for p in patterns)]

    def holes(self) -> list[Hole]:
        """What is missing below the frontier, and why."""
        found = [Hole(1, self.first - 1, "retention")] if self.first > 1 else []
        for segment in self.segments:
            seal = segment.header.seal
            if not segment.gaps and seal and seal.messages == segment.next - segment.first:
                continue
            positions = segment.index()["position"].astype(numpy.int64)
            edges = numpy.concatenate(([segment.first - 1], positions, [segment.next]))
            reason = "compaction" if segment.header.flags & layout.SEGMENT_COMPACTED else "lost"
            for at in numpy.flatnonzero(numpy.diff(edges) > 1):
                found.append(Hole(int(edges[at]) + 1, int(edges[at + 1]) - 1, reason))
        return found

    def entries(
        self, start: int | None = None, stop: int | None = None, *, topics: Iterable[str] | None = None
    ) -> Iterator[tuple[Segment, Entries]]:
        """Index entries of a range of positions, segment by segment."""
        start = self.first if start is None else start
        stop = self.frontier if stop is None else min(stop, self.frontier)
        wanted = self.topic_ids(topics)
        for segment in self.segments:
            if segment.next <= start or segment.first >= stop:
                continue
            rows = None if wanted is None else segment.topics_here()
            if rows is not None:
                self._check_named(rows["topic"])
                if not numpy.isin(rows["topic"], wanted or []).any():
                    continue
            entries = segment.index(start, stop)
            if wanted is not None:
                self._check_named(entries["topic"])
                entries = entries[numpy.isin(entries["topic"], wanted)]
            if len(entries):
                yield segment, entries

    def batches(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        topics: Iterable[str] | None = None,
        rows: int = 65536,
        bytes: int = 4 << 20,
        check: bool = True,
    ) -> Iterator[pyarrow.RecordBatch]:
        """Arrow record batches of the positions from ``start`` up to but without ``end``."""
        from penstock.journal.arrow import record_batches

        return record_batches(self, start, end, columns, topics, rows, bytes, check)
