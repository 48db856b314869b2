"""``archive``: a journal to Parquet, partitioned by topic and date, exactly once; ``read_all``: history and tail as
one table.

The manifest (``_penstock/manifest.json``) is the truth: which files belong to the archive, and up to which position
of which journal they reach. A round writes and syncs new files first and then renames a new manifest into place; files
that no manifest names are leftovers of a crash and are swept. ``read_all`` reads the manifest once: Parquet up to it,
the journal after it, so there is neither overlap nor gap, whatever is written meanwhile. Small files of a partition are
put together when they are many. One process archives into a directory at a time (a lock file says so); any number
read it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "_penstock"
VERSION = 1
COMPACT_FILES = 16
FILE_BYTES = 128 << 20
FILTERS = ("topics", "startOrdinal", "endOrdinal", "startTime", "endTime")
COLUMNS = (
    "topic", "ordinal", "position", "timestamp", "timestamp_ns", "payload", "properties", "message_id", "vchan_id",
    "journal",
)  # fmt: skip


@dataclass(slots=True)
class Manifest:
    """What the archive holds: for each journal the next position to archive, and the files with their sizes."""

    reached: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    dropped: list[str] = field(default_factory=list)  # put together into others; kept once more for readers under way
    filters: dict[str, str] = field(default_factory=dict)  # options that leave messages out: they count as archived

    def encode(self) -> bytes:
        """As JSON."""
        words = {"version": VERSION, "reached": self.reached, "rows": self.rows, "files": self.files}
        return json.dumps({**words, "dropped": self.dropped, "filters": self.filters}, indent=0).encode()


@dataclass(frozen=True, slots=True)
class Archived:
    """What one round did, and how many positions of the journals are still to come."""

    rows: int
    payload_bytes: int
    files: int
    lag: int
    seconds: float


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest; an empty one where there is no archive yet."""
    path = Path(directory) / FOLDER / "manifest.json"
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise InvalidArgument(f"{path} is of version {data['version']}; this Penstock reads version {VERSION}")
        files = {str(name): int(size) for name, size in data["files"].items()}
        reached = {str(key): int(value) for key, value in data["reached"].items()}
        filters = {str(name): str(value) for name, value in data.get("filters", {}).items()}
        return Manifest(reached, files, int(data["rows"]), [str(name) for name in data["dropped"]], filters)
    except FileNotFoundError:
        return Manifest()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise CorruptionError(f"{path} is damaged: {error}", str(path)) from error


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    folder = directory / FOLDER
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".manifest-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(manifest.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "manifest.json")
    _sync(folder)


