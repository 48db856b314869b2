"""Refill: makes a journal's directory a copy of the stream. The stream is the truth.

- Complete segments stay; the last one is always compared with the stream, block by block.
- What is past the frontier and not on the stream was never confirmed: it is wiped, never truncated, because readers
  may have it mapped.
- Messages before the frontier that are whole and that the stream does not have are put aside with their segment
  (``aside-N``, a journal that can be read) and named: somebody believes that they are stored.
- A segment of another journal, or of another position, is put aside in a directory of its own, as its own journal.
- Nothing here is synced. So after a restart of the machine (another boot id) every segment is checked in full.
- If the directory has more durable messages than the stream, the stream has lost something: this is refused.
- What is here already and right takes no room: a log of the stream is held in memory, and only what differs is written.
  If there is no room for that, it is refused with how much is wanted, and the directory is left as it was.

Under the writer's lock of the directory, and through what it holds: whatever takes the directory's place meanwhile is
not touched. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.journal import foreign, layout, recovery
from penstock.journal.disk import Disk, open_regular, read_all, read_part
from penstock.journal.lock import WriterLock
from penstock.journal.repairs import merge
from penstock.journal.rewrite import SUFFIXES, remove_segment
from penstock.replica.history import History, Segment
from penstock.replica.writers import DISK_FULL
from penstock.replica.writers import FILE_NAME as WRITERS_NAME

log = logging.getLogger("penstock.replica")
PIECE_BYTES = 1 << 20
MOST_RANGES = 5  # of positions in one line of the log
UNDONE_BYTES = 8  # that many bytes of a batch that could not be written are wiped by its writer
BOOT_NAME = layout.REPLICA_NAME  # holds the boot id under which the directory was last written


@dataclass
class Refilled:
    """The directory, and where a writer continues."""

    uuid: UUID
    begins: dict[tuple[int, int], int] = field(default_factory=dict)  # by segment: its first block
    segment: tuple[int, int] = (0, 0)
    end: int = 0  # end of the last segment's log
    next: int = 1
    copied: list[str] = field(default_factory=list)  # the logs that were written
    damaged: list[str] = field(default_factory=list)  # files that were damaged or missing and have been repaired
    aside: list[tuple[int, int]] = field(default_factory=list)  # segments that were put aside


class UnsyncedDisk(Disk):
    """A disk without syncs: what a crash loses here is on the stream."""

    native = False
    for_copies = True

    def sync(self, file: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


def check_directory(directory: Path) -> None:
    """Refuse a directory that this process cannot write, that another one writes, or that is no place for a journal."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = os.listdir(directory)
    if BOOT_NAME not in names and not layout.latest_segments(names):  # the marker of a copy may be made again
        recovery.check_place(directory)
    recovery.check_owner(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    WriterLock(directory).release()


def refuse_messages(directory: Path, name: str) -> None:
    """Of a stream without blocks: a directory with messages is no copy of it."""
    if layout.latest_segments(os.listdir(directory)):
        raise InvalidArgument(f"{directory} has messages and {name} has none: --seed copies them there")


def refill(directory: Path, history: History, *, check: bool = False) -> Refilled:
    """Make the directory a copy of the stream, as far as ``history`` goes. ``check``: every segment, in full."""
    result, lock = refill_held(directory, history, check=check)
    lock.release()
    return result


def refill_held(
    directory: Path, history: History, *, check: bool = False, told: Collection[str] = ()
) -> tuple[Refilled, WriterLock]:
    """As ``refill``, and keep the lock. ``check``: every segment, in full. ``told``: the files that are known to be
    missing or wrong.
    """
    disk = UnsyncedDisk()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = history.last.uuid if history.last is not None else None
    was_new = not (directory / layout.MARKER_NAME).exists()
    try:
        if wanted is not None:
            _mend_marker(directory, wanted, disk, told)
        uuid, lock, _ = recovery.prepare(directory, disk, wanted)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        disk.remove(directory / f"{layout.MARKER_NAME}.new")
        raise full(directory, f"{layout.MARKER_BYTES} bytes are needed for {layout.MARKER_NAME}", error.errno) from None
    try:
        if wanted is not None and uuid != wanted:
            raise InvalidArgument(f"{directory} is of journal {uuid}, {history.blocks.name} of {wanted}: not touched")
        result = Refilled(uuid)
        if not history.segments:
            refuse_messages(directory, history.blocks.name)
        elif any(segment.head.uuid != uuid for segment in history.segments):
            raise CorruptionError(f"{history.blocks.name} has blocks of more than one journal", history.blocks.name)
        else:
            with lock.naming():
                copying = Copying(directory, lock.place, history, disk, result, told)
                copying.run(check or not same_boot(lock.place))
        with lock.naming():
            _note_boot(lock.place, disk)
        return result, lock
    except BaseException as error:
        if was_new and isinstance(error, OSError) and error.errno in DISK_FULL:
            disk.remove(lock.place / layout.MARKER_NAME)
        lock.release()
        raise


def _mend_marker(directory: Path, wanted: UUID, disk: Disk, told: Collection[str]) -> None:
    """Repair a marker that disagrees with all segments: it is damaged, or was lost in a power cut."""
    marker = directory / layout.MARKER_NAME
    known = None
    with contextlib.suppress(FileNotFoundError, PenstockError):
        known = layout.decode_marker(read_all(marker), str(marker))
    owners = _owners(directory)
    was_copy = not owners and known is None and (directory / BOOT_NAME).exists()
    if known != wanted and (owners == {wanted} or was_copy):
        if marker.name not in told:
            log.warning("%s was missing or damaged and is written again: it is of journal %s", marker, wanted)
        disk.write_file(marker, layout.encode_marker(wanted))


def _owners(directory: Path) -> set[UUID]:
    """The identities of the journals that the segments of a directory belong to."""
    found = set()
    for segment in layout.latest_segments(os.listdir(directory)):
        path = directory / layout.segment_name(*segment)
        with contextlib.suppress(OSError, PenstockError):
            found.add(layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path)).uuid)
    return found


