"""Staging: stores rows between the tasks that write them and the one commit that publishes them.

Beside a journal ``DIRECTORY`` they lie in ``DIRECTORY.staging/TRANSACTION/``, one Arrow file a task attempt; only
files whose task succeeded are named to ``commit``. The marks of what was committed are state records of the journal,
in the same atomic batch as the messages. ``write`` runs on executors and needs no native code; ``commit`` runs on the
driver.

A transaction of any size becomes visible at once: batches of ``SPILL_BYTES`` are appended to the journal invisibly, and
the last batch, which carries the mark, makes all of them visible. A crash before it leaves nothing visible.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow

from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError
from penstock.spark import blocks

if TYPE_CHECKING:
    from penstock.journal import Journal

STATE_KIND = 0x5350  # marks of Spark commits among a journal's state records
MAX_MARKS = 1000
TRIES = 10
LOCK_WAIT_S, LOCK_POLL_S = 10.0, 0.05
SPILL_BYTES, PIECE_BYTES = 64 << 20, 8 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Staging(Protocol):
    """One transaction of one target."""

    def begin(self) -> None:
        """Make the place where tasks stage their rows."""

    def write(self, partition: int, attempt: int, batches: Iterator[pyarrow.RecordBatch]) -> tuple[str, int]:
        """Stage one task's rows; returns the name for ``commit`` and the number of rows."""

    def is_seen(self, name: str) -> bool:
        """Whether this process sees what a task has staged under ``name``."""

    def commit(self, names: Sequence[str], *, once: bool, batch: int | None) -> None:
        """Publish what was staged under ``names``, in that order, atomically; with ``once`` never a second time."""

    def abort(self) -> None:
        """Discard the transaction."""


def open_staging(target: str, transaction: str, options: Mapping[str, str]) -> Staging:
    """The staging of ``transaction`` for a journal's directory or ``broker://HOST:PORT``."""
    if _NAME.fullmatch(transaction) is None:
        raise InvalidArgument(f"transaction {transaction!r} must be 1 to 200 letters, digits, dots, dashes")
    from penstock.spark.places import local_path, with_options

    if target.startswith("broker://"):
        from penstock.spark.remote import BrokerStaging

        return BrokerStaging(with_options(target, options), transaction)
    path = local_path(target)
    segment_bytes = options.get("segmentBytes")
    return DirectoryStaging(Path(os.path.abspath(path)), transaction, int(segment_bytes) if segment_bytes else None)


