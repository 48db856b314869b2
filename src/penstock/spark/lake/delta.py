"""The table's log: opens, creates and commits to it. The only module that uses ``deltalake``'s transactions.

Rules. A commit lands right after the version that it was made on, or fails (``max_commit_retries=0``): deltalake's own
retries would let a second committer with the same or an older transaction version through, and two that remove the
same file. Whoever loses reads the table again, checks again whether the commit still holds, and tries again.
deltalake syncs nothing: the entry and its folder are synced here, then the table is opened anew and compared. The
automatic checkpoint is off, since a torn one keeps the table from opening; ``checkpoint`` writes and syncs one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import CapacityError, CorruptionError, InvalidArgument, PenstockError, StateError
from penstock.printable import command
from penstock.spark.lake import schema
from penstock.spark.lake.files import File
from penstock.spark.lake.store import LOG, VERSION_1, Store, entry_name

if TYPE_CHECKING:
    from deltalake import DeltaTable

FILTERS = "penstock.filters"
FORMAT = "penstock.lake"
LAST = "penstock.last"
NOTE = "penstock"
CHECKPOINT_EVERY = 50
EDGES = ("journal", "position", "stored_ns")  # whose least and greatest values are used here
LOOKED_AT = 5  # entries that a round checks before it believes the newest
TRIES = 1000
SETTINGS = {
    "delta.dataSkippingStatsColumns": ",".join(schema.STATISTICS),
    "delta.checkpointInterval": str(10**9),
    FORMAT: "1",
}


def step(name: str) -> None:
    """A named step of a commit; tests stop the process here."""


def open_table(where: Store, version: int | None = None) -> DeltaTable:
    """The table as it is now, or at an older version; ``InvalidArgument`` where there is none."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    _check_process()
    if where.path is not None and where.path.is_file():
        raise InvalidArgument(f"{where.uri} is a file; a lake is a directory")
    try:
        return DeltaTable(where.uri, version=version, storage_options=dict(where.options) or None)
    except TableNotFoundError:
        raise InvalidArgument(f"{where.uri} is not a lake: it has no {LOG}{_version_1_hint(where)}") from None
    except Exception as error:  # deltalake raises many classes of its own for damaged tables
        if where.path is None and isinstance(error, OSError):
            raise _no_answer(where, error) from error
        if version is not None:
            newest = open_table(where).version()
            if not 0 <= version <= newest:
                there = f"its versions are 0 to {newest}, and the oldest ones may be cleaned up"
                raise InvalidArgument(f"{where.uri} has no version {version}; {there}") from None
            raise InvalidArgument(f"{where.uri} cannot be opened at version {version}: {_first_line(error)}") from None
        run = command("lake", "verify", where.uri)
        text = f"the log of {where.uri} cannot be read: {_first_line(error)}; run: {run}"
        raise CorruptionError(text, where.uri) from error


_used_in: list[int] = []  # the process in which deltalake was first used


def _check_process() -> None:
    """deltalake has no threads in a forked child: it panics there, which no ``except Exception`` catches."""
    if not _used_in:
        _used_in.append(os.getpid())
    if _used_in[0] != os.getpid():
        raise StateError("this process was forked from one that has used a lake: start it by spawn, not by fork")


def _causes(error: BaseException) -> list[str]:
    """deltalake gives a line for each layer, the cause last, in colours."""
    lines = (re.sub(r"\x1b\[[0-9;]*m|\u21b3", "", line).strip() for line in str(error).splitlines())
    return [line for line in lines if line][-3:]


def exists(where: Store) -> bool:
    """Whether there is a table."""
    from deltalake import DeltaTable

    _check_process()
    try:
        return bool(DeltaTable.is_deltatable(where.uri, dict(where.options) or None))
    except OSError as error:
        raise _no_answer(where, error) from error


def _no_answer(where: Store, error: OSError) -> StateError:
    """The object store could not be asked."""
    text = f"{where.uri} cannot be reached: {' / '.join(_causes(error))[:500]}"
    if "URL scheme is not allowed" in text:
        text += "; an endpoint of http:// needs AWS_ALLOW_HTTP=true (storage={'allow_http': 'true'})"
    return StateError(text)