def full(directory: Path, text: str, number: int = errno.ENOSPC) -> OSError:
    """The error of a directory that has no room."""
    return OSError(number, f"{os.strerror(number)}: {text}", str(directory))


def mend(directory: Path, lock: WriterLock, history: History, names: set[tuple[int, int]]) -> list[str]:
    """Check these segments, none of which is the last one, and fetch damaged ones again; returns the names of those
    files.
    """
    result = Refilled(history.segments[-1].head.uuid)
    with lock.naming():
        copying = Copying(directory, lock.place, history, UnsyncedDisk(), result)
        with copying.or_as_it_was():
            copying.put_foreign_aside(names)
            copying.older(names)
            copying.end_aside()
    return result.damaged


class Copying:
    """Makes the segments of a directory copies of the stream's, and records what was wrong with them. ``directory`` is
    what it is called, ``place`` where its files are.
    """

    def __init__(
        self,
        directory: Path,
        place: Path,
        history: History,
        disk: Disk,
        result: Refilled,
        told: Collection[str] = (),
    ) -> None:
        self._name = directory
        self._directory = place
        self._told = told
        self._history = history
        self._disk = disk
        self._result = result
        self._words = recovery.read_frontier(place, result.uuid)
        # without a frontier it is not known what was confirmed here: every intact message may have been
        self._durable = self._words.frontier if self._words is not None else layout.MAX_POSITION
        self._used = 0  # bytes that were written and took room
        self._later = 0  # bytes that the files will take which are made of the logs
        self._undo: list[Callable[[], None]] = []  # makes the directory as it was

    def run(self, check: bool) -> None:
        """Copy the segments, the last one first: it shows whether the stream has everything that the directory has."""
        history, result = self._history, self._result
        last = history.segments[-1]
        result.begins = {segment.name: segment.begin for segment in history.segments}
        result.segment = last.name
        fetched = _fetch(history, last, result)
        frontier = self._frontier(fetched)
        with self.or_as_it_was():
            self.put_foreign_aside()
            self.older({segment.name for segment in history.segments[:-1]}, check)
            self._take(last, fetched, layout.MAX_POSITION)
            self._forget_others()
            self.end_aside()
        if frontier is not None:
            _write_frontier(self._directory, result.uuid, frontier)
        else:
            with contextlib.suppress(FileNotFoundError):  # it is rebuilt when the journal is opened
                (self._directory / layout.FRONTIER_NAME).unlink()

    @contextlib.contextmanager
    def or_as_it_was(self) -> Iterator[None]:
        """A context that undoes what was done in it when there is no room for the rest."""
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                for step in reversed(self._undo):
                    step()
            raise

    def _frontier(self, fetched: bytes) -> layout.Frontier | None:
        """The frontier for a directory that was used before: exactly what the stream has is durable. ``fetched`` is the
        last segment's log. Nothing in the directory has been changed yet.
        """
        words, name = self._words, layout.FRONTIER_NAME
        if words is None:
            if layout.latest_segments(os.listdir(self._directory)):
                if name not in self._told:
                    log.warning("%s: the frontier was missing or damaged and is made again", self._name)
                self._result.damaged.append(name)
            return None
        stream = self._history.blocks.name
        header = layout.decode_segment_header(fetched[: layout.SEGMENT_HEADER_BYTES], stream)
        scan = native.scan(fetched, header.nonce, header.first, 2**63, 0, header.gaps)
        following = scan["next_position"]
        if words.frontier > following:
            raise CorruptionError(
                f"{stream} ends at position {following - 1}, and {self._name} has messages up to "
                f"{words.frontier - 1}: the stream has lost some, or another program wrote there. They are left as "
                "they are; a broker that is started on the directory that the stream was written from puts back what "
                "was lost",
                stream,
            )
        first = min(first for first, _ in self._result.begins)
        return layout.Frontier(
            words.pid, words.sequence + 1, following, header.first, scan["end"], words.generation + 1, first
        )

    def older(self, names: set[tuple[int, int]], check: bool = True) -> None:
        """Fetch those of these segments that are not complete here; ``check``: read them to find out."""
        for segment, following in zip(self._history.segments, self._history.segments[1:], strict=False):
            wrong: list[str] = []
            if segment.name in names and not self._is_whole(segment, following, check, wrong):
                self._take(segment, _fetch(self._history, segment), following.name[0])
            self._say(wrong, "was damaged or missing and is made again")

    def _is_whole(self, segment: Segment, following: Segment, check: bool, wrong: list[str]) -> bool:
        """Whether a segment is as the stream has it. It was sealed only after the next had begun.

        Caches that had to be rebuilt are added to ``wrong``.
        """
        path = self._path(segment.name)
        try:
            data = read_all(path) if check else read_part(path, 0, layout.SEGMENT_HEADER_BYTES)
            header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
        except (FileNotFoundError, PenstockError):
            return False
        if header.seal is None or header.seal.next != following.name[0] or not self._begins_as(segment):
            return False
        if self._path(following.name).exists() and not self._begins_as(following):
            return False  # the two logs differ from there on, or even earlier
        if not check:
            return True
        scan = native.scan(data, header.nonce, header.first, header.seal.next, header.seal.next, header.gaps)
        if scan["damage"] or scan["end"] != header.seal.end or scan["next_position"] != header.seal.next:
            return False
        recovery.seal_segment(self._directory, segment.name, header, data, scan, header.seal.next, self._disk, wrong)
        return True

    def _begins_as(self, segment: Segment) -> bool:
        """Whether the log of that name is the same one as on the stream."""
        try:
            here = read_part(self._path(segment.name), 0, layout.SEGMENT.size)
        except (FileNotFoundError, CorruptionError):
            return False
        return _same_log(here, segment.head.data)

    def _path(self, name: tuple[int, int]) -> Path:
        return self._directory / layout.segment_name(*name)

    def _take(self, segment: Segment, fetched: bytes, following: int) -> None:
        """Make the local log equal to a fetched one, and record why."""
        path = self._path(segment.name)
        if path.is_dir():
            raise InvalidArgument(f"{self._name / path.name} is a directory and no log: move it away")
        what = self._look(segment.name, fetched, following)
        if self._install(segment, fetched):
            self._result.copied.append(path.name)
            if what:
                self._say([path.name], f"{what}: it is taken from {self._history.blocks.name}")

    def _install(self, segment: Segment, fetched: bytes) -> bool:
        """Write what a log lacks; returns whether anything was. If the same log exists already, its bytes are changed
        in place, because it may be mapped; so are those of a log whose header is damaged.
        """
        path = self._path(segment.name)
        if not (self._begins_as(segment) or self._has_damaged_header(segment)):
            self._check_room(segment, fetched, 0)
            with self._counting(len(fetched)):
                _write_new(path, fetched, self._disk, self._undo)
            return True
        file = self._disk.open(path)
        try:
            size = os.fstat(file).st_size
            self._check_room(segment, fetched, size)
            with self._counting(max(0, len(fetched) - size)):
                return _write_into(path, file, fetched, self._disk, self._undo)
        finally:
            self._disk.close(file)

    def _has_damaged_header(self, segment: Segment) -> bool:
        path = self._path(segment.name)
        try:
            layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path))
        except FileNotFoundError:
            return False
        except CorruptionError:
            return path.is_file() and not path.is_symlink()
        return False

    def _check_room(self, segment: Segment, fetched: bytes, size: int) -> None:
        """Refuse before anything is written what has no room here, with the files that are made of it later."""
        system = os.statvfs(self._directory)
        grown = _grown(size, len(fetched), system.f_frsize)
        if not grown:
            return
        if not self._later:
            small = [BOOT_NAME, WRITERS_NAME, *([layout.FRONTIER_NAME] if self._words is None else [])]
            self._later = sum(system.f_frsize for name in small if not (self._directory / name).exists())
        for suffix, wanted in self._caches(segment, fetched).items():
            path = self._directory / layout.segment_name(*segment.name, suffix)
            self._later += _grown(path.stat().st_size if path.is_file() else 0, wanted, system.f_frsize)
        free = system.f_bavail * system.f_frsize
        if grown + self._later > free:
            raise self._full(errno.ENOSPC, grown, free)
        self._used += grown

    def _caches(self, segment: Segment, log: bytes) -> dict[str, int]:
        """How long the files will be that are made of a log."""
        header = layout.decode_segment_header(log[: layout.SEGMENT_HEADER_BYTES], self._history.blocks.name)
        later = [other.name[0] for other in self._history.segments if other.begin > segment.begin]
        following = min(later, default=None)
        scan = native.scan(log, header.nonce, header.first, following or 2**63, 0, header.gaps)
        sizes = {"index": len(scan["index"]), "sums": len(native.block_sums(log, scan["end"]))}
        if following is not None:
            sizes["topics"] = len(native.summarise(scan["index"], header.nonce))
        return sizes

    @contextlib.contextmanager
    def _counting(self, wanted: int) -> Iterator[None]:
        """A context in which a full disk is told with what is wanted of it."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._full(error.errno or errno.ENOSPC, wanted) from None

    def _full(self, number: int, wanted: int, free: int | None = None) -> OSError:
        wanted += self._used + self._later
        text = f"at least {wanted} bytes are needed for a copy of {self._history.blocks.name}"
        return full(self._name, text if free is None else f"{text}, and {free + self._used} are free", number)

    def _look(self, name: tuple[int, int], fetched: bytes, following: int) -> str:
        """What is wrong with a log, compared with the stream's; nothing if it only ends earlier. A log with messages
        that the stream does not have is put aside.
        """
        try:
            data = read_all(self._path(name))
            header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], "")
        except FileNotFoundError:
            missing = self._words is not None and name[0] < self._durable and not self._result.aside
            return f"was missing{self._mended(b'', fetched)}" if missing else ""
        except CorruptionError:
            return f"was damaged{self._mended(self._read(name), fetched)}"
        if self._is_same(name, data, fetched):  # the usual case, and a scan takes long
            return ""
        durable = min(self._durable, following)
        scan = native.scan(data, header.nonce, header.first, layout.MAX_POSITION, durable, header.gaps)
        own = list(_others(data, scan["index"], self._durable, fetched))
        if own:
            self._put_aside(name, own)
            return ""
        ends_early = self._words is not None and scan["next_position"] < durable
        ends_early = ends_early or scan["end"] < self._durable_end(name, len(fetched))
        if scan["damage"] or ends_early or (_same_log(data, fetched) and not _same_header(data, header, fetched)):
            return f"was damaged{self._mended(data, fetched)}"
        if not scan["tail_bytes"] or scan["open_group"]:
            return ""
        tail = data[scan["end"] :]
        if tail[:UNDONE_BYTES] == bytes(UNDONE_BYTES):
            return "ended with a write that was broken off, as by a full disk, and never confirmed"
        return "had bytes after its end"

    def _read(self, name: tuple[int, int]) -> bytes:
        """A log, whatever it is; nothing if it cannot be one."""
        try:
            return read_all(self._path(name))
        except CorruptionError:
            return b""

    def _mended(self, data: bytes, fetched: bytes) -> str:
        """Which messages a log lacks that it must have, in words."""
        if not fetched:
            return ""
        header = layout.decode_segment_header(fetched[: layout.SEGMENT_HEADER_BYTES], self._history.blocks.name)
        scan = native.scan(fetched, header.nonce, header.first, layout.MAX_POSITION, 0, header.gaps)
        # without a frontier it is not known how long the log must be
        least = len(fetched) if self._words is not None else len(data.rstrip(b"\0"))
        wrong = [
            position
            for position, offset, end in _places(scan["index"])
            if position < self._durable and offset < least and data[offset:end] != fetched[offset:end]
        ]
        if not wrong:
            return " (no message)"
        ranges = merge([(position, position) for position in wrong])
        texts = [f"{first} to {last}" if last > first else f"{first}" for first, last in ranges[:MOST_RANGES]]
        more = " and more" if len(ranges) > MOST_RANGES else ""
        many = "s" if len(wrong) > 1 else ""
        return f" ({len(wrong)} message{many}, position{many} {', '.join(texts)}{more})"

    def _is_same(self, name: tuple[int, int], data: bytes, fetched: bytes) -> bool:
        """Whether a log has everything that it must have, and nothing that the stream's log does not have."""
        end = max(layout.SEGMENT_HEADER_BYTES, self._durable_end(name, len(fetched)))
        body = slice(layout.SEGMENT_HEADER_BYTES, end)
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], "")
        same = _same_header(data, header, fetched) and data[body] == fetched[body]
        tail = data[end:].rstrip(b"\0")
        if tail[:UNDONE_BYTES] == bytes(UNDONE_BYTES):  # a batch that was not written, on a full disk say
            tail, end = tail[UNDONE_BYTES:], end + UNDONE_BYTES
        return same and fetched.startswith(tail, end)

    def _durable_end(self, name: tuple[int, int], whole: int) -> int:
        """How long a segment's log must be at least, by the frontier."""
        if self._words is None or name[0] > self._words.segment:
            return 0
        return self._words.end if name[0] == self._words.segment else whole

    def put_foreign_aside(self, names: Collection[tuple[int, int]] | None = None) -> None:
        """Those segments, or all, that are of another journal or of another position: each is a journal of its own."""
        for other in foreign.find(self._directory, self._result.uuid):
            if names is not None and other.name not in names:
                continue
            with self._counting(layout.MARKER_BYTES + layout.FRONTIER_BYTES):
                now = foreign.set_aside(self._directory, other, self._disk)
            self._undo.append(functools.partial(shutil.rmtree, now.parent))
            for suffix in SUFFIXES:
                moved = now.with_name(layout.segment_name(other.first, other.name[1], suffix))
                if moved.exists():
                    back = self._directory / layout.segment_name(*other.name, suffix)
                    self._undo.append(functools.partial(self._disk.rename, moved, back))
            with self._counting(layout.FRONTIER_BYTES):
                _make_readable(now, other.uuid, self._disk)
            log.warning(
                "%s: %s is %s: it is put aside in %s", self._name, other.path.name, other.whose(self._result.uuid),
                self._name / now.parent.name,
            )  # fmt: skip

    def _put_aside(self, name: tuple[int, int], positions: list[int]) -> None:
        """Move a segment's files to a directory that becomes a journal once its frontier is written."""
        place = self._aside
        if not self._result.aside:
            place.mkdir(mode=0o700)
            self._undo.append(functools.partial(shutil.rmtree, place))
            self._disk.write_file(place / layout.MARKER_NAME, layout.encode_marker(self._result.uuid))
        self._result.aside.append(name)
        for suffix in SUFFIXES:
            part = layout.segment_name(*name, suffix)
            with contextlib.suppress(FileNotFoundError):
                self._disk.rename(self._directory / part, place / part)
                self._undo.append(functools.partial(self._disk.rename, place / part, self._directory / part))
        log.warning(
            "%s: %s has messages that %s does not have (positions %d to %d): it is put aside in %s", self._name,
            layout.segment_name(*name), self._history.blocks.name, positions[0], positions[-1], self._name / place.name,
        )  # fmt: skip

    @functools.cached_property
    def _aside(self) -> Path:
        return next(path for number in itertools.count(1) if not (path := self._directory / f"aside-{number}").exists())

    def end_aside(self) -> None:
        """Make what was put aside a journal that can be read; without a frontier ``penstock journal repair`` does."""
        if self._result.aside and self._words is not None:
            words = replace(self._words, first=min(first for first, _ in self._result.aside))
            self._disk.write_file(self._aside / layout.FRONTIER_NAME, layout.encode_frontier(self._result.uuid, words))

    def _say(self, names: list[str], what: str) -> None:
        self._result.damaged += names
        for name in names:
            if name not in self._told:
                log.warning("%s: %s %s", self._name, name, what)

    def _forget_others(self) -> None:
        """Remove segments that the stream no longer has (retention). Those that it never had are put aside."""
        oldest = self._history.segments[0].name[0]
        for file in os.listdir(self._directory):
            name = layout.parse_segment_name(file)
            if name is not None and name not in self._result.begins:
                if name[0] >= oldest:
                    self._look(name, b"", layout.MAX_POSITION)
                remove_segment(self._directory, *name, self._disk)


