"""Inspecting a lake and cleaning it up: ``info``, ``versions``, ``verify``, ``vacuum``. None needs Spark."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet

from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.spark.lake import delta, types
from penstock.spark.lake.files import read_parts
from penstock.spark.lake.store import LOG, Store, entry_name, store

LEAST_RETENTION_H = 1
RETENTION_H = 168
_ENTRY = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.parquet")
_OWN_FILE = re.compile(r"date=\d{4}-\d\d-\d\d/[^/]+\.parquet")


@dataclass(frozen=True, slots=True)
class Info:
    """What a lake holds."""

    uri: str
    version: int
    rows: int
    files: int
    bytes: int
    days: dict[str, int]
    reached: dict[str, int]
    filters: dict[str, str]


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify`` found; ``orphans`` are files that no version names, of rounds that crashed or still run.
    ``notes`` are about rows that another program has taken away: by intention, as far as anybody can tell.
    """

    uri: str
    version: int | None
    files: int
    rows: int
    problems: list[str]
    orphans: list[str]
    notes: list[str] = field(default_factory=list)


def info(
    directory: str | os.PathLike[str], *, version: int | None = None, storage: Mapping[str, str] | None = None
) -> Info:
    """Rows, files, days, and up to which position of which journal they reach."""
    where = store(directory, storage)
    table = delta.open_table(where, version)
    actions = delta.live_files(table)
    days: dict[str, int] = {}
    for action in actions:
        day = str(action["partition"]["date"])
        days[day] = days.get(day, 0) + action["num_records"]
    return Info(
        where.uri, table.version(), sum(days.values()), len(actions), sum(action["size_bytes"] for action in actions),
        dict(sorted(days.items())), _reached(where, table), delta.filters(table),
    )  # fmt: skip


def _reached(where: Store, table: Any) -> dict[str, int]:
    """The next position to archive of every journal."""
    found = {journal: delta.reached(table, journal) for journal in sorted(_committers(where, table.version()))}
    return {journal: position for journal, position in found.items() if position is not None and _is_uuid(journal)}


def _is_uuid(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) is not None


def _committers(where: Store, version: int) -> set[str]:
    """All application ids with a transaction in the log; deltalake itself can only look up an id that is named."""
    import pyarrow.fs

    files = where.filesystem()
    names = sorted(
        entry.base_name for entry in files.get_file_info(pyarrow.fs.FileSelector(LOG, allow_not_found=True))
    )
    checkpoints = [match for match in map(_CHECKPOINT.fullmatch, names) if match and int(match[1]) <= version]
    first, found = -1, set()
    if checkpoints:
        first = int(checkpoints[-1][1])
        state = pyarrow.parquet.read_table(f"{LOG}/{checkpoints[-1][0]}", columns=["txn"], filesystem=files)
        found = {row["appId"] for row in state["txn"].to_pylist() if row is not None}
    for match in map(_ENTRY.fullmatch, names):
        if match and first < int(match[1]) <= version:
            with files.open_input_file(f"{LOG}/{match[0]}") as file:
                lines = file.read().decode(errors="replace").splitlines()
            found |= {json.loads(line)["txn"]["appId"] for line in lines if line.startswith('{"txn"')}
    return found


