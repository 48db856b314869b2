"""Arrow batches without the JVM in between: the same rows as ``spark.read``, as of the moment they were named."""

from __future__ import annotations

import collections

import pyarrow
import pytest
from tests.spark.journals import extend, make

from penstock.errors import InvalidArgument
from penstock.journal import Journal
from penstock.spark import arrow_batches


def test_a_function_over_batches(spark, tmp_path):
    rows = make(tmp_path / "j", 4000)

    def sizes(batches):
        for batch in batches:
            lengths = pyarrow.compute.binary_length(batch["payload"]).cast(pyarrow.int64())
            yield pyarrow.RecordBatch.from_arrays([batch["topic"], lengths], ["topic", "size"])

    named = arrow_batches(spark, tmp_path / "j", columns="topic,payload", partitionBytes=60_000)
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        later = extend(journal, 100)
    frame = named.mapInArrow(sizes, "topic string, size bigint")
    assert frame.rdd.getNumPartitions() > 3
    expected = collections.Counter()
    for topic, _, _, data, _, _ in rows:
        expected[topic] += len(data)
    assert {row[0]: row[1] for row in frame.groupBy("topic").sum("size").collect()} == expected
    some = arrow_batches(spark, tmp_path / "j", topics="b", startPosition=101)
    count = some.mapInArrow(lambda batches: (batch.select(["position"]) for batch in batches), "position bigint").count()
    assert count == sum(row[0] == "b" and row[1] > 100 for row in rows + later)
    with pytest.raises(InvalidArgument, match="topics"):
        arrow_batches(spark, tmp_path / "j", topic_s="b")