def _others(data: bytes, index: bytes, durable: int, stream: bytes) -> Iterator[int]:
    """The positions before the frontier at which an intact message differs from the stream's."""
    same_log = _same_log(data, stream)
    for position, offset, end in _places(index):
        if position < durable and not (same_log and data[offset:end] == stream[offset:end]):
            yield position


def _places(index: bytes) -> Iterator[tuple[int, int, int]]:
    """Position, offset and end of each message of an index."""
    for position, _, _, _, offset, size, _, more, *_ in layout.INDEX_ENTRY.iter_unpack(index):
        yield position, offset, offset + layout.RECORD.size + size + more


def _same_log(data: bytes, other: bytes) -> bool:
    """Whether two logs have the same header, as far as its checksum goes."""
    return data[: layout.SEGMENT.size] == other[: layout.SEGMENT.size]


def _same_header(data: bytes, header: layout.SegmentHeader, stream: bytes) -> bool:
    """Whether a log begins as the stream's, which has no seal."""
    sealed = slice(layout.SEAL_OFFSET, layout.SEAL_OFFSET + layout.SEAL_BYTES)
    after = slice(sealed.stop, layout.SEGMENT_HEADER_BYTES)
    seal_is_right = header.seal is not None or data[sealed] == stream[sealed]
    return data[: sealed.start] == stream[: sealed.start] and seal_is_right and data[after] == stream[after]


