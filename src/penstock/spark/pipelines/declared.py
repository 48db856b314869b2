"""Pipelines declared in a TOML file: a source, steps, a sink.

Every name in the file is checked before Spark starts: an error for an unknown step or option names the nearest one.
Steps are the functions of this package, ``decode`` and three of Spark's own (``select``, ``filter``, ``sql``);
nothing in the file is evaluated as Python. See docs/rooms/spark.md for the form.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument, StateError, nearest
from penstock.quantities import interval_s
from penstock.spark import decode
from penstock.spark.pipelines.align import align
from penstock.spark.pipelines.quality import quality
from penstock.spark.pipelines.rollup import rollup
from penstock.spark.pipelines.sessions import sessions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Step = Callable[..., "DataFrame"]
_TABLES = ("name", "streaming", "source", "steps", "sink")
_SINK = ("format", "path", "mode", "checkpoint", "every", "partition_by", "output_mode", "options")


def select(frame: DataFrame, *, columns: Sequence[str]) -> DataFrame:
    """Columns as SQL expressions."""
    return frame.selectExpr(*columns)


def filter_rows(frame: DataFrame, *, where: str) -> DataFrame:
    """The rows for which ``where`` holds."""
    return frame.filter(where)


def sql(frame: DataFrame, *, query: str) -> DataFrame:
    """A SQL query over the rows so far, which the query names ``{input}``."""
    return frame.sparkSession.sql(query, input=frame)


def observed(frame: DataFrame, watch: Observation | str) -> DataFrame:
    """The same rows; ``watch`` counts them as ``rows`` and their payloads as ``bytes``. Streams need a name for it."""
    from pyspark.sql import functions as F

    size = F.sum(F.octet_length("payload")) if "payload" in frame.columns else F.lit(None)
    return frame.observe(watch, F.count("*").alias("rows"), F.coalesce(size, F.lit(0)).alias("bytes"))


STEPS: Mapping[str, Step] = {
    "select": select,
    "filter": filter_rows,
    "sql": sql,
    "json": decode.json,
    "msgpack": decode.msgpack,
    "arrow": decode.arrow,
    "struct": decode.struct,
    "array": decode.array,
    "gateway": decode.gateway,
    "align": align,
    "quality": quality,
    "rollup": rollup,
    "sessions": sessions,
}


@dataclass(frozen=True, slots=True)
class Declared:
    """A pipeline read from a file, checked."""

    name: str
    streaming: bool
    source: Mapping[str, Any]
    steps: tuple[tuple[str, Mapping[str, Any]], ...]
    sink: Mapping[str, Any]

    def frame(self, spark: SparkSession, watch: Observation | str | None = None) -> DataFrame:
        """The rows after all steps; ``watch`` gets the rows and bytes that came from the source (see ``observed``)."""
        options = {key: _text(value) for key, value in self.source.items() if key not in ("format", "path")}
        reader = spark.readStream if self.streaming else spark.read
        path = self.source["path"]
        named = str(path) if isinstance(path, str) else [str(item) for item in path]
        frame = reader.format(self.source.get("format", "penstock")).options(**options).load(named)  # type: ignore[arg-type]
        if watch is not None:
            frame = observed(frame, watch)
        for step, arguments in self.steps:
            frame = STEPS[step](frame, **arguments)
        return frame

    def run(self, spark: SparkSession, watch: Observation | str | None = None) -> StreamingQuery | None:
        """Write the rows to the sink; returns the query if it is a stream."""
        frame = self.frame(spark, watch)
        if self.streaming:
            return self._stream(frame)
        self._batch(frame)
        return None

    def _batch(self, frame: DataFrame) -> None:
        from pyspark.errors import AnalysisException

        kind = self.sink.get("format", "parquet")
        # A second run into the same files would store every row again; a journal is there to be added to.
        is_new = "path" in self.sink and kind != "penstock"
        writer = frame.write.format(kind).mode(self.sink.get("mode", "error" if is_new else "append"))
        if "partition_by" in self.sink:
            writer = writer.partitionBy(*self.sink["partition_by"])
        try:
            writer.options(**_texts(self.sink.get("options", {}))).save(self.sink.get("path"))
        except AnalysisException as error:
            if error.getCondition() != "PATH_ALREADY_EXISTS":
                raise
            path = self.sink.get("path")
            text = f'{path} exists: choose mode = "overwrite" or "append" in [sink], or another path'
            raise StateError(text) from None

    def _stream(self, frame: DataFrame) -> StreamingQuery:
        writer = frame.writeStream.format(self.sink.get("format", "parquet")).queryName(self.name)
        writer = writer.outputMode(self.sink.get("output_mode", "append"))
        writer = writer.option("checkpointLocation", self.sink["checkpoint"])
        if "partition_by" in self.sink:
            writer = writer.partitionBy(*self.sink["partition_by"])
        every = self.sink.get("every")
        trigger: dict[str, Any] = {"availableNow": True}
        if every is not None:
            trigger = {"processingTime": f"{interval_s(every, '--every'):g} seconds"}
        writer = writer.trigger(**trigger).options(**_texts(self.sink.get("options", {})))
        return writer.start(self.sink.get("path"))


def load(path: str | os.PathLike[str]) -> Declared:
    """The pipeline in a file; ``InvalidArgument`` names what is wrong in it."""
    try:
        text = Path(path).read_bytes().decode()
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}") from None
    return check(data, str(path))


def check(data: Mapping[str, Any], place: str) -> Declared:
    """The tables of a file as a pipeline."""
    _check_keys(data, _TABLES, place)
    source, sink = _table(data, "source", place), _table(data, "sink", place)
    if "path" not in source:
        raise InvalidArgument(f"{place}: [source] needs a path")
    _check_keys(sink, _SINK, f"{place}: [sink]")
    streaming = data.get("streaming", False)
    if not isinstance(streaming, bool):
        raise InvalidArgument(f"{place}: streaming is true or false, not {streaming!r}")
    if streaming and "checkpoint" not in sink:
        raise InvalidArgument(
            f"{place}: a streaming pipeline needs a checkpoint in [sink], where it keeps how far it is"
        )
    steps = tuple(_step(step, place) for step in data.get("steps", ()))
    return Declared(str(data.get("name", Path(place).stem)), streaming, source, steps, sink)


def _table(data: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    table = data.get(name)
    if not isinstance(table, dict):
        raise InvalidArgument(f"{place}: the table [{name}] is missing")
    return table


def _step(step: Any, place: str) -> tuple[str, Mapping[str, Any]]:
    name = str(step.get("do")) if isinstance(step, dict) else "nothing"
    if name not in STEPS:
        raise InvalidArgument(f"{place}: a step says do = {name!r}; {nearest(name, STEPS)}")
    arguments = {key: value for key, value in step.items() if key != "do"}
    parameters = list(inspect.signature(STEPS[name]).parameters.values())[1:]
    _check_keys(arguments, [parameter.name for parameter in parameters], f"{place}: step {name}")
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in arguments:
            raise InvalidArgument(f"{place}: step {name} needs {parameter.name}")
    return name, arguments


def _check_keys(table: Mapping[str, Any], names: Sequence[str], place: str) -> None:
    for key in table:
        if key not in names:
            raise InvalidArgument(f"{place} has no {key!r}; {nearest(key, names)}")


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {key: _text(value) for key, value in options.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
