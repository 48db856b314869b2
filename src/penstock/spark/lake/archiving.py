"""``archive`` copies journals' messages to the lake, exactly once, in rounds; ``follow`` does so repeatedly.

A round: read the table's position, check that the journal is the one that the lake has (``lineage``), plan ranges from
there, let tasks write files, check them, commit files and new positions in one version, sync, reopen the table and
compare. A crash in between leaves files that no version names; the next round begins where the table says. Any number
of archivers may run, even of the same journals: if two archive the same positions, one commits and the other repeats
its round. Segments may be deleted from the journal (``trim``) only after the last check.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError
from penstock.spark.bounds import from_options
from penstock.spark.lake import compaction, delta, holdings, lineage, planning, takeover, types
from penstock.spark.lake.files import File, Work
from penstock.spark.lake.store import Store, store
from penstock.spark.lake.tasks import run
from penstock.spark.places import DirectoryPlace, log_skipped, shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger("penstock.spark")
MOST_MESSAGES = 5_000_000
ROUND_S = 1800.0  # half of the least retention of ``vacuum``, which would delete the files of a longer round


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of an archive, and how many positions of the journals remain."""

    rows: int = 0
    payload_bytes: int = 0
    files: int = 0
    lag: int = 0
    seconds: float = 0.0
    segments: int = 0  # deleted from the journals (``trim``)


def archive(
    spark: SparkSession | None,
    journal: str | Sequence[str],
    directory: str | os.PathLike[str],
    *,
    most_messages: int = MOST_MESSAGES,
    compact_files: int = compaction.MOST_FILES,
    trim: bool = False,
    fail_on_data_loss: bool = True,
    options: Mapping[str, str] | None = None,
    storage: Mapping[str, str] | None = None,
    on_progress: Callable[[Archived], None] | None = None,
) -> Archived:
    """Archive all that the journals hold now, in rounds of ``most_messages``; gives the sum of the rounds.

    ``spark`` None: this process does the work. ``storage``: options of an object store. ``compact_files``: a day with
    more small files than this gets them put together; 0 never. ``trim``: segments that are in the lake go from their
    journals. ``fail_on_data_loss=False``: positions that retention took unread, or that are in no segment, are skipped,
    with a warning of the logger ``penstock.spark``. Each round is all or nothing: after a crash the next call goes on
    where the table ends.
    """
    if most_messages < 1:
        raise InvalidArgument(f"most_messages={most_messages} must be at least 1")
    planning.check_meaning(options or {})
    where, given = store(directory, storage), planning.filters(options or {})
    lossy = not fail_on_data_loss
    begun = time.monotonic()
    opened = planning.places(journal)
    planning.check_apart(opened, where)
    if trim:
        planning.check_trim(opened, given)
    takeover.take_over(spark, where)
    total = Archived()
    while True:
        done = _round(spark, opened, where, most_messages, given, lossy)
        written = compaction.compact(spark, where, compact_files) if done.rows and compact_files else 0
        total = Archived(
            total.rows + done.rows, total.payload_bytes + done.payload_bytes, total.files + done.files + written,
            done.lag, time.monotonic() - begun, total.segments,
        )  # fmt: skip
        if on_progress is not None:
            on_progress(total)
        if done.lag == 0:
            break
    return _with_segments(total, trim_archived(opened, where)) if trim else total


def _with_segments(done: Archived, segments: int) -> Archived:
    return Archived(done.rows, done.payload_bytes, done.files, done.lag, done.seconds, segments)


def _round(
    spark: SparkSession | None,
    opened: Sequence[tuple[str, Any]],
    where: Store,
    most: int,
    given: Mapping[str, str],
    lossy: bool,
) -> Archived:
    """One round; repeated if another archiver was faster."""
    while True:
        table = delta.open_or_create(where, given)
        planning.check_filters(delta.filters(table), given, where.uri)
        spans, lag = _spans(where, table, opened, most, lossy)
        unmoved = _unmoved(where, table, opened, spans)
        try:
            if spans:
                return _write(spark, where, table, spans, lag, given, lossy, unmoved)
            if unmoved:
                last = lineage.text_of(_kept_records(where, table, unmoved))
                delta.commit(where, table, [], moved=unmoved, note={"do": "archive", "from": {}}, last=last)
            return Archived()
        except delta.Superseded:
            continue


