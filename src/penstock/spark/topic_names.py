"""Topic names by number for the messages of a segment, read from the heads of segments and of batches."""

from __future__ import annotations

import bisect
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from penstock.errors import CorruptionError
from penstock.journal import layout
from penstock.journal.disk import open_regular
from penstock.journal.format import record_bytes
from penstock.spark.checksum import crc32c

if TYPE_CHECKING:
    from penstock.spark.directory import Directory, Segment


class TopicNames:
    """Topic names. A segment begins with all names known so far, so the next segment's head has all of this one's.

    For the last segment they come from its own head and from those of its batches that are marked as naming topics.
    """

    def __init__(self, directory: Directory, segment: Segment, listed: Sequence[tuple[int, int]] | None = None) -> None:
        """``listed``: the directory's segments, if the caller has just listed them."""
        self.directory = directory
        self.names: dict[int, str] = {}
        names = layout.latest_segments(os.listdir(directory.path)) if listed is None else listed
        later = names[bisect.bisect_right(names, (segment.first, sys.maxsize)) :]
        for name in later:  # each of them has all these names; the next one has the fewest others
            with suppress(CorruptionError):
                path = directory.path / layout.segment_name(*name)
                self._head(path, directory.header(name).nonce)
                return
        self._head(directory.file(segment, "log"), segment.nonce)
        self._later_batches(segment)

    def _head(self, path: Path, nonce: int) -> None:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(layout.SEGMENT_HEADER_BYTES)
            self._batch(file, path, nonce)

    def _batch(self, file: Any, path: Path, nonce: int) -> None:
        place = file.tell()
        head = file.read(layout.BATCH.size)
        fields = layout.BATCH.unpack(head) if len(head) == layout.BATCH.size else ()
        if not fields or head[:4] != layout.BATCH_MAGIC or fields[2] != nonce or fields[10] != crc32c(head[8:60]):
            raise CorruptionError(f"{path}:{place} is not the head of a batch", f"{path}:{place}")
        position, records, size = fields[3], fields[5], fields[6]
        data = file.read(min(size, 1 << 30) - len(head))
        at = 0
        for _ in range(records):
            kind, at = self._record(data, at, nonce, position)
            if at < 0:
                raise CorruptionError(f"{path}:{place}: a batch that names topics is damaged", f"{path}:{place}")
            position += kind == layout.KIND_MESSAGE

    def _record(self, data: bytes, at: int, nonce: int, position: int) -> tuple[int, int]:
        """Read a topic's name from the record at ``at``; returns its kind and the next offset (-1: damaged)."""
        if at + layout.RECORD.size > len(data):
            return 0, -1
        fields = layout.RECORD.unpack_from(data, at)
        size, kind, number, length = fields[1], fields[2], fields[7], fields[9]
        if size < layout.RECORD.size or at + size > len(data) or length > size - layout.RECORD.size:
            return 0, -1
        if kind == layout.KIND_TOPIC:
            if crc32c(data[at + 4 : at + size], crc32c(struct.pack("<QQ", nonce, position))) != fields[0]:
                return 0, -1
            begin = at + layout.RECORD.size
            self.names[number] = data[begin : begin + length].decode("utf-8", "replace")
        return kind, int(at + size)

    def _later_batches(self, segment: Segment) -> None:
        """Read the topics that are new in this segment from marked batches, which lie in the gaps between messages."""
        entries = self.directory.index(segment, segment.first, segment.next)
        if not len(entries) or set(numpy.unique(entries["topic"]).tolist()) <= self.names.keys():
            return
        path = self.directory.file(segment, "log")
        offsets = entries["offset"].astype(numpy.int64)
        ends = offsets + record_bytes(entries)
        gaps = offsets[1:] != ends[:-1]
        self.nonce = segment.nonce.to_bytes(8, "little")
        with os.fdopen(open_regular(path), "rb") as file:
            self._gap(file, path, layout.SEGMENT_HEADER_BYTES, int(offsets[0]))
            for begin, end in zip(ends[:-1][gaps].tolist(), offsets[1:][gaps].tolist(), strict=True):
                self._gap(file, path, begin, end)

    def _gap(self, file: Any, path: Path, at: int, end: int) -> None:
        """Read what lies between two messages: heads of batches, and records that are not messages."""
        while at + layout.RECORD.size <= end:
            file.seek(at)
            head = file.read(layout.BATCH.size)
            if head[:4] == layout.BATCH_MAGIC and head[8:16] == self.nonce:
                if layout.BATCH.unpack(head)[9] & layout.BATCH_TOPICS:
                    file.seek(at)
                    self._batch(file, path, int.from_bytes(self.nonce, "little"))
                at += layout.BATCH.size
            else:
                at += max(layout.RECORD.size, int.from_bytes(head[4:8], "little"))
