"""Plans a round of the archive: which positions of which journals, in ranges that cover all of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument, StateError
from penstock.spark.bounds import Bounds
from penstock.spark.lake.store import Store
from penstock.spark.options import check_options, folded
from penstock.spark.places import DirectoryPlace, Place, Range, open_places, resolve, shown

LOG = logging.getLogger("penstock.spark")
RANGE_BYTES = 64 << 20
LEAST_RANGE_BYTES = 4 << 20
PIECES = 8  # pieces in a range, so that ranges differ by about a sixteenth at most
FILTERS = ("topics", "startOrdinal", "endOrdinal", "startTime", "endTime")


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start`` to ``end - 1`` of one journal; ``known`` is the table's position, None if it has none."""

    text: str
    place: Place
    known: int | None
    start: int
    end: int


def places(journal: str | Sequence[str]) -> list[tuple[str, Place]]:
    """The journals that were named, each once, in a stable order."""
    named = [journal] if isinstance(journal, str) else [os.fspath(item) for item in journal]
    if not all(item.strip() for item in named):
        raise InvalidArgument("a journal to archive has no name: give its directory, a glob or broker://HOST:PORT")
    texts = resolve({"paths": json.dumps(named)})
    return list(zip(texts, open_places(texts), strict=True))


def check_apart(opened: Sequence[tuple[str, Place]], where: Store) -> None:
    """Raise ``InvalidArgument`` for a lake in a journal's own directory, which belongs to the journal alone."""
    lake = None if where.path is None else Path(os.path.realpath(where.path))
    for text, place in opened:
        if lake is not None and isinstance(place, DirectoryPlace) and lake.is_relative_to(os.path.realpath(place.path)):
            raise InvalidArgument(f"the lake {where.uri} would be in the directory of the journal {text}: name another")


def check_trim(opened: Sequence[tuple[str, Place]], given: Mapping[str, str]) -> None:
    """Raise ``InvalidArgument`` if segments are to be deleted although the lake has only some of their messages.

    A broker frees what no queue needs; there the other queues keep their messages.
    """
    for text, place in opened:
        if given and isinstance(place, DirectoryPlace):
            raise InvalidArgument(
                f"trim would delete messages of {text} that are in no lake: this archive takes only "
                f"{' '.join(f'{name}={value}' for name, value in given.items())}. Archive every message, or keep the "
                "journal and bound it by its own retention"
            )


def start(known: int | None, text: str, place: Place, *, lossy: bool = False) -> int:
    """The first position of a journal that the lake does not have. ``StateError`` if retention has deleted it, unless
    ``lossy``: then the first one that is kept.
    """
    first = place.first
    begin = first if known is None else known
    if begin < first and not lossy:
        raise StateError(
            f"positions {begin} to {first - 1} of {shown(text)} were deleted by retention before they were archived: "
            "keep more; --skip-lost (archive(fail_on_data_loss=False)) goes on without them"
        )
    if known is None and first > 1 and first <= place.frontier:
        LOG.warning(
            "%s is new to this lake, and begins at position %d: the %d positions before it were deleted from it and "
            "are not archived here", shown(text), first, first - 1,
        )  # fmt: skip
    if begin > place.frontier:
        raise StateError(
            f"{shown(text)} ends before position {place.frontier}, and the archive has it up to {begin - 1}: it is an "
            "older copy. Name the journal itself, or archive to another directory"
        )
    return max(begin, first)


def cover(span: Span, *, lossy: bool = False) -> Iterator[Range]:
    """Cut a span into adjacent pieces from its start to its end; a missing segment is damage, and a deleted one a
    ``StateError``, unless ``lossy``.

    Holes that compaction recorded in a segment belong to the piece after them.
    """
    reached = span.start
    last: Range | None = None
    most = RANGE_BYTES // PIECES
    for piece in span.place.ranges(span.start, span.end, Bounds(), most, fail_if_deleted=not lossy, lossy=lossy):
        if piece.start < reached or piece.end <= piece.start:
            raise AssertionError(f"ranges of {span.text} overlap at position {piece.start}")
        if last is not None:
            yield last
        last = Range(piece.place, piece.journal, reached, piece.end, piece.size)
        reached = piece.end
    place = span.text if last is None else last.place
    begin = span.start if last is None else last.start
    yield Range(place, span.place.uuid, begin, span.end, 0 if last is None else last.size)


def tasks(pieces: Sequence[Range], parallel: int) -> list[Range]:
    """Join pieces into ranges for tasks: as many as can run at once, none much above ``RANGE_BYTES``."""
    total = sum(piece.size for piece in pieces)
    rounds = max(1, -(-total // (RANGE_BYTES * parallel)))
    most = max(LEAST_RANGE_BYTES, -(-total // (rounds * parallel)))
    joined: list[Range] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.journal == piece.journal and last.size + piece.size // 2 < most:
            joined[-1] = Range(last.place, last.journal, last.start, piece.end, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


def check_plan(ranges: Sequence[Range], spans: Sequence[Span]) -> None:
    """Check, independently of how they were planned, that the ranges cover every position of the spans once."""
    reached = {span.place.uuid: span.start for span in spans}
    for piece in ranges:
        if piece.start != reached[piece.journal]:
            raise AssertionError(f"positions {reached[piece.journal]} to {piece.start - 1} are in no task")
        reached[piece.journal] = piece.end
    if reached != {span.place.uuid: span.end for span in spans}:
        raise AssertionError("the tasks do not reach the end of the round")


def check_meaning(options: Mapping[str, str]) -> None:
    """Raise ``InvalidArgument`` for an option of the source that means nothing to an archive: it would change nothing,
    in silence.
    """
    check_options(options)
    meant = (*FILTERS, "topic")
    for name, value in folded(options).items():
        if name in ("topics", "topic") and not value.strip(", "):
            raise InvalidArgument(f"{name}={value!r} names no topic; leave it out to archive every topic")
        if name not in meant:
            raise InvalidArgument(
                f"the option {name} means nothing to an archive, which takes every column and position; "
                f"valid: {', '.join(meant)}"
            )


def filters(options: Mapping[str, str]) -> dict[str, str]:
    """The options that filter messages, topics sorted; an unknown option is an error."""
    check_options(options)
    given = folded(options)
    chosen = given.pop("topics", "") or given.pop("topic", "")
    if chosen:
        given["topics"] = ",".join(sorted({part.strip() for part in chosen.split(",")} - {""})) or chosen
    return {name: given[name] for name in FILTERS if name in given}


def check_filters(made: Mapping[str, str], given: Mapping[str, str], where: Any) -> None:
    """Raise ``InvalidArgument`` if the archive was made with other filters: messages would be missing for good."""
    if made != given:
        had, wanted = (
            " ".join(f"{name}={value}" for name, value in each.items()) or "all messages" for each in (made, given)
        )
        raise InvalidArgument(
            f"the archive {where} was made with {had}; this run asks for {wanted}. What the archive left out counts "
            "as archived already. Use the same filters, or archive to another directory"
        )
