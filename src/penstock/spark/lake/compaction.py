"""Compaction: merges the small files of a day, sorted as before; a Spark job (or threads) like the archive itself.

Old files are removed and new ones added in one version, so that a reader sees either. Rows are neither made nor lost:
the counts are compared before the commit. Old files stay on the disk for readers and older versions until ``vacuum``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from penstock.errors import CorruptionError, InvalidArgument
from penstock.printable import command
from penstock.spark.lake import delta, schema
from penstock.spark.lake.files import File, check_sees, node, read_parts, write_file
from penstock.spark.lake.store import Store, store
from penstock.spark.lake.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger("penstock.spark")
MOST_FILES = 16
SMALL_BYTES = 64 << 20
GROUP_BYTES = 128 << 20
HELD_BYTES = 512 << 20  # decompressed size of one group: Arrow's offsets of binary columns end at 2 GiB


@dataclass(frozen=True, slots=True)
class Merge:
    """Task ``number`` merges the files ``groups[number]``."""

    store: Store
    version: int
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    def __call__(self, number: int) -> dict[str, Any]:
        check_sees(self.store, self.version)
        day, names = self.groups[number]
        parts = [pyarrow.Table.from_batches([part]) for name in names for part in read_parts(self.store, name)]
        table = pyarrow.concat_tables([part.select(schema.SCHEMA.names).cast(schema.SCHEMA) for part in parts])
        order = pyarrow.compute.sort_indices(
            table, [("topic", "ascending"), ("journal", "ascending"), ("position", "ascending")]
        )
        made = write_file(self.store, dictionaries(table.take(order)), day)
        return {"number": number, "node": node(), "rows": table.num_rows, "files": [asdict(made)]}


def dictionaries(table: pyarrow.Table) -> pyarrow.Table:
    """The table with columns of few distinct values as dictionaries, which the writer stores more compactly."""
    for name in ("topic", "journal"):
        column = table[name].dictionary_encode().unify_dictionaries()
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def compact(
    spark: SparkSession | None,
    directory: str | os.PathLike[str] | Store,
    most_files: int = MOST_FILES,
    *,
    storage: Mapping[str, str] | None = None,
) -> int:
    """Merge the small files of each day that has more than ``most_files``; returns how many were written."""
    if most_files < 1:
        raise InvalidArgument(f"most_files={most_files} must be at least 1")
    where = store(directory, storage)
    while True:
        table = delta.open_table(where)
        actions = delta.live_files(table)
        groups = [group for group in _groups(where, actions, most_files) if len(group) > 1]
        if not groups:
            return 0
        try:
            return _merge(spark, where, table, groups)
        except delta.Superseded:
            continue


def _groups(where: Store, actions: Sequence[dict[str, Any]], most_files: int) -> list[list[dict[str, Any]]]:
    """The files to merge, day by day, in groups whose rows fit into memory."""
    by_day: dict[Any, list[dict[str, Any]]] = {}
    for action in actions:
        if action["size_bytes"] < SMALL_BYTES:
            by_day.setdefault(action["partition"]["date"], []).append(action)
    groups: list[list[dict[str, Any]]] = []
    filesystem = where.filesystem()
    for small in by_day.values():
        if len(small) <= most_files:
            continue
        small.sort(key=lambda action: (action["min"]["journal"], action["min"]["position"]))
        packed = held = 0
        groups.append([])
        for action in small:
            try:
                footer = pyarrow.parquet.read_metadata(action["path"], filesystem=filesystem)
            except FileNotFoundError:
                raise
            except (pyarrow.ArrowException, OSError) as error:
                text = f"{action['path']} of {where.uri} is damaged: {error}"
                raise CorruptionError(f"{text}; run: {command('lake', 'verify', where.uri)}", action["path"]) from None
            decompressed = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
            if packed + action["size_bytes"] > GROUP_BYTES or held + decompressed > HELD_BYTES:
                groups.append([])
                packed = held = 0
            groups[-1].append(action)
            packed, held = packed + action["size_bytes"], held + decompressed
    return groups


def _merge(spark: SparkSession | None, where: Store, table: Any, groups: list[list[dict[str, Any]]]) -> int:
    named = tuple(
        (group[0]["partition"]["date"].isoformat(), tuple(action["path"] for action in group)) for group in groups
    )
    where = where.begin_round()
    results = run(spark, Merge(where, table.version(), named), len(named), where)
    files = [File(**file) for result in results for file in result["files"]]
    try:
        for result, group in zip(results, groups, strict=True):
            wanted = sum(action["num_records"] for action in group)
            written = sum(file["rows"] for file in result["files"])
            if not wanted == written == result["rows"]:
                raise CorruptionError(
                    f"node {result['node']} put {wanted} rows of {where.uri} together and wrote {written}; run: "
                    f"{command('lake', 'verify', where.uri)}",
                    where.uri,
                )
        nodes = {file["name"]: result["node"] for result in results for file in result["files"]}
        delta.check_files(where, files, nodes)
        where.sync(file.name for file in files)
        removed = [action for group in groups for action in group]
        wanted_paths = {action["path"] for action in removed}
        delta.step("merged")
        delta.commit(
            where, table, files, removed=removed, moved={}, note={"do": "compact"},
            still_holds=lambda now: wanted_paths <= {action["path"] for action in delta.live_files(now)},
        )  # fmt: skip
    except Exception:
        where.delete(file.name for file in files if not delta.is_committed(where, file))
        raise
    return len(files)


class Background:
    """A thread that compacts while others archive; failures are logged and retried later."""

    def __init__(self, spark: SparkSession | None, where: Store, most_files: int) -> None:
        self._spark, self._where, self._most = spark, where, most_files
        self._new = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-compaction", daemon=True)
        if most_files:
            self._thread.start()

    def wake(self, files: int) -> None:
        """Tell the thread that ``files`` were added."""
        with self._changed:
            self._new += files
            self._changed.notify()

    def close(self) -> None:
        """Wait for a running compaction and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._new > self._most)
                if self._closed:
                    return
                self._new = 0
            try:
                compact(self._spark, self._where, self._most)
            except Exception as error:
                LOG.warning("%s was not compacted: %s", self._where.uri, error)
