"""A journal behind a broker, for executors that cannot reach its directory: ``load("broker://HOST:PORT")``.

Ranges are fetched by position over a connection of each task's own; nothing here loads native code. The broker checks
what it reads, so ``check`` and ``mode`` have nothing to do. A broker that goes away in the middle fails the task,
which Spark runs again. With the option ``queue`` a streaming query also moves a queue of that name as it commits, so
that the broker shows its lag and its retention can wait for it.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import Iterable, Iterator, Sequence

import numpy
import pyarrow

from penstock.address import parse
from penstock.broker.fetch import RangeClient
from penstock.broker.ranges import Range as FetchedRange
from penstock.broker.words import OWN_PROPERTIES, Refusal, check_pattern
from penstock.errors import ClosedError, InvalidArgument, PenstockError, StateError, nearest
from penstock.spark import blocks, rows
from penstock.spark.bounds import Bounds
from penstock.spark.directory import anew_text, gone_text
from penstock.spark.places import Range, Reading, shown

SAMPLE = 256
FETCH_BYTES = 4 << 20
MOST_PARTS_BYTES, MOST_TOPICS_BYTES = 60_000, 30_000  # bytes of names in one line of the protocol
ADDRESS_OPTIONS = ("token", "tls", "queue", "timeout")


@contextlib.contextmanager
def connect(text: str, kind: type[RangeClient] = RangeClient) -> Iterator[RangeClient]:
    """A connection to the broker at ``broker://HOST:PORT?token=...``; errors name the broker."""
    host, port, options = address(text)
    try:
        client = kind(
            host,
            port,
            token=options.get("token"),
            tls=_tls(options.get("tls")),
            timeout=float(options.get("timeout", "30")),
        )
    except ssl.SSLError as error:
        raise StateError(f"no TLS with the broker at {host}:{port}: {error}; name its certificate: tls=FILE") from None
    except (OSError, ClosedError) as error:
        raise StateError(f"no broker answers at {host}:{port} ({error}); start it, or check port and tls") from None
    try:
        with client:
            yield client
    except (OSError, ClosedError) as error:
        raise StateError(
            f"the broker at {host}:{port} went away in the middle: {error}; the query can be started again"
        ) from error


def address(text: str) -> tuple[str, int, dict[str, str]]:
    """Host, port and options of a broker's address."""
    shape = "broker://HOST:PORT?token=TOKEN&tls=true&queue=NAME"
    try:
        parts = parse(text)
    except InvalidArgument:
        raise InvalidArgument(f"{shown(text)!r} is not of the form {shape}") from None
    options = dict(parts.options)
    if parts.scheme != "broker":
        raise InvalidArgument(f"{shown(text)!r} is not of the form {shape}")
    for name in options:
        if name not in ADDRESS_OPTIONS:
            raise InvalidArgument(f"a broker's address has no option {name!r} here; {nearest(name, ADDRESS_OPTIONS)}")
    if parts.topic:
        raise InvalidArgument(
            f"{shown(text)!r} names a topic; here an address names the broker alone: give the topic by the option "
            f"{'topics'!r} (reading) or {'topic'!r} (writing)"
        )
    return parts.host, 9876 if parts.port is None else parts.port, options


def _tls(text: str | None) -> ssl.SSLContext | None:
    """``true`` trusts the system's certificates; any other text is the file of the certificate to trust."""
    if text is None or text.lower() == "false":
        return None
    try:
        return ssl.create_default_context(cafile=None if text.lower() == "true" else text)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"tls={text!r} is neither true, false nor a file of certificates: {error}") from None


def queue_name(text: str) -> str | None:
    """The queue that a broker's address names."""
    return parse(text).options.get("queue")


class WholeRanges(RangeClient):
    """Raises an error for positions that retention has deleted; a plain client would skip them."""

    def fetch(
        self,
        start: int,
        most: int = 65_536,
        *,
        most_bytes: int = FETCH_BYTES,
        topics: Iterable[str] | None = None,
        queue: str | None = None,
        stored: bool = False,
    ) -> FetchedRange:
        part = super().fetch(start, most, most_bytes=most_bytes, topics=topics, queue=queue, stored=stored)
        if start < part.first:
            raise StateError(gone_text(start, part.first, f"the broker's journal {self.journal}"))
        return part


