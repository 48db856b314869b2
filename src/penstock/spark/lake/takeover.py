"""Converts an archive of version 1 (Parquet by topic and date, with a manifest) into a lake, exactly once.

One job writes its rows anew, sorted as the lake's; one commit adds them with the positions that the manifest had
reached and a mark of its own, so that a second take-over finds nothing to do. Only then are the old files deleted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet

from penstock.errors import CorruptionError, InvalidArgument, StateError
from penstock.spark.lake import delta, schema
from penstock.spark.lake.compaction import dictionaries
from penstock.spark.lake.files import File, check_sees, node, sorted_parts, write_file
from penstock.spark.lake.store import Store, sync
from penstock.spark.lake.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER = "_penstock"
MARK = "archive version 1"
TASK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Old:
    """The manifest of version 1."""

    reached: dict[str, int]
    files: dict[str, int]
    rows: int
    filters: dict[str, str]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Task ``number`` rewrites the rows of the old files ``groups[number]``."""

    store: Store
    version: int
    groups: tuple[tuple[str, ...], ...]

    def __call__(self, number: int) -> dict[str, Any]:
        check_sees(self.store, self.version)
        path = self.store.path
        assert path is not None
        tables = [_old_table(path, name) for name in self.groups[number]]
        table = pyarrow.concat_tables(tables)
        files = [write_file(self.store, part, day) for day, part in sorted_parts(dictionaries(table))]
        return {"number": number, "node": node(), "rows": table.num_rows, "files": [asdict(file) for file in files]}


def _old_table(root: Path, name: str) -> pyarrow.Table:
    """An old file with the lake's columns: the topic comes from its folder; columns unknown to version 1 are empty."""
    table = pyarrow.parquet.read_table(root / name, partitioning=None)
    topic = unquote(Path(name).parts[0].removeprefix("topic="))
    columns = []
    for field in schema.SCHEMA:
        if field.name == "topic":
            columns.append(pyarrow.repeat(pyarrow.scalar(topic), table.num_rows))
        elif field.name in table.column_names:
            columns.append(table[field.name].cast(field.type))
        elif field.name in ("stored", "stored_ns"):  # version 1 had one time, which was the stored one
            columns.append(table[field.name.replace("stored", "timestamp")].cast(field.type))
        else:
            columns.append(pyarrow.nulls(table.num_rows, field.type))
    return pyarrow.table(columns, schema=schema.SCHEMA)


def take_over(spark: SparkSession | None, where: Store) -> int:
    """Convert the archive of version 1, if there is one; returns the number of its rows."""
    path = where.path
    if path is None or not delta.has_version_1(where):
        return 0
    old = read(path)
    while True:
        table = delta.open_or_create(where, old.filters)
        if table.transaction_version(MARK) is not None:
            break  # an earlier run was killed after its commit: only the old files are left to delete
        groups = tuple(tuple(group) for group in _groups(old))
        where = where.begin_round()
        results = run(spark, Rewrite(where, table.version(), groups), len(groups), where)
        files = [File(**file) for result in results for file in result["files"]]
        rows = sum(file.rows for file in files)
        # the old files are deleted below, so nothing may be missing in the new ones
        if not rows == sum(result["rows"] for result in results) == old.rows:
            raise StateError(f"the archive {path} says {old.rows} rows, its files have {rows}: nothing was taken over")
        nodes = {file["name"]: result["node"] for result in results for file in result["files"]}
        delta.check_files(where, files, nodes)
        where.sync(file.name for file in files)
        moved: dict[str, tuple[int | None, int]] = {uuid: (None, end) for uuid, end in old.reached.items()}
        moved[MARK] = (None, 1)
        delta.step("before take-over")
        try:
            delta.commit(where, table, files, moved=moved, note={"do": "take over version 1"})
        except delta.Superseded:  # another archiver was faster: begin again on its version
            where.delete(file.name for file in files)
            continue
        break
    delta.step("before old files go")
    for name in old.files:
        (path / name).unlink(missing_ok=True)
    for folder in path.glob("topic=*"):
        shutil.rmtree(folder, ignore_errors=True)
    (path / FOLDER / "manifest.json").unlink(missing_ok=True)
    sync(path / FOLDER)
    return old.rows


def read(path: Path) -> Old:
    """The manifest of version 1."""
    file = path / FOLDER / "manifest.json"
    try:
        data = json.loads(file.read_bytes())
        if data["version"] != 1:
            raise InvalidArgument(f"{file} is of version {data['version']}; this Penstock takes over version 1")
        return Old(
            {str(key): int(value) for key, value in data["reached"].items()},
            {str(name): int(size) for name, size in data["files"].items()},
            int(data["rows"]),
            {str(name): str(value) for name, value in data.get("filters", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise CorruptionError(f"{file} is damaged: {error}", str(file)) from error


def _groups(old: Old) -> Iterator[Sequence[str]]:
    group: list[str] = []
    size = 0
    for name in sorted(old.files, key=lambda name: Path(name).parts[1:] + Path(name).parts[:1]):  # day by day
        if group and size + old.files[name] > TASK_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += old.files[name]
    if group:
        yield group