def versions(
    directory: str | os.PathLike[str], *, most: int | None = None, storage: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The commits that the log still contains, the newest first."""
    found: list[dict[str, Any]] = delta.open_table(store(directory, storage)).history(most)
    return found


def vacuum(
    directory: str | os.PathLike[str],
    *,
    hours: int = RETENTION_H,
    dry_run: bool = False,
    storage: Mapping[str, str] | None = None,
) -> list[str]:
    """Delete files that no version of the last ``hours`` names, and orphans of the same age; returns their names.

    A round commits within half of the least retention or fails, so that its files are never taken for orphans. A
    reader that reads longer than ``hours`` gets an error for a missing file, and older versions cannot be read.
    """
    if hours < LEAST_RETENTION_H:
        raise InvalidArgument(f"hours={hours} must be at least {LEAST_RETENTION_H}: a round may be under way")
    where = store(directory, storage)
    table = delta.open_table(where)
    delta.check_ours(table, where)
    delta.secure(where, table.version())  # if an unsynced entry were lost, the files it removed would be needed again
    found: list[str] = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
    # deltalake would delete everything that the table does not name, also what somebody else put there.
    taken = [name for name in found if _OWN_FILE.fullmatch(name)]
    if dry_run:
        return taken
    where.delete(taken)
    return [name for name, size in where.sizes(taken).items() if size is None]


def verify(
    directory: str | os.PathLike[str], *, deep: bool = False, storage: Mapping[str, str] | None = None
) -> Verified:
    """Check the log, and each file against it; ``deep`` also reads every row, to find damage and duplicates."""
    where = store(directory, storage)
    problems = list(_log_problems(where))
    try:
        table = delta.open_table(where)
    except CorruptionError as error:
        return Verified(where.uri, None, 0, 0, [*problems, str(error).partition("; run:")[0]], [])
    problems += types.problems(where)
    try:
        actions = delta.live_files(table)
    except CorruptionError as error:
        return Verified(where.uri, table.version(), 0, 0, [*problems, str(error)], _orphans(where, table))
    for action in actions:
        problems += _file_problems(where, action)
    if deep and not problems:
        problems += _position_problems(where, table, actions)
    rows = sum(action["num_records"] for action in actions)
    notes = list(_taken_away(where, table.version()))
    return Verified(where.uri, table.version(), len(actions), rows, problems, _orphans(where, table), notes)


def _log_problems(where: Store) -> Iterator[str]:
    """Entries that are empty or torn, versions that are missing, checkpoints that cannot be read."""
    path = where.path
    if path is None:
        return
    if not (path / LOG).is_dir():
        raise InvalidArgument(f"{path} is not a lake: it has no {LOG}")
    names = sorted(os.listdir(path / LOG))
    checkpoints = [match for match in map(_CHECKPOINT.fullmatch, names) if match]
    known = [int(match[1]) for match in map(_ENTRY.fullmatch, names) if match]
    for version in known:
        text = (path / LOG / entry_name(version)).read_text(errors="replace")
        if not text.strip():
            lost = _lost_with(where, version, known)
            if lost is not None:
                yield f"{LOG}/{entry_name(version)} is empty: a power cut took version {version}. {lost}"
            continue
        entry = delta.read_entry(where, version)
        # The journal still has the rows of the last entry, which nothing was trimmed behind.
        take_away = ""
        if version == known[-1]:
            file = path / LOG / entry_name(version)
            take_away = f". Take it away (rm {file}) and archive again, which takes its rows anew"
        if entry is not None and entry.damage:
            yield f"{LOG}/{entry_name(version)} is damaged: {entry.damage}{take_away}"
        try:
            for line in text.splitlines():
                json.loads(line)
        except ValueError:
            yield f"{LOG}/{entry_name(version)} is torn: version {version} cannot be read{take_away}"
    for match in checkpoints:
        try:
            pyarrow.parquet.read_metadata(path / LOG / match[0])
        except Exception as error:
            yield f"{LOG}/{match[0]} is damaged ({error}); where all entries are there, delete it and _last_checkpoint"
    named = _named_checkpoint(path)
    if named is not None and all(int(match[1]) != named for match in checkpoints):
        yield (
            f"{LOG}/_last_checkpoint names the checkpoint of version {named}, which is not there; where all entries "
            f"are, delete it (rm {path / LOG / '_last_checkpoint'})"
        )
    first = max((int(match[1]) for match in checkpoints), default=0)
    gone = sorted(set(range(first, max(known, default=-1) + 1)) - set(known) - ({first} if checkpoints else set()))
    if gone:
        yield f"{LOG} has no entry of version {gone[0]}"


def _named_checkpoint(path: Path) -> int | None:
    """The version whose checkpoint readers begin with; None if none is named."""
    try:
        return int(json.loads((path / LOG / "_last_checkpoint").read_text())["version"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _lost_with(where: Store, lost: int, known: list[int]) -> str | None:
    """What is missing with an entry that was lost; None: a round began after it where the ones before it had ended, for
    every journal, so that its rows were taken anew.
    """
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for version in known:
        entry = delta.read_entry(where, version)
        for journal, (start, end) in entry.moved.items() if entry is not None else ():
            if version < lost:
                before[journal] = end
            else:  # without a start there was nothing to archive
                after.setdefault(journal, before.get(journal, 1) if start is None else start)
    for journal, start in after.items():
        end = before.get(journal, 1)
        if start > end:
            return (
                f"The rows of journal {journal} from position {end} to {start - 1} are missing, and later rounds went "
                "on behind them: archive the journal to a new lake while it still has them"
            )
    if after and before.keys() <= after.keys():
        return None
    return "Rows that it archived are missing; archive again, which takes them from the journal where it still has them"


def _taken_away(where: Store, newest: int) -> Iterator[str]:
    """Versions in which another program removed rows."""
    rows: dict[str, int] = {}
    for version in range(newest + 1) if where.path is not None else ():
        entry = delta.read_entry(where, version)
        if entry is None:
            continue
        rows |= entry.added
        taken = sum(rows.get(name, 0) for name in entry.removed) - sum(entry.added.values())
        if entry.operation and taken > 0:
            yield (
                f"version {version} ({entry.operation}, by another program) took {taken} rows away; the positions of "
                "their journals stay, so they are not archived again, and --trim refuses while a journal has them"
            )


def _file_problems(where: Store, action: Mapping[str, Any]) -> list[str]:
    name, size = action["path"], where.sizes([action["path"]])[action["path"]]
    if size is None:
        return [f"{name} is missing: {action['num_records']} rows"]
    if size != action["size_bytes"]:
        return [f"{name} has {size} bytes, the log says {action['size_bytes']}"]
    try:
        rows = pyarrow.parquet.read_metadata(name, filesystem=where.filesystem()).num_rows
    except Exception as error:
        return [f"{name} is damaged: {error}"]
    return [] if rows == action["num_records"] else [f"{name} has {rows} rows, the log says {action['num_records']}"]


def _position_problems(where: Store, table: Any, actions: list[dict[str, Any]]) -> Iterator[str]:
    """Damaged pages, duplicate positions, and positions beyond the one that the table records for their journal."""
    held: dict[str, list[Any]] = {}
    for action in actions:
        try:
            for part in read_parts(where, action["path"]):
                journal = part["journal"].to_numpy(zero_copy_only=False)
                position = part["position"].to_numpy()
                for name in numpy.unique(journal).tolist():
                    held.setdefault(name, []).append(position[journal == name])
        except CorruptionError as error:
            yield str(error)
        except FileNotFoundError:
            yield f"{action['path']} is missing: {action['num_records']} rows"
    for name, parts in held.items():
        positions = numpy.sort(numpy.concatenate(parts))
        twice = int((numpy.diff(positions) == 0).sum())
        if twice:
            yield f"{twice} positions of journal {name} are there twice"
        end = delta.reached(table, name)
        if end is None or int(positions[-1]) >= end:
            yield f"journal {name} has rows up to position {positions[-1]}, the log says {end}"


def _orphans(where: Store, table: Any) -> list[str]:
    path = where.path
    if path is None:
        return []
    named = {action["path"] for action in delta.live_files(table, measured=False)}
    there = (str(file.relative_to(path)) for file in path.glob("date=*/*.parquet"))
    try:
        removed = set(_removed(path))
    except PenstockError:
        removed = set()
    return sorted(name for name in there if name not in named and name not in removed)


def _removed(path: Any) -> Iterator[str]:
    """Files that a version of the log removed; readers of older versions still need them."""
    for entry in (path / LOG).glob("*.json"):
        for line in entry.read_text(errors="replace").splitlines():
            if line.startswith('{"remove"'):
                yield json.loads(line)["remove"]["path"]
