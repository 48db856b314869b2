"""The columns of a journal as a table, and the choice of columns that a query makes.

The name of a column is in ``FIELDS`` once; a user's schema or ``columns=`` picks among them, and only what is picked
is read. Types must be those of ``FIELDS`` exactly, since batches go to the JVM without conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument, nearest

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

FIELDS: Mapping[str, str] = {
    "topic": "string",
    "ordinal": "bigint",
    "position": "bigint",
    "timestamp": "timestamp",
    "timestamp_ns": "bigint",
    "stored_ns": "bigint",
    "payload": "binary",
    "properties": "map<string,string>",
    "message_id": "string",
    "vchan_id": "int",
    "key": "string",
    "journal": "string",
}
DEFAULT = (
    "topic",
    "ordinal",
    "position",
    "timestamp",
    "timestamp_ns",
    "payload",
    "properties",
    "message_id",
    "vchan_id",
)
IN_INDEX = frozenset(("topic", "ordinal", "position", "timestamp", "timestamp_ns", "stored_ns", "journal"))


def choose(text: str | None) -> list[str]:
    """The columns named in ``text``, separated by commas; the default columns if ``text`` is None."""
    if text is None:
        return list(DEFAULT)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgument(f"columns={text!r} names no column; {nearest('', FIELDS)}")
    check(names)
    return names


def check(names: Sequence[str]) -> None:
    """Raise ``InvalidArgument`` for a column that a journal does not have, or that is named twice."""
    for name in names:
        if name not in FIELDS:
            raise InvalidArgument(f"a journal has no column {name!r}; {nearest(name, FIELDS)}")
        if names.count(name) > 1:
            raise InvalidArgument(f"column {name!r} is named twice")


def ddl(names: Sequence[str]) -> str:
    """The schema of these columns as Spark text."""
    return ", ".join(f"{name} {FIELDS[name]}" for name in names)


def check_schema(schema: StructType) -> list[str]:
    """The names in ``schema``; ``InvalidArgument`` names a column that is not there or of another type."""
    names = [str(name) for name in schema.fieldNames()]
    check(names)
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if kind != FIELDS[field.name]:
            raise InvalidArgument(f"column {field.name!r} is {FIELDS[field.name]}, the schema asks for {kind}")
    return names


def arrow_schema(schema: StructType) -> pyarrow.Schema:
    """The exact schema of batches: Spark compares it and refuses any difference."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