def _sync(path: Path) -> None:
    """A file's bytes, or a directory's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the archive's lock; ``RefusedError`` when another process archives there."""
    missing = [path for path in (directory / FOLDER, directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode is for the last part alone
    (directory / FOLDER).mkdir(mode=0o700, exist_ok=True)
    for path in missing:
        _sync(path.parent)
    with (directory / FOLDER / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RefusedError(f"another process archives to {directory}; wait for it or stop it") from None
        yield


def archive(
    spark: SparkSession,
    journal: str | Sequence[str],
    directory: str | os.PathLike[str],
    *,
    most_messages: int = 5_000_000,
    compact_files: int = COMPACT_FILES,
    options: dict[str, str] | None = None,
    on_progress: Callable[[Archived], None] | None = None,
) -> Archived:
    """Archive all that the journals hold now, in rounds of ``most_messages``; gives the sum of the rounds.

    Each round is all or nothing: after a crash the next call goes on from the last manifest. Afterwards the segments
    below ``read_manifest(directory).reached`` may go.
    """
    root = Path(directory)
    begun = time.monotonic()
    total = Archived(0, 0, 0, 0, 0.0)
    with _alone(root):
        sweep(root)
        while True:
            done = _round(spark, journal, root, most_messages, options or {})
            if done is None:
                return total
            compacted = compact(spark, root, compact_files)
            total = Archived(
                total.rows + done.rows, total.payload_bytes + done.payload_bytes, total.files + done.files + compacted,
                done.lag, time.monotonic() - begun,
            )  # fmt: skip
            if on_progress is not None:
                on_progress(total)
            if done.lag == 0:
                return total


def _places(journal: str | Sequence[str]) -> list[Any]:
    from penstock.spark.places import open_places, resolve

    named = [journal] if isinstance(journal, str) else list(journal)
    texts = resolve({"paths": json.dumps(named)})
    return list(zip(texts, open_places(texts), strict=True))


def filters(options: Mapping[str, str]) -> dict[str, str]:
    """Those of the options that leave messages out, topics in one order."""
    from penstock.spark.source import folded

    given = folded(options)
    chosen = given.pop("topics", "") or given.pop("topic", "")
    if chosen:
        given["topics"] = ",".join(sorted({part.strip() for part in chosen.split(",")} - {""})) or chosen
    return {name: given[name] for name in FILTERS if name in given}


def check_filters(manifest: Manifest, given: Mapping[str, str], directory: str | os.PathLike[str]) -> None:
    """``InvalidArgument`` where an archive was made with others: what these left out would be missing for good."""
    if manifest.reached and given != manifest.filters:
        made, wanted = (
            " ".join(f"{name}={value}" for name, value in each.items()) or "all messages"
            for each in (manifest.filters, given)
        )
        raise InvalidArgument(
            f"the archive {os.fspath(directory)} is one of {made}, not of {wanted}: what was left out counts as "
            "archived. Name the same, or archive to another directory"
        )


def _span(
    spark: SparkSession, text: str, journal: str, start: int, end: int, options: Mapping[str, str]
) -> DataFrame:
    """Positions ``start`` to ``end - 1`` of one journal; reading fails when they went or it was made anew meanwhile."""
    reader = spark.read.format("penstock").options(**options).option("columns", ",".join(COLUMNS))
    reader = reader.option("failOnDataLoss", "true").option("ends", json.dumps({journal: end}))
    return reader.option("startPosition", start).option("endPosition", end - 1).load(text)


def _start(manifest: Manifest, text: str, place: Any) -> int:
    """The first position of a journal that the archive does not have; ``StateError`` when it is gone."""
    from penstock.spark.places import shown

    start: int = manifest.reached.get(place.uuid, place.first)
    if start < place.first:
        raise StateError(
            f"positions {start} to {place.first - 1} of {shown(text)} went by retention before they were archived"
        )
    if start > place.frontier:
        raise StateError(
            f"{shown(text)} ends before position {place.frontier}, and the archive has it up to {start - 1}: it is an "
            "older copy. Name the journal itself, or archive to another directory"
        )
    return start


def _round(
    spark: SparkSession, journal: str | Sequence[str], root: Path, most: int, options: dict[str, str]
) -> Archived | None:
    from pyspark.sql import functions as F

    manifest, given = read_manifest(root), filters(options)
    check_filters(manifest, given, root)
    frames, reached, lag, left = [], dict(manifest.reached), 0, most
    for text, place in _places(journal):
        start, frontier = _start(manifest, text, place), place.frontier
        end = min(frontier, start + left)
        left -= end - start
        lag += frontier - end
        reached[place.uuid] = end
        if end > start:
            frames.append(_span(spark, text, place.uuid, start, end, options))
    if not frames:
        return None
    frame = frames[0]
    for other in frames[1:]:
        frame = frame.unionByName(other)
    frame = frame.withColumns({"date": F.to_date("timestamp"), "size": F.octet_length("payload")})
    rows, payload_bytes, files = _write(frame, root)
    made = Manifest(reached, {**manifest.files, **files}, manifest.rows + rows, manifest.dropped, given)
    _write_manifest(root, made)
    return Archived(rows, payload_bytes, len(files), lag, 0.0)


def _write(frame: DataFrame, root: Path) -> tuple[int, int, dict[str, int]]:
    """Write one round to a folder of its own, then move its files to their place; none counts before the manifest."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    name = uuid.uuid4().hex
    aside = root / FOLDER / f"round-{name}"
    seen = Observation()
    counted = frame.observe(seen, F.count("*").alias("rows"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
    ordered = counted.drop("size").sortWithinPartitions("topic", "date", "journal", "position")
    ordered.write.option("compression", "zstd").partitionBy("topic", "date").parquet(str(aside))
    return int(seen.get["rows"]), int(seen.get["bytes"]), _move(aside, root, name)


def _move(aside: Path, root: Path, name: str) -> dict[str, int]:
    paths = sorted(aside.glob("*/*/*.parquet"))
    return _put(aside, root, {path: path.parent.relative_to(aside) for path in paths}, name)


def _put(aside: Path, root: Path, folders: dict[Path, Path], name: str) -> dict[str, int]:
    """Move each file to its folder of the archive and give their names and sizes; ``aside`` is removed.

    Bytes and names are on the disk when it returns: a manifest that survives a power cut names only files that do too.
    """
    files = {}
    for number, (path, folder) in enumerate(folders.items()):
        relative = folder / f"{name}-{number:05d}.parquet"
        (root / folder).mkdir(parents=True, exist_ok=True)
        files[str(relative)] = path.stat().st_size
        _sync(path)
        os.replace(path, root / relative)
    for changed in {parent for name in files for parent in Path(name).parents}:
        _sync(root / changed)
    shutil.rmtree(aside, ignore_errors=True)
    return files


def sweep(directory: str | os.PathLike[str], *, dropped: bool = False) -> int:
    """Remove what no manifest names: the leftovers of a round that died. Gives how many files.

    With ``dropped`` also the files that compaction put together into others: only when nobody is reading. Until then
    a reader that ignores the manifest and takes every file of the directory sees their rows twice.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    named = {*manifest.files, *(() if dropped else manifest.dropped)}
    swept = 0
    for path in root.glob("topic=*/date=*/*.parquet"):
        if str(path.relative_to(root)) not in named:
            path.unlink()
            swept += 1
    for path in (root / FOLDER).glob("round-*"):
        shutil.rmtree(path, ignore_errors=True)
    return swept


def compact(spark: SparkSession, directory: str | os.PathLike[str], most_files: int = COMPACT_FILES) -> int:
    """Put the small files of each partition that has more than ``most_files`` together; gives how many were written.

    A reader that has the old manifest may still want the old files: they are kept until the next compaction.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    small: dict[str, list[str]] = {}
    for name, size in manifest.files.items():
        if size < FILE_BYTES // 2:
            small.setdefault(str(Path(name).parent), []).append(name)
    crowded = {folder: names for folder, names in small.items() if len(names) > most_files}
    if not crowded:
        return 0
    files = dict(manifest.files)
    written = 0
    for folder, names in crowded.items():
        merged = _merge(spark, root, folder, names)
        for name in names:
            del files[name]
        files.update(merged)
        written += len(merged)
    dropped = [name for names in crowded.values() for name in names]
    _write_manifest(root, replace(manifest, files=files, dropped=dropped))
    for name in manifest.dropped:
        (root / name).unlink(missing_ok=True)
    return written


def _merge(spark: SparkSession, root: Path, folder: str, names: Sequence[str]) -> dict[str, int]:
    name = uuid.uuid4().hex
    aside = root / FOLDER / f"round-{name}"
    total = sum((root / item).stat().st_size for item in names)
    frame = spark.read.parquet(*(str(root / item) for item in names))
    parts = max(1, -(-total // FILE_BYTES))
    frame.coalesce(parts).sortWithinPartitions("position").write.option("compression", "zstd").parquet(str(aside))
    return _put(aside, root, {path: Path(folder) for path in sorted(aside.glob("*.parquet"))}, name)


def history(spark: SparkSession, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> DataFrame:
    """What was archived, as one table."""
    root = Path(directory)
    known = manifest if manifest is not None else read_manifest(root)
    schema = history_schema()
    if not known.files:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(f"{schema}, date date").option("basePath", str(root))
    return reader.parquet(*(str(root / name) for name in sorted(known.files)))  # these and no others: see above


def history_schema() -> str:
    """The columns of the archive's files."""
    from penstock.spark.columns import ddl

    return ddl(COLUMNS)


def read_all(
    spark: SparkSession,
    journal: str | Sequence[str],
    directory: str | os.PathLike[str],
    *,
    options: dict[str, str] | None = None,
) -> DataFrame:
    """History from the archive and the tail from the journals as one table, without overlap or gap.

    The tail is of the topics that the archive is of. Reading it fails once retention took a part of it: call it again.
    """
    manifest, given = read_manifest(directory), filters(options or {})
    if given:
        check_filters(manifest, given, directory)
    options = {**(options or {}), **manifest.filters}
    result = history(spark, directory, manifest).select(*COLUMNS)
    for text, place in _places(journal):
        start = _start(manifest, text, place)
        frontier = place.frontier
        if frontier > start:
            result = result.unionByName(_span(spark, text, place.uuid, start, frontier, options))
    return result


def topics(manifest: Manifest) -> dict[str, list[datetime.date]]:
    """Which topics and days an archive has."""
    found: dict[str, set[datetime.date]] = {}
    for name in manifest.files:
        topic, day = Path(name).parts[:2]
        found.setdefault(unquote(topic.removeprefix("topic=")), set()).add(
            datetime.date.fromisoformat(day.removeprefix("date="))
        )
    return {topic: sorted(days) for topic, days in sorted(found.items())}


__all__ = ["Archived", "Manifest", "archive", "compact", "history", "read_all", "read_manifest", "sweep", "topics"]
