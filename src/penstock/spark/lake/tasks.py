"""Running numbered tasks: by Spark on its executors, or in threads of this process. Rows never pass through the JVM."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow

from penstock.spark.lake.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Task = Callable[[int], dict[str, Any]]


def run(spark: SparkSession | None, task: Task, count: int, where: Store) -> list[dict[str, Any]]:
    """The results of ``task(number)`` for each number below ``count``, in that order. The only files of the round that
    remain are those that the results name: none if a task failed, and of one that ran twice those of one run.
    """
    if count == 0:
        return []
    try:
        results = _run(spark, task, count)
    except BaseException:
        where.forget_round()
        raise
    where.forget_round(file["name"] for result in results for file in result["files"])
    return results


def _run(spark: SparkSession | None, task: Task, count: int) -> list[dict[str, Any]]:
    if spark is None:
        with ThreadPoolExecutor(min(count, os.cpu_count() or 1), "penstock-lake") as pool:
            return list(pool.map(task, range(count)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")  # which is not used here
        described = spark.range(0, count, 1, count).mapInArrow(_Described(task), "result string")
    rows = described.collect()
    return sorted((json.loads(row.result) for row in rows), key=lambda result: int(result["number"]))


class _Described:
    """A task's results as rows of text."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pyarrow.RecordBatch.from_pydict({"result": [json.dumps(self.task(number))]})