def _fetch(history: History, segment: Segment, result: Refilled | None = None) -> bytes:
    """A segment's log, from the stream."""
    parts = []
    for block in history.commits(segment):
        parts.append(block.data)
        if result is not None:
            result.end, result.next = block.offset + len(block.data), block.next
    return b"".join(parts)


def _grown(old: int, new: int, block: int) -> int:
    """How much room a file takes more, in whole blocks of the file system."""
    return max(0, -(-new // block) - -(-old // block)) * block


def _write_new(path: Path, data: bytes, disk: Disk, undo: list[Callable[[], None]]) -> None:
    """Write a log under a temporary name, then give it its own."""
    temporary = path.with_suffix(".log.new")
    file = disk.create(temporary)
    try:
        disk.write(file, data, 0, 0)
    except BaseException:
        disk.remove(temporary)
        raise
    finally:
        disk.close(file)
    if not path.exists():
        undo.append(functools.partial(disk.remove, path))
    disk.rename(temporary, path)


def _write_into(path: Path, file: int, data: bytes, disk: Disk, undo: list[Callable[[], None]]) -> bool:
    """Change those bytes of a log that differ, and zero what follows; returns whether anything was changed. What it
    lacks at its end is written first, because only that needs room.
    """
    size = os.fstat(file).st_size
    changed = size < len(data)
    if changed:
        undo.append(functools.partial(os.truncate, path, size))  # no reader has seen what is past that
        disk.write(file, data[size:], 0, size)
    for at in range(0, min(size, len(data)), PIECE_BYTES):
        piece = data[at : min(at + PIECE_BYTES, size)]
        if os.pread(file, len(piece), at) != piece:
            disk.write(file, piece, 0, at)
            changed = True
    return _wipe(file, len(data)) or changed


def _wipe(file: int, end: int) -> bool:
    """Zero everything after the end; returns whether there was anything."""
    found = False
    while data := os.pread(file, PIECE_BYTES, end):
        if data.count(0) != len(data):
            os.pwrite(file, bytes(len(data)), end)  # not truncated: it may be mapped
            found = True
        end += len(data)
    return found


def _make_readable(path: Path, uuid: UUID, disk: Disk) -> None:
    """Write the frontier of a journal that has this one log: everything in it is confirmed."""
    data = read_all(path)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    scan = native.scan(data, header.nonce, header.first, layout.MAX_POSITION, 0, header.gaps)
    words = layout.Frontier(0, 1, scan["next_position"], header.first, scan["end"], 1, header.first)
    disk.write_file(path.with_name(layout.FRONTIER_NAME), layout.encode_frontier(uuid, words))


def _write_frontier(directory: Path, uuid: UUID, words: layout.Frontier) -> None:
    encoded = layout.encode_frontier(uuid, words)
    file = open_regular(directory / layout.FRONTIER_NAME, os.O_RDWR)
    try:
        for place in layout.FRONTIER_COPIES:  # one after the other, so that a reader always finds an intact one
            os.pwrite(file, encoded[place : place + layout.FRONTIER_COPY.size], place)
    finally:
        os.close(file)


def same_boot(directory: Path) -> bool:
    """Whether the machine has not been restarted since the directory was written: then its files are as they were
    written.
    """
    return _noted_boot(directory) == _boot_id()


def _note_boot(directory: Path, disk: Disk) -> None:
    """Note under which boot the directory was written. A note that is there already is changed in place, which needs no
    room: one that is torn matches no boot.
    """
    noted, now = _noted_boot(directory), _boot_id()
    if len(noted) != len(now):
        disk.write_file(directory / BOOT_NAME, now)
    elif noted != now:
        file = disk.open(directory / BOOT_NAME)
        try:
            disk.write(file, now, 0, 0)
        finally:
            disk.close(file)


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.urandom(16)  # a random id never matches, so everything is checked


def _noted_boot(directory: Path) -> bytes:
    try:
        return read_all(directory / BOOT_NAME)
    except (FileNotFoundError, CorruptionError):
        return b""
