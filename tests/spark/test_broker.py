"""Reading and writing through a broker: the same rows as from its directory; a broker that goes away is told."""

from __future__ import annotations

import socket

import pytest
from pyspark.errors import PySparkException
from tests.spark.test_source import as_rows, load

from penstock.broker import Client, Server


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def broker(tmp_path):
    port = free_port()
    with Server(tmp_path / "j", port).start(), Client(port=port) as client:
        yield client, f"broker://127.0.0.1:{port}"


def fill(client, messages=3000):
    for topic in ("a.x", "a.y", "b"):
        client.publish_many(topic, [f"{topic}{number}".encode() for number in range(messages // 3)])


def test_the_same_rows_as_from_the_directory(spark, broker, tmp_path):
    client, url = broker
    fill(client)
    remote = load(spark, url, partitionBytes=20_000)
    assert as_rows(remote) == as_rows(load(spark, tmp_path / "j"))
    assert remote.rdd.getNumPartitions() > 2
    assert load(spark, url, topics="a.*").count() == 2000
    assert load(spark, url, startPosition=10, endPosition=19).count() == 10
    assert load(spark, url).filter("topic = 'b' and ordinal <= 5").count() == 5
    assert load(spark, url, columns="position,topic").filter("topic = 'b'").count() == 1000


def test_streaming_moves_a_queue(spark, broker, tmp_path):
    client, url = broker
    fill(client)

    def run():
        frame = (
            spark.readStream.format("penstock")
            .options(maxMessagesPerTrigger=1000, columns="position")
            .load(url + "?queue=spark")
        )
        query = (
            frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start(str(tmp_path / "out"))
        )  # fmt: skip
        query.awaitTermination()

    run()
    fill(client, 300)
    run()
    got = sorted(row.position for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert got == list(range(1, 3301))
    (queue,) = [queue for queue in client.queues() if "spark" in queue.values()]
    assert 0 < queue["depth"] < 3300, queue  # what Spark has committed is behind it; its commit lags one batch


def test_the_sink_publishes_once_through_a_broker(spark, broker, tmp_path):
    _, url = broker
    frame = spark.range(500).selectExpr("concat('t', id % 3) as topic", "cast(id as string) as payload")
    for _ in range(2):
        frame.write.format("penstock").mode("append").option("transaction", "job-1").save(url)
    assert load(spark, tmp_path / "j").count() == 500
    frame.write.format("penstock").mode("append").save(url)
    assert load(spark, tmp_path / "j").count() == 1000
    bad = spark.range(1).selectExpr("'a' as topic", "'x' as payload", "map('k', 'v') as properties")
    with pytest.raises(PySparkException, match="drop the column 'properties'"):
        bad.write.format("penstock").mode("append").save(url)


def test_no_broker(spark):
    with pytest.raises(PySparkException, match="no broker answers"):
        load(spark, f"broker://127.0.0.1:{free_port()}").count()
    with pytest.raises(PySparkException, match="not of the form"):
        load(spark, "broker://nowhere").count()
