"""Reading a journal with numpy only: the equivalent of the native reader, for Spark executors without the compiled
core.

``Directory.columns`` gives what ``penstock._core.journal.Reader.columns`` gives, and a test compares the two.

Rules:

- No native code, no mapping: files are read by ``pread``, so a file that is truncated meanwhile raises an error instead
  of a SIGBUS.
- Nothing at or past the durable frontier is read.
- An index entry is checked by its own checksum, and compared with its record when the record's bytes are returned. A
  record is checked by its CRC32C. An index that fails its check is rebuilt from the log.

A ``Directory`` is used by one thread at a time. docs/formats.md, "Journal", has the tables.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import numpy
from numpy.typing import NDArray

from penstock.errors import CorruptionError, InvalidArgument, StateError
from penstock.journal import layout
from penstock.journal.disk import LISTINGS, open_regular, read_part
from penstock.printable import command
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
PARTS: Final = {"payload": "data_bytes", "properties": "properties_bytes", "message_id": "id_bytes", "key": "key_bytes"}
LONG_ROW = 64  # longer than so many times the number of rows: cut into pieces
_TABLE = numpy.array(layout._TABLE, dtype=numpy.uint32)

Entries = NDArray[Any]


def crc32c_rows(rows: NDArray[numpy.uint8], seeds: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """CRC32C of each row, continued from its seed: one step per column, for all rows at once.

    Few long rows are cut into pieces, which are taken as rows and put together again.
    """
    count, size = rows.shape
    pieces = math.isqrt(size) if size > LONG_ROW * max(1, count) else 1
    length = size // pieces
    crc = _crc_of_columns(rows[:, : size - pieces * length] if pieces > 1 else rows, ~seeds)
    if pieces > 1:
        body = numpy.ascontiguousarray(rows[:, size - pieces * length :]).reshape(count * pieces, length)
        # The checksum is linear: that of a piece is added to what came before it, moved on over as many zero bytes.
        parts = _crc_of_columns(body, numpy.zeros(count * pieces, numpy.uint32)).reshape(count, pieces)
        tables = _over_zeros(length)
        for piece in range(pieces):
            moved = [tables[at][crc >> numpy.uint32(8 * at) & numpy.uint32(255)] for at in range(4)]
            crc = moved[0] ^ moved[1] ^ moved[2] ^ moved[3] ^ parts[:, piece]
    return ~crc


def _crc_of_columns(rows: NDArray[numpy.uint8], crc: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    for column in range(rows.shape[1]):
        crc = crc >> numpy.uint32(8) ^ _TABLE[(crc ^ rows[:, column]) & numpy.uint32(255)]
    return crc


@functools.lru_cache(64)
def _over_zeros(count: int) -> list[NDArray[numpy.uint32]]:
    """What ``count`` zero bytes make of a checksum: a table for each of its four bytes, to be combined by XOR."""
    bits = numpy.uint32(1) << numpy.arange(32, dtype=numpy.uint32)
    step = bits >> numpy.uint32(8) ^ _TABLE[bits & numpy.uint32(255)]  # one zero byte, for each bit alone
    found = bits
    while count:  # squared and multiplied, as numbers are raised to a power
        found = _applied(step, found) if count & 1 else found
        step, count = _applied(step, step), count >> 1
    every = numpy.arange(256, dtype=numpy.uint32)
    return [_applied(found, every << numpy.uint32(8 * at)) for at in range(4)]


def _applied(images: NDArray[numpy.uint32], values: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """The values under the linear map that takes bit ``i`` to ``images[i]``."""
    has = (values[:, None] >> numpy.arange(32, dtype=numpy.uint32) & numpy.uint32(1)).astype(numpy.bool_)
    result: NDArray[numpy.uint32] = numpy.bitwise_xor.reduce(numpy.where(has, images, numpy.uint32(0)), axis=1)
    return result


def believed(entries: Entries, nonce: int) -> bool:
    """Whether the checksums of all index entries are right. Uses the native core if it is loaded."""
    if not len(entries):
        return True
    packed = numpy.ascontiguousarray(entries)
    if core := sys.modules.get("penstock._core"):
        return bool(core.journal.believed(packed.view(numpy.uint8), nonce) == len(entries))
    rows = packed.view(numpy.uint8).reshape(len(entries), INDEX.itemsize)
    seeds = numpy.full(len(entries), layout.crc32c(struct.pack("<Q", nonce)), numpy.uint32)
    return bool((crc32c_rows(rows[:, :-4], seeds) == entries["entry_checksum"]).all())


def summary(data: bytes, header: layout.SegmentHeader) -> NDArray[Any] | None:
    """A ``.topics`` file; None if a checksum is wrong or a row is missing."""
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


def record_bytes(entries: Entries) -> Entries:
    """The size of each entry's record: header, data, properties, message id and key, up to a multiple of 8."""
    sizes: Entries = (entries["length"].astype(numpy.int64) + entries["extra_bytes"] + HEAD + 7) & ~7
    return sizes


