"""The lake as Spark frames: exactly the files that one version of its log names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument
from penstock.spark.bounds import Bounds, from_options
from penstock.spark.columns import FIELDS, ddl
from penstock.spark.lake import delta, lineage, planning, types
from penstock.spark.lake.store import Store, store
from penstock.spark.places import Place

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = f"{ddl(tuple(FIELDS))}, date date"


def table(
    spark: SparkSession,
    directory: str | os.PathLike[str],
    *,
    version: int | None = None,
    topics: str | None = None,
    decode: str = "none",
    storage: Mapping[str, str] | None = None,
) -> DataFrame:
    """The lake, now or at an older version, by Spark's own vectorised Parquet reader.

    ``createOrReplaceTempView`` makes it a view for SQL. An object store, for which Spark has no reader without jars, is
    read as Arrow by the executors. ``topics``: patterns, separated by commas, as a journal's. ``decode="auto"`` adds
    ``value`` and ``_corrupt``, as the source's option does, by the types that the archive keeps.
    """
    where = store(directory, storage)
    found = frame(spark, where, delta.open_table(where, version))
    chosen = found if topics is None else _of_topics(found, topics)
    return _decoded(chosen, where, decode, from_options({"topics": topics} if topics else {}))


def _decoded(found: DataFrame, where: Store, decode: str, bounds: Bounds, places: Sequence[Place] = ()) -> DataFrame:
    if decode not in ("auto", "none"):
        raise InvalidArgument(f"decode={decode!r} is not a choice; valid: auto, none")
    if decode == "none":
        return found
    from penstock.spark.described import attach

    texts = types.joined(where)
    for place in places:  # what a journal says is newer than what was archived
        texts[place.uuid] = texts.get(place.uuid, {}) | place.schemas()
    wanted = {
        journal: {topic: text for topic, text in topics.items() if bounds.wants_topic(topic)}
        for journal, topics in texts.items()
    }
    if not any(wanted.values()):
        raise InvalidArgument(f"decode=auto: no topic of {where.uri} that is read has a known type")
    return attach(found, wanted)


def _of_topics(found: DataFrame, topics: str) -> DataFrame:
    from pyspark.sql import functions as F

    bounds = from_options({"topics": topics})
    known = [row.topic for row in found.select("topic").distinct().collect()]
    return found.where(F.col("topic").isin([name for name in known if bounds.wants_topic(name)]))


def frame(spark: SparkSession, where: Store, opened: Any) -> DataFrame:
    """The files of an open table."""
    names = sorted(action["path"] for action in delta.live_files(opened, measured=False))
    if not names:
        return spark.createDataFrame([], SCHEMA)
    path = where.path
    if path is None:
        numbers = spark.range(0, len(names), 1, len(names))
        return numbers.mapInArrow(_Files(where, names), SCHEMA)
    reader = spark.read.schema(SCHEMA).option("basePath", str(path))
    return reader.parquet(*(_escaped(str(path / name)) for name in names))


def _escaped(path: str) -> str:
    """Escape the characters of a path that Spark would take for a glob pattern."""
    return "".join(f"\\{letter}" if letter in "\\*?[]{}" else letter for letter in path)


class _Files:
    """Reads files of an object store on executors."""

    def __init__(self, where: Store, names: Sequence[str]) -> None:
        self.where, self.names = where, names

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import datetime

        import pyarrow

        from penstock.spark.lake import schema
        from penstock.spark.lake.files import read_parts

        for batch in batches:
            for number in batch.column(0).to_pylist():
                name = self.names[number]
                day = datetime.date.fromisoformat(name.split("/")[0].removeprefix("date="))
                for part in read_parts(self.where, name):
                    days = pyarrow.repeat(pyarrow.scalar(day, pyarrow.date32()), part.num_rows)
                    columns = [part.column(field.name).cast(field.type) for field in schema.SCHEMA]
                    yield pyarrow.RecordBatch.from_arrays([*columns, days], schema=schema.TABLE)


def history(
    spark: SparkSession,
    directory: str | os.PathLike[str],
    *,
    version: int | None = None,
    decode: str = "none",
    storage: Mapping[str, str] | None = None,
) -> DataFrame:
    """What was archived, as one table; empty if there is no lake yet. ``decode`` as for ``table``."""
    where = store(directory, storage)
    if version is None and not delta.exists(where) and not delta.has_version_1(where):
        return spark.createDataFrame([], SCHEMA)
    return table(spark, directory, version=version, decode=decode, storage=storage)


def read_all(
    spark: SparkSession,
    journal: str | Sequence[str],
    directory: str | os.PathLike[str],
    *,
    options: Mapping[str, str] | None = None,
    decode: str = "none",
    storage: Mapping[str, str] | None = None,
) -> DataFrame:
    """History from the lake and the tail from the journals as one table, without overlap or gap.

    The tail has the same topics as the lake. ``decode`` as for ``table``. Reading fails if retention has deleted a part
    of the tail: call this again.
    """
    where, given = store(directory, storage), planning.filters(options or {})
    opened = delta.open_table(where) if delta.exists(where) or delta.has_version_1(where) else None
    made = delta.filters(opened) if opened is not None else given
    if given:
        planning.check_filters(made, given, where.uri)
    names = tuple(FIELDS)
    result = spark.createDataFrame([], ddl(names)) if opened is None else frame(spark, where, opened).select(*names)
    opened_places = planning.places(journal)
    for text, place in opened_places:
        known = None if opened is None else delta.reached(opened, place.uuid)
        start, frontier = planning.start(known, text, place), place.frontier
        if opened is not None:
            lineage.check(where, opened, text, place)
        if frontier > start:
            tail = _tail(spark, text, place.uuid, start, frontier, {**(options or {}), **made})
            result = result.unionByName(tail)
    return _decoded(result, where, decode, from_options(made), [place for _, place in opened_places])


def _tail(spark: SparkSession, text: str, journal: str, start: int, end: int, options: Mapping[str, str]) -> DataFrame:
    """Positions ``start`` to ``end - 1`` of one journal; reading fails if they were deleted or it was created anew."""
    reader = spark.read.format("penstock").options(**options).option("columns", ",".join(FIELDS))
    reader = reader.option("failOnDataLoss", "true").option("ends", json.dumps({journal: end}))
    return reader.option("startPosition", start).option("endPosition", end - 1).load(text)
