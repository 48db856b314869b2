"""``sessions``: when activity of a key began and when it ended, in batch and streaming.

A session is a run of messages of one key with less than ``gap_s`` between neighbours. Streaming emits the start at
once, and the end when the watermark has passed the last message by the gap; state is kept in RocksDB. A late message
within the watermark extends its session, joins two sessions, or begins one of its own; Spark drops a message behind the
watermark and counts it in its progress. Batch gives the same ends in one pass.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.quantities import check_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

Interval = tuple[int, int, int]  # first and last time in microseconds, messages
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def sessions(
    frame: DataFrame,
    *,
    by: Sequence[str] = ("topic",),
    gap_s: float = 30.0,
    watermark: str = "1 minute",
    time: str = "timestamp",
    starts: bool = False,
) -> DataFrame:
    """Rows of: the keys, ``event`` ("start" or "end"), ``started``, ``ended`` (null at a start), ``messages``.

    Rows for starts are emitted only if ``starts`` is set; rows for ends always.
    """
    gap_us = max(1, round(check_duration(gap_s, "gap_s") * 1e6))
    if frame.isStreaming:
        return _streaming(frame, by, gap_us, watermark, time=time, starts=starts)
    return _batch(frame, by, gap_us, time, starts)


def merge(open_: Iterable[Interval], times_us: Iterable[int], gap_us: int) -> tuple[list[Interval], list[Interval]]:
    """The open sessions after these messages, in order, and those among them that are new."""
    known = sorted(open_)
    spans = sorted([*known, *((time, time, 1) for time in times_us)])
    merged: list[Interval] = []
    for first, last, count in spans:
        if merged and first - merged[-1][1] < gap_us:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], last), before[2] + count)
        else:
            merged.append((first, last, count))
    new = [span for span in merged if not any(span[0] <= first <= span[1] for first, _, _ in known)]
    return merged, new


def _streaming(
    frame: DataFrame, by: Sequence[str], gap_us: int, watermark: str, *, time: str, starts: bool
) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    keys = [frame.schema[name] for name in by]
    schema = StructType(list(keys))
    schema = schema.add("event", "string").add("started", "timestamp").add("ended", "timestamp").add("messages", "long")
    narrow = frame.select(*by, F.col(time).alias("__time")).withWatermark("__time", watermark)
    processor = make_processor(list(by), gap_us, starts)
    return narrow.groupBy(*by).transformWithState(processor, schema, outputMode="append", timeMode="EventTime")


def make_processor(by: list[str], gap_us: int, starts: bool) -> Any:
    """The stateful processor: a class made here, since its base needs PySpark."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Sessions(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.open = handle.getListState("open", "first long, last long, messages long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            before = [tuple(item) for item in self.open.get()]
            merged, new = merge(before, (microseconds(row["__time"]) for row in rows), gap_us)
            self._keep(merged)
            for span in new if starts else ():
                yield self._row(key, "start", span)

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
            now = timerValues.getCurrentWatermarkInMs()
            spans = sorted(tuple(item) for item in self.open.get())
            over = [span for span in spans if _deadline_ms(span, gap_us) <= now]
            self._keep([span for span in spans if span not in over])
            for span in over:
                yield self._row(key, "end", span)

        def close(self) -> None:
            pass

        def _keep(self, spans: list[Interval]) -> None:
            """Make state and timers match exactly these sessions."""
            if spans:
                self.open.put(spans)
            else:
                self.open.clear()
            wanted = {_deadline_ms(span, gap_us) for span in spans}
            for timer in list(self.handle.listTimers()):
                if timer in wanted:
                    wanted.remove(timer)
                else:
                    self.handle.deleteTimer(timer)
            for timer in wanted:
                self.handle.registerTimer(timer)

        def _row(self, key: Any, event: str, span: Interval) -> Row:
            ended = moment(span[1]) if event == "end" else None
            values = dict(zip(by, key, strict=True))
            return Row(**values, event=event, started=moment(span[0]), ended=ended, messages=span[2])

    return Sessions()


def _deadline_ms(span: Interval, gap_us: int) -> int:
    return -(-(span[1] + gap_us) // 1000)


def microseconds(value: datetime.datetime) -> int:
    """A time as microseconds since 1970; one without a zone is local, as Spark hands it to Python."""
    since = value.astimezone(datetime.UTC) - _EPOCH
    return (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds


def moment(microseconds_: int) -> datetime.datetime:
    """Microseconds since 1970 as a time."""
    return _EPOCH + datetime.timedelta(microseconds=microseconds_)


def _batch(frame: DataFrame, by: Sequence[str], gap_us: int, time: str, starts: bool) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = Window.partitionBy(*by).orderBy("__us")
    timed = frame.select(*by, F.col(time).alias("__time"), F.unix_micros(time).alias("__us"))
    fresh = F.coalesce((F.col("__us") - F.lag("__us").over(order) >= gap_us).cast("long"), F.lit(1))
    numbered = timed.withColumn("__fresh", fresh)
    numbered = numbered.withColumn("__session", F.sum("__fresh").over(order.rowsBetween(Window.unboundedPreceding, 0)))
    grouped = numbered.groupBy(*by, "__session").agg(
        F.min("__time").alias("started"), F.max("__time").alias("ended"), F.count("*").alias("messages")
    )
    ends = grouped.select(*by, F.lit("end").alias("event"), "started", "ended", "messages")
    if not starts:
        return ends
    nothing = F.lit(None).cast("timestamp").alias("ended")
    return ends.unionByName(grouped.select(*by, F.lit("start").alias("event"), "started", nothing, "messages"))
