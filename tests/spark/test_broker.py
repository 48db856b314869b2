"""Reading and writing through a broker: the same rows as from its directory; a broker that goes away is told."""

from __future__ import annotations

import shutil
import socket
import threading
import time

import pyarrow
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType
from tests.broker.test_security import certificate
from tests.spark.test_source import as_rows, load

from penstock.broker import Client, Server
from penstock.errors import InvalidArgument, PenstockError, StateError
from penstock.journal import Journal
from penstock.spark import lake
from penstock.spark.blocks import SHAPE
from penstock.spark.bounds import Bounds
from penstock.spark.columns import FIELDS
from penstock.spark.places import Reading, open_place
from penstock.spark.staging import open_staging
from penstock.spark.stream import JournalStreamReader


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def broker(tmp_path):
    port = free_port()
    with Server(tmp_path / "j", port).start() as server, Client(port=port) as client:
        yield client, f"broker://127.0.0.1:{port}", server


def fill(client, messages=3000):
    for topic in ("a.x", "a.y", "b"):
        client.publish_many(topic, [f"{topic}{number}".encode() for number in range(messages // 3)])


def test_a_queue_is_where_the_query_is(broker):
    """Also after its last batch, and before its first, so that retention waits from the beginning."""
    client, url, _ = broker
    fill(client, 300)
    reader = JournalStreamReader({"path": url + "?queue=spark"}, StructType([StructField("position", LongType())]))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert [(queue["queue"], queue["depth"]) for queue in client.queues()] == [("spark", 300)]
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert [queue["depth"] for queue in client.queues()] == [0]


@pytest.mark.parametrize(("text", "told"), [
    ("broker://127.0.0.1:9/t.0", "names a topic; .* by the option 'topics'"), ("broker://127.0.0.1:9?nope=1", "no option 'nope'"),
    ("broker://127.0.0.1:0", "port=0 must be"),
])  # fmt: skip
def test_an_address_that_cannot_be_meant(text, told):
    with pytest.raises((InvalidArgument, StateError), match=told):
        open_place(text)
    with pytest.raises((InvalidArgument, StateError), match=told):
        open_staging(text, "t", {}).abort()


def test_the_same_rows_as_from_the_directory(spark, broker, tmp_path):
    client, url, _ = broker
    fill(client)
    remote = load(spark, url, partitionBytes=20_000)
    assert as_rows(remote) == as_rows(load(spark, tmp_path / "j"))
    assert remote.rdd.getNumPartitions() > 2
    assert load(spark, url, topics="a.*").count() == 2000
    assert load(spark, url, startPosition=10, endPosition=19).count() == 10
    assert load(spark, url).filter("topic = 'b' and ordinal <= 5").count() == 5
    assert load(spark, url, columns="position,topic").filter("topic = 'b'").count() == 1000


def test_streaming_moves_a_queue(spark, broker, tmp_path):
    client, url, _ = broker
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
    assert queue["depth"] == 0, "what the last batch of the query has committed is behind it too"


def test_the_sink_publishes_once_through_a_broker(spark, broker, tmp_path):
    _, url, server = broker
    frame = spark.range(500).selectExpr("concat('t', id % 3) as topic", "cast(id as string) as payload")
    for _ in range(2):
        frame.write.format("penstock").mode("append").option("transaction", "job-1").save(url)
    assert load(spark, tmp_path / "j").count() == 500
    frame.write.format("penstock").mode("append").save(url)
    assert load(spark, tmp_path / "j").count() == 1000
    more = spark.range(1).selectExpr("'m' as topic", "'x' as payload", "map('k', 'v', 'l', '') as properties")
    more.write.format("penstock").mode("append").save(url)
    for place in (url, tmp_path / "j"):
        assert load(spark, place, topics="m").first().properties == {"k": "v", "l": ""}
    bad = spark.range(1).selectExpr("'a' as topic", "'x' as payload", "map('$k', 'v') as properties")
    with pytest.raises(PySparkException, match="the broker's own"):
        bad.write.format("penstock").mode("append").save(url)
    assert not server.broker.transactions.staged, "a job that failed leaves nothing"


DETAILED = [
    ("a", b"1", {"k": "v", "vchan_id": "7"}, "id1", None),
    ("b", b"", None, None, "key"),
    ("a", b"x" * 5000, {}, "i", "k"),
    ("c", b"", {"e": ""}, None, None),
    ("b", b"2", {"vchan_id": "none"}, "", "\N{SNOWMAN}"),
]


def test_ids_and_keys_both_ways(spark, broker, tmp_path):
    """Every column, from the broker and from the directory that it serves: what the sink was given, once."""
    _, url, server = broker
    schema = "topic string, payload binary, properties map<string,string>, message_id string, key string"
    frame = spark.createDataFrame([(a, b and bytearray(b), *more) for a, b, *more in DETAILED * 300], schema).coalesce(1)
    for _ in range(2):
        frame.write.format("penstock").mode("append").option("transaction", "job").save(url)
    every = ",".join(FIELDS)
    remote = load(spark, url, columns=every, batchBytes=20_000).orderBy("position").collect()
    assert remote == load(spark, tmp_path / "j", columns=every).orderBy("position").collect()
    assert [(row.topic, bytes(row.payload), row.properties, row.message_id, row.key) for row in remote] == [
        (topic, data or b"", more or {}, name or None, key) for topic, data, more, name, key in DETAILED * 300
    ]
    assert [row.vchan_id for row in remote[:5]] == [7, None, None, None, None]
    assert [row.message_id for row in load(spark, url, columns="message_id").collect()[:2]] == ["id1", None]
    assert load(spark, url, topics="b", columns="key,position").filter("key = 'key'").count() == 300
    assert not server.broker.transactions.staged


def test_the_publishers_time_and_the_brokers_both_ways(spark, broker, tmp_path):
    """Through a broker a row keeps its time; when it was stored is another column, by which filters and seeks go."""
    _, url, _ = broker
    times = [-(2**62), -1, 0, 1, 2**62, None]
    schema = "topic string, payload binary, timestamp_ns bigint"
    frame = spark.createDataFrame([("t", bytearray(b"x"), when) for when in times], schema)
    begun = time.time_ns()
    frame.coalesce(1).write.format("penstock").mode("append").save(url)
    rows = load(spark, url, columns="position,timestamp_ns,stored_ns").orderBy("position").collect()
    assert [row.timestamp_ns for row in rows[:5]] == times[:5]
    assert rows[5].timestamp_ns == rows[5].stored_ns >= begun
    directory = load(spark, tmp_path / "j", columns="position,timestamp_ns,stored_ns").orderBy("position").collect()
    assert rows == directory
    middle = rows[3].stored_ns
    wanted = [row.position for row in rows if row.stored_ns >= middle]
    frame = load(spark, url, columns="position,stored_ns").filter(f"stored_ns >= {middle}")
    assert sorted(row.position for row in frame.collect()) == wanted
    for where in (url, str(tmp_path / "j")):
        assert open_place(where).find(time_ns=middle, bounds=Bounds()) == wanted[0]
        assert open_place(where).find(time_ns=middle + 10**15, bounds=Bounds()) == 7


def test_a_lake_of_a_broker_is_that_of_its_directory(broker, tmp_path):
    client, url, _ = broker
    fill(client, 300)
    lake.archive(None, url, tmp_path / "remote")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "near")
    remote, near = (DeltaTable(tmp_path / name).to_pyarrow_table().sort_by("position") for name in ("remote", "near"))
    assert remote.num_rows == 300 and remote["stored_ns"].null_count == 0
    assert remote.equals(near)


def test_a_copy_of_a_brokers_journal_that_was_archived_stops_the_archive(broker, tmp_path):
    client, url, server = broker
    fill(client, 300)
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 300
    fill(client, 300)
    assert lake.archive(None, url, tmp_path / "lake").rows == 300, "by the directory and by the broker it is the same"
    server.stop()
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    with Journal(tmp_path / "copy") as journal:
        journal.append_many("a.x", [b"other"] * 100)
    assert lake.archive(None, str(tmp_path / "copy"), tmp_path / "lake").rows == 100
    port = free_port()
    with Server(tmp_path / "j", port).start(), Client(port=port) as again:
        fill(again, 300)
        with pytest.raises(StateError, match="other messages: at position"):
            lake.archive(None, f"broker://127.0.0.1:{port}?queue=archive", tmp_path / "lake", trim=True)
        assert lake.info(tmp_path / "lake").rows == 700


def test_a_replayed_batch_with_ids_is_published_once(spark, broker, tmp_path):
    """The last commit file is gone, as if the driver had died before it wrote it: the batch runs again."""
    _, url, _ = broker
    with Journal(tmp_path / "source") as journal:
        for number in range(100):
            journal.append("t", b"%d" % number, message_id=f"id{number}", key=f"key{number % 7}")

    def run():
        frame = spark.readStream.format("penstock").options(columns="topic,payload,message_id,key", maxMessagesPerTrigger=40)
        query = (
            frame.load(str(tmp_path / "source")).writeStream.format("penstock")
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start(url)
        )  # fmt: skip
        query.awaitTermination()
        return query

    run()
    wanted = [(b"%d" % number, f"id{number}", f"key{number % 7}") for number in range(100)]

    def found():
        rows = load(spark, url, columns="payload,message_id,key").collect()
        return sorted(((bytes(row.payload), row.message_id, row.key) for row in rows), key=lambda row: int(row[0]))

    assert found() == wanted
    commits = tmp_path / "checkpoint" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in (last, commits / f".{last.name}.crc"):
        path.unlink(missing_ok=True)
    assert any(step["numInputRows"] for step in run().recentProgress), "the batch was not run again"
    assert found() == wanted


def test_what_failed_attempts_left_is_forgotten(broker):
    """A job that failed, and an attempt that was not the one committed: the broker keeps nothing of either."""
    _, url, server = broker
    batch = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": b"x"}] * 5, schema=SHAPE)
    for transaction, committed in (("batch-1", [0]), ("batch-2", [])):
        staging = open_staging(url, transaction, {})
        names = [staging.write(0, attempt, iter([batch]))[0] for attempt in range(3)]
        other = open_staging(url, transaction + "1", {}).write(0, 0, iter([batch]))[0]
        if committed:
            staging.commit([names[0]], once=True, batch=None)
        else:
            staging.abort()
        assert list(server.broker.transactions.staged) == [other], "only the other transaction is left"
        open_staging(url, transaction + "1", {}).abort()
    assert server.broker.staged_bytes == 0


def test_as_many_tasks_as_a_cluster_has(broker):
    """Hundreds of parts in one commit; more than a line of the protocol has room for is refused in a sentence."""
    client, url, server = broker
    batch = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": b"x"}], schema=SHAPE)
    staging = open_staging(url, "query-0123456789abcdef0123456789abcdef-7", {})
    staging.commit([staging.write(part, 100_000 + part, iter([batch]))[0] for part in range(400)], once=True, batch=7)
    assert client.statistics()["next"] - 1 == 400 and not server.broker.transactions.staged
    with pytest.raises(InvalidArgument, match="coalesce"):
        staging.commit([f"{staging.transaction}.{part}.{part}" for part in range(20_000)], once=True, batch=8)


@pytest.mark.parametrize(
    "wanted", [["a,b"], ["x y"], [""], ["a..b"], ["$dead.q"], [f"t{number}" for number in range(3000)], ["a,b", "b"]]
)
def test_topics_that_no_request_can_name_are_found_all_the_same(broker, wanted):
    client, url, _ = broker
    client.publish("a,b", b"1")
    client.publish("b", b"2")
    client.publish("t7", b"3")
    reading = Reading(pyarrow.schema([("topic", pyarrow.string())]), Bounds(patterns=(tuple(f"={name}" for name in wanted),)))
    place = open_place(url)
    found = [name for part in place.batches(1, place.frontier, reading) for name in part.column(0).to_pylist()]
    assert found == [name for name in ("a,b", "b", "t7") if name in wanted]


def test_what_a_killed_run_staged_is_not_published(broker, tmp_path):
    """A driver that starts anew counts its attempts from 0: the parts of the one before it are none of its own."""
    _, url, server = broker
    batch = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": b"x"}] * 5, schema=SHAPE)
    open_staging(url, "query-1-0", {}).write(0, 0, iter([batch]))
    name, count = open_staging(url, "query-1-0", {}).write(0, 0, iter([batch]))
    open_staging(url, "query-1-0", {}).commit([name], once=True, batch=0)
    assert count == 5 and open_place(url).frontier == 6
    assert not server.broker.transactions.staged


def test_a_task_that_fails_leaves_nothing(broker):
    _, url, server = broker
    batch = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": b"x"}] * 5, schema=SHAPE)
    held = []

    def rows():
        yield batch
        held.append(server.broker.transactions.staged_bytes)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        open_staging(url, "query-1-0", {}).write(0, 0, rows())
    assert held[0] > 0 and not server.broker.transactions.staged


def test_a_broker_that_goes_away_and_comes_back(spark, tmp_path):
    """The query that was under way ends with a clear text; started again it loses nothing and writes nothing twice."""
    port = free_port()
    url = f"broker://127.0.0.1:{port}"
    going = threading.Event()

    def run(trigger):
        frame = spark.readStream.format("penstock").options(maxMessagesPerTrigger=300, columns="position,payload").load(url)
        query = (
            frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(**trigger).start(str(tmp_path / "out"))
        )  # fmt: skip
        return query

    with Server(tmp_path / "j", port).start(), Client(port=port) as client:
        fill(client)
        query = run({"processingTime": "0 seconds"})
        while not any(step["numInputRows"] for step in query.recentProgress):
            assert query.isActive
            going.wait(0.02)
    with pytest.raises(PySparkException, match=r"no broker answers|went away in the middle"):
        query.awaitTermination(120)
    with pytest.raises(StateError, match="no broker answers"):
        load(spark, url).count()
    with Server(tmp_path / "j", port).start(), Client(port=port) as client:
        fill(client, 300)
        run({"availableNow": True}).awaitTermination()
    got = sorted(row.position for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert got == list(range(1, 3301))


def test_a_broker_that_goes_away_while_a_range_is_fetched(tmp_path):
    port = free_port()
    with Server(tmp_path / "j", port).start(), Client(port=port) as client:
        fill(client)
        place = open_place(f"broker://127.0.0.1:{port}")
        schema = pyarrow.schema([("position", pyarrow.int64())])
        batches = place.batches(1, place.frontier, Reading(schema, Bounds(), batch_bytes=64))
        assert next(batches).num_rows > 0
    with pytest.raises(StateError, match=r"went away in the middle|no broker answers"):
        list(place.batches(1, 3001, Reading(schema, Bounds())))


def test_token_and_tls(spark, tmp_path):
    """By options or in the address; neither the wrong one nor none gets in, and no error prints the token."""
    port = free_port()
    rights = tmp_path / "rights.toml"
    rights.write_text('[[token]]\nname = "spark"\ntoken = "sesame"\npublish = [">"]\nsubscribe = [">"]\nqueues = [">"]\n')
    rights.chmod(0o600)
    chain, key = certificate(tmp_path)
    with Server(tmp_path / "j", port, tokens=rights, certificate=chain, key=key).start():
        url = f"broker://127.0.0.1:{port}"
        options = {"token": "sesame", "tls": str(chain)}
        frame = spark.range(20).selectExpr("'a' as topic", "cast(id as string) as payload")
        frame.write.format("penstock").mode("append").options(**options).save(url)
        assert load(spark, url, **options).count() == 20
        assert load(spark, f"{url}?token=sesame&tls={chain}").count() == 20
        for wrong in ({"token": "open", "tls": str(chain)}, {"tls": str(chain)}, {"token": "sesame"}):
            with pytest.raises(PenstockError) as caught:
                load(spark, url, **wrong).count()
            assert "sesame" not in str(caught.value)


def test_no_broker(spark):
    with pytest.raises(StateError, match="no broker answers"):
        load(spark, f"broker://127.0.0.1:{free_port()}").count()
    with pytest.raises(InvalidArgument, match="not of the form"):
        load(spark, "broker://nowhere").count()
