"""Staging beside a journal's directory: what is not stored does not count, and what others keep there stays."""

from __future__ import annotations

import errno
import functools
import threading
from dataclasses import replace

import pyarrow
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from tests.spark.test_broker import free_port

from penstock.broker import Client, Server
from penstock.errors import InvalidArgument, RefusedError, StateError
from penstock.journal import Journal
from penstock.journal.transaction import Transaction
from penstock.spark import blocks
from penstock.spark import staging as staging_module
from penstock.spark.blocks import SHAPE
from penstock.spark.sink import JournalWriter
from penstock.spark.staging import committed, open_staging

SEGMENT_BYTES = 1 << 16


def publish(path, transaction, payloads):
    """One job that writes ``payloads`` with one task."""
    staging = open_staging(str(path), transaction, {"segmentBytes": str(SEGMENT_BYTES)})
    staging.begin()
    batch = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": data} for data in payloads], schema=SHAPE)
    name, _ = staging.write(0, 0, iter([batch]))
    staging.commit([name], once=True, batch=0)


def messages(path):
    with Journal(path, mode="read") as journal:
        return journal.frontier - 1


def test_a_batch_that_could_not_be_stored_is_published_when_it_comes_again(tmp_path, monkeypatch):
    """Its commit begins a segment, whose head holds the marks: the mark of a batch that then fails is not among them."""
    publish(tmp_path / "j", "query-1-0", [bytes(1000)] * 100)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.journal.Journal", functools.partial(Journal, max_message_bytes=2000))
        with pytest.raises(InvalidArgument):
            publish(tmp_path / "j", "query-1-1", [b"small", bytes(3000)])
    assert len(list((tmp_path / "j").glob("*.log"))) == 2, "the commit that failed began no segment"
    publish(tmp_path / "j", "query-1-1", [b"small", b"smaller"])
    assert messages(tmp_path / "j") == 102
    publish(tmp_path / "j", "query-1-1", [b"small", b"smaller"])
    assert messages(tmp_path / "j") == 102


def test_a_worker_of_a_killed_run_that_still_writes(tmp_path):
    """A driver that starts anew counts its attempts from 0: its files are not those of the one before it."""
    rows = [pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": data}] * 5, schema=SHAPE) for data in (b"old", b"new")]
    names = []

    def old():
        yield rows[0]
        names.append(open_staging(str(tmp_path / "j"), "query-1-0", {}).write(0, 0, iter(rows[1:]))[0])
        yield rows[0]

    open_staging(str(tmp_path / "j"), "query-1-0", {}).begin()
    open_staging(str(tmp_path / "j"), "query-1-0", {}).write(0, 0, old())
    open_staging(str(tmp_path / "j"), "query-1-0", {}).commit(names, once=True, batch=0)
    with Journal(tmp_path / "j", mode="read") as journal:
        assert [bytes(message) for message in journal.read_many(1)] == [b"new"] * 5


def test_a_brokers_state_and_the_marks_survive_each_others_segments(tmp_path):
    """Spark writes into the directory of a broker that stands still; then the broker begins segments, then Spark."""
    port = free_port()
    options = {"segment_bytes": SEGMENT_BYTES}
    with Server(tmp_path / "j", port, **options).start(), Client(port=port) as client:
        client.queue("q", topics="kept")
        client.publish("kept", b"1")
    for number in range(4):
        publish(tmp_path / "j", f"query-1-{number}", [bytes(1000)] * 100)
    with Server(tmp_path / "j", port, **options).start(), Client(port=port) as client:
        (queue,) = client.queues()
        assert "q" in queue.values() and queue["depth"] == 1, queue
        for _ in range(3):
            client.publish_many("b", [bytes(1000)] * 100)
    with Journal(tmp_path / "j") as journal:
        assert committed(journal) == ["query-1-3"]
    before = messages(tmp_path / "j")
    publish(tmp_path / "j", "query-1-3", [bytes(1000)] * 100)
    assert messages(tmp_path / "j") == before


def stage(path, payloads, transaction="query-1-0"):
    staging = open_staging(str(path), transaction, {"segmentBytes": str(SEGMENT_BYTES)})
    staging.begin()
    batches = [
        pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": data} for data in payloads[at : at + 7]], schema=SHAPE)
        for at in range(0, len(payloads), 7)
    ]
    return staging, staging.write(0, 0, iter(batches))[0]


def contents(path):
    with Journal(path, mode="read") as journal:
        return [bytes(journal.read(position)) for position in range(1, journal.frontier)]


@pytest.mark.parametrize("dies_at", [1, 2, 5])
def test_a_large_transaction_is_seen_at_once(tmp_path, monkeypatch, dies_at):
    """Killed between two of its parts nothing of it is there; then Spark runs the batch again, in another order."""
    monkeypatch.setattr(staging_module, "SPILL_BYTES", 4000)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 2)
    publish(tmp_path / "j", "query-1-0", [b"before"])
    payloads = [b"%03d" % number + bytes(5000) for number in range(40)]
    staging, name = stage(tmp_path / "j", payloads, "query-1-1")
    real, left, seen = Transaction.spill, [dies_at], []

    def spill(self):
        real(self)
        seen.append(messages(tmp_path / "j"))
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Transaction, "spill", spill)
    with pytest.raises(KeyboardInterrupt):
        staging.commit([name], once=True, batch=1)
    staging.abort()  # as Spark does for a batch that failed
    assert seen == [1] * dies_at and contents(tmp_path / "j") == [b"before"]
    for order in (payloads[::-1], payloads):  # the second time it is there already
        staging, name = stage(tmp_path / "j", order, "query-1-1")
        staging.commit([name], once=True, batch=1)
        assert contents(tmp_path / "j") == [b"before", *payloads[::-1]] and not (tmp_path / "j.staging").exists()
    assert set(seen) == {1} and len(seen) > 15, "a reader saw a part of it"


