"""``asof`` gives what ``pandas.merge_asof`` gives, on random data with ties, keys, tolerances and many buckets."""

from __future__ import annotations

import numpy
import pandas
import pytest

from penstock.errors import InvalidArgument
from penstock.spark.pipelines import align, asof, grid


def random_frames(seed: int, keys: int, span: int):
    random = numpy.random.default_rng(seed)

    def side(rows: int, value: str) -> pandas.DataFrame:
        times = numpy.sort(random.integers(0, span, rows))
        return pandas.DataFrame({
            "timestamp_ns": times,
            "topic": [f"t{key}" for key in random.integers(0, keys, rows)],
            "ordinal": numpy.arange(1, rows + 1),
            value: random.integers(0, 10**6, rows),
        })  # fmt: skip

    return side(150, "a"), side(200, "b")


@pytest.mark.parametrize(("direction", "tolerance", "exact", "keys", "span", "bucket"), [
    ("backward", None, True, 1, 120, 40),       # many ties, many buckets
    ("forward", None, True, 1, 120, 40),
    ("nearest", None, True, 1, 120, 40),
    ("backward", None, True, 3, 10**9, 25),     # buckets without a right row of every key: carried across several
    ("nearest", None, True, 3, 10**9, 25),
    ("nearest", 7, False, 2, 2000, 10**6),      # one bucket
    ("forward", 10**7, True, 2, 10**9, 30),
    ("nearest", 10**7, True, 2, 10**9, 30),
    ("backward", None, False, 1, 60, 20),
])  # fmt: skip
def test_equals_pandas(spark, direction, tolerance, exact, keys, span, bucket):
    left, right = random_frames(span + keys, keys, span)
    by = ["topic"] if keys > 1 else []
    if not by:
        right = right.drop(columns="topic")
    expected = pandas.merge_asof(
        left, right, on="timestamp_ns", by=by or None, direction=direction, tolerance=tolerance,
        allow_exact_matches=exact, suffixes=("", "_right"),
    )  # fmt: skip
    got = asof(
        spark.createDataFrame(left), spark.createDataFrame(right), by=by, direction=direction, tolerance=tolerance,
        exact=exact, rows_per_bucket=bucket,
    ).toPandas()  # fmt: skip
    got = got.sort_values("ordinal").reset_index(drop=True)[list(expected.columns)]
    expected = expected.sort_values("ordinal").reset_index(drop=True)
    pandas.testing.assert_frame_equal(got, expected, check_dtype=False)
    assert expected["b"].notna().any()


def test_no_two_columns_are_equal(spark):
    rows = [("x", 1, 10, "x"), ("a.b", 1, 10, "dot"), ("a_b", 1, 10, "line"), ("A/B", 1, 10, "slash"), ("timestamp", 1, 9, "ns")]
    frame = spark.createDataFrame(rows, "topic string, ordinal bigint, timestamp_ns bigint, payload string")
    result = align(frame, "x", columns=["payload", "ordinal"])
    assert len({name.lower() for name in result.columns}) == len(result.columns)
    found = result.first().asDict()
    assert {found[name] for name in result.columns if name.endswith("payload")} == {"x", "dot", "line", "slash", "ns"}


@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
def test_what_has_no_time_matches_nothing(spark, direction):
    left = spark.createDataFrame([(1, 100), (2, None)], "ordinal bigint, timestamp_ns bigint")
    right = spark.createDataFrame([(7, 100), (8, None)], "b bigint, timestamp_ns bigint")
    got = {row.ordinal: row.b for row in asof(left, right, direction=direction).collect()}
    assert got == {1: 7, 2: None}


def test_no_cross_join(spark):
    left, right = random_frames(1, 2, 1000)
    joined = asof(spark.createDataFrame(left), spark.createDataFrame(right), by=["topic"], rows_per_bucket=50)
    plan = joined._jdf.queryExecution().optimizedPlan().toString()
    assert "Cross" not in plan and "Join Inner" not in plan


def messages(spark):
    rows = [("camera", index, 1_000_000_000 * index) for index in range(1, 6)]
    rows += [("imu/left", index, 400_000_000 * index) for index in range(1, 12)]
    frame = spark.createDataFrame(rows, "topic string, ordinal long, timestamp_ns long")
    return frame.selectExpr("*", "cast(cast(ordinal as string) as binary) as payload")


def test_topics_onto_one(spark):
    rows = align(messages(spark), "camera", columns=["ordinal"], tolerance_s=0.5).orderBy("ordinal").collect()
    assert [row.imu_left_ordinal for row in rows] == [2, 5, 7, 10, None]
    assert rows[0].imu_left_timestamp_ns == 800_000_000 and rows[0].topic == "camera"


def test_onto_a_grid(spark):
    rows = align(messages(spark), every_s=1.5, direction="backward", columns=["ordinal"]).orderBy("timestamp_ns")
    table = [(row.timestamp_ns, row.camera_ordinal, row.imu_left_ordinal) for row in rows.collect()]
    assert table == [(1_500_000_000, 1, 3), (3_000_000_000, 3, 7), (4_500_000_000, 4, 11)]
    assert grid(messages(spark).filter("false"), 1.0).count() == 0


def test_what_cannot_be(spark):
    frame = messages(spark)
    with pytest.raises(InvalidArgument, match="either onto"):
        align(frame)
    with pytest.raises(InvalidArgument, match="did you mean backward"):
        asof(frame, frame, direction="backwards")
    with pytest.raises(InvalidArgument, match="no column 'time'"):
        asof(frame, frame, on="time")
