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
    from pyspark.sql.types import DataType, StructType

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
VALUE, CORRUPT = "value", "_corrupt"
DECODED = (VALUE, CORRUPT)  # with ``decode=auto`` (see ``described``)
IN_INDEX = frozenset(("topic", "ordinal", "position", "timestamp", "timestamp_ns", "stored_ns", "journal"))


def choose(text: str | None, more: Sequence[str] = ()) -> list[str]:
    """The columns named in ``text``, separated by commas; the default columns and ``more`` if ``text`` is None."""
    if text is None:
        return [*DEFAULT, *more]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgument(f"columns={text!r} names no column; {nearest('', FIELDS)}")
    check(names, more)
    return names


def check(names: Sequence[str], more: Sequence[str] = ()) -> None:
    """Raise ``InvalidArgument`` for a column that is neither a journal's nor one of ``more``, or is named twice."""
    for name in names:
        if name in DECODED and not more:
            raise InvalidArgument(f"column {name!r} exists only with the option decode=auto")
        if name not in FIELDS and name not in more:
            raise InvalidArgument(f"a journal has no column {name!r}; {nearest(name, [*FIELDS, *more])}")
        if names.count(name) > 1:
            raise InvalidArgument(f"column {name!r} is named twice")


def ddl(names: Sequence[str]) -> str:
    """The schema of these columns as Spark text."""
    return ", ".join(f"{name} {FIELDS[name]}" for name in names)


def spark_type(name: str) -> DataType:
    """The type of a column of ``FIELDS``; where Spark asks for a schema there is no JVM to parse ``ddl``."""
    from pyspark.sql import types

    simple: dict[str, DataType] = {
        "string": types.StringType(),
        "bigint": types.LongType(),
        "int": types.IntegerType(),
        "timestamp": types.TimestampType(),
        "binary": types.BinaryType(),
        "map<string,string>": types.MapType(types.StringType(), types.StringType()),
    }
    return simple[FIELDS[name]]


def check_schema(schema: StructType, more: Sequence[str] = ()) -> list[str]:
    """The names in ``schema``; ``InvalidArgument`` names a column that is not there or of another type.

    Columns of ``more`` are not looked at.
    """
    names = [str(name) for name in schema.fieldNames()]
    check(names, more)
    for field in schema.fields:
        if field.name in more:
            continue
        kind = field.dataType.simpleString()
        if kind != FIELDS[field.name]:
            raise InvalidArgument(f"column {field.name!r} is {FIELDS[field.name]}, the schema asks for {kind}")
    return names


def arrow_schema(schema: StructType) -> pyarrow.Schema:
    """The exact schema of batches: Spark compares it and refuses any difference."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
