"""Retention: removes whole sealed segments, the oldest first, by age, by size and by what every queue has handled.

The active segment is never removed. A reader keeps a removed file that it has mapped. Called under the writer's lock;
``choose`` is a pure function.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.journal import layout
from penstock.journal.disk import Disk, read_part
from penstock.journal.rewrite import remove_segment


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit. ``passed``: every queue has handled the positions up to it."""

    age_s: float | None = None
    size: int | None = None
    passed: int | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """What retention needs to know of a sealed segment."""

    first: int
    revision: int
    next: int
    greatest_stored_ns: int
    bytes: int


def choose(
    segments: list[Sealed], active_bytes: int, limits: Limits, now_ns: int, newest: int | None = None
) -> list[Sealed]:
    """The segments to remove: always the oldest ones, so that the rest is one range. For its size alone the one with
    the position ``newest``, the last message of all, is not removed: what was just stored would be gone."""
    total = active_bytes + sum(segment.bytes for segment in segments)
    chosen = []
    for segment in segments:
        too_old = limits.age_s is not None and segment.greatest_stored_ns < now_ns - int(limits.age_s * 1e9)
        too_much = limits.size is not None and total > limits.size and (newest is None or segment.next <= newest)
        done_with = limits.passed is not None and segment.next - 1 <= limits.passed
        if not (too_old or too_much or done_with):
            break
        chosen.append(segment)
        total -= segment.bytes
    return chosen


def apply(directory: Path, limits: Limits, disk: Disk, newest: int | None = None) -> int:
    """Remove the segments that exceed the limits; returns how many. ``newest`` is the position of the last message."""
    if limits == Limits():
        return 0
    names = layout.latest_segments(os.listdir(directory))
    sealed = []
    for first, revision in names[:-1]:
        found = _sealed_segment(directory, first, revision)
        if found is None:
            break  # not sealed yet, or damaged: neither it nor what follows can be judged
        sealed.append(found)
    if not names:
        return 0
    active = (directory / layout.segment_name(*names[-1])).stat().st_size
    chosen = choose(sealed, active, limits, time.time_ns(), newest)
    for segment in chosen:
        remove_segment(directory, segment.first, segment.revision, disk)
    if chosen:
        disk.sync_directory(directory)
    return len(chosen)


def _sealed_segment(directory: Path, first: int, revision: int) -> Sealed | None:
    path = directory / layout.segment_name(first, revision)
    try:
        header = layout.decode_segment_header(read_part(path, 0, layout.SEGMENT_HEADER_BYTES), str(path))
    except PenstockError:
        return None
    if header.seal is None:
        return None
    return Sealed(first, revision, header.seal.next, header.seal.greatest_stored_ns, path.stat().st_size)
