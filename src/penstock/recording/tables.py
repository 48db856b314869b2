"""Tables: a recording's topics as Arrow, pandas and polars tables, with a column for each field of a described type.

A row is a message; of a type that holds rows (a numpy array, an Arrow batch) it is one of them, and the columns of the
message are repeated. pyarrow is loaded when a table is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import DecodeError, InvalidArgument, PenstockError, nearest
from penstock.recording.span import Span, messages, reader, topic_names
from penstock.recording.story import parts
from penstock.types import Schema
from penstock.types.fields import Rows, fitted, reader_of
from penstock.types.shape import Shape, arrow_type, holds_rows, shape_of

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

__all__ = ["Columns", "Recording", "newest_schemas"]

#: What every table has of a message beside its fields; a field of such a name is called ``value.NAME``.
OF_MESSAGE = ("position", "ordinal", "timestamp", "properties")
MOST_ROWS = 20_000
MOST_BYTES = 32 << 20


def newest_schemas(journals: Sequence[Journal]) -> dict[str, Schema]:
    """Of each topic that was described, in the last part that says it; damaged ones are left out."""
    found: dict[str, Schema] = {}
    for journal in journals:
        schemas = journal.schemas
        for topic in schemas.topics:
            with contextlib.suppress(PenstockError):
                found[topic] = Schema.parse(schemas.newest(topic)[1])
    return found


class Columns:
    """The columns of one type, and the rows that a message gives them."""

    def __init__(self, schema: Schema) -> None:
        shape = shape_of(schema)
        self.read = reader_of(schema)  #: the whole value; ``ValueError`` where a message is not of the type
        self._whole = shape if shape.kind == "struct" else Shape("struct", None, (("value", shape),))
        self._wraps = shape is not self._whole
        self._holds_rows = holds_rows(schema)
        self.fields = self._whole.fields  #: by name, in order

    def rows(self, message: Message) -> list[list[Any]]:
        """The values of its rows, by column; ``ValueError`` where it is not of the type."""
        value = self.read(message)
        found = value if self._holds_rows and isinstance(value, Rows) else [value]
        made = []
        for row in found:
            fit = fitted({"value": row} if self._wraps else row, self._whole)
            if fit is None:
                raise ValueError("null is no value of its type")
            made.append([fit[name] for name, _ in self.fields])
        return made


class Recording:
    """A recording, or any journal, opened for reading. A context."""

    def __init__(self, directory: str | Path) -> None:
        self._stack = contextlib.ExitStack()
        self._journals = [self._stack.enter_context(reader(folder)) for folder in parts(Path(directory))]
        self._schemas = newest_schemas(self._journals)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back. Tables that were made stay."""
        self._stack.close()

    @property
    def topics(self) -> list[str]:
        """The topics that hold messages."""
        return sorted({name for journal in self._journals for name in topic_names(journal, None)})

    def schema(self, topic: str) -> Schema | None:
        """What the topic's messages are made of, where it was said."""
        return self._schemas.get(topic)

    def batches(
        self, topic: str, *, start: str | None = None, length: str | None = None, errors: str = "raise"
    ) -> Iterator[Any]:
        """``to_arrow`` as RecordBatches, one after another, for what does not fit into memory."""
        if errors not in ("raise", "skip"):
            raise InvalidArgument(f"errors={errors!r} is not a choice; valid: raise, skip")
        if topic not in self.topics:
            raise InvalidArgument(f"there is no topic {topic!r}; {nearest(topic, self.topics)}")
        described = self._schemas.get(topic)
        columns = None if described is None else Columns(described)
        chosen = messages(self._journals, [topic], Span.of(self._journals, start, length))
        return _batches(chosen, columns, arrow_schema(columns), errors)

    def to_arrow(
        self, topic: str, *, start: str | None = None, length: str | None = None, errors: str = "raise"
    ) -> Any:
        """A pyarrow.Table: position, ordinal, timestamp and properties of the message, then a column a field.

        A type that is no record has the column ``value``, a topic that nobody described ``payload``. ``start`` and
        ``length`` are ``--from`` and ``--for`` of the command. A message that is not of its type is a ``DecodeError``;
        with ``errors="skip"`` it is left out.
        """
        import pyarrow

        described = self._schemas.get(topic)
        found = list(self.batches(topic, start=start, length=length, errors=errors))
        return pyarrow.Table.from_batches(found, arrow_schema(None if described is None else Columns(described)))

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


def _batches(chosen: Iterator[Message], columns: Columns | None, schema: Any, errors: str) -> Iterator[Any]:
    rows: list[Sequence[Any]] = []
    size = 0
    for message in chosen:
        of_message = (message.position, message.ordinal, message.timestamp_ns, list(message.properties.items()))
        try:
            found: list[list[Any]] = [[bytes(message)]] if columns is None else columns.rows(message)
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