class BrokerPlace:
    """A journal that a broker has open. Each call makes its own connection, so that nothing is shared with a fork."""

    def __init__(self, text: str) -> None:
        self.text = text
        with connect(text) as client:
            self.uuid = client.journal

    @property
    def first(self) -> int:
        with connect(self.text) as client:
            return client.first

    @property
    def frontier(self) -> int:
        with connect(self.text) as client:
            return client.frontier

    def ranges(
        self,
        start: int,
        end: int,
        bounds: Bounds,
        most_bytes: int,
        *,
        log: bool = True,
        fail_if_deleted: bool = False,
        lossy: bool = False,
        permissive: bool = False,
    ) -> Iterator[Range]:
        start, end = max(start, bounds.positions[0]), min(end, bounds.positions[1] + 1)
        if end <= start:
            return
        each = self._bytes_each(start)
        step = max(1, int(min(most_bytes, 1 << 50) // each))
        for low in range(start, end, step):
            high = min(low + step, end)
            yield Range(self.text, self.uuid, low, high, int((high - low) * each))

    def schemas(self) -> dict[str, str]:
        with connect(self.text) as client:
            return client.schema_versions()

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        return []  # a broker refuses to start with such a journal

    def _bytes_each(self, start: int) -> float:
        """The approximate size of a message: the mean of a few."""
        with connect(self.text) as client:
            part = client.fetch(start, SAMPLE)
        return max(1.0, len(part.payload) / part.count) + rows.HEADER_BYTES if part.count else 100.0

    def batches(self, start: int, end: int, reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        names = reading.schema.names
        with connect(self.text, WholeRanges if reading.fail_if_deleted else RangeClient) as client:
            if client.journal != self.uuid:
                raise StateError(anew_text(shown(self.text)))
            for part in self._parts(client, start, end, reading.bounds, column="stored_ns" in names):
                entries = part.entries()
                topics = part.topics
                if reading.bounds.by_row:
                    ids = [number for number, name in topics.items() if reading.bounds.wants_topic(name)]
                    wanted = numpy.array(ids, numpy.uint32) if reading.bounds.patterns else None
                    entries = entries[reading.bounds.mask(entries, wanted)]
                data = numpy.frombuffer(part.payload, numpy.uint8)
                for low, high in rows.cuts(entries["length"], rows.row_bytes(names), reading.batch_bytes):
                    source = rows.FetchedRows(entries[low:high], data, topics, self.uuid)
                    yield source.batch(reading.schema)

    def _parts(
        self, client: RangeClient, start: int, end: int, bounds: Bounds, *, column: bool
    ) -> Iterator[FetchedRange]:
        """The broker filters by one set of plain patterns; any further filter is applied here."""
        patterns = bounds.patterns[0] if len(bounds.patterns) == 1 else ()
        plain = [pattern.removeprefix("=") for pattern in patterns if not pattern.startswith("^")]
        known = len(plain) == len(patterns) and all(map(_can_be_asked_for, plain))
        fits = sum(len(name.encode()) + 1 for name in plain) <= MOST_TOPICS_BYTES
        topics = plain if plain and known and fits else None
        stored = column or bounds.stored != Bounds().stored
        yield from client.ranges(start, end, most_bytes=FETCH_BYTES, topics=topics, stored=stored)

    def find(self, *, time_ns: int | None = None, ordinal: int | None = None, bounds: Bounds, start: int = 1) -> int:
        narrowed = bounds if time_ns is None else bounds.narrowed("stored", low=time_ns)
        narrowed = narrowed if ordinal is None else narrowed.narrowed("ordinals", low=ordinal)
        frontier = self.frontier
        schema = pyarrow.schema([("position", pyarrow.int64())])
        for batch in self.batches(max(self.first, start), frontier, Reading(schema, narrowed)):
            if batch.num_rows:
                return int(batch.column(0)[0].as_py())
        return frontier

    def committed(self, position: int) -> None:
        """Everything below ``position`` was processed: move the queue there, if one is named."""
        name = queue_name(self.text)
        if name is not None:
            with connect(self.text) as client:
                client.hold(name, position)


def _can_be_asked_for(name: str) -> bool:
    """Whether a request can contain a topic or pattern; others are filtered here, out of all topics."""
    try:
        check_pattern(name)
    except Refusal:
        return False
    return "," not in name


class BrokerStaging:
    """A transaction of the broker: tasks stage parts of it, and one commit publishes them, once for each id."""

    def __init__(self, text: str, transaction: str) -> None:
        self.text = text
        self.transaction = transaction

    def begin(self) -> None:
        """Nothing is to be made: parts come to be as they are sent."""

    def write(self, partition: int, attempt: int, batches: Iterator[pyarrow.RecordBatch]) -> tuple[str, int]:
        # Every driver counts attempts from 0, and what a driver that died has staged is still there.
        name = f"{self.transaction}.{partition}.{attempt}-{secrets.token_hex(6)}"
        count = 0
        try:
            with connect(self.text) as client:
                for batch in batches:
                    for block in blocks.encode(batch, own=OWN_PROPERTIES):
                        count += client.load(name, block.topics, block.index, block.data, times=True)
        except BaseException:
            with contextlib.suppress(PenstockError):  # else the commit or the broker removes it later
                self._forget(name)
            raise
        return (name, count) if count else ("", 0)

    def is_seen(self, name: str) -> bool:
        return True  # the broker itself refuses to commit what it does not have

    def commit(self, names: Sequence[str], *, once: bool, batch: int | None) -> None:
        parts = [name.removeprefix(self.transaction) for name in names if name]
        if sum(len(part) + 1 for part in parts) > MOST_PARTS_BYTES:
            raise InvalidArgument(
                f"{len(parts)} tasks with rows are more than one commit of {shown(self.text)} takes: "
                "write fewer, as in frame.coalesce(100)"
            )
        with connect(self.text) as client:
            if parts:
                client.commit(self.transaction, parts)
            client.abort(f"{self.transaction}.*")  # remove what failed attempts have staged

    def abort(self) -> None:
        self._forget(f"{self.transaction}.*")

    def _forget(self, name: str) -> None:
        with connect(self.text) as client:
            client.abort(name)
