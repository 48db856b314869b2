"""Batch, sink and streaming on a real cluster, an executor killed under way in each."""

from __future__ import annotations

import pyarrow.parquet
import pytest
from tests.spark.test_cluster import (
    KINDS,
    by_position,
    cluster,  # noqa: F401
    local_rows,
    rows_of,
    run_jobs,
    without_places,
)


@pytest.mark.timeout(600)
def test_batch_sink_and_streaming_on_a_cluster(cluster, tmp_path):  # noqa: F811
    expected = run_jobs(cluster, tmp_path, "batch", "sink", "stream")
    table = pyarrow.parquet.read_table(tmp_path / "batch").select(list(KINDS))
    assert sorted(rows_of(table), key=by_position) == expected
    for copy in ("sink", "stream"):
        assert without_places(local_rows(tmp_path / copy)) == without_places(expected)