class DirectoryStaging:
    """Files beside the journal's directory."""

    def __init__(self, journal: Path, transaction: str, segment_bytes: int | None = None) -> None:
        self.journal = journal
        self.transaction = transaction
        self.segment_bytes = segment_bytes
        self.root = journal.with_name(journal.name + ".staging")
        self.directory = self.root / transaction

    def begin(self) -> None:
        for _ in range(TRIES):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another transaction has just ended and removed the root
                self.directory.mkdir(mode=0o700, exist_ok=True)
                return

    def write(self, partition: int, attempt: int, batches: Iterator[pyarrow.RecordBatch]) -> tuple[str, int]:
        try:
            return self._write(partition, attempt, batches)
        except FileNotFoundError:
            raise StateError(
                f"node {socket.gethostname()} does not see {self.directory}, or the job has ended. "
                "Name a directory that every node mounts, or write through a broker: .save('broker://HOST:PORT')"
            ) from None
        except OSError as error:  # that of Arrow does not name where
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), str(self.directory)) from error

    def _write(self, partition: int, attempt: int, batches: Iterator[pyarrow.RecordBatch]) -> tuple[str, int]:
        # Every driver counts attempts from 0, and a worker of a driver that died may still be writing.
        name = f"{partition:06d}-{attempt}-{secrets.token_hex(6)}"
        rows = 0
        first = next(batches, None)
        if first is None:
            return "", 0
        with (
            pyarrow.OSFile(str(self.directory / f"{name}.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, first.schema) as out,
        ):
            for batch in _chain(first, batches):
                for piece in _pieces(batch):
                    out.write_batch(piece)
                rows += batch.num_rows
        final_name = f"{name}-{rows}.arrow"  # with the number of rows: a truncated file is detected
        os.rename(self.directory / f"{name}.arrow", self.directory / final_name)
        return final_name, rows

    def is_seen(self, name: str) -> bool:
        return not name or (self.directory / Path(name).name).exists()

    def commit(self, names: Sequence[str], *, once: bool, batch: int | None) -> None:
        from penstock.journal import Journal

        options: dict[str, Any] = {} if self.segment_bytes is None else {"segment_bytes": self.segment_bytes}
        # Another query that commits into the same directory holds the lock for as long as its commit takes.
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                journal = Journal(self.journal, **options)
                break
            except RefusedError as error:
                if time.monotonic() > until:
                    raise RefusedError(
                        f"{error}. A journal with a live writer is written through its broker: "
                        ".save('broker://HOST:PORT')"
                    ) from error
            time.sleep(LOCK_POLL_S)
        with journal:
            self._publish(journal, [name for name in names if name], once)
        self.abort()

    def _publish(self, journal: Journal, names: Sequence[str], once: bool) -> None:
        from penstock._core.broker import batch_names, range_batch

        marks = committed(journal)
        # the commit may begin a new segment, which must carry the marks of earlier transactions
        journal.on_snapshot(lambda: ((STATE_KIND, encode_mark(mark)) for mark in marks), (STATE_KIND,))
        if once and self.transaction in marks:
            return  # Spark repeats a batch whose commit it did not hear of
        held = 0
        with journal.transaction() as transaction:
            for block in (block for name in names for batch in self._batches(name) for block in blocks.encode(batch)):
                size = len(block.data) + len(block.index)
                if held and held + size > SPILL_BYTES:
                    transaction.spill()
                    held = 0
                batch = range_batch(block.index, block.data, dict(enumerate(block.topics)), foreign=False)
                transaction.append_batch(batch, batch_names(batch))
                held += size
            if once:  # in the same commit as the rows: either both are stored or neither
                transaction.state(STATE_KIND, encode_mark(self.transaction))

    def _batches(self, name: str) -> Iterator[pyarrow.RecordBatch]:
        place = str(self.directory / Path(name).name)
        rows = 0
        try:
            with pyarrow.OSFile(place, "rb") as file:
                for batch in pyarrow.ipc.open_stream(file):
                    if not batch.schema.equals(blocks.SHAPE):
                        raise ValueError("it has other columns")
                    batch.validate(full=True)  # wrong offsets must not be followed
                    rows += batch.num_rows
                    yield batch
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            text = f"{place} is no file of staged rows ({error}); run the job again"
            raise CorruptionError(text, place) from None
        if not name.endswith(f"-{rows}.arrow"):
            raise CorruptionError(f"{place} has {rows} rows, not as many as its name says; run the job again", place)

    def abort(self) -> None:
        for _ in range(TRIES):  # a task that still runs may have begun a file meanwhile
            shutil.rmtree(self.directory, ignore_errors=True)
            if not self.directory.exists():
                break
        with contextlib.suppress(OSError):  # the directory is not empty while another transaction is staged
            self.root.rmdir()


def committed(journal: Journal) -> list[str]:
    """The transactions that a journal has marks of, oldest first: the last of each query, and named batch jobs."""
    latest: dict[str, str] = {}
    for kind, data in journal.state_records():
        if kind == STATE_KIND:
            name = str(json.loads(data)["transaction"])
            latest.pop(_owner(name), None)  # so that the newest mark moves to the end of the order
            latest[_owner(name)] = name
    return list(latest.values())[-MAX_MARKS:]


def _owner(transaction: str) -> str:
    """The streaming query of a transaction. Spark replays its last batch only, so only the last mark is needed."""
    return transaction.rpartition("-")[0] if transaction.startswith("query-") else transaction


def encode_mark(transaction: str) -> bytes:
    """A mark as a state record's bytes."""
    return json.dumps({"transaction": transaction}).encode()


def _pieces(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """The batch in pieces of about ``PIECE_BYTES``: the commit has one in memory at a time."""
    step = max(1, batch.num_rows * PIECE_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _chain(first: pyarrow.RecordBatch, rest: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    yield first
    yield from rest