def _spans(
    where: Store, table: Any, opened: Sequence[tuple[str, Any]], most: int, lossy: bool
) -> tuple[list[planning.Span], int]:
    spans, lag = [], 0
    for text, place in opened:
        known = delta.reached(table, place.uuid)
        start, frontier = planning.start(known, text, place, lossy=lossy), place.frontier
        lineage.check(where, table, text, place)
        end = min(frontier, start + most)
        most -= end - start
        lag += frontier - end
        if end > start:
            spans.append(planning.Span(text, place, known, start, end))
    return spans, lag


def _unmoved(
    where: Store, table: Any, opened: Sequence[tuple[str, Any]], spans: Sequence[planning.Span]
) -> dict[str, tuple[int | None, int]]:
    """Journals that have nothing to archive although an entry of the log was lost since their last one.

    Their position is committed again as it is: this tells ``verify`` that the lost entry had nothing of them.
    """
    busy = {span.place.uuid for span in spans}
    known = {place.uuid: delta.reached(table, place.uuid) for _, place in opened if place.uuid not in busy}
    return {
        uuid: (position, position)
        for uuid, position in known.items()
        if position is not None and delta.lost_since(where, table, uuid)
    }


def _kept_records(
    where: Store, table: Any, unmoved: Mapping[str, tuple[int | None, int]]
) -> dict[str, lineage.Message]:
    """What earlier commits recorded of journals whose position is committed again."""
    found = {uuid: lineage.recorded(where, table, uuid, position) for uuid, (_, position) in unmoved.items()}
    return {uuid: message for uuid, message in found.items() if message is not None}


def _write(
    spark: SparkSession | None,
    where: Store,
    table: Any,
    spans: Sequence[planning.Span],
    lag: int,
    given: Mapping[str, str],
    lossy: bool,
    unmoved: Mapping[str, tuple[int | None, int]],
) -> Archived:
    begun = time.monotonic()
    pieces = [piece for span in spans for piece in planning.cover(span, lossy=lossy)]
    ranges = planning.tasks(pieces, parallel(spark))
    planning.check_plan(ranges, spans)  # a position left out here would be missing from the lake for good
    last = lineage.text_of(_kept_records(where, table, unmoved) | lineage.last_of(spans))
    where = where.begin_round()
    work = Work(where, table.version(), tuple(ranges), from_options(given), lossy)
    results = run(spark, work, len(ranges), where)
    delta.step("files written")
    files = [File(**file) for result in results for file in result["files"]]
    try:
        _check(where, results, ranges)
        if time.monotonic() - begun > ROUND_S:
            raise StateError(
                f"a round took more than {ROUND_S:g} s, so vacuum might have removed its files; it was not committed: "
                "set most_messages, so that a round is smaller"
            )
        types.keep(where, [span.place for span in spans])
        where.sync(file.name for file in files)  # before the commit: a version must not name a file that a crash loses
        moved = {span.place.uuid: (span.known, span.end) for span in spans} | dict(unmoved)
        note = {"do": "archive", "from": {span.place.uuid: span.start for span in spans}}
        delta.commit(where, table, files, moved=moved, note=note, last=last)
    except Exception as error:
        if not isinstance(error, CorruptionError):  # where damage was found, delete nothing
            where.delete(file.name for file in files if not delta.is_committed(where, file))
        raise
    for span in spans if lossy else ():
        begin = span.start if span.known is None else span.known
        log_skipped(span.place, begin, span.end, _deleted(span, begin, results, ranges))
    rows, size = sum(file.rows for file in files), sum(file.payload_bytes for file in files)
    return Archived(rows, size, len(files), lag)


def _deleted(
    span: planning.Span, begin: int, results: Sequence[Mapping[str, Any]], ranges: Sequence[Any]
) -> list[tuple[int, int]] | None:
    """What retention deleted of the span before it was read. None: a broker does not say."""
    if not isinstance(span.place, DirectoryPlace):
        return None
    found = [(begin, span.start)]
    for result in results:
        if ranges[result["number"]].journal == span.place.uuid:
            found += [(low, high) for low, high in result["deleted"]]
    return [(low, high) for low, high in found if low < high]