def wrong_records(log: Entries, begins: Entries, entries: Entries, nonce: int) -> Entries:
    """Which records fail their CRC32C (over nonce, position and all bytes after it), or do not belong to their
    entries."""
    wrong = numpy.zeros(len(begins), numpy.bool_)
    sizes = record_bytes(entries)
    head = numpy.frombuffer(nonce.to_bytes(8, "little"), numpy.uint8)
    for size in numpy.unique(sizes).tolist():  # records of one size at once
        places = numpy.flatnonzero(sizes == size)
        step = max(1, (16 << 20) // size)
        for part in (places[at : at + step] for at in range(0, len(places), step)):
            if size > LONG_ROW * len(part):  # one by one, without a number for each byte of them
                rows = numpy.stack([log[begin : begin + size] for begin in begins[part].tolist()])
            else:
                rows = log[begins[part][:, None] + numpy.arange(size)]
            positions = numpy.ascontiguousarray(entries["position"][part]).view(numpy.uint8).reshape(-1, 8)
            seeds = numpy.zeros(len(part), numpy.uint32)
            for piece in (numpy.broadcast_to(head, (len(part), 8)), positions, rows[:, 4:]):
                seeds = crc32c_rows(piece, seeds)
            wrong[part] = seeds != entries["checksum"][part]
            wrong[part] |= seeds != numpy.ascontiguousarray(rows[:, :4]).view(numpy.uint32)[:, 0]
    return wrong


class Segment:
    """One ``.log`` and its caches. ``first`` to ``next`` - 1 are its positions (with gaps where ``gaps``)."""

    def __init__(self, directory: Path, name: tuple[int, int], following: int, frontier: layout.Frontier) -> None:
        self.first, self.revision = name
        self.next = min(following, frontier.frontier)
        self.path = directory / layout.segment_name(*name)
        self.active = following > frontier.frontier
        head = read_part(self.path, 0, layout.SEGMENT_HEADER_BYTES)
        self.header = layout.decode_segment_header(head, str(self.path))
        self.gaps = self.header.gaps
        known_end = frontier.end if frontier.segment == self.first else 0
        self.end = self.header.seal.end if self.header.seal else known_end  # 0: not known
        self._scanned: Entries | None = None

    def index(self, start: int | None = None, stop: int | None = None) -> Entries:
        """Index entries of the positions from ``start`` up to but not including ``stop``, checked or rebuilt from the
        log."""
        start = self.first if start is None else max(start, self.first)
        stop = self.next if stop is None else min(stop, self.next)
        if stop <= start:
            return numpy.empty(0, INDEX)
        if self._scanned is None:
            seal = self.header.seal
            # With gaps an entry is found by its position, and a wrong position would hide others: read all of them.
            low, count = (0, seal.messages if seal else 0) if self.gaps else (start - self.first, stop - start)
            entries = _read_entries(self.path.with_suffix(".index"), low, count)
            positions = entries["position"].astype(numpy.int64)
            steps = numpy.diff(positions, prepend=self.first + low - 1)
            ordered = bool((steps > 0 if self.gaps else steps == 1).all())
            complete = len(entries) == count and (seal is not None or not self.gaps)
            if complete and ordered and believed(entries, self.header.nonce):
                return _between(entries, start, stop)
            self._scanned = self._scan()
        return _between(self._scanned, start, stop)

    def _scan(self) -> Entries:
        """Build the index from the log, and check every record. Slow; only done if the cache was lost."""
        entries = _between(numpy.array(list(_walk(self)), dtype=INDEX), self.first, self.next)
        count = self.header.seal.messages if self.header.seal else None if self.gaps else self.next - self.first
        if count is not None and len(entries) != count:
            what = f"{self.path} holds {len(entries)} of {count} messages"
            raise CorruptionError(f"{what}; run: {command('journal', 'verify', self.path.parent)}", f"{self.path}")
        if len(entries):
            self.read(entries)
        return entries

    def read(self, entries: Entries) -> tuple[NDArray[numpy.uint8], Entries]:
        """Bytes of the log and where the records of ``entries`` begin in them, each of them checked."""
        begin, ends = int(entries["offset"][0]), entries["offset"].astype(numpy.int64) + record_bytes(entries)
        data = numpy.frombuffer(read_part(self.path, begin, max(0, int(ends[-1]) - begin)), numpy.uint8)
        starts = entries["offset"].astype(numpy.int64) - begin
        bad = (starts < 0) | (ends - begin > len(data)) | (starts % 8 != 0)
        if not bad.any():
            bad = wrong_records(data, starts, entries, self.header.nonce)
        if bad.any():
            entry = entries[int(numpy.argmax(bad))]
            place = f"{self.path}:{int(entry['offset'])}"
            raise CorruptionError(f"position {int(entry['position'])} is damaged ({place})", place)
        return data, starts


def _between(entries: Entries, start: int, stop: int) -> Entries:
    positions = entries["position"]
    return entries[numpy.searchsorted(positions, start) : numpy.searchsorted(positions, stop)]


def _read_entries(path: Path, start: int, count: int) -> Entries:
    try:
        data = read_part(path, start * INDEX.itemsize, count * INDEX.itemsize)
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
            if HEAD + length + extra > record[1]:  # its parts are longer than the batch itself: reported as damage
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


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """The journal in ``path``, read-only."""
    return Directory(path)


class Directory:
    """A journal's files as they are now; ``refresh`` lists them again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        marker = self.path / layout.MARKER_NAME
        try:
            self.uuid: UUID = layout.decode_marker(read_part(marker, 0, layout.MARKER_BYTES), str(marker))
        except FileNotFoundError:
            raise InvalidArgument(f"{self.path} is not a journal (no {layout.MARKER_NAME} in it)") from None
        self._names: dict[int, str] = {}
        self.segments: list[Segment] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the frontier and the list of files again."""
        for _ in range(100):
            words = read_frontier(self.path, self.uuid)
            found = [item for item in layout.latest_segments(os.listdir(self.path)) if item[0] <= words.frontier]
            following = [first for first, _ in found[1:]] + [2**63] * bool(found)
            old = {(segment.first, segment.revision): segment for segment in self.segments if not segment.active}
            try:
                self.segments = [
                    old.get(name) or Segment(self.path, name, after, words)
                    for name, after in zip(found, following, strict=True)
                ]
            except FileNotFoundError:  # retention or compaction was at work
                continue
            self.frontier, self._searched = words.frontier, False
            return
        raise CorruptionError(f"{self.path}: its files are deleted while they are opened", str(self.path))

    @property
    def first(self) -> int:
        """The least position kept."""
        return self.segments[0].first if self.segments else 1

    def topics(self) -> dict[int, str]:
        """Names by topic id. The newest segment's snapshot has all that were known before it; if it is damaged, the
        older segments are read."""
        for segment in reversed(self.segments):
            if self._names_of(segment):
                break
        return dict(self._names)

    def _names_of(self, segment: Segment) -> bool:
        """Read names from a segment; False if it may have more of them."""
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

    def _unknown(self, numbers: Entries) -> set[int]:
        """Those of these topics whose names are not known; they are searched for once after each ``refresh``."""
        found = set(numpy.unique(numbers).tolist())
        if not self._searched and not found <= self._names.keys():
            self.topics()
            self._searched = True
        return found - self._names.keys()

    def columns(
        self, start: int, stop: int, most: int, most_bytes: int, patterns: list[str] | None, wanted: Iterable[str]
    ) -> tuple[dict[str, Any], Sequence[str], int, int]:
        """As ``Reader.columns``: columns, names by topic id, how many messages, where to go on."""
        for _ in range(LISTINGS):
            try:
                return self._columns(start, stop, most, most_bytes, patterns, frozenset(wanted))
            except FileNotFoundError:  # retention or compaction has removed a segment: continue with the others
                self.refresh()
        raise StateError(f"the segments of {self.path} are deleted faster than they can be read; keep more")

    def _columns(
        self, start: int, stop: int, most: int, most_bytes: int, patterns: list[str] | None, wanted: frozenset[str]
    ) -> tuple[dict[str, Any], Sequence[str], int, int]:
        at = bisect.bisect_right(self.segments, start, key=lambda segment: segment.first)
        for segment in self.segments[max(0, at - 1) :]:
            begin, end = max(start, segment.first), min(stop, self.frontier)
            if patterns is None and not segment.gaps:
                end = min(end, begin + most)  # no more are returned, so their entries need not be read
            entries = segment.index(begin, end)
            unknown = set()
            if patterns is not None or "topic" in wanted:
                unknown = self._unknown(entries["topic"])
            names = self._names
            if patterns is not None:
                if unknown:  # a filter by name must not silently skip a topic whose name is damaged
                    text = f"the name of topic number {min(unknown)} is damaged"
                    raise CorruptionError(f"{text}; run: {command('journal', 'verify', self.path)}", str(self.path))
                chosen = [number for number, name in names.items() if any(matches(p, name) for p in patterns)]
                entries = entries[numpy.isin(entries["topic"], chosen)]
            if len(entries):
                fitting = int(numpy.cumsum(entries["length"], dtype=numpy.int64).searchsorted(most_bytes, side="right"))
                entries = entries[: min(most, max(1, fitting))]
                texts = [names.get(number, f"unknown#{number}") for number in range(int(entries["topic"].max()) + 1)]
                return _columns(segment, entries, wanted), texts, len(entries), int(entries["position"][-1]) + 1
        return {}, (), 0, stop

    def batches(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        topics: Iterable[str] | None = None,
        rows: int = 65536,
        bytes: int = 4 << 20,
    ) -> Iterator[pyarrow.RecordBatch]:
        """Arrow record batches of the positions from ``start`` up to but without ``end``."""
        from penstock.journal.arrow import record_batches

        patterns = None if topics is None else [check_pattern(pattern) for pattern in topics]
        begin, stop = self.first if start is None else start, self.frontier if end is None else end
        return record_batches(self.columns, begin, stop, columns, patterns, rows, bytes)


def read_frontier(path: Path, uuid: UUID) -> layout.Frontier:
    """The words of the frontier file."""
    place = path / layout.FRONTIER_NAME
    for _ in range(1000):  # both copies may be changing at the moment they are read
        try:
            words = layout.decode_frontier(read_part(place, 0, layout.FRONTIER_BYTES), uuid)
        except FileNotFoundError:
            break
        if words is not None:
            return words
    what = f"{place} is missing or damaged: open the journal for writing once to make it again"
    raise CorruptionError(what, str(place))


def _columns(segment: Segment, entries: Entries, wanted: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: entries["length" if name == "size" else name].astype(numpy.int64).tobytes()
        for name in wanted & {"position", "ordinal", "timestamp_ns", "stored_ns", "size"}
    }
    if "topic" in wanted:
        found["topic"] = entries["topic"].tobytes()
    if not wanted & PARTS.keys():
        return found
    data, starts = segment.read(entries)
    heads = data[starts[:, None] + numpy.arange(HEAD)].view(RECORD)[:, 0]
    at = starts + HEAD
    for name, field in PARTS.items():  # in the order of a record
        sizes = heads[field].astype(numpy.int64)
        if name in wanted:
            offsets = numpy.concatenate(([0], numpy.cumsum(sizes)))
            places = numpy.repeat(at - offsets[:-1], sizes) + numpy.arange(offsets[-1])
            found[name] = offsets.astype(numpy.int32).tobytes(), data[places].tobytes()
        at = at + sizes
    return found
