"""``rollup``: aggregates of decoded fields by key and window of time, in batch and streaming; late data by
watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def rollup(
    frame: DataFrame,
    aggregates: Mapping[str, str | Column],
    *,
    by: Sequence[str] = ("topic",),
    window: str = "10 seconds",
    slide: str | None = None,
    watermark: str = "1 minute",
    time: str = "timestamp",
) -> DataFrame:
    """``rollup(frame, {"mean": "avg(value.speed)"}, by=["topic"], window="10 seconds")``.

    Columns: ``window_start``, ``window_end``, the keys, the aggregates. Rows later than ``watermark`` behind the newest
    one are left out by a streaming query (Spark counts them in its progress as ``numRowsDroppedByWatermark``).
    """
    from pyspark.sql import functions as F

    if not aggregates:
        raise InvalidArgument("rollup needs at least one aggregate, as in {'mean': 'avg(value.speed)'}")
    columns = [(F.expr(text) if isinstance(text, str) else text).alias(name) for name, text in aggregates.items()]
    windows = F.window(time, window, slide) if slide is not None else F.window(time, window)
    grouped = frame.withWatermark(time, watermark).groupBy(windows.alias("window"), *by).agg(*columns)
    return grouped.select(
        F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end"), *by, *aggregates
    )
