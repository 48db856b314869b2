"""``quality``: rate, sizes, gaps, duplicates, order and latency of each topic in each window of time.

The same table in batch and streaming. Within a window a gap is a missing number between its least and greatest
ordinal. Batch also counts what is missing between a window and the next one of the topic; streaming cannot look
across windows, so ``between_windows`` adds that to a finished table. ``worst`` names the windows to look at first.
Latency is what the expression ``latency_ns`` says, by default the message's time minus its property ``sent_ns``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.quantities import interval_s

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LATENCY = "timestamp_ns - try_cast(properties['sent_ns'] as bigint)"
FAULTS = ("missing", "duplicates", "out_of_order")


def quality(
    frame: DataFrame,
    *,
    window: str = "1 minute",
    watermark: str = "1 minute",
    latency_ns: str | None = None,
    sequence: str = "ordinal",
    order: str = "position",
) -> DataFrame:
    """One row per topic and window; ``sequence`` numbers the messages of a topic, ``order`` is how they arrived."""
    from pyspark.sql import functions as F

    if latency_ns is None:
        latency_ns = LATENCY if "properties" in frame.columns else "cast(null as bigint)"
    rows = frame.select(
        "topic",
        "timestamp",
        F.col(sequence).alias("sequence"),
        F.col(order).alias("arrival"),
        F.octet_length("payload").alias("size"),
        (F.expr(latency_ns) / 1e6).alias("latency_ms"),
    )
    rows = rows.withWatermark("timestamp", watermark)
    table = _by_arrays(rows, window) if frame.isStreaming else _by_neighbours(rows, window)
    return table if frame.isStreaming else between_windows(table)


def _columns(seconds: float) -> list[Column]:
    from pyspark.sql import functions as F

    percentiles = F.percentile_approx("latency_ms", [0.5, 0.95, 0.99], 1000)
    return [
        F.count("*").alias("messages"),
        (F.count("*") / F.lit(seconds)).alias("rate_per_s"),
        F.sum("size").alias("payload_bytes"),
        F.min("size").alias("size_min"),
        F.avg("size").alias("size_mean"),
        F.max("size").alias("size_max"),
        percentiles.alias("latency"),
        F.max("latency_ms").alias("latency_max_ms"),
        F.min("sequence").alias("first_ordinal"),
        F.max("sequence").alias("last_ordinal"),
    ]


def _shaped(grouped: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    distinct = F.col("distinct")
    return grouped.select(
        "topic",
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        "messages",
        "rate_per_s",
        "payload_bytes",
        "size_min",
        "size_mean",
        "size_max",
        (F.col("last_ordinal") - F.col("first_ordinal") + 1 - distinct).alias("missing"),
        (F.col("messages") - distinct).alias("duplicates"),
        "out_of_order",
        *(F.col("latency")[index].alias(f"latency_p{name}_ms") for index, name in enumerate((50, 95, 99))),
        "latency_max_ms",
        "first_ordinal",
        "last_ordinal",
    )


def _by_neighbours(rows: DataFrame, window: str) -> DataFrame:
    """Batch: compare each message with its neighbours by sorted windows, which spill to disk when they must."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    keyed = rows.withColumn("window", F.window("timestamp", window))
    group = ["topic", "window"]
    arrivals = Window.partitionBy(*group).orderBy("arrival").rowsBetween(Window.unboundedPreceding, -1)
    numbers = Window.partitionBy(*group).orderBy("sequence", "arrival")
    marked = keyed.withColumn(
        "late", F.coalesce((F.col("sequence") < F.max("sequence").over(arrivals)).cast("long"), F.lit(0))
    )
    fresh = F.coalesce((F.col("sequence") != F.lag("sequence").over(numbers)).cast("long"), F.lit(1))
    marked = marked.withColumn("fresh", fresh)
    extra = [F.sum("fresh").alias("distinct"), F.sum("late").alias("out_of_order")]
    return _shaped(marked.groupBy(*group).agg(*_columns(interval_s(window, "window")), *extra))


def _by_arrays(rows: DataFrame, window: str) -> DataFrame:
    """Streaming has no sorted windows: collects the numbers of a window (16 bytes a message) and compares neighbours.
    """
    from pyspark.sql import functions as F

    gathered = F.sort_array(F.collect_list(F.struct("arrival", "sequence")))
    grouped = rows.groupBy("topic", F.window("timestamp", window).alias("window")).agg(
        *_columns(interval_s(window, "window")), gathered.alias("walk")
    )
    start = F.struct(F.lit(None).cast("long").alias("most"), F.lit(0).cast("long").alias("late"))
    walked = F.aggregate(
        "walk",
        start,
        lambda state, item: F.struct(
            F.greatest(state["most"], item["sequence"]).alias("most"),
            (state["late"] + F.coalesce((item["sequence"] < state["most"]).cast("long"), F.lit(0))).alias("late"),
        ),
        lambda state: state["late"],
    )
    distinct = F.size(F.array_distinct(F.transform("walk", lambda item: item["sequence"]))).cast("long")
    return _shaped(grouped.withColumns({"distinct": distinct, "out_of_order": walked}))


def between_windows(table: DataFrame) -> DataFrame:
    """``table`` with what is missing between a window and the one before it of the same topic added to ``missing``."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = Window.partitionBy("topic").orderBy("window_start").rowsBetween(Window.unboundedPreceding, -1)
    step = F.col("first_ordinal") - F.max("last_ordinal").over(before) - 1
    return table.withColumn("missing", F.col("missing") + F.greatest(F.coalesce(step, F.lit(0)), F.lit(0)))


def worst(table: DataFrame, most: int = 10) -> DataFrame:
    """The windows with the most faults first, then those with the longest latency; leaves out flawless ones."""
    from pyspark.sql import functions as F

    faults = sum((F.col(name) for name in FAULTS[1:]), F.col(FAULTS[0]))
    flawed = table.filter((faults > 0) | F.col("latency_p99_ms").isNotNull())
    return flawed.orderBy(faults.desc(), F.col("latency_p99_ms").desc_nulls_last(), "window_start").limit(most)
