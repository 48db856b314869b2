"""``arrow_batches(spark, where).mapInArrow(function, schema)``: a function over a journal's Arrow batches.

For reads whose first step is a Python or Arrow function: ranges of positions are the tasks, each task reads its own as
Arrow and hands the batches to the function in the same process. Rows do not go through the JVM before it, as those of
``spark.read`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow

from penstock.spark.described import fixed, table_schema
from penstock.spark.relation import ends_of
from penstock.spark.source import JournalReader, read_part

if TYPE_CHECKING:
    import os

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Function = Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]


def arrow_batches(spark: SparkSession, where: str | os.PathLike[str], **options: Any) -> ArrowBatches:
    """What a journal (or ``broker://HOST:PORT``) holds now, for ``mapInArrow``; options as for ``spark.read``."""
    return ArrowBatches(spark, {"path": str(where), **{name: _text(value) for name, value in options.items()}})


class ArrowBatches:
    """A journal's messages as Arrow batches that do not pass through the JVM; made by ``arrow_batches``."""

    def __init__(self, spark: SparkSession, options: dict[str, str]) -> None:
        self._spark = spark
        options = fixed(options)
        self.schema = table_schema(options)
        self._options = options | {"ends": ends_of(options, self.schema)}

    def mapInArrow(self, function: Function, schema: StructType | str) -> DataFrame:
        """Apply ``function`` to the batches of each task, as ``DataFrame.mapInArrow`` does."""
        reader = JournalReader(dict(self._options), self.schema)
        parts, how = reader.partitions(), reader.how

        def run(numbers: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from function(read_part(parts[number], how))

        return self._spark.range(0, len(parts), 1, len(parts)).mapInArrow(run, schema)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