def has_version_1(where: Store) -> bool:
    """Whether there is an archive of version 1 that has not been taken over completely."""
    path = where.path
    return path is not None and (path / VERSION_1).exists()


def _version_1_hint(where: Store) -> str:
    return "; it is an archive of version 1: archive to it once, which takes it over" if has_version_1(where) else ""


def open_or_create(where: Store, filters: Mapping[str, str]) -> DeltaTable:
    """The table, created if there is none; its latest log entries are on disk when this returns."""
    from deltalake import DeltaTable, Schema

    if not exists(where):
        where.prepare()
        settings = {**SETTINGS, FILTERS: json.dumps(dict(filters))}
        try:
            DeltaTable.create(
                where.uri, Schema.from_arrow(schema.TABLE), mode="error", partition_by=["date"],
                configuration=settings, storage_options=dict(where.options) or None, raise_if_key_not_exists=False,
            )  # fmt: skip
        except Exception:
            if not exists(where):  # otherwise another archiver has just created it
                raise
    table = open_table(where)
    check_ours(table, where)
    secure(where, table.version())
    return table


def check_ours(table: DeltaTable, where: Store) -> None:
    """Raise ``InvalidArgument`` for a Delta table that Penstock did not create."""
    if FORMAT not in table.metadata().configuration:
        raise InvalidArgument(f"{where.uri} is a Delta table, but not one that penstock made: archive to another place")


def secure(where: Store, version: int) -> None:
    """Sync log entries of an archiver that may have died before its own sync, so that its commit is durable."""
    where.sync_log(max(0, version - 2 * CHECKPOINT_EVERY), version)


def filters(table: DeltaTable) -> dict[str, str]:
    """The filter options that this table was made with."""
    kept = json.loads(table.metadata().configuration.get(FILTERS, "{}"))
    return {str(key): str(value) for key, value in kept.items()}


def reached(table: DeltaTable, journal: str) -> int | None:
    """The next position of a journal to archive; None if nothing of it has been archived."""
    found = table.transaction_version(journal)
    return None if found is None else int(found)


def lost_since(where: Store, table: DeltaTable, journal: str) -> bool:
    """Whether a power cut emptied an entry of the log after the last one that moved this journal's position.

    Only the newest entries can be unsynced, so older ones are not looked at.
    """
    if where.path is None:
        return False
    newest = table.version()
    for version in range(newest, max(0, newest - 2 * CHECKPOINT_EVERY) - 1, -1):
        entry = read_entry(where, version)
        if entry is None or journal in entry.moved:
            return entry is None
    return False


@dataclass(slots=True)
class LogEntry:
    """What is used of an entry of the log."""

    #: {journal: (where its round began, its position from then on)}; the first None: the round did not say.
    moved: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)  # {file: its rows}
    removed: list[str] = field(default_factory=list)
    operation: str = ""  # of another program; empty for our own
    last: str | None = None  # what ``last_archived`` gives
    damage: str = ""  # what contradicts itself in it


def read_entry(where: Store, version: int) -> LogEntry | None:
    """An entry of a local log; None for an empty one, which lost what it had."""
    assert where.path is not None
    try:
        text = (where.path / LOG / entry_name(version)).read_text(errors="replace")
    except FileNotFoundError:
        return LogEntry()  # a checkpoint has replaced it, and it was cleaned up
    return _parse_entry(version, text) if text.strip() else None


def _parse_entry(version: int, text: str) -> LogEntry:
    found = LogEntry()
    begun: dict[str, int] = {}
    ended: dict[str, int] | None = None
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn entry, which `verify` names
            ((kind, action),) = json.loads(line).items()
            if kind == "commitInfo":
                found.last = action.get(LAST)
                if NOTE in action:
                    note = json.loads(action[NOTE])
                    begun, ended = note.get("from", {}), note.get("to")
                elif version:
                    found.operation = str(action.get("operation", "an unknown operation"))
            elif kind == "txn":
                found.moved[action["appId"]] = begun.get(action["appId"]), action["version"]
            elif kind == "add":
                found.added[action["path"]] = json.loads(action["stats"])["numRecords"]
            elif kind == "remove":
                found.removed.append(action["path"])
    moved = {journal: end for journal, (_, end) in found.moved.items()}
    if ended is not None and ended != moved:
        found.damage = f"it moves {_texts(moved)}, and says that it moves {_texts(ended)}"
    return found


