"""ReplicatedDisk: the journal's disk whose ``sync`` is an append to the stream.

A journal writes a batch to its log, syncs it, and only then moves its frontier and confirms. Here the write goes to the
local file without a sync, and the sync appends the same bytes to the stream: when it returns, a quorum of machines has
them. A new segment (its header and the snapshot at its head) is a block too. Everything else in the directory (indexes,
sums, seals) can be rebuilt from the logs and is only local. Retention purges the stream. The journal's thread that
leads calls it; never two at a time.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from uuid import UUID

from penstock.errors import PenstockError, StateError
from penstock.journal import layout
from penstock.replica.appender import Appender
from penstock.replica.block import BEGIN, EPOCH, Block
from penstock.replica.client import UnansweredError
from penstock.replica.refill import Refilled, UnsyncedDisk

log = logging.getLogger("penstock.replica")


class ReplicatedDisk(UnsyncedDisk):
    """Made by ``Replica.disk`` for one opening of the journal."""

    def __init__(self, appender: Appender, directory: Refilled, epoch: int, writer: int) -> None:
        self._appender = appender
        self._uuid: UUID = directory.uuid
        self._epoch, self._writer = epoch, writer
        self._begins = dict(directory.begins)
        self._segment = directory.segment
        self._end = directory.end
        self._begin = directory.begins.get(directory.segment, 0)
        self._names: dict[int, str] = {}  # names of the open logs
        self._unsent: dict[int, bytes] = {}  # bytes written to them that are not on the stream yet
        self._purged = 0
        self._note_kept()

    def _note_kept(self) -> None:
        self._appender.oldest, self._appender.newest = min(self._begins.values(), default=0), self._begin

    # -- files ------------------------------------------------------------------------------------------------------

    def create(self, path: Path, mode: int = 0o600) -> int:
        """A new file; a log is begun under a temporary name."""
        return self._note(super().create(path, mode), path)

    def open(self, path: Path) -> int:
        """An existing file."""
        return self._note(super().open(path), path)

    def _note(self, file: int, path: Path) -> int:
        if path.name.endswith((".log", ".log.new")):
            self._names[file] = path.name
        return file

    def close(self, file: int) -> None:
        """Close the descriptor."""
        self._names.pop(file, None)
        self._unsent.pop(file, None)
        super().close(file)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole file. Refuses a log: that would be a rewritten segment, which the stream cannot represent."""
        if path.suffix == ".log":
            raise StateError("segments of a replicated journal are not rewritten: neither compacted nor repaired")
        super().write_file(path, data)

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        """Write to the local file; bytes of the log are kept for ``sync``. No space is allocated ahead, which would be
        useless here.
        """
        super().write(file, data, 0, offset)
        name = self._names.get(file)
        if name is None:
            return
        if name.endswith(".new"):
            before = self._unsent.get(file, b"")
            if offset == len(before):
                self._unsent[file] = before + data
        elif (
            offset == self._end and data[:4] == layout.BATCH_MAGIC and layout.parse_segment_name(name) == self._segment
        ):
            self._unsent[file] = data  # anything else is a seal, or a rewrite by recovery
        elif offset > self._end and data[:4] == layout.BATCH_MAGIC and layout.parse_segment_name(name) == self._segment:
            raise StateError(f"{name} is written at {offset}, and the stream has it up to {self._end}")

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file. A segment that is on the stream must get its name here, or nothing can follow it."""
        try:
            super().rename(old, new)
        except OSError as error:
            if new.suffix == ".log":
                self._appender.fault = error
            raise
        for file, name in self._names.items():
            if name == old.name:
                self._names[file] = new.name

    def remove(self, path: Path) -> None:
        """Remove a file. A removed log is also purged from the stream, if nothing older is kept."""
        super().remove(path)
        segment = layout.parse_segment_name(path.name)
        if segment in self._begins:
            del self._begins[segment]
            self._note_kept()
            self._purge(min(self._begins.values(), default=0))

    def _purge(self, below: int) -> None:
        if below <= self._purged:
            return
        try:
            self._appender.blocks.purge(below)
            self._purged = below
        except (PenstockError, UnansweredError, ConnectionError) as error:
            log.warning("%s could not be purged below block %d: %s", self._appender.blocks.name, below, error)

    # -- the stream -------------------------------------------------------------------------------------------------

    def sync(self, file: int) -> None:
        """Return when what was written to a log is on the stream. OSError: the outcome is unknown, or another broker
        leads.
        """
        data = self._unsent.pop(file, b"")
        if self._appender.fault is not None and file in self._names:
            raise OSError(self._appender.fault.errno or errno.EIO, str(self._appender.fault))
        if not data:
            return
        if self._names[file].endswith(".new"):
            self._begin_segment(data)
        else:
            self._append(data, self._segment, self._end, self._begin, 0)
            self._end += len(data)

    def _begin_segment(self, data: bytes) -> None:
        header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], "a new segment")
        segment = header.first, header.revision
        begin = self._append(data, segment, 0, self._begin, BEGIN)
        self._begins = {name: at for name, at in self._begins.items() if name[0] < header.first or name == segment}
        self._begins[segment] = begin
        self._segment, self._begin, self._end = segment, begin, len(data)
        self._note_kept()

    def _append(self, data: bytes, segment: tuple[int, int], offset: int, link: int, flags: int) -> int:
        """Append a commit; returns the sequence of its first block."""
        batch = layout.BATCH.unpack_from(data, layout.SEGMENT_HEADER_BYTES if flags & BEGIN else 0)
        first = batch[3]
        following = first + batch[4]
        return self._appender.append(
            Block(self._uuid, self._epoch, self._writer, first, following, *segment, offset, link, flags, data)
        )


def epoch_block(directory: Refilled, epoch: int, writer: int) -> Block:
    """The block that says that ``writer`` leads from here on."""
    link = directory.begins.get(directory.segment, 0)
    following = directory.next
    return Block(directory.uuid, epoch, writer, following, following, *directory.segment, directory.end, link, EPOCH)
