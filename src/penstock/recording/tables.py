"""Tables: a recording's topics as Arrow, pandas and polars tables, with a column for each field of a schema.

A row is a message; of a type that holds rows (a numpy array, an Arrow batch) it is one of them, and the columns of the
message are repeated. pyarrow is loaded when a table is made.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import DecodeError, InvalidArgument, PenstockError, nearest
from penstock.recording.span import Span, located, reader, topic_names
from penstock.recording.story import parts
from penstock.topics import matches
from penstock.types import Schema
from penstock.types.shape import arrow_type
from penstock.types.versions import Place, Versions, distinct, parse_versions

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

__all__ = ["Columns", "Described", "Recording"]

#: The columns that every table has besides the fields; a field with such a name becomes ``value.NAME``.
OF_MESSAGE = ("position", "ordinal", "timestamp", "properties")
MOST_ROWS = 20_000
MOST_BYTES = 32 << 20


class Described:
    """The schemas of a recording's topics: every version, in every part."""

    def __init__(self, journals: Sequence[Journal]) -> None:
        self._part_of = {journal: part for part, journal in enumerate(journals)}
        self._schemas = [journal.schemas for journal in journals]
        self._lines: dict[str, list[tuple[Place, Schema]]] = {}
        self._versions: dict[str, Versions | None] = {}

    def topics(self, patterns: Sequence[str] | None) -> list[str]:
        """The topics that have a schema, or those of them that match, whether or not they have messages."""
        names = {name for schemas in self._schemas for name in schemas.topics}
        return sorted(n for n in names if patterns is None or any(matches(p, n) for p in patterns))

    def newest(self, topic: str) -> Schema | None:
        """The newest schema of a topic; None if there is none, or it is damaged."""
        line = self.line(topic)
        return line[-1][1] if line else None

    def schemas(self, topic: str) -> list[Schema]:
        """Every version of its schema, the oldest first; empty if it has none."""
        return [schema for _, schema in self.line(topic)]

    def versions(self, topic: str) -> Versions:
        """Every version of it. ``PenstockError`` or ``ModuleNotFoundError`` where it cannot be read."""
        return Versions(self.line(topic))

    def columns(self, topic: str) -> Columns:
        """The columns of a described topic. ``PenstockError`` or ``ModuleNotFoundError`` where it cannot be read."""
        return Columns(self.versions(topic), self._part_of)

    def schema_of(self, journal: Journal, message: Message) -> Schema | None:
        """The schema of a message: the one that was current when it was stored, or another version that matches. None
        if the topic has no schema, ``ValueError`` if the message matches none.
        """
        topic = message.channel or ""
        if topic not in self._versions:
            self._versions[topic] = None
            with contextlib.suppress(PenstockError, ModuleNotFoundError):  # no version can be decoded here
                self._versions[topic] = self.versions(topic)
        versions = self._versions[topic]
        found = None if versions is None else versions.schema(message, self.place(journal, message))
        return found or self.schema_at(journal, message)

    def schema_at(self, journal: Journal, message: Message) -> Schema | None:
        """The schema that was current when the message was stored; None if there was none."""
        line = self.line(message.channel or "")
        here = self.place(journal, message)
        return next((schema for since, schema in reversed(line) if since <= here), line[0][1] if line else None)

    def place(self, journal: Journal, message: Message) -> Place:
        """The place of a message in the recording."""
        return self._part_of[journal], message.position or 0

    def line(self, topic: str) -> list[tuple[Place, Schema]]:
        """Its versions in the order in which they were declared; damaged ones are left out."""
        if topic not in self._lines:
            parts = (parse_versions(schemas.joined(topic), part) for part, schemas in enumerate(self._schemas))
            self._lines[topic] = list(distinct(itertools.chain.from_iterable(parts)))
        return self._lines[topic]


class Columns:
    """The columns of one topic, over all versions of its type, and the rows that each message adds."""

    def __init__(self, versions: Versions, parts: Mapping[Journal, int]) -> None:
        self._versions = versions
        self._parts = parts
        self.fields = versions.record.fields  #: by name, in order

    def read(self, journal: Journal, message: Message) -> Any:
        """The decoded message; ``ValueError`` if it does not match."""
        return self._versions.read(message, self._place(journal, message))

    def value(self, data: bytes, place: Place) -> Any:
        """The same for bytes that were stored at a place."""
        return self._versions.read(data, place)

    def rows(self, journal: Journal, message: Message) -> list[list[Any]]:
        """The values of its rows, by column; ``ValueError`` where it is not of the type."""
        found = self._versions.rows(message, self._place(journal, message))
        return [[row[name] for name, _ in self.fields] for row in found]

    def _place(self, journal: Journal, message: Message) -> tuple[int, int]:
        return self._parts[journal], message.position or 0