def _texts(moved: Mapping[str, int]) -> str:
    return ", ".join(f"journal {journal} to position {end}" for journal, end in sorted(moved.items())) or "none"


def check_newest(where: Store, table: DeltaTable) -> None:
    """Raise ``CorruptionError`` if one of the newest entries contradicts itself: a round that believed it would leave
    rows out or archive them twice.
    """
    files, newest = where.filesystem(), table.version()
    for version in range(newest, max(-1, newest - LOOKED_AT), -1):
        try:
            with files.open_input_file(f"{LOG}/{entry_name(version)}") as file:
                entry = _parse_entry(version, file.read().decode(errors="replace"))
        except FileNotFoundError:
            return  # a checkpoint has replaced it and those before it, and they were cleaned up
        if entry.damage:
            text = f"{LOG}/{entry_name(version)} of {where.uri} is damaged: {entry.damage}"
            run = command("lake", "verify", where.uri)
            raise CorruptionError(f"{text}; nothing was archived or trimmed; run: {run}", where.uri)


def last_archived(where: Store, table: DeltaTable, journal: str) -> str | None:
    """What the commit that moved this journal's position recorded of its last messages (``lineage``); None if nothing.

    Only the newest entries are read.
    """
    files, newest = where.filesystem(), table.version()
    for version in range(newest, max(0, newest - 2 * CHECKPOINT_EVERY) - 1, -1):
        try:
            with files.open_input_file(f"{LOG}/{entry_name(version)}") as file:
                entry = _parse_entry(version, file.read().decode(errors="replace"))
        except FileNotFoundError:
            return None  # a checkpoint has replaced it and those before it, and they were cleaned up
        if journal in entry.moved:
            return entry.last
    return None


class Superseded(PenstockError):
    """Another committer did the same work first: read the table again."""


def commit(
    where: Store,
    table: DeltaTable,
    added: Sequence[File],
    *,
    removed: Sequence[Mapping[str, Any]] = (),
    moved: Mapping[str, tuple[int | None, int]],
    note: Mapping[str, Any],
    last: str | None = None,
    still_holds: Callable[[DeltaTable], bool] = lambda table: True,
) -> DeltaTable:
    """Add and remove files and move journals' positions, all in one version; returns the new table.

    ``moved``: {journal: (the position that the table must have, the one it gets)}; where the table has another one,
    or ``still_holds`` says no, it is ``Superseded`` and nothing was written. ``last``: what ``last_archived`` gives.
    """
    from deltalake import Schema
    from deltalake.exceptions import CommitFailedError
    from deltalake.transaction import CommitProperties, PostCommitHookProperties, Transaction

    now = int(time.time() * 1000)
    # The position of each journal is an application transaction of the same commit: files and positions never differ.
    told = {**note, "to": {journal: end for journal, (_, end) in moved.items()}}  # `check_newest` compares them
    properties = CommitProperties(
        custom_metadata={NOTE: json.dumps(told)} | ({} if last is None else {LAST: last}),
        max_commit_retries=0,
        app_transactions=[Transaction(journal, end, now) for journal, (_, end) in moved.items()],
    )
    actions = [*_removes(removed, now), *_adds(added, now, data_change=not removed)]
    quiet = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
    for number in range(TRIES):
        if any(reached(table, journal) != start for journal, (start, _) in moved.items()) or not still_holds(table):
            raise Superseded(f"another process committed to {where.uri} first")
        version = table.version() + 1
        step("before commit")
        try:
            table.create_write_transaction(
                actions, "append", Schema.from_arrow(schema.TABLE), ["date"],
                commit_properties=properties, post_commithook_properties=quiet,
            )  # fmt: skip
        except CommitFailedError:
            table = open_table(where)
            if number and _landed(table, added, moved):
                break  # deltalake reported a failure, but the commit did land
            continue
        except Exception as error:
            raise _not_written(where, version, error) from error
        step("after commit")
        where.sync_log(version, version)
        step("after sync")
        break
    else:
        raise CapacityError(f"{TRIES} commits to {where.uri} lost against others: too many archivers at once")
    # Reopen and compare: what counts is what other readers will see. A later version may have compacted our files.
    fresh = open_table(where)
    if not _landed(fresh, added, moved) and fresh.version() == version:
        raise CorruptionError(f"version {version} of {where.uri} does not hold what was committed", where.uri)
    check_files(where, added, {})
    if fresh.version() % CHECKPOINT_EVERY == 0:
        checkpoint(where, fresh)
    return fresh


