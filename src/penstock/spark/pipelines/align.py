"""``align``: several topics joined in time onto one, or onto a regular grid; ``asof`` is the join under it.

Rules: the result is that of ``pandas.merge_asof`` on the same rows; among right rows of equal time the last counts
backward and the first forward, by ordinal. There is no cross join: time is cut into buckets, each bucket is sorted
once by itself, and one row per bucket is carried into the next, so that the cost is n log n and no task holds more
than a bucket. All of it runs inside the JVM. Batch only: Spark has no such window in streaming (use
``foreachBatch``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from penstock.errors import InvalidArgument, nearest
from penstock.quantities import check_duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, WindowSpec

Direction = Literal["backward", "forward", "nearest"]
ROWS_PER_BUCKET = 1_000_000
_DIRECTIONS = ("backward", "forward", "nearest")


def align(
    frame: DataFrame,
    onto: str | None = None,
    *,
    topics: Sequence[str] | None = None,
    every_s: float | None = None,
    direction: Direction = "nearest",
    tolerance_s: float | None = None,
    columns: Sequence[str] = ("payload",),
    rows_per_bucket: int = ROWS_PER_BUCKET,
) -> DataFrame:
    """For each message of topic ``onto`` (or each point of a grid), the nearest one in time of every other topic.

    The result has the columns of ``onto`` and, for each other topic, ``TOPIC_timestamp_ns`` and ``TOPIC_COLUMN``, where
    TOPIC has ``_`` for what is no letter or digit, and ``_2`` and so on after it where that name is taken.
    """
    from pyspark.sql import functions as F

    if (onto is None) == (every_s is None):
        raise InvalidArgument("align needs either onto='TOPIC' or every_s=SECONDS for a regular grid")
    tolerance = None if tolerance_s is None else 0
    if tolerance_s:
        tolerance = round(check_duration(tolerance_s, "tolerance_s") * 1e9)
    if topics is None:
        topics = sorted(row.topic for row in frame.select("topic").distinct().collect())
    result = frame.filter(F.col("topic") == onto) if onto is not None else grid(frame, every_s or 0.0)
    names = column_names([topic for topic in topics if topic != onto], columns, result.columns)
    for topic, name in names.items():
        right = frame.filter(F.col("topic") == topic).select(
            "timestamp_ns",
            F.col("ordinal").alias("__ordinal"),
            F.col("timestamp_ns").alias(f"{name}_timestamp_ns"),
            *(F.col(column).alias(f"{name}_{column}") for column in columns),
        )
        result = asof(
            result, right, direction=direction, tolerance=tolerance, ties="__ordinal", rows_per_bucket=rows_per_bucket
        ).drop("__ordinal")
    return result


def column_name(topic: str) -> str:
    """``topic`` as the beginning of a column name."""
    return re.sub(r"\W+", "_", topic).strip("_") or "_"


def column_names(topics: Sequence[str], columns: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """For each topic the beginning of its columns' names, so that no two are equal, whatever their case."""
    known, names = {name.lower() for name in taken}, {}
    for topic in dict.fromkeys(topics):
        plain = column_name(topic)
        for name in itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2))):
            made = {f"{name}_{column}".lower() for column in ("timestamp_ns", *columns)}
            if known.isdisjoint(made):
                known |= made
                names[topic] = name
                break
    return names