class Recording:
    """A recording, or any journal, opened for reading. A context."""

    def __init__(self, directory: str | Path) -> None:
        self._stack = contextlib.ExitStack()
        self._journals = [self._stack.enter_context(reader(folder)) for folder in parts(Path(directory))]
        self._described = Described(self._journals)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tables that were made stay valid."""
        self._stack.close()

    @property
    def topics(self) -> list[str]:
        """The topics that hold messages."""
        return sorted({name for journal in self._journals for name in topic_names(journal, None)})

    def schema(self, topic: str) -> Schema | None:
        """The newest schema of the topic's messages, or None."""
        return self._described.newest(topic)

    def batches(
        self, topic: str, *, start: str | None = None, length: str | None = None, errors: str = "raise"
    ) -> Iterator[Any]:
        """``to_arrow`` as RecordBatches, one after another, for what does not fit into memory."""
        if errors not in ("raise", "skip"):
            raise InvalidArgument(f"errors={errors!r} is not a choice; valid: raise, skip")
        if topic not in self.topics:
            raise InvalidArgument(f"there is no topic {topic!r}; {nearest(topic, self.topics)}")
        columns = self._columns(topic)
        chosen = located(self._journals, [topic], Span.of(self._journals, start, length))
        return _batches(chosen, columns, arrow_schema(columns), errors)

    def _columns(self, topic: str) -> Columns | None:
        return self._described.columns(topic) if self._described.newest(topic) else None

    def to_arrow(
        self, topic: str, *, start: str | None = None, length: str | None = None, errors: str = "raise"
    ) -> Any:
        """A pyarrow.Table: position, ordinal, timestamp and properties of the message, then a column a field.

        A topic whose type has changed has the columns of every version. A type that is no record has the column
        ``value``, a topic that nobody described ``payload``. ``start`` and
        ``length`` are ``--from`` and ``--for`` of the command. A message that is not of its type is a ``DecodeError``;
        with ``errors="skip"`` it is left out.
        """
        import pyarrow

        found = list(self.batches(topic, start=start, length=length, errors=errors))
        return pyarrow.Table.from_batches(found, arrow_schema(self._columns(topic)))

    def to_pandas(self, topic: str, **options: Any) -> Any:
        """``to_arrow`` as a pandas.DataFrame."""
        return self.to_arrow(topic, **options).to_pandas()

    def to_polars(self, topic: str, **options: Any) -> Any:
        """``to_arrow`` as a polars.DataFrame."""
        import polars

        return polars.from_arrow(self.to_arrow(topic, **options))


def arrow_schema(columns: Columns | None) -> Any:
    """The schema of a topic's table."""
    import pyarrow

    text = pyarrow.string()
    kinds = (pyarrow.int64(), pyarrow.int64(), pyarrow.timestamp("ns", "UTC"), pyarrow.map_(text, text))
    fields = list(zip(OF_MESSAGE, kinds, strict=True))
    if columns is None:
        return pyarrow.schema([*fields, ("payload", pyarrow.binary())])
    named = [(f"value.{name}" if name in OF_MESSAGE else name, arrow_type(part)) for name, part in columns.fields]
    return pyarrow.schema([*fields, *named])


def _batches(
    chosen: Iterator[tuple[Journal, Message]], columns: Columns | None, schema: Any, errors: str
) -> Iterator[Any]:
    rows: list[Sequence[Any]] = []
    size = 0
    for journal, message in chosen:
        of_message = (message.position, message.ordinal, message.timestamp_ns, list(message.properties.items()))
        try:
            found: list[list[Any]] = [[bytes(message)]] if columns is None else columns.rows(journal, message)
        except ValueError as error:
            if errors == "raise":
                place = f"position {message.position} of {message.channel}"
                raise DecodeError(f"{place}, {message.size} bytes: {error}", message) from None
            continue
        rows += [(*of_message, *row) for row in found]
        size += message.size
        if len(rows) >= MOST_ROWS or size >= MOST_BYTES:
            yield _batch(rows, schema)
            rows, size = [], 0
    if rows:
        yield _batch(rows, schema)


def _batch(rows: list[Sequence[Any]], schema: Any) -> Any:
    import pyarrow

    columns = zip(zip(*rows, strict=True), schema, strict=True)
    arrays = [pyarrow.array(list(column), field.type) for column, field in columns]
    return pyarrow.record_batch(arrays, schema=schema)