def _not_written(where: Store, version: int, error: Exception) -> Exception:
    """deltalake's own error has no place, and a line for each of its layers."""
    full = "No space left" in str(error)
    name = f"{where.uri}/{LOG}/{entry_name(version)}"
    if full and where.path is not None:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    return StateError(f"{name} was not written: {' / '.join(_causes(error))[:500]}")


def _landed(table: DeltaTable, added: Sequence[File], moved: Mapping[str, tuple[int | None, int]]) -> bool:
    live = {str(action["path"]) for action in live_files(table, measured=False)}
    return all(file.name in live for file in added) and all(
        (reached(table, journal) or 0) >= end for journal, (_, end) in moved.items()
    )


def is_committed(where: Store, file: File) -> bool:
    """Whether the newest version names a file: then it must stay, whatever else failed."""
    return any(action["path"] == file.name for action in live_files(open_table(where), measured=False))


def check_files(where: Store, files: Iterable[File], nodes: Mapping[str, str]) -> None:
    """Raise ``StateError`` if this process does not see a file with the right size; names the node that wrote it."""
    wanted = {file.name: file.size for file in files}
    for name, size in where.sizes(wanted).items():
        if size != wanted[name]:
            seen = "is not there" if size is None else f"has {size} bytes here"
            raise StateError(
                f"node {nodes.get(name, 'unknown')} wrote {name} with {wanted[name]} bytes, and in {where.uri} it "
                f"{seen}. Name a directory that every node mounts, or an object store such as s3://"
            )


def live_files(table: DeltaTable, *, measured: bool = True) -> list[dict[str, Any]]:
    """The files of this version: path, size, rows, least and greatest values. ``measured``: raise ``CorruptionError``
    if the log lacks these values for one.
    """
    import pyarrow

    rows: list[dict[str, Any]] = pyarrow.table(table.get_add_actions()).to_pylist()
    for row in rows if measured else ():
        edges = row.get("min") or {}, row.get("max") or {}
        if row.get("num_records") is None or any(edge.get(name) is None for edge in edges for name in EDGES):
            text = f"the log does not say how many rows {row['path']} has, and which: its entry is damaged, or another "
            raise CorruptionError(f"{text}program wrote it without statistics", row["path"])
    return rows


def checkpoint(where: Store, table: DeltaTable) -> None:
    """Write the state of the whole log to one file, so that opening stays fast; it is on disk when this returns."""
    from penstock.spark.lake.store import sync

    table.create_checkpoint()
    path = where.path
    if path is not None:
        # Sync the pointer last: it should not name a checkpoint that a crash has lost.
        for file in (path / LOG).glob(f"{table.version():020d}.checkpoint*.parquet"):
            sync(file)
        sync(path / LOG / "_last_checkpoint")
        sync(path / LOG)


def _adds(files: Iterable[File], now: int, *, data_change: bool) -> list[Any]:
    from deltalake.transaction import AddAction

    return [
        AddAction(file.name, file.size, {"date": file.day}, now, data_change, json.dumps(file.statistics))
        for file in files
    ]


def _removes(actions: Iterable[Mapping[str, Any]], now: int) -> list[Any]:
    from deltalake.transaction import RemoveAction

    return [
        RemoveAction(
            action["path"], False, now, action["size_bytes"], {"date": action["partition"]["date"].isoformat()}
        )
        for action in actions
    ]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
