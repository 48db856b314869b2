"""quality, rollup and sessions over a stream of a journal that really closes its windows, against pandas.

A window or session is given out when the watermark has passed it: what is open when a stream ends is not. So the last
message here comes an hour after all others, and everything before it is closed.
"""

from __future__ import annotations

import numpy
import pandas
import pytest

from penstock.journal import Journal
from penstock.spark.pipelines import quality, rollup, sessions

BEGIN = 1_767_225_600_000_000_000  # 2026-01-01
GAP_NS, WINDOW_NS = 3 * 10**9, 10 * 10**9


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """Bursts of three topics, late by up to 20 s; gives its path and the messages as pandas has them."""
    random = numpy.random.default_rng(5)
    path = tmp_path_factory.mktemp("windows") / "j"
    rows = []
    for topic in ("a", "b", "c"):
        at = BEGIN + int(random.integers(10**9))
        for _ in range(600):
            at += int(random.choice([200, 900, 2999, 3001, 8000], p=[0.6, 0.2, 0.05, 0.05, 0.1])) * 10**6
            rows.append((at + int(random.integers(0, 20 * 10**9)), at, topic, int(random.integers(10, 500))))
    rows.sort()  # by the time of arrival
    frame = pandas.DataFrame(rows, columns=["arrival", "time", "topic", "size"])
    frame["latency_ms"] = random.gamma(2.0, 5.0, len(frame)).round(6)
    with Journal(path, sync=False) as journal, journal.transaction() as transaction:
        for row in frame.itertuples():
            sent = {"sent_ns": str(row.time - round(row.latency_ms * 1e6))}
            transaction.append(row.topic, bytes(row.size), timestamp_ns=row.time, properties=sent)
        transaction.append("end", b"", timestamp_ns=BEGIN + 10**13)
    return path, frame


def closed(spark, journal, tmp_path, pipeline):
    """What a streaming query gave out, in several batches."""
    stream = spark.readStream.format("penstock").option("maxMessagesPerTrigger", 700).load(str(journal))
    name = f"closed_{pipeline.__name__}"
    writer = pipeline(stream).writeStream.format("memory").queryName(name).outputMode("append")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination(300)
    assert query.exception() is None and sum(bool(item["numInputRows"]) for item in query.recentProgress) == 3
    assert all(state["numRowsDroppedByWatermark"] == 0 for item in query.recentProgress for state in item["stateOperators"])
    found = spark.table(name).filter("topic <> 'end'").toPandas()
    return found.sort_values(list(found.columns[:2])).reset_index(drop=True)


def nanoseconds(times):
    return times.astype("datetime64[ns]").astype("int64")


def test_rollup_closes_every_window(spark, journal, tmp_path):
    path, frame = journal

    def sums(stream):
        return rollup(stream, {"n": "count(*)", "size": "sum(octet_length(payload))"}, window="10 seconds")

    found = closed(spark, path, tmp_path, sums)
    frame = frame.assign(window=frame.time // WINDOW_NS * WINDOW_NS)
    expected = frame.groupby(["window", "topic"]).agg(n=("size", "count"), size=("size", "sum")).reset_index()
    got = pandas.DataFrame({"window": nanoseconds(found.window_start), "topic": found.topic, "n": found.n, "size": found["size"]})
    got = got.sort_values(["window", "topic"]).reset_index(drop=True)
    pandas.testing.assert_frame_equal(got, expected, check_dtype=False)


def test_sessions_closes_every_session(spark, journal, tmp_path):
    path, frame = journal
    found = closed(spark, path, tmp_path, lambda_named("ends", lambda stream: sessions(stream, gap_s=GAP_NS / 1e9)))
    frame = frame.sort_values(["topic", "time"])
    fresh = frame.groupby("topic").time.diff().fillna(GAP_NS) >= GAP_NS
    expected = frame.groupby(["topic", fresh.cumsum().rename("number")]).time.agg(["min", "max", "count"]).reset_index()
    found = found.sort_values(["topic", "started"]).reset_index(drop=True)
    got = pandas.DataFrame({
        "topic": found.topic, "min": nanoseconds(found.started), "max": nanoseconds(found.ended), "count": found.messages,
    })  # fmt: skip
    micros = expected.assign(min=expected["min"] // 1000 * 1000, max=expected["max"] // 1000 * 1000)
    pandas.testing.assert_frame_equal(got, micros.drop(columns="number"), check_dtype=False)
    assert len(expected) > 150


def test_quality_closes_every_window(spark, journal, tmp_path):
    path, frame = journal
    found = closed(spark, path, tmp_path, lambda_named("table", lambda stream: quality(stream, window="1 minute")))
    minute = 60 * 10**9
    frame = frame.assign(window_start=frame.time // minute * minute, ordinal=frame.groupby("topic").cumcount() + 1)
    found["window_start"] = nanoseconds(found.window_start)
    groups = frame.groupby(["topic", "window_start"])
    assert len(found) == groups.ngroups > 20
    for row in found.itertuples():
        group = groups.get_group((row.topic, row.window_start))
        spread = group.ordinal.max() - group.ordinal.min() + 1
        late = int((group.ordinal < group.ordinal.cummax().shift()).sum())
        assert (row.messages, row.payload_bytes, row.missing, row.out_of_order) == (
            len(group), group["size"].sum(), spread - len(group), late,
        )  # fmt: skip
        # the rank of the p50 is within a thousandth of the rows, and one, of the middle
        ranks = numpy.sort(group.latency_ms.to_numpy())
        low, high = numpy.searchsorted(ranks, [row.latency_p50_ms - 1e-6, row.latency_p50_ms + 1e-6])
        assert low <= len(ranks) / 2 * 1.002 + 1 and high >= len(ranks) / 2 * 0.998 - 1
        assert abs(row.latency_max_ms - ranks[-1]) < 1e-6


def lambda_named(name, function):
    function.__name__ = name
    return function
