"""Foreign segments: files in a journal's directory that have the name of a segment and are of another journal, or of
another position of this one. They are never adopted and never removed: ``verify`` names them, ``repair`` sets them
aside in a directory of their own (``aside-N``).

Setting aside is called under the writer's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from penstock.errors import PenstockError
from penstock.journal import layout
from penstock.journal.disk import Disk, read_part
from penstock.journal.recovery import Damage, read_frontier
from penstock.journal.rewrite import SUFFIXES

Name = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file and what its header says."""

    path: Path
    name: Name
    uuid: UUID
    first: int

    def whose(self, identity: UUID) -> str:
        """Where it belongs, in words. ``identity`` is that of the directory's journal."""
        if self.uuid == identity:
            return f"this journal's segment from position {self.first}, under a wrong name"
        return f"a segment of journal {self.uuid} from position {self.first}, which is not this one"

    def damage(self, identity: UUID, own: list[Name], words: layout.Frontier | None) -> Damage:
        """The file as a damaged place. The positions from its name up to this journal's first segment are lost with it;
        what is lost between and after segments is found by those who read them.
        """
        first = words.first if words else 1
        end = own[0][0] if own else words.frontier if words else self.name[0]
        lost = (max(first, self.name[0]), end - 1) if max(first, self.name[0]) < end else (1, 0)
        return Damage(str(self.path), 0, self.path.stat().st_size, *lost, self.whose(identity))


def find(directory: Path, identity: UUID) -> list[Foreign]:
    """Those of a directory. A segment whose header is damaged is none: nobody knows whose it is."""
    found = []
    for file in sorted(os.listdir(directory)):
        name = layout.parse_segment_name(file)
        if name is None:
            continue
        path = directory / file
        try:
            header = layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path))
        except PenstockError:
            continue
        if header.uuid != identity or header.first != name[0]:
            found.append(Foreign(path, name, header.uuid, header.first))
    return found


def owner(directory: Path, identity: UUID) -> UUID:
    """Whose directory this is: the journal that the marker names, unless the frontier and all segments are of one
    other. Then the marker is damaged, which has no checksum.
    """
    others = find(directory, identity)
    segments = sum(layout.parse_segment_name(file) is not None for file in os.listdir(directory))
    owners = {other.uuid for other in others} if len(others) == segments else set()
    return next((uuid for uuid in owners if len(owners) == 1 and read_frontier(directory, uuid) is not None), identity)


def set_aside(directory: Path, foreign: Foreign, disk: Disk) -> Path:
    """Move a segment's files to a new directory, with the marker of its own journal; returns where its log is then."""
    place = next(path for number in itertools.count(1) if not (path := directory / f"aside-{number}").exists())
    place.mkdir(mode=0o700)
    try:
        disk.write_file(place / layout.MARKER_NAME, layout.encode_marker(foreign.uuid))
    except OSError:
        shutil.rmtree(place)
        raise
    for suffix in SUFFIXES:  # the log first: without it the others are ignored
        part = layout.segment_name(*foreign.name, suffix)
        with contextlib.suppress(FileNotFoundError):
            disk.rename(directory / part, place / layout.segment_name(foreign.first, foreign.name[1], suffix))
    disk.sync_directory(place)
    disk.sync_directory(directory)
    return place / layout.segment_name(foreign.first, foreign.name[1])