def test_a_node_that_staged_where_the_driver_does_not_look_is_named(tmp_path):
    """Its files are in a directory of the same name on another machine: that is no damage, and nothing is published."""
    schema = StructType([StructField("topic", StringType()), StructField("payload", BinaryType())])
    writer = JournalWriter({"path": str(tmp_path / "j")}, schema)
    rows = pyarrow.RecordBatch.from_pydict({"topic": ["a"], "payload": [b"1"]})
    near = writer.write(iter([rows]))
    far = replace(near, partition=1, node="worker-7", name="000001-0-0123456789ab-1.arrow")
    with pytest.raises(StateError, match=r"node worker-7 does not see .*broker://"):
        writer.commit([near, far])
    assert not (tmp_path / "j").exists()
    writer.commit([near])
    with Journal(tmp_path / "j", mode="read") as journal:
        assert [bytes(message) for message in journal.read_many(1)] == [b"1"]


def test_a_task_that_still_runs_when_its_job_has_failed_leaves_nothing(tmp_path):
    schema = StructType([StructField("topic", StringType()), StructField("payload", BinaryType())])
    writer = JournalWriter({"path": str(tmp_path / "j")}, schema)
    rows = pyarrow.RecordBatch.from_pydict({"topic": ["a"], "payload": [b"1"]})

    def still_running():
        yield rows
        writer.abort([])
        yield rows

    for batches in (still_running(), iter([rows])):  # one that has begun its file, one that begins after the end
        with pytest.raises(StateError, match=r"the job has ended.*broker://"):
            writer.write(batches)
        assert not (tmp_path / "j.staging").exists()


def test_a_commit_waits_for_that_of_another_query(tmp_path, monkeypatch):
    """It holds the journal's lock for as long as it takes; a writer that stays is told."""
    publish(tmp_path / "j", "query-1-0", [b"1"])
    journal = Journal(tmp_path / "j")
    threading.Timer(0.5, journal.close).start()
    publish(tmp_path / "j", "query-2-0", [b"2"])
    assert messages(tmp_path / "j") == 2
    monkeypatch.setattr(staging_module, "LOCK_WAIT_S", 0.2)
    with Journal(tmp_path / "j"), pytest.raises(RefusedError, match=r"being written by .* written through its broker"):
        publish(tmp_path / "j", "query-2-1", [b"3"])


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "[Errno 28] Error writing bytes to file")

    monkeypatch.setattr(pyarrow.ipc, "new_stream", full)
    with pytest.raises(OSError, match=r"No space left on device: .*j\.staging") as told:
        publish(tmp_path / "j", "query-1-0", [b"1"])
    assert told.value.errno == errno.ENOSPC


def test_large_batches_are_staged_in_pieces(tmp_path, monkeypatch):
    """So that the memory of a commit does not depend on the size of Spark's batches."""
    monkeypatch.setattr(staging_module, "PIECE_BYTES", 20_000)
    payloads = [bytes([number]) * 1000 for number in range(100)] + [bytes(50_000)]
    staging = open_staging(str(tmp_path / "j"), "query-1-0", {})
    staging.begin()
    rows = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": data} for data in payloads], schema=SHAPE)
    name, count = staging.write(0, 0, iter([rows, rows.slice(0, 0)]))
    with pyarrow.ipc.open_stream((tmp_path / "j.staging" / "query-1-0" / name).read_bytes()) as staged:
        assert max(batch.num_rows for batch in staged) < 20 and count == len(payloads)
    staging.commit([name], once=True, batch=0)
    with Journal(tmp_path / "j", mode="read") as journal:
        assert [bytes(journal.read(position)) for position in range(1, count + 1)] == payloads