def _check(where: Store, results: Sequence[Mapping[str, Any]], ranges: Sequence[Any]) -> None:
    """Check the results: every task answered, row counts equal index entries, and this process sees the files."""
    if [result["number"] for result in results] != list(range(len(ranges))):
        raise AssertionError("a task gave no result or two")
    nodes = {}
    for result, piece in zip(results, ranges, strict=True):
        rows = sum(file["rows"] for file in result["files"])
        if rows != result["entries"]:
            raise CorruptionError(
                f"node {result['node']} wrote {rows} rows of positions {piece.start} to {piece.end - 1} of "
                f"{shown(piece.place)}, whose index has {result['entries']}; nothing was archived",
                piece.place,
            )
        nodes.update(dict.fromkeys((file["name"] for file in result["files"]), result["node"]))
    delta.check_files(where, [File(**file) for result in results for file in result["files"]], nodes)


def parallel(spark: SparkSession | None) -> int:
    """How many tasks run at once."""
    return max(1, spark.sparkContext.defaultParallelism if spark is not None else os.cpu_count() or 1)


def trim_archived(opened: Sequence[tuple[str, Any]], where: Store) -> int:
    """Delete segments that are safely in the lake; returns how many. Those that queues still need stay."""
    table = delta.open_table(where)
    delta.secure(where, table.version())
    delta.step("before trim")
    for text, place in opened:
        lineage.check(where, table, text, place)
    removed = 0
    for text, place in opened:
        known = delta.reached(table, place.uuid)
        if known is None:
            continue
        holdings.check_holds(where, table, text, place, known)
        if isinstance(place, DirectoryPlace):
            removed += _trim_directory(place, known, functools.partial(lineage.check, where, table, text, place))
        elif "queue=" in text:
            place.committed(known)
        else:
            raise InvalidArgument(f"to trim {shown(text)} name the archive's queue: broker://HOST:PORT?queue=archive")
    return removed


def _trim_directory(place: DirectoryPlace, known: int, check: Callable[[], None]) -> int:
    from penstock.journal import Journal

    try:
        journal = Journal(place.path, retain_queues=True)
    except RefusedError as error:
        raise RefusedError(
            f"{place.path} has a writer, which must trim it itself, by journal.retain(passed=P) with the position P "
            f"that `penstock lake info` shows: {error}"
        ) from None
    with journal:
        if str(journal.uuid) != place.uuid:  # it may have been replaced since it was read
            raise StateError(f"{place.path} was made anew meanwhile: nothing was trimmed")
        check()  # again: nobody else can write to it now
        floors = [state.floor for state in journal.queue_states.values()]
        return journal.retain(passed=min([known - 1, *floors]))


def follow(
    spark: SparkSession | None,
    journal: str | Sequence[str],
    directory: str | os.PathLike[str],
    *,
    every_s: float,
    stop: threading.Event,
    compact_files: int = compaction.MOST_FILES,
    on_progress: Callable[[Archived], None] | None = None,
    **settings: Any,
) -> Archived:
    """Archive every ``every_s`` seconds until ``stop`` is set; compacts small files in the background. While somebody
    writes a journal, ``trim`` leaves it alone and says so once.
    """
    total = Archived()
    where, trim = store(directory, settings.get("storage")), settings.pop("trim", False)
    if trim:
        planning.check_trim(planning.places(journal), planning.filters(settings.get("options") or {}))
    told = False
    worker = compaction.Background(spark, where, compact_files)
    try:
        while True:
            done = archive(spark, journal, directory, compact_files=0, **settings)
            worker.wake(done.files)
            try:
                done = _with_segments(done, trim_archived(planning.places(journal), where) if trim else 0)
            except RefusedError as error:
                if not told:
                    LOG.warning("%s; trying again after each round", error)
                told = True
            total = Archived(
                total.rows + done.rows, total.payload_bytes + done.payload_bytes, total.files + done.files, done.lag,
                total.seconds + done.seconds, total.segments + done.segments,
            )  # fmt: skip
            if on_progress is not None:
                on_progress(total)
            if stop.wait(every_s):
                return total
    finally:
        worker.close()
