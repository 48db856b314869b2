"""``df.write`` and ``df.writeStream.format("penstock")``: rows become messages, once per (query, batch), also when
replayed.

Executors stage: each task writes its rows to a file of its own (for a journal) or to a transaction of the broker. The
driver publishes all of them in one atomic commit that also holds the mark "this query, this batch". A batch that
Spark runs again after a crash finds the mark and publishes nothing. Row ids could not do that: a replay may order
rows differently.

A journal is written by the driver, unless another process has it open: then name its broker instead.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.errors import InvalidArgument, StateError, nearest
from penstock.spark.blocks import SHAPE, check_nulls
from penstock.spark.options import check_options, folded
from penstock.spark.places import shown
from penstock.spark.staging import Staging, open_staging

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ACCEPTED = {
    "topic": ("string",),
    "payload": ("binary", "string"),
    "timestamp_ns": ("bigint",),
    "timestamp": ("timestamp",),
    "properties": ("map<string,string>",),
    "message_id": ("string",),
    "key": ("string",),
}
IGNORED = ("ordinal", "position", "stored_ns", "vchan_id", "journal")  # the journal assigns these itself


@dataclass
class Staged(WriterCommitMessage):
    """What one task staged."""

    transaction: str
    partition: int
    name: str
    rows: int
    node: str


def target(options: dict[str, str]) -> str:
    """Where to write: one directory or one broker."""
    path = options.get("path", "")
    if not path:
        raise InvalidArgument("name where to write: .save('/path/to/journal') or .save('broker://HOST:PORT')")
    return path


def check_schema(schema: StructType, options: dict[str, str]) -> list[str]:
    """The columns that become parts of messages; ``InvalidArgument`` for a missing or unusable one."""
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, kind in kinds.items():
        if name in IGNORED:
            continue
        if name not in ACCEPTED:
            raise InvalidArgument(f"a message has no place for column {name!r}; {nearest(name, ACCEPTED)}")
        if kind not in ACCEPTED[name]:
            raise InvalidArgument(f"column {name!r} must be {' or '.join(ACCEPTED[name])}, not {kind}")
    if "payload" not in kinds:
        raise InvalidArgument(f"a column 'payload' is needed; the frame has {', '.join(kinds)}")
    if "topic" not in kinds and not options.get("topic"):
        raise InvalidArgument("a column 'topic' or the option topic=NAME is needed")
    return [name for name in kinds if name in ACCEPTED]


class _Writer:
    """Common to batch and streaming writers."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.options = folded(options)
        check_options(self.options)
        self.columns = check_schema(schema, self.options)
        self.target = target(self.options)

    def stage(self, batches: Iterator[pyarrow.RecordBatch], transaction: str) -> Staged:
        """On an executor: stage the rows of one task."""
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        attempt = context.taskAttemptId() if context is not None else 0
        staging = self.staging(transaction)
        name, rows = staging.write(partition, attempt, (self._shaped(batch) for batch in batches))
        return Staged(transaction, partition, name, rows, socket.gethostname())

    def _shaped(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """The columns in the form that staging keeps: topic, payload, timestamp_ns, properties, message_id, key."""
        rows = batch.num_rows
        found = {name: batch.column(batch.schema.get_field_index(name)) for name in self.columns}
        topic, given = found.get("topic"), self.options.get("topic")
        if topic is None:
            topic = pyarrow.repeat(pyarrow.scalar(given, pyarrow.string()), rows)
        elif given:
            topic = pyarrow.compute.fill_null(topic, given)
        check_nulls(topic, found["payload"])
        time = found.get("timestamp_ns")
        if "timestamp" in found and (time is None or time.null_count):
            micros = found["timestamp"].cast(pyarrow.timestamp("us", tz="UTC")).cast(pyarrow.int64())
            try:
                coarse = pyarrow.compute.multiply_checked(micros, 1000)
            except pyarrow.ArrowInvalid:
                raise InvalidArgument("a timestamp outside of the years 1678 to 2261 is no message's time") from None
            time = coarse if time is None else pyarrow.compute.coalesce(time, coarse)
        kinds = SHAPE.types
        columns = [
            topic,
            found["payload"],
            time,
            found.get("properties"),
            found.get("message_id"),
            found.get("key"),
        ]
        made = [
            pyarrow.nulls(rows, kind) if column is None else column.cast(kind)
            for column, kind in zip(columns, kinds, strict=True)
        ]
        return pyarrow.RecordBatch.from_arrays(made, schema=SHAPE)

    def publish(self, messages: Sequence[Any], transaction: str, *, once: bool, batch: int | None = None) -> None:
        """On the driver: one atomic commit of what all tasks staged, in the order of partitions."""
        # By partition, not by completion: a frame that was sorted keeps its order in the journal.
        staged = sorted((message for message in messages if message is not None), key=lambda message: message.partition)
        staging = self.staging(transaction)
        for message in staged:
            if not staging.is_seen(message.name):
                raise StateError(
                    f"node {message.node} does not see {shown(self.target)} as the driver does: {message.rows} rows "
                    "that it staged are not here, and nothing was published. Name a directory that every node mounts, "
                    "or write through a broker: .save('broker://HOST:PORT')"
                )
        staging.commit([message.name for message in staged], once=once, batch=batch)

    def discard(self, transaction: str) -> None:
        """On the driver: the job failed; nothing of it is published."""
        self.staging(transaction).abort()

    def staging(self, transaction: str) -> Staging:
        return open_staging(self.target, transaction, self.options)


class JournalWriter(DataSourceArrowWriter):
    """``df.write``: the option ``transaction`` names the job, so that a second run publishes nothing again."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.inner = _Writer(options, schema)
        named = self.inner.options.get("transaction")
        self.once = named is not None
        self.transaction = f"batch-{named if named is not None else uuid.uuid4().hex}"
        # Not by the tasks: one that still runs when the job has failed would make it again, and nobody would remove it.
        self.inner.staging(self.transaction).begin()

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return self.inner.stage(iterator, self.transaction)

    def commit(self, messages: list[Any]) -> None:
        self.inner.publish(messages, self.transaction, once=self.once)

    def abort(self, messages: list[Any]) -> None:
        self.inner.discard(self.transaction)


class JournalStreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream``: the query's id and the batch's number name the commit; a replay has the same ones."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.inner = _Writer(options, schema)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        if query is None or batch is None:
            raise StateError("Spark did not say which query and batch this task belongs to; PySpark 4.3 is needed")
        transaction = transaction_name(query, int(batch))
        # A batch that is tried again has the same name, and its commit removes what was left.
        self.inner.staging(transaction).begin()
        return self.inner.stage(iterator, transaction)

    def commit(self, messages: list[Any], batchId: int) -> None:
        staged = [message for message in messages if message is not None]
        if staged:
            self.inner.publish(staged, staged[0].transaction, once=True, batch=batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:
        for transaction in {message.transaction for message in messages if message is not None}:
            self.inner.discard(transaction)


def transaction_name(query: str, batch: int) -> str:
    """The name by which a batch of a streaming query is marked as committed."""
    return f"query-{query}-{batch}"


def batch_writer(options: dict[str, str], schema: StructType, overwrite: bool) -> JournalWriter:
    """A writer for ``df.write``; a journal can only be added to."""
    if overwrite:
        raise InvalidArgument("a journal is only added to, never written over: use mode('append')")
    return JournalWriter(options, schema)


def stream_writer(options: dict[str, str], schema: StructType) -> JournalStreamWriter:
    """A writer for ``df.writeStream``."""
    return JournalStreamWriter(options, schema)