def grid(frame: DataFrame, every_s: float) -> DataFrame:
    """One row ``timestamp_ns`` every ``every_s`` seconds from the first to the last message, on whole multiples."""
    from pyspark.sql import functions as F

    step = max(1, round(check_duration(every_s, "every_s") * 1e9))
    row = frame.agg(F.min("timestamp_ns").alias("first"), F.max("timestamp_ns").alias("last")).first()
    first, last = (row["first"], row["last"]) if row is not None and row["first"] is not None else (0, -1)
    start = -(-first // step) * step
    return frame.sparkSession.range(start, last + 1, step).withColumnRenamed("id", "timestamp_ns")


def asof(
    left: DataFrame,
    right: DataFrame,
    *,
    on: str = "timestamp_ns",
    by: Sequence[str] = (),
    direction: Direction = "backward",
    tolerance: int | None = None,
    exact: bool = True,
    ties: str | None = "ordinal",
    suffix: str = "_right",
    rows_per_bucket: int = ROWS_PER_BUCKET,
) -> DataFrame:
    """Each row of ``left`` with the row of ``right`` nearest in ``on`` (an integer column), as ``merge_asof``."""
    from pyspark.sql import functions as F

    if direction not in _DIRECTIONS:
        raise InvalidArgument(f"direction={direction!r} is not a choice; {nearest(str(direction), _DIRECTIONS)}")
    _require(left, [on, *by], "left")
    _require(right, [on, *by], "right")
    order = F.col(ties) if ties is not None and ties in right.columns else F.lit(0)
    keys = [f"__by_{name}" for name in by]
    both = _union_of_sides(left, right, on=on, by=by, keys=keys, order=order)
    width = _bucket_width(both, rows_per_bucket)
    both = both.withColumn("__bucket", F.floor(F.col("__on") / F.lit(width)).cast("long") if width else F.lit(0))
    both = _matched(both, keys, direction, exact, carry=width is not None)
    chosen = _chosen(direction, tolerance)
    values = [name for name in right.columns if name != on and name not in by]
    rows = both.filter("__left is not null").withColumn("__match", chosen)
    return rows.select(
        *(F.col("__left")[name].alias(name) for name in left.columns),
        *(F.col("__match")[name].alias(name if name not in left.columns else name + suffix) for name in values),
    )


def _require(frame: DataFrame, names: Sequence[str], side: str) -> None:
    for name in names:
        if name not in frame.columns:
            raise InvalidArgument(f"the {side} frame has no column {name!r}; {nearest(name, frame.columns)}")


def _union_of_sides(
    left: DataFrame, right: DataFrame, *, on: str, by: Sequence[str], keys: Sequence[str], order: Column
) -> DataFrame:
    """Left and right rows in one frame: time, keys, the tie-breaker, and the whole row of its side."""
    from pyspark.sql import functions as F

    right_row = F.struct(*(F.col(f"`{name}`") for name in right.columns))
    lefts = left.select(
        F.col(on).cast("long").alias("__on"),
        *(F.col(name).alias(key) for name, key in zip(by, keys, strict=True)),
        F.lit(None).cast("long").alias("__tie"),
        F.struct(*(F.col(f"`{name}`") for name in left.columns)).alias("__left"),
        F.lit(None).cast(right.select(right_row.alias("row")).schema["row"].dataType).alias("__right"),
    )
    rights = right.filter(F.col(on).isNotNull()).select(
        F.col(on).cast("long").alias("__on"),
        *(F.col(name).alias(key) for name, key in zip(by, keys, strict=True)),
        order.cast("long").alias("__tie"),
        F.lit(None).cast(lefts.schema["__left"].dataType).alias("__left"),
        right_row.alias("__right"),
    )
    return lefts.unionByName(rights)


def _bucket_width(both: DataFrame, rows_per_bucket: int) -> int | None:
    """How wide in time a bucket is so that it holds about ``rows_per_bucket`` rows; None when one is enough."""
    from pyspark.sql import functions as F

    row = both.agg(F.count("*").alias("rows"), F.min("__on").alias("first"), F.max("__on").alias("last")).first()
    if row is None or row["first"] is None or row["rows"] <= rows_per_bucket:
        return None
    buckets = -(-row["rows"] // rows_per_bucket)
    return int(max(1, (row["last"] - row["first"]) // buckets + 1))


def _matched(both: DataFrame, keys: Sequence[str], direction: Direction, exact: bool, *, carry: bool) -> DataFrame:
    """``__back`` and ``__ahead``: the right row before and after each left row, each a struct (on, row) or null."""
    from pyspark.sql import functions as F

    timed = F.col("__on").isNotNull()  # a row without a time matches nothing
    candidate = F.when(F.col("__right").isNotNull() & timed, F.struct("__on", "__right"))
    for name, backward in (("__back", True), ("__ahead", False)):
        if direction == ("forward" if backward else "backward"):
            continue
        own = F.last(candidate, ignorenulls=True).over(_window([*keys, "__bucket"], exact, backward))
        both = both.withColumn(name, F.when(timed, own))
    if carry:
        both = _carried(both, keys, direction)
    return both


def _window(partition: Sequence[str], exact: bool, backward: bool) -> WindowSpec:
    """Rows in time order, right rows of equal time before left ones when they may match exactly."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    right_first = F.col("__right").isNull() if exact else F.col("__right").isNotNull()
    time, tie = (F.col("__on"), F.col("__tie")) if backward else (F.col("__on").desc(), F.col("__tie").desc())
    window = Window.partitionBy(*partition).orderBy(time, right_first, tie)
    return window.rowsBetween(Window.unboundedPreceding, Window.currentRow)


def _carried(both: DataFrame, keys: Sequence[str], direction: Direction) -> DataFrame:
    """Where a bucket has no match of its own: the last right row of the buckets before, the first of those after."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    row = F.struct("__on", "__right")
    order = F.when(F.col("__right").isNotNull(), F.struct("__on", "__tie"))
    edges = both.groupBy(*keys, "__bucket").agg(
        F.max_by(row, order).alias("__last"), F.min_by(row, order).alias("__first")
    )
    before = Window.partitionBy(*keys).orderBy("__bucket").rowsBetween(Window.unboundedPreceding, -1)
    after = Window.partitionBy(*keys).orderBy(F.col("__bucket").desc()).rowsBetween(Window.unboundedPreceding, -1)
    edges = edges.select(
        *(F.col(key).alias(f"{key}_edge") for key in keys),
        F.col("__bucket").alias("__bucket_edge"),
        F.last("__last", ignorenulls=True).over(before).alias("__before"),
        F.last("__first", ignorenulls=True).over(after).alias("__after"),
    )
    condition = F.col("__bucket").eqNullSafe(F.col("__bucket_edge"))
    for key in keys:
        condition = condition & F.col(key).eqNullSafe(F.col(f"{key}_edge"))
    joined = both.join(edges, condition, "left")
    timed = F.col("__on").isNotNull()  # a left row without a time has no neighbour
    if direction != "forward":
        joined = joined.withColumn("__back", F.when(timed, F.coalesce("__back", "__before")))
    if direction != "backward":
        joined = joined.withColumn("__ahead", F.when(timed, F.coalesce("__ahead", "__after")))
    return joined


def _chosen(direction: Direction, tolerance: int | None) -> Column:
    """The right row that counts: within the tolerance, and the earlier one when both are equally near."""
    from pyspark.sql import functions as F

    def near(name: str) -> Column:
        match = F.col(name)
        if tolerance is None:
            return match
        return F.when(F.abs(F.col("__on") - match["__on"]) <= F.lit(tolerance), match)

    if direction == "backward":
        return near("__back")["__right"]
    if direction == "forward":
        return near("__ahead")["__right"]
    back, ahead = near("__back"), near("__ahead")
    earlier = ahead.isNull() | (F.col("__on") - back["__on"] <= ahead["__on"] - F.col("__on"))
    return F.when(back.isNotNull() & earlier, back["__right"]).otherwise(ahead["__right"])
